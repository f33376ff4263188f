"""random.epochs: random samples, or random changes of samples, that are the same in each epoch."""

from collections.abc import Iterator

from hookcb.core.text import join_names
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.batch_hashes import MIN_BATCHES, BatchHashes, Window, in_same_order
from hookcb.diagnosis.measurements.drawing import GENERATORS
from hookcb.diagnosis.run import Run, Skipped


@fault("random.epochs", Site.INPUT, needs="batches", leads_to="random.workers", exact=True)
class RepeatedRandomNumbers(Fault):
    """Batches that are drawn at random, and come again because a generator was set back in the training.

    Exact: hashes of the inputs of 4 batches or more, which all differ, are the same in two epochs, or after
    the program has set a seed; each of these batches was drawn at random both times, and the states of the
    generator were the same. A generator of torch, Python or NumPy counts if numbers were drawn from it
    between the step and the next batch, or by a worker of the DataLoader for its first batch. Batches that
    come again from other states, or without random numbers, are right: data that is neither shuffled nor
    augmented. So are they if a new optimizer has come in between, as in a training that begins anew, or if
    each sample has a seed of its own.

    Source: PyTorch, "Reproducibility", and torch.utils.data, "Randomness in multi-process data loading".
    """

    headline = "Random samples are the same in each epoch"
    uses = (BatchHashes,)
    severity = "warning"
    passed = "random batches that come again"

    def findings(self, run: Run) -> Iterator[Result]:
        seen = run.measured(BatchHashes)
        if (pair := seen.alike(lambda a, b: bool(_same_numbers(a, b)))) is None:
            n_long = sum(len(x.hashes) >= MIN_BATCHES for x in seen.windows)
            return self.told(
                run, (), "" if n_long > 1 else Skipped("no two epochs of four batches were seen")
            )
        first, second = pair
        n = min(len(x.hashes) for x in pair)
        is_init = bool(second.workers and second.of is not None and second.of.has_init)
        finding = self.finding(
            f"The {n} batches from {second.step} on are those from {first.step} on, although random numbers "
            f"of {join_names(_same_numbers(first, second), 3)} are drawn for them: that generator was set "
            "back in between.",
            when=second.step,
            value=float(n),
            causes=(
                "a worker_init_fn that sets the same seeds in each epoch"
                if is_init
                else "a seed that is set again in the training, as in each epoch or before a validation",
            ),
            next_steps=(
                "In worker_init_fn, take seeds from torch.initial_seed(), which differs in each epoch"
                if is_init
                else "Set seeds once, before the training; give a validation its own generator",
            ),
        )
        return self.told(run, [finding])


def _same_numbers(a: Window, b: Window) -> list[str]:
    """Generators from which the same numbers were drawn for the same batches of two windows."""
    if not in_same_order([a.hashes, b.hashes], inputs_only=True):
        return []
    return [name for i, name in enumerate(GENERATORS) if _in_process(a, b, i) or _in_workers(a, b, i)]


def _in_process(a: Window, b: Window, i: int) -> bool:
    """Whether each batch but the first, before which seeds may be set, was drawn from the same state."""
    batches = list(zip(a.are_drawn, b.are_drawn, a.states, b.states, strict=False))[1:]
    return len(batches) >= MIN_BATCHES - 1 and all(x[i] and y[i] and s[i] == t[i] for x, y, s, t in batches)


def _in_workers(a: Window, b: Window, i: int) -> bool:
    """Whether each worker has drawn the same numbers for its first batch."""
    both = a.n_pass != b.n_pass and len(a.workers) == len(b.workers) > 0
    pairs = [(x.of(i), y.of(i)) for x, y in zip(a.workers, b.workers, strict=True)] if both else []
    return both and all(x == y and x[0] != x[1] for x, y in pairs)
