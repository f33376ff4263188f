"""coord_check: whether layers' outputs and updates keep their size when a model gets wider."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.activations.stats import has_stats
from hookcb.core.arguments import check_count, hinted
from hookcb.core.batch import called, parts, split_batch
from hookcb.core.randomness import set_seed
from hookcb.core.restore import preserve_random
from hookcb.core.text import join_names
from hookcb.hooks.hook import Hooks
from hookcb.hooks.modules import device_of, is_leaf, named_modules
from hookcb.records.plots import Size, check_any, gapped, make_panels
from hookcb.records.tables import Column, Ranked, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Half of 1/2, the smallest exponent by which theory lets a size grow or fall with the width if it does at all
MAX_SLOPE = 0.25
MAX_NAMED = 12  # lines of a figure that are all named; of more, those of layers that do not keep their size
Sizes = dict[str, tuple[float, float]]  # RMS of the output at the beginning and of its change, by layer


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthRow(Ranked):
    """Sizes of a layer's output in models of several widths.

    Attributes:
        outputs: RMS of the output before the first step, by width.
        updates: RMS of the change of the output by the steps, by width.
        output_slope, update_slope: exponents of the width with which these grow, NaN if unknown.
        is_last: whether it is the last layer, whose output may fall at the beginning.
    """

    outputs: tuple[float, ...]
    updates: tuple[float, ...]
    output_slope: float
    update_slope: float
    is_last: bool

    @property
    def says(self) -> str:
        """Names what does not keep its size; "" if all do."""
        return ", ".join(
            [
                *_trend("output", self.output_slope, may_fall=self.is_last),
                *_trend("update", self.update_slope, may_fall=False),
            ]
        )


def _trend(what: str, slope: float, may_fall: bool) -> list[str]:
    if math.isnan(slope):
        return [f"{what} is 0 or not finite"]
    if slope > MAX_SLOPE:
        return [f"{what} grows"]
    return [f"{what} vanishes"] if slope < -MAX_SLOPE and not may_fall else []


class CoordCheck(Report[WidthRow]):
    """Sizes of layers' outputs and updates by width; prints as a table.

    Attributes:
        widths: the widths.
        rows: a `WidthRow` for each layer, in the order of execution; `check["head"]` finds one by its name.

    >>> import torch
    >>> from hookcb import coord_check
    >>> def make_model(width):
    ...     return torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Linear(width, 1))
    >>> batch = torch.ones(4, 2), torch.ones(4, 1)
    >>> check = coord_check(make_model, (16, 256), batch, torch.nn.functional.mse_loss, steps=1)
    >>> check.widths, check.is_stable, len(check["1"].updates)
    ((16, 256), False, 2)
    """

    missing = "the check has no layer"

    def __init__(self, rows: Sequence[WidthRow], widths: Sequence[int], steps: int) -> None:
        self.widths = tuple(widths)
        first, last = self.widths[0], self.widths[-1]
        self.columns = (  # type: ignore[misc]  # their titles have the widths
            Column(f"output at {first}", lambda row: f"{row.outputs[0]:.3g}", 2),
            Column(f"at {last}", lambda row: f"{row.outputs[-1]:.3g}", 2),
            Column("slope", lambda row: f"{row.output_slope:+.2f}"),
            Column(f"update at {first}", lambda row: f"{row.updates[0]:.3g}", 2),
            Column(f"at {last}", lambda row: f"{row.updates[-1]:.3g}", 2),
            Column("slope", lambda row: f"{row.update_slope:+.2f}"),
            Column("", lambda row: row.says, is_text=True, style="yellow"),
        )
        title = f"size of outputs, and of their change in {steps} step{'s' * (steps > 1)}, by width"
        rule = f"slope: exponent of the width; beyond ±{MAX_SLOPE} a layer does not keep its size"
        super().__init__(rows, title, worst=None, caption=rule)

    @property
    def is_stable(self) -> bool:
        """Whether all layers keep their sizes, so that a learning rate holds at other widths."""
        return not any(row.says for row in self.rows)

    def plot(self, figsize: Size = None, axs: "Sequence[Axes] | None" = None) -> "Figure":
        """Draws the sizes over the width, a line for each layer: outputs, and updates.

        Args:
            figsize: width and height in inches.
            axs: two axes to draw on; by default those of a new figure.

        Raises:
            ModuleNotFoundError: Without matplotlib.
        """
        check_any(self.rows, len(self.widths))
        axs = make_panels(2, 2, figsize) if axs is None else axs
        for ax, what in zip(axs, ("outputs", "updates"), strict=True):
            for row in self.rows:
                label = row.name if row.says or len(self) <= MAX_NAMED else None
                ax.plot(self.widths, gapped(getattr(row, what), above=0), ".-", label=label)
            ax.set(xscale="log", yscale="log", xlabel="width", ylabel=f"RMS of {what}")
            ax.set_xticks(self.widths, [str(n) for n in self.widths])
            ax.set_xticks([], minor=True)
        axs[-1].legend(frameon=False, fontsize=7)
        return axs[0].figure.figure


@hinted
def coord_check(
    make_model: Callable[[int], Any],
    widths: Iterable[int],
    batch: Any,
    loss_func: Callable[..., Tensor] | None = None,
    opt_func: Callable[..., Optimizer] = torch.optim.Adam,
    lr: float = 1e-2,
    *,
    steps: int = 3,
    seeds: int = 3,
    n_inp: int | None = None,
) -> CoordCheck:
    """Trains models of several widths for a few steps on one batch, and compares the sizes of their outputs.

    If a layer's output or its change grows with the width, or the change vanishes, then a learning rate that
    is right for a narrow model is wrong for a wide one. With the maximal update parametrization they stay.
    The random state is afterwards as it was.

    Args:
        make_model: makes a model from its width; or the model and its optimizer, `(model, optimizer)`, if
            layers have rates of their own. Layers have the same names at each width.
        widths: two or more, such as `(64, 128, 256, 512)`.
        batch: `(*xb, *yb)`, or a mapping of keyword arguments, for all widths.
        loss_func: called as `loss_func(pred, *yb)`; without it, the model's output must have a `.loss`.
        opt_func: called as `opt_func(model.parameters(), lr=lr)`.
        lr: learning rate for `opt_func`.
        steps: number of steps.
        seeds: number of models of each width; the sizes are geometric means over them.
        n_inp: number of items of the batch that are inputs; by default all but the last.

    Returns:
        The sizes: root mean square of each layer's output before the first step, and of what the steps change
        of it, with the slopes of their logarithms over that of the width, by least squares.

    Raises:
        TypeError: If `make_model` does not give a model.
        ValueError: If there are fewer than two widths, or layers have other names at another width.

    Source: the coordinate check of G. Yang et al., "Tensor Programs V", 2022, appendix D.1.

    >>> import torch
    >>> from torch import nn
    >>> from hookcb import coord_check
    >>> def make_model(width):
    ...     return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))
    >>> batch = torch.randn(32, 8), torch.randint(3, (32,))
    >>> check = coord_check(make_model, (64, 256, 1024), batch, nn.functional.cross_entropy)
    >>> check["2"].says
    'update grows'
    """
    known = sorted({check_count("widths", width, "units") for width in widths})
    check_count("steps", steps)
    check_count("seeds", seeds)
    if len(known) < 2:
        raise ValueError(f"widths must be two or more, such as (64, 128, 256, 512), got {known}")
    found: list[Sizes] = []
    with preserve_random():
        for width in known:
            of_seeds = []
            for seed in range(seeds):
                set_seed(seed)
                model, opt = _made(make_model(width), partial(opt_func, lr=lr))
                of_seeds.append(
                    _sizes(model, opt, split_batch(batch, device_of(model), n_inp), loss_func, steps, seed)
                )
            found.append({name: _mean([sizes[name] for sizes in of_seeds]) for name in of_seeds[0]})
    names = list(found[0])
    for width, sizes in zip(known, found, strict=True):
        if odd := sorted(set(names) ^ set(sizes)):
            raise ValueError(
                f"layers must have the same names at each width, but {join_names(odd, 3)} is only in one of "
                f"widths {known[0]} and {width}"
            )
    return CoordCheck([_row(name, known, found, name == names[-1]) for name in names], known, steps)


def _made(made: Any, make_opt: Callable[..., Optimizer]) -> tuple[nn.Module, Optimizer]:
    model, opt = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module) or not isinstance(opt, Optimizer | None):
        raise TypeError(f"make_model must return a model, or (model, optimizer), got {made!r:.80}")
    return model, make_opt(model.parameters()) if opt is None else opt


def _sizes(
    model: nn.Module,
    opt: Optimizer,
    batch: tuple[Any, tuple[Any, ...]],
    loss_func: Callable[..., Tensor] | None,
    steps: int,
    seed: int,
) -> Sizes:
    """RMS of each layer's output, and of its change by the steps."""
    xb, yb = batch
    names = {m: name for name, m in named_modules(model).items() if is_leaf(m)}
    model.train()

    def call() -> Any:
        set_seed(seed)  # the same dropout in each forward
        return called(model, xb)

    def watched() -> tuple[Any, dict[str, Tensor]]:
        """The prediction, and the first output of each layer, in the order of execution."""
        seen: dict[str, Tensor] = {}

        def note(m: nn.Module, given: Any, output: Any) -> None:
            found = (x for _, x in parts(output) if has_stats(x) and x.is_floating_point())
            if names[m] not in seen and (x := next(found, None)) is not None:
                seen[names[m]] = x.float().clone()

        with Hooks(list(names), note):
            return call(), seen

    pred, before = watched()
    for i in range(steps):
        opt.zero_grad()
        (pred.loss if loss_func is None else loss_func(pred, *yb)).backward()
        opt.step()
        pred, after = watched() if i + 1 == steps else (call(), before)
    return {name: (_rms(x), _rms(after[name] - x)) for name, x in before.items() if name in after}


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _mean(sizes: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Geometric means; NaN if one is 0 or not finite."""
    outputs, updates = zip(*sizes, strict=True)
    return math.exp(sum(map(_log, outputs)) / len(sizes)), math.exp(sum(map(_log, updates)) / len(sizes))


def _log(x: float) -> float:
    return math.log(x) if 0 < x < math.inf else math.nan


def _row(name: str, widths: Sequence[int], found: Sequence[Sizes], is_last: bool) -> WidthRow:
    outputs, updates = zip(*(sizes[name] for sizes in found), strict=True)
    slopes = _slope(widths, outputs), _slope(widths, updates)
    return WidthRow(
        name=name, module=name, weight=(0.0,), outputs=outputs, updates=updates,
        output_slope=slopes[0], update_slope=slopes[1], is_last=is_last,
    )  # fmt: skip


def _slope(widths: Sequence[int], sizes: Sequence[float]) -> float:
    """Slope of the logarithm of a size over that of the width, by least squares."""
    xs, ys = [math.log(width) for width in widths], [_log(size) for size in sizes]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    products = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return products / sum((x - x_mean) ** 2 for x in xs)
