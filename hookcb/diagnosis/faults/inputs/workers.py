"""random.workers and data.workers: workers of a DataLoader that draw, or give, the same."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from hookcb.core.text import join_names
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.heard import heard
from hookcb.diagnosis.measurements.drawing import GENERATORS, Around, Seeding, Workers
from hookcb.diagnosis.measurements.loading import Loading, Pass
from hookcb.diagnosis.measurements.replicas import hash_of
from hookcb.diagnosis.run import Absent, Run, Skipped
from hookcb.diagnosis.verdict import Finding

N_BATCHES = 64  # after whose start of a pass it is read
MIN_TURNS = 3  # of all workers, whose batches are compared
NO_WORKERS = Absent("no DataLoader with workers was heard of")


@fault("random.workers", Site.INPUT, needs="batches", leads_to="random.epochs", exact=True)
class CopiedGenerators(Fault):
    """Workers that draw the same random numbers, as they have copies of a generator, or the same seed.

    Exact: the dataset of a DataLoader, or a transform, has a generator of NumPy, Python or torch as an
    attribute that one of its methods uses, none of which seeds a generator or asks for its worker, and there
    is no `worker_init_fn` that could reach the dataset. Two workers or more then draw the same numbers. Or
    the global generator of torch, Python or NumPy had the same state in two workers, both before and after
    their first batch, for which numbers were drawn from it, as after a `worker_init_fn` that sets one seed
    for all. A note if only two epochs began with the same state in a worker, as workers are not persistent:
    other samples get these numbers if the data is shuffled. Only the loader counts that was iterated over
    last when a training batch began; global generators are seen in forked workers, and not for an
    IterableDataset.

    Source: PyTorch, torch.utils.data, "Randomness in multi-process data loading".
    """

    headline = "Workers draw the same random numbers"
    hears = (Loading, Workers, Seeding)
    severity = "warning"
    passed = "workers that draw the same random numbers"
    cadence = N_BATCHES

    def __init__(self) -> None:
        super().__init__()
        self._live: list[Pass] = []
        self._passes: list[Pass] = []
        self._of_workers: list[list[Around]] = []  # random states in each pass

    def on_batch(self, run: Run) -> None:
        last = heard(Loading).last
        is_new = last is not None and last.n_workers and all(last is not x for x in self._live)
        if last is not None and is_new and len(self._live) < N_BATCHES:
            self._live.append(last)

    def tell(self, run: Run) -> None:
        self._passes = [x._replace(states=None) for x in self._live]
        self._of_workers = [[] if x.states is None else x.states.read() for x in self._live]

    def freeze(self) -> None:
        self._live = []

    def findings(self, run: Run) -> Iterator[Result]:
        found = [*self._of_copies(), *self._of_seeds()]
        return self.told(run, found, "" if self._passes else NO_WORKERS)

    def _of_copies(self) -> Iterator[Finding]:
        """Generators that the dataset holds."""
        open_ = [x for x in self._passes if x.held and not x.may_reseed]
        several = next((x for x in open_ if x.n_workers > 1), None)
        states = [x.held for x in open_ if not x.is_kept]
        again = next((x for x in open_ if not x.is_kept and states.count(x.held) > 1), None)
        if (found := several or again) is None:
            return
        names = join_names([name for name, _ in found.held], 3)
        copies = f"each of the {found.n_workers} workers has a copy with the same state"
        what = [copies] if several else []
        what += ["each epoch begins with the same state again"] if again else []
        yield self.finding(
            f"The dataset draws from {names}, and {', and '.join(what)}: samples get the same random "
            "changes.",
            self.severity if several else "info",
            when=0,
            value=float(found.n_workers),
            causes=(
                "a generator that is made once, before workers copy the dataset",
                *(("a worker_init_fn that seeds other generators than this one",) if found.has_init else ()),
            ),
            next_steps=("Make the generator in __getitem__ or in worker_init_fn, from torch.initial_seed()",),
        )

    def _of_seeds(self) -> Iterator[Finding]:
        """Global generators, which a worker_init_fn may have seeded."""
        of_each = [(known, own) for known, own in zip(self._passes, self._of_workers, strict=True) if own]
        same = {name for _, own in of_each for name in same_of(own)}
        firsts = [own[0] for known, own in of_each if known.has_init]
        again = set(same_of(firsts))
        if not (names := [name for name in GENERATORS if name in (same or again)]):
            return
        n = max(known.n_workers for known, _ in of_each)
        where = f"{n} workers begin" if same else "each worker begins each epoch"
        yield self.finding(
            f"The dataset draws from the global generator of {join_names(names, 3)}, with which {where} in "
            f"the same state: {'samples' if same else 'epochs'} get the same random changes.",
            self.severity if same else "info",
            when=0,
            value=float(n),
            causes=(
                f"a worker_init_fn that sets the same seed {'in all workers' if same else 'in each epoch'}",
            ),
            next_steps=(
                "Take the seed from torch.initial_seed(), which differs in each worker and epoch; without a "
                "worker_init_fn, PyTorch seeds all three generators so",
            ),
        )


def same_of(workers: Sequence[Around]) -> list[str]:
    """Generators from which two workers have drawn the same numbers for their first batch."""
    found = []
    for i, name in enumerate(GENERATORS):
        ends = [(before, after) for before, after in (x.of(i) for x in workers) if before != after]
        if len(set(ends)) < len(ends):
            found.append(name)
    return found


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
        self._n_read = 0  # batches

    def on_batch(self, run: Run) -> None:
        last = heard(Loading).last
        if self._pass is None and last is not None and last.n_workers:
            self._pass = last
        if self._pass is None or last is not self._pass or not self._pass.is_unsharded:
            return
        if len(self._hashes) < MIN_TURNS * self._pass.n_workers and (own := hash_of(run.loop.xb)) is not None:
            self._hashes.append(own)

    def tell(self, run: Run) -> None:
        self.seen, self._n_read = [], len(self._hashes)
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
        self._pass = None if self._pass is None else self._pass._replace(states=None)

    def findings(self, run: Run) -> Iterator[Result]:
        known = self._pass
        is_read = known is not None and (not known.is_unsharded or self._n_read >= MIN_TURNS)
        unseen = NO_WORKERS if known is None else Skipped("too few batches of the workers were seen")
        return self.told(run, self.seen, "" if is_read else unseen)
