"""Opponents: whether a training plays against another one, as generators and discriminators do."""

from collections.abc import Iterable
from weakref import ReferenceType, ref

from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.core import graph
from hookcb.core.batch import parts
from hookcb.diagnosis.fault import Measurement
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.loss_graph import last_parameters
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.run import Run
from hookcb.gradients.samples import are_same, sketch_copies
from hookcb.gradients.stats import is_readable
from hookcb.hooks.optimizer_steps import params_of
from hookcb.processes.shards import is_in_memory

N_FOLLOWED = 64  # steps
MIN_TIMES = 3
MIN_SHARE = 0.1  # of the steps: a discriminator may make several of them for one of its generator


class Opponents(Measurement):
    """Sees in the first 64 steps, and in inspected ones, whether the loss is one of a game.

    It is, if all targets are the same, so that guessing them gives zero; if the loss goes through layers of
    another model that is trained; if inputs are computed with parameters of another model in some batches and
    not in others, as those of a discriminator are; or if two optimizers step in turn on weights of their
    own, each after another backward.
    """

    cadence = N_FOLLOWED
    uses = (Steps, Loss)

    def __init__(self) -> None:
        self.why = ""  # how that is known, "" if it is not
        self._behind: list[tuple[ReferenceType[Tensor], Tensor]] = []  # of another model, as they were
        self._n_fed = self._n_plain = 0  # batches with inputs from another model, and with others
        self._own = set[int]()  # ids of the model's parameters
        # the optimizer that has stepped last, and the number of backwards until then
        self._last: tuple[ReferenceType[Optimizer], int] | None = None
        self._n_steps = self._n_turns = self._n_joint = 0

    def on_prediction(self, run: Run) -> None:
        given = [x.grad_fn for _, x in parts(run.loop.xb) if isinstance(x, Tensor) and x.grad_fn is not None]
        behind = graph.leaves(given, graph.MAX_NODES) if given else ()
        is_fed = bool(self._foreign([p for p in behind if isinstance(p, nn.Parameter)], run))
        self._n_fed, self._n_plain = self._n_fed + is_fed, self._n_plain + (not is_fed)

    def on_loss(self, run: Run) -> None:
        if not self._behind:
            others = self._foreign(last_parameters(run.loop.loss_node), run)
            known = [p for p in others if _can_compare(p)]
            self._behind = list(zip(map(ref, known), sketch_copies(known), strict=True))

    def _foreign(self, params: Iterable[Tensor], run: Run) -> list[Tensor]:
        """Parameters that are not the model's, each once; it is walked only if one is not known to be."""
        found = {id(p): p for p in params}
        if found.keys() - self._own:
            self._own = {id(p) for p in run.loop.model.parameters()}
        return [p for key, p in found.items() if key not in self._own]

    def on_step(self, run: Run) -> None:
        if not isinstance(opt := run.loop.opt, Optimizer):
            return
        n, self._n_steps = run.measured(Steps).n_backward, self._n_steps + 1
        last, before = self._last or (None, n)
        other = None if last is None else last()
        if other is not None and other is not opt:
            is_apart = n > before and params_of(other).isdisjoint(params_of(opt))
            self._n_turns, self._n_joint = self._n_turns + is_apart, self._n_joint + (not is_apart)
        self._last = ref(opt), n

    def tell(self, run: Run) -> None:
        behind = [(found(), before) for found, before in self._behind]
        known = [(p, before) for p, before in behind if p is not None and _can_compare(p)]
        loss = run.measured(Loss)
        if loss.constant <= loss.perfect:
            self.why = "all targets are the same, as those of a generator"
        elif not all(are_same(sketch_copies([p for p, _ in known]), [before for _, before in known])):
            self.why = "the loss goes through another model that is trained"
        elif min(self._n_fed, self._n_plain) >= MIN_TIMES:
            self.why = "in some batches another model that gets gradients computes the inputs"
        elif not self._n_joint and self._n_turns >= max(2 * MIN_TIMES, MIN_SHARE * self._n_steps):
            self.why = "two optimizers step in turn, each after another backward"

    def freeze(self) -> None:
        self._behind, self._last = [], None


def _can_compare(p: Tensor) -> bool:
    return is_readable(p) and is_in_memory(p)
