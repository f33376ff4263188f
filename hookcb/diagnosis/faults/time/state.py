"""memory.state_kept: attributes of modules that keep the graphs of past batches."""

from collections import defaultdict
from itertools import chain, pairwise

from hookcb.core import graph
from hookcb.core.text import join_names
from hookcb.diagnosis.fault import Fault, Site, fault
from hookcb.diagnosis.measurements.attributes import with_graph
from hookcb.diagnosis.run import Run

MIN_LOOKS, MIN_BATCHES = 4, 60  # whose graphs are all kept
MAX_NODES = 4_000  # of the graph behind an attribute that are looked at
KEY = "hookcb look"


@fault("memory.state_kept", Site.RUN, needs="batches", leads_to="memory.* time.growing", exact=True)
class StateKept(Fault):
    """An attribute of a module that keeps the graphs of past batches, as a list of losses does.

    Exact: after each inspected batch, the nodes of the tensors with a graph in attributes are marked. A list
    or dict that still has the marks of all of them in batch 60 or after keeps them; so does a single tensor,
    as a running mean, if the nodes behind it bear those of four or more, one more with each. What is
    overwritten in each batch bears one mark, and a list may be cleared within 60 batches, as by an epoch.
    """

    headline = "A module keeps the graphs of past batches"
    severity = "warning"
    passed = "modules that keep graphs of past batches"
    unless = f"fewer than {MIN_LOOKS} batches were inspected"

    def __init__(self) -> None:
        super().__init__()
        self._n = 0
        self._n_marks: dict[str, list[int]] = {}  # found behind an attribute, in each inspected batch

    def on_batch_end(self, run: Run) -> None:
        if not run.looking:
            return
        self._n += 1
        nodes = defaultdict[str, list[object]](list)
        for path, x in with_graph(run.loop.model):
            nodes[path].append(x.grad_fn)
        found = {path: self._n_marks.get(path, []) for path in nodes}
        for path, own in nodes.items():
            marks = {at.metadata[KEY] for at in graph.walk(own, at_most=MAX_NODES) if KEY in at.metadata}
            found[path].append(len(marks))
        for node in chain(*nodes.values()):
            node.metadata.setdefault(KEY, self._n)  # type: ignore[attr-defined]  # nodes are untyped
        self._n_marks = found
        is_late = run.n_batches >= MIN_BATCHES
        growing = [
            path
            for path, ns in found.items()
            if (_grows(ns) if len(nodes[path]) == 1 else is_late and ns[-1] == self._n - 1)
        ]
        if self._n >= MIN_LOOKS:
            self.unless = ""
        if growing:
            self.done = True
            more = f" (and {join_names(growing[1:], 3)})" if len(growing) > 1 else ""
            held = found[growing[0]][-1]
            self.see(
                f"Attribute {growing[0]} of the model{more} keeps the graphs of past batches: those of all "
                f"{held} that were inspected before this one are still in it.",
                at=growing[0].rpartition(".")[0],
                when=run.step,
                value=float(held),
                causes=(
                    "losses or outputs that are appended to a list with their graph",
                    "a running mean or state that is computed from itself without detach()",
                ),
                next_steps=("Keep x.detach() or x.item() in the attribute, and not x itself",),
            )


def _grows(n_marks: list[int]) -> bool:
    last = n_marks[-MIN_LOOKS:]
    return last[-1] >= MIN_LOOKS and all(y == x + 1 for x, y in pairwise(last))
