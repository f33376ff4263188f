"""random.duplicated: ranks that draw the same random numbers."""

import zlib
from collections.abc import Iterator, Sequence

import torch

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.processes import Processes
from hookcb.diagnosis.run import Passed, Run, Skipped
from hookcb.hooks.modules import device_of
from hookcb.processes.groups import name_ranks

MIN_COMPARED, N_COMPARED = 4, 8  # inspected batches


@fault("random.duplicated", Site.MODULES, needs="batches", subject="replicas", exact=True)
class DuplicatedRandomNumbers(Fault):
    """Replicas that draw the same random numbers, for dropout or noise: a note.

    Exact: the state of torch's generator on the device of the model, which is the same on two ranks before
    the forward, and another after it, in each of 4 to 8 inspected batches.

    Source: PyTorch, "Reproducibility", on torch.manual_seed.
    """

    headline = "Ranks draw the same random numbers"
    uses = (Processes,)
    severity = "info"

    def __init__(self) -> None:
        super().__init__()
        self._around: list[list[int]] = []  # hashes of the state around the forward and loss of batches
        self.of_ranks: Sequence[list[int]] = ()  # hashes of the states from which numbers were drawn

    def on_batch(self, run: Run) -> None:
        self.done = not run.measured(Processes).has_replicas
        if len(self._around) < N_COMPARED:
            self._around.append([_state(device_of(run.loop.model))])

    def on_loss(self, run: Run) -> None:
        if self._around and len(self._around[-1]) == 1:
            self._around[-1].append(_state(device_of(run.loop.model)))

    def state(self, run: Run) -> list[int]:
        pairs = [pair for pair in self._around if len(pair) == 2]
        return [before for before, after in pairs if before != after]

    def merge(self, run: Run, of_ranks: Sequence[list[int]], rank: int) -> None:
        n = min(map(len, of_ranks))
        self.of_ranks = [states[:n] for states in of_ranks]

    def findings(self, run: Run) -> Iterator[Result]:
        n = len(self.of_ranks[0]) if self.of_ranks else 0
        same = run.measured(Processes).ranks_alike(self.of_ranks) if self.of_ranks else ()
        if n < MIN_COMPARED:
            unseen = "too little was seen of the random numbers of all ranks"
            yield Skipped("no random numbers were drawn in the forward" if self.of_ranks else unseen)
        elif not same:
            yield Passed("ranks with the same random numbers")
        else:
            yield self.finding(
                f"{name_ranks(same).capitalize()} draw the same random numbers in the forward, as for "
                f"dropout, in each of {n} inspected batches: their masks or noise are no more diverse than "
                "those of one rank.",
                when=0,
                value=float(len(same)),
                causes=("the same seed on all ranks",),
                next_steps=("Call torch.manual_seed(seed + rank) once the model is made",),
                ranks=same,
            )


def _state(device: torch.device) -> int:
    """Hash of the state of the generator that dropout uses; that of a GPU is kept by the CPU."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return zlib.crc32(state.numpy().tobytes())
