"""loss.reused_graph: a loss that goes back into the graph of an earlier batch, which fails."""

from types import TracebackType
from typing import Any

from torch import Tensor

from hookcb.core import graph
from hookcb.core.batch import parts
from hookcb.core.text import join_names
from hookcb.core.torch_private import sequence_nr
from hookcb.diagnosis.fault import Fault, Site, fault
from hookcb.diagnosis.measurements.attributes import with_graph
from hookcb.diagnosis.measurements.outside import TWICE
from hookcb.diagnosis.run import Run
from hookcb.loops.loss_found import BACKWARDS

WRITTEN = "one of the variables needed for gradient computation has been modified by an inplace operation"

N_DENSE = 64  # steps in which each batch is followed; later, inspected ones


@fault("loss.reused_graph", Site.LOSS, needs="batches", exact=True)
class ReusedGraph(Fault):
    """A loss whose backward fails because its graph goes back to an earlier batch, as by a hidden state.

    Exact: torch's error says that the graph was freed, or that a tensor in it was written, and the graph of
    that loss has operations that are older than the loss of the batch before, by autograd's sequence numbers.
    An attribute of a module, or an input of the model, through which it goes back is named.

    Source: torch.Tensor.backward, `retain_graph`; torch.Tensor.detach.
    """

    headline = "The loss goes back into the graph of an earlier batch"
    cadence = N_DENSE
    passed = "losses that go back into the graphs of earlier batches"

    def __init__(self) -> None:
        super().__init__()
        self._last = self._before = -1  # sequence number of the last loss, and of that of the batch before
        self._is_given = False  # whether an input of the model has a graph

    def on_batch(self, run: Run) -> None:
        self._before = self._last
        given = [x for _, x in parts(run.loop.xb) if isinstance(x, Tensor) and x.grad_fn is not None]
        self._is_given = any(sequence_nr(x.grad_fn) <= self._before for x in given)

    def on_loss(self, run: Run) -> None:
        if (node := run.loop.loss_node) is not None:
            self._last = sequence_nr(node)

    def on_error(self, run: Run, error: BaseException) -> None:
        text = str(error)
        if not isinstance(error, RuntimeError) or not text.startswith((TWICE, WRITTEN)):
            return
        old = self._old_nodes(_roots(error.__traceback__))
        if not old:
            return
        held = dict.fromkeys(path for path, x in with_graph(run.loop.model) if _leads_to(x, old))
        through = f", through attribute {join_names(list(held), 3)} of the model" if held else ""
        through = ", through an input of the model" if self._is_given else through
        what = (
            "the backward of that has freed it" if text.startswith(TWICE) else "the step has changed weights"
        )
        self.see(
            f"The loss of batch {run.step} goes back into the graph of an earlier batch{through}; {what}.",
            when=run.step,
            causes=("a hidden state, cache or running loss that is carried on without detach()",),
            next_steps=(
                "Detach what is carried on to the next batch: state = state.detach()",
                "retain_graph=True is no remedy: the graph then grows with each batch",
            ),
        )

    def _old_nodes(self, roots: list[Any]) -> set[Any]:
        """Operations of earlier batches, or of before the training, in the graph of a loss."""
        nodes = graph.walk(roots, at_most=graph.MAX_NODES)
        return {x for x in nodes if graph.leaf(x) is None and 0 <= sequence_nr(x) <= self._before}


def _leads_to(x: Tensor, old: set[Any]) -> bool:
    return any(node in old for node in graph.walk([x.grad_fn], at_most=graph.MAX_NODES))


def _roots(traceback: TracebackType | None) -> list[Any]:
    """Nodes of the losses whose backward has raised an error."""
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code in BACKWARDS:
            return graph.roots(frame.f_locals[BACKWARDS[frame.f_code]])
        traceback = traceback.tb_next
    return []
