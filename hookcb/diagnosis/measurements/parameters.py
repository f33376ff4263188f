"""Parameters: which of the model's have moved since the beginning, and which had no gradient."""

from collections import Counter

from torch import Tensor, nn

from hookcb.diagnosis.fault import Measurement
from hookcb.diagnosis.measurements.outside import OutsideParameters
from hookcb.diagnosis.run import Run
from hookcb.gradients.samples import named_sketches, unchanged
from hookcb.gradients.stats import is_readable
from hookcb.hooks.params import find_params
from hookcb.processes.shards import has_no_part


class Parameters(Measurement):
    """Copies some elements of each parameter at the beginning, and counts steps without a gradient."""

    cadence = 64  # steps at the beginning
    uses = (OutsideParameters,)

    def __init__(self) -> None:
        self.begins: dict[str, tuple[nn.Parameter, Tensor]] = {}  # those that can be read, and the copies
        self.moved: dict[str, bool] = {}  # whether any copied element has changed
        self.is_still = False  # whether parameters are trained, and none of them has moved
        self.params: list[tuple[str, nn.Parameter]] = []  # of the model, and their names
        self._n_without = Counter[str]()

    def on_model(self, run: Run) -> None:
        self.params = [(name, p) for name, p, _ in find_params(run.loop.model)]
        new: dict[str, nn.Parameter] = {}
        for name, p in self.params:
            is_known = name in self.begins and self.begins[name][0] is p
            is_there = is_readable(p) and not isinstance(p, nn.parameter.UninitializedParameter)
            if is_there and p.numel() and not is_known:
                new[name] = p
        copies = named_sketches(new)
        self.begins |= {name: (p, copies[name]) for name, p in new.items()}

    def on_step(self, run: Run) -> None:
        if run.looking and run.measured(OutsideParameters).has_joined:
            self.on_model(run)
        without = ((name, p) for name, p in self.params if p.requires_grad and p.grad is None)
        self._n_without.update(name for name, p in without if not has_no_part(p))

    def tell(self, run: Run) -> None:
        params, began = ({name: pair[i] for name, pair in self.begins.items()} for i in (0, 1))
        self.moved = dict.fromkeys(params, True) | dict.fromkeys(unchanged(params, began), False)
        trained = [name for name, (p, _) in self.begins.items() if p.requires_grad]
        self.is_still = bool(trained) and not any(self.moved[name] for name in trained)
        for name, param in run.params.items():
            param.has_moved = self.moved.get(name, param.has_moved)
            param.n_without = self._n_without.get(name, param.n_without)

    def freeze(self) -> None:
        self.begins, self.params = {}, []
