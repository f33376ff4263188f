"""random.workers and data.workers: workers of a DataLoader that draw, or give, the same."""

from collections.abc import Iterator

from torch import Tensor

from hookcb.core.text import join_names
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.heard import heard
from hookcb.diagnosis.measurements.loading import Loading, Pass
from hookcb.diagnosis.measurements.replicas import hash_of
from hookcb.diagnosis.run import Absent, Run, Skipped

N_BATCHES = 64  # after whose start of a pass it is read
MIN_TURNS = 3  # of all workers, whose batches are compared
NO_WORKERS = Absent("no DataLoader with workers was heard of")


@fault("random.workers", Site.INPUT, needs="batches", exact=True)
class CopiedGenerators(Fault):
    """Workers that draw the same random numbers, as each has a copy of a generator that the dataset holds.

    Exact: the dataset of a DataLoader, or a transform, has a generator of NumPy, Python or torch as an
    attribute that one of its methods uses, none of which seeds a generator or asks for its worker, and there
    is no `worker_init_fn`. Two workers or more then draw the same numbers. A note if there is one worker,
    whose generator began two epochs with the same state, as workers are not persistent. Only the loader
    counts that was iterated over last when a training batch began.

    Source: PyTorch, torch.utils.data, "Randomness in multi-process data loading".
    """

    headline = "Workers draw the same random numbers"
    hears = (Loading,)
    severity = "warning"
    passed = "random generators that are copied into workers"
    cadence = N_BATCHES

    def __init__(self) -> None:
        super().__init__()
        self._passes: list[Pass] = []

    def on_batch(self, run: Run) -> None:
        last = heard(Loading).last
        if last is not None and all(last is not x for x in self._passes) and len(self._passes) < N_BATCHES:
            self._passes.append(last)

    def findings(self, run: Run) -> Iterator[Result]:
        open_ = [x for x in self._passes if x.held and not x.has_init]
        several = next((x for x in open_ if x.n_workers > 1), None)
        states = [x.held for x in open_ if not x.is_kept]
        again = next((x for x in open_ if not x.is_kept and states.count(x.held) > 1), None)
        if (found := several or again) is None:
            return self.told(run, (), "" if self._passes else NO_WORKERS)
        names = join_names([name for name, _ in found.held], 3)
        copies = f"each of the {found.n_workers} workers has a copy with the same state"
        what = [copies] if several else []
        what += ["each epoch begins with the same state again"] if again else []
        finding = self.finding(
            f"The dataset draws from {names}, and {', and '.join(what)}: samples get the same random "
            "changes.",
            self.severity if several else "info",
            when=0,
            value=float(found.n_workers),
            causes=("a generator that is made once, before workers copy the dataset",),
            next_steps=("Make the generator in __getitem__ or in worker_init_fn, from torch.initial_seed()",),
        )
        return self.told(run, [finding])


@fault("data.workers", Site.INPUT, needs="batches", leads_to="loss.* train.unfinished", exact=True)
class UnshardedWorkers(Fault):
    """Workers that each give all samples of an IterableDataset, so that each batch comes several times.

    Exact: hashes of the inputs of the first batches of the training: those of all k workers are the same, in
    three turns which differ; the dataset never asks for `get_worker_info`, and there is no `worker_init_fn`.

    Source: PyTorch, torch.utils.data.IterableDataset, on several workers.
    """

    headline = "Each worker gives the same samples"
    hears = (Loading,)
    severity = "warning"
    passed = "workers that give the same samples"
    cadence = N_BATCHES

    def __init__(self) -> None:
        super().__init__()
        self._pass: Pass | None = None
        self._hashes: list[Tensor] = []
        self.n_same: int | None = None

    def on_batch(self, run: Run) -> None:
        last = heard(Loading).last
        if self._pass is None and last is not None:
            self._pass = last
        if self._pass is None or last is not self._pass or not self._pass.is_unsharded:
            return
        if len(self._hashes) < MIN_TURNS * self._pass.n_workers and (own := hash_of(run.loop.xb)) is not None:
            self._hashes.append(own)

    def tell(self, run: Run) -> None:
        self.seen = []
        if (found := self._pass) is None or len(self._hashes) < MIN_TURNS * found.n_workers:
            return
        k, hashes = found.n_workers, [int(x) for x in self._hashes]
        turns = [set(hashes[i : i + k]) for i in range(0, MIN_TURNS * k, k)]
        if (
            k > 1
            and not found.has_init
            and all(len(x) == 1 for x in turns)
            and len(set(hashes)) == len(turns)
        ):
            self.see(
                f"Each of the first {MIN_TURNS} batches comes {k} times, once from each of {k} workers: the "
                "IterableDataset gives all samples in each of them.",
                when=0,
                value=float(k),
                causes=("an IterableDataset that is not split between its workers",),
                next_steps=(
                    "In __iter__, give each worker its part: torch.utils.data.get_worker_info() has its id",
                ),
            )

    def freeze(self) -> None:
        self._hashes = []

    def findings(self, run: Run) -> Iterator[Result]:
        known = self._pass
        is_read = known is not None and (not known.is_unsharded or len(self._hashes) >= MIN_TURNS)
        unseen = NO_WORKERS if known is None else Skipped("too few batches of the workers were seen")
        return self.told(run, self.seen, "" if is_read else unseen)
