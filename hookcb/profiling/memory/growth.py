"""Memory growth from batch to batch: bytes per step, and the layers that made what stays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt

from hookcb.core.text import as_layer, format_bytes
from hookcb.profiling.memory.ledger import LOSS

# at a watched batch: its step, live bytes of earlier watched batches, and the bytes allocated by CUDA's
# allocator when it began; None without CUDA
InUse = tuple[int, int, int | None]
MIN_LOOKS = 3  # a line through fewer points has no standard error


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth of memory per step, as measured; whether that is too much is for `learn.diagnose()` to say.

    Attributes:
        slope: bytes per step, by least squares over the later half of the watched batches, because the first
            ones fill caches. On CUDA, the slope of the bytes allocated; elsewhere, of the tensors of earlier
            batches that are still alive, and each watched batch stands for all since the previous one.
        error: standard error of `slope`, in bytes per step.
        layers: bytes of earlier watched batches that are still alive, by the layer that made them, largest
            first; only layers with bytes from two or more batches.
        n_looks: number of watched batches.
        source: source of the numbers, "allocator" or "tensors".
    """

    slope: float = 0.0
    error: float = 0.0
    layers: Mapping[str, int] = field(default_factory=dict)
    n_looks: int = 0
    source: str = "tensors"

    def __str__(self) -> str:
        if self.n_looks < MIN_LOOKS:
            return f"memory growth is unknown: {self.n_looks} of {MIN_LOOKS} batches needed were watched"
        stays = [f"{as_layer(name)} ({format_bytes(n)})" for name, n in list(self.layers.items())[:3]]
        layers = f"; still alive from earlier batches: {', '.join(stays)}" if stays else ""
        hint = "; a loss is kept with its graph, keep loss.item() instead" if LOSS in self.layers else ""
        error = f"standard error {format_bytes(self.error)}"
        return f"memory growth: {format_bytes(self.slope)} per step ({error}){layers}{hint}"


def growth_of(in_use: Sequence[InUse], layers: Mapping[str, int]) -> Growth:
    """Growth over watched batches; `layers` is what the last one found."""
    later = in_use[len(in_use) // 2 :] if len(in_use) >= 2 * MIN_LOOKS else in_use
    by_allocator = [(float(step), float(n)) for step, _, n in later if n is not None]
    points = by_allocator or [(float(i), float(old)) for i, (_, old, _) in enumerate(later)]
    slope, error = fit_line(points)
    return Growth(slope, error, layers, len(in_use), "allocator" if by_allocator else "tensors")


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope of the least-squares line through points, and its standard error; 0 for fewer than two points.

    The standard error of two points is 0, too. The report here and the check `memory.growth` share this.

    error² = Σ residuals² / (n - 2) / Σ(x - mean x)².

    Source: Draper & Smith, "Applied Regression Analysis", 1998.
    """
    n = len(points)
    if n < 2:
        return 0.0, 0.0
    mean_x, mean_y = (sum(values) / n for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    residuals = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return slope, sqrt(residuals / (n - 2) / spread) if n > 2 else 0.0
