"""Memory that stays from batch to batch: by how much, and whose it is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt

from rich.filesize import decimal

from hookcb.profiling.memory.ledger import LOSS

ENOUGH = 3  # looks; fewer make no line
CERTAIN = 4.0  # times its own standard error: what the allocator shows is noisy, by the sizes of batches


@dataclass(frozen=True, slots=True)
class Look:
    """What is alive at a watched batch.

    Attributes:
        step: of the training, from 0.
        old_bytes: of earlier watched batches.
        allocated: bytes of CUDA's allocator when the batch began; None without CUDA.
    """

    step: int
    old_bytes: int
    allocated: int | None = None


@dataclass(frozen=True, slots=True)
class Growth:
    """How memory grows from step to step.

    Attributes:
        slope: bytes a step, by least squares over the later half of the looks, as the first ones fill caches;
            on CUDA of what the allocator has given, else of tensors of earlier batches that are still alive,
            where each watched batch stands for all those since the one before it.
        error: its standard error.
        layers: bytes of earlier watched batches still alive, by the layer that made them, the most first;
            of layers of which two batches or more are.
        n_looks: number of watched batches.
        source: what `slope` is of, "allocator" or "tensors".
    """

    slope: float = 0.0
    error: float = 0.0
    layers: Mapping[str, int] = field(default_factory=dict)
    n_looks: int = 0
    source: str = "tensors"

    @property
    def is_growing(self) -> bool:
        """Whether memory grows, and not by chance alone."""
        return self.n_looks >= ENOUGH and self.slope > CERTAIN * self.error

    def __str__(self) -> str:
        if self.n_looks < ENOUGH:
            batches = "1 watched batch" if self.n_looks == 1 else f"{self.n_looks} watched batches"
            return f"whether memory grows cannot be told from {batches}"
        if not self.is_growing:
            return "memory does not grow"
        by = [f"{name} ({decimal(n)})" for name, n in list(self.layers.items())[:3]]
        of = f"; what stays is of {', '.join(by)}" if by else ""
        hint = "; a loss is kept with its graph, keep loss.item()" if LOSS in self.layers else ""
        return f"memory grows by {decimal(max(1, round(self.slope)))} a step{of}{hint}"


def growth_of(looks: Sequence[Look], layers: Mapping[str, int]) -> Growth:
    """The growth over some looks, of which the last has found `layers`."""
    later = looks[len(looks) // 2 :] if len(looks) >= 2 * ENOUGH else looks
    by_allocator = [(float(look.step), float(look.allocated)) for look in later if look.allocated is not None]
    points = by_allocator or [(float(i), float(look.old_bytes)) for i, look in enumerate(later)]
    slope, error = fit_line(points)
    return Growth(slope, error, layers, len(looks), "allocator" if by_allocator else "tensors")


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope of the line through points by least squares, and the standard error of that; 0 of one point.

    Source: any book on regression; error² = residuals² / (n - 2) / Σ(x - mean x)².
    """
    n = len(points)
    if n < 2:
        return 0.0, 0.0
    mean_x, mean_y = (sum(values) / n for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    residuals = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return slope, sqrt(residuals / (n - 2) / spread) if n > 2 else 0.0
