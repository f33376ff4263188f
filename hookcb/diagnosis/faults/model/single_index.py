"""embed.single_index: embeddings that get one index only."""

from collections.abc import Iterator

from hookcb.core.text import as_layer
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.tokens import Tokens
from hookcb.diagnosis.run import Run

POSITIONS = ("pos", "wpe")  # in the name of a table of positions


@fault("embed.single_index", Site.MODULES, needs="batches", subject="embeddings", exact=True)
class SingleIndex(Fault):
    """An embedding that gets the same index at all positions of all inspected batches.

    Exact: smallest and largest index in three batches, of an embedding with as many rows as positions, eight
    or more. A warning for an embedding with "pos" or "wpe" in its name, as positions then cannot be told
    apart; else a note, as an id that all samples share may be intended.
    """

    headline = "An embedding gets one index only"
    uses = (Tokens,)
    severity = "warning"
    passed = "embeddings that get a single index"

    def findings(self, run: Run) -> Iterator[Result]:
        indices, found = run.measured(Tokens).indices, []
        for layer, (n, low, high) in indices.items():
            if low == high:
                is_position = any(part in layer.lower() for part in POSITIONS)
                told = self.finding(
                    f"Embedding {as_layer(layer) or 'of the model'} gets index {low} at all positions of all "
                    f"{n} inspected batches"
                    f"{', so the model cannot tell positions apart' if is_position else ''}.",
                    "warning" if is_position else "info",
                    at=layer,
                    value=float(low),
                    causes=("positions or ids that are all 0, as torch.zeros gives them",),
                    next_steps=("For positions, pass torch.arange(T); it is fine for an id that all share",),
                )
                found.append(told)
        yield from self.told(run, found, "" if indices else run.why_not("indices of embeddings"))
