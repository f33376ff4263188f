"""embed.clamped: positions beyond the last row of their table, which all get that row."""

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hookcb.core.text import as_layer
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.operations import Operations
from hookcb.diagnosis.run import Run
from hookcb.hooks.modules import named_modules

N_CALLS = 3  # of a table that are compared
MIN_ROWS = 8  # of a table
MAX_START = 2  # of positions, as some tables have rows for padding first
MIN_SHARE, MIN_SEQUENCES = 0.25, 0.5  # of the positions, and of the sequences
MIN_WIDTH = 32  # of the only table of a model; one number for each head is a bias by distance


@fault("embed.clamped", Site.MODULES, needs="batches", subject="embeddings")
class ClampedPositions(Fault):
    """Positions beyond the last row of their table, which are clamped to it: they cannot be told apart.

    Formula: share of the indices of an embedding that are its last row, in three inspected batches, where the
    indices of half of the sequences or more begin at 2 or below, and rise by one from place to place until
    they stay at the last row. Limit: a quarter. Only a table as wide as another one counts, or the only one
    of 32 columns or more, as distances between places may be clamped on purpose.

    Source: Shaw et al., "Self-Attention with Relative Position Representations", 2018, section 3.2, on
    clamped distances, which are not absolute positions.
    """

    headline = "Late positions all get the same embedding"
    uses = (Operations,)
    severity = "warning"
    passed = "positions that are clamped"

    def __init__(self) -> None:
        super().__init__()
        self._widths: dict[str, int] = {}
        # of each table and call: share of sequences whose indices count up, and of last rows in them
        self._shares = defaultdict[str, list[Tensor]](list)
        self._n_rows: dict[str, tuple[int, int]] = {}  # rows of the table, and length of the sequence
        self.n_calls = 0

    def on_model(self, run: Run) -> None:
        modules = named_modules(run.loop.model)
        self._widths = {name: m.embedding_dim for name, m in modules.items() if isinstance(m, nn.Embedding)}
        self.done = not self._widths
        run.measured(Operations).listeners.append(self)

    @property
    def is_under_way(self) -> bool:
        """Whether a model without attention is to be measured, too."""
        return any(len(calls) < N_CALLS for calls in self._shares.values())

    def add_indices(self, layer: str, n_rows: int, indices: Tensor, padding: int) -> None:
        """Compares the indices of a call with positions that are clamped; see `Operations`."""
        length = indices.shape[-1] if indices.ndim else 0
        self.n_calls += 1
        is_long = n_rows >= MIN_ROWS and (1 - MIN_SHARE) * length >= n_rows - 1 - MAX_START
        if not is_long or not indices.numel() or len(self._shares[layer]) == N_CALLS:
            return
        rows = indices.reshape(-1, length)
        is_last = rows == n_rows - 1
        steps = rows.diff(dim=1)
        counts_up = ((steps == 1) | ((steps == 0) & is_last[:, 1:])).all(1) & (rows[:, 0] <= MAX_START)
        share = (is_last & counts_up[:, None]).sum() / (counts_up.sum() * length).clamp_min(1)
        self._shares[layer].append(torch.stack([counts_up.float().mean(), share.float()]))
        self._n_rows[layer] = n_rows, length

    def tell(self, run: Run) -> None:
        self.seen = []
        for layer, calls in self._shares.items():
            sequences, share = torch.stack(calls).amin(0).tolist() if calls else (0.0, 0.0)
            is_found = len(calls) == N_CALLS and sequences >= MIN_SEQUENCES and share >= MIN_SHARE
            if is_found and self._is_of_positions(layer):
                n_rows, length = self._n_rows[layer]
                self.see(
                    f"{share:.0%} of the positions get the last of the {n_rows} rows of {as_layer(layer)}: "
                    f"in sequences of {length} all from place {n_rows - 1} on are clamped to it (limit "
                    f"{MIN_SHARE:.0%}), so the model cannot tell their order.",
                    at=layer,
                    value=share,
                    limit=MIN_SHARE,
                    causes=("sequences that are longer than the context of the model",),
                    next_steps=(
                        "Give the table a row for each position, or cut the sequences to its length",
                    ),
                )

    def _is_of_positions(self, layer: str) -> bool:
        width = self._widths.get(layer, 0)
        others = [x for name, x in self._widths.items() if name != layer]
        return width in others if others else width >= MIN_WIDTH

    def freeze(self) -> None:
        self._shares.clear()

    def findings(self, run: Run) -> Iterator[Result]:
        return self.told(run, self.seen, "" if self.n_calls else run.why_not("indices of embeddings"))
