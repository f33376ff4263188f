"""checkpoint.incomplete: files that lack trained weights."""

from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.core.text import join_names
from hookcb.diagnosis.fault import Fault, Result, Site, Unknown, fault
from hookcb.diagnosis.faults.model.checkpoints import NOTHING, UNSEEN, memory_of, place_of
from hookcb.diagnosis.heard import heard
from hookcb.diagnosis.measurements.loads import Dict, Load, LoadClock, Loads, Save, Saves
from hookcb.diagnosis.measurements.parameters import Parameters
from hookcb.diagnosis.measurements.state_dicts import is_initial, is_plain, statistics
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.run import Absent, Run
from hookcb.gradients.samples import named_sketches, unchanged
from hookcb.processes.shards import is_shard

PARAMETERS = "named_parameters() is saved, which has no buffers, instead of state_dict()"
MAX_HEAD = 0.1  # share of the trained weights; more may be of use by itself, as a decoder


@fault("checkpoint.incomplete", Site.RUN, needs="batches", subject="checkpoints", exact=True)
class IncompleteCheckpoint(Fault):
    """A file from which the training cannot be resumed, or the model not be used.

    Exact: a file has the state of an optimizer, and some of the weights that this trains, but no file has
    the others; or the only weights in files are a tenth or less of those trained, at the end of the model,
    while trained weights before them are in none; or a file is loaded with strict=False into a module of the
    same names and shapes, and weights stay there as they were initialized which the training has changed, as
    they are not in the file; or files have all parameters of the model, or of a part of it with batch norms,
    but none has their running statistics, which the training has changed. Weights count as saved if their
    memory was, or a copy by that name and shape. Frozen weights need not be saved, and an encoder or decoder
    may be saved alone, or the weights of adapters.
    """

    headline = "A checkpoint lacks trained weights"
    severity = "warning"
    uses = (LoadClock, Parameters, Steps)
    passed = "checkpoints that lack trained weights"
    unless: Unknown = UNSEEN

    def __init__(self) -> None:
        super().__init__()
        self._began: dict[str, Tensor] = {}  # elements of running statistics, before the first step
        # names of what was saved and of what was not, the share of it, the file, and the steps before
        self._head: tuple[tuple[str, ...], tuple[str, ...], float, str, int] | None = None

    def on_model(self, run: Run) -> None:
        known = statistics(run.loop.model)
        self._began = named_sketches({name: x for name, x in known.items() if is_plain(x)})

    def freeze(self) -> None:
        self._began = {}

    def tell(self, run: Run) -> None:
        clock = run.measured(LoadClock)
        named, saves = clock.params(), [x for x in heard(Saves).saves if clock.steps(x.clock)]
        self.seen, self._head = [], None
        if any(map(is_shard, named.values())):
            self.unless = "the weights are divided over ranks"
            return
        memory = memory_of(named.values())
        ours = [x for x in saves if any(y.memory & memory for y in x.dicts) or _has_copies(x, named)]
        self.unless = "" if ours else Absent(NOTHING) if clock.has_heard_start else UNSEEN
        if len(ours) == 0 or any(x.is_opaque for x in saves):
            return  # it may be the model itself
        files = Files([x for save in saves for x in save.dicts], named)
        for save in reversed(ours):
            for opt in run.measured(Steps).optimizers.values():
                held = [p for group in opt.param_groups for p in group["params"]]
                if len(held) in save.optimizers and (lost := files.lost(_trained(held, opt))):
                    names = [files.names[id(p)] for p in lost if id(p) in files.names]
                    self._see(save, names, len(lost), len(held), clock.steps(save.clock))
                    return
        for load in heard(Loads).loads:
            if load.file is not None and self._see_load(run, load, named, clock.steps(load.clock)):
                return
        if not self._see_statistics(run, named, files, ours[-1]):
            self._note_head(run, named, files, ours[-1])

    def _see(self, save: Save, known: list[str], n_lost: int, n: int, step: int) -> None:
        outside = f"{n_lost - len(known)} outside of the model"
        what = join_names([join_names(known, 4)] * bool(known) + [outside] * (n_lost > len(known)))
        self.see(
            f"The file that was saved after {step} steps{place_of(save)} has the optimizer's state of {n} "
            f"parameters, but no file has the weights of {n_lost} of these: {what}. The training cannot "
            "be resumed from it.",
            at=known[0].rpartition(".")[0] if known else None,
            param=known[0] if known else "",
            when=step,
            value=float(n_lost),
            limit=0.0,
            causes=("a module, or parameters of the loss, that are left out of what is saved",),
            next_steps=("Save the state_dict of each module that the optimizer trains",),
        )

    def _see_load(self, run: Run, load: Load, named: dict[str, nn.Parameter], step: int) -> bool:
        """Whether a file of this training was loaded into a copy of the model, and lacks trained weights."""
        ear, moved = heard(Loads), run.measured(Parameters).moved
        is_copy, changed = load.own == {name: tuple(p.shape) for name, p in named.items()}, self._changed(run)
        fresh = {name: p for name in load.missing if (p := load.params[name]()) is not named.get(name)}
        lost = [x for x, p in fresh.items() if moved.get(x) and p is not None and not ear.was_loaded(p)]
        lost += [
            name
            for name, kept in load.statistics.items()
            if name in changed and (x := kept()) is not None and x is not changed[name]
            if not ear.was_loaded(x) and is_initial(name, x)
        ]
        if not (is_copy and step and lost and not load.unexpected):
            return False
        is_of_norms = not fresh.keys() & set(lost)
        cause = PARAMETERS if is_of_norms else "a filter of names that leaves out too many when it is saved"
        self.see(
            f"A file of this training was loaded into {load.about} with strict=False, and lacks "
            f"{join_names(lost, 4)}: these stay as they were initialized, but the training has changed them.",
            at=lost[0].rpartition(".")[0],
            param=lost[0],
            when=step,
            value=float(len(lost)),
            limit=0.0,
            causes=(cause,),
            next_steps=("Save the whole of model.state_dict(), and load it with strict=True",),
        )
        return True

    def _changed(self, run: Run) -> dict[str, Tensor]:
        """Running statistics that the training has changed."""
        now = run.measured(LoadClock).statistics()
        known = {name: x for name, x in now.items() if name in self._began}
        same = unchanged(known, self._began)
        return {name: x for name, x in known.items() if name not in same}

    def _see_statistics(self, run: Run, named: dict[str, nn.Parameter], files: "Files", save: Save) -> bool:
        """Whether files have all parameters of the model, or of a part, but no statistics of its norms."""
        changed = {name: x for name, x in self._changed(run).items() if not files.has(name, x)}
        lost = {id(p) for p in files.lost(named.values())}
        for part in ("", *dict.fromkeys(f"{name.partition('.')[0]}." for name in changed)):
            own = [p for name, p in named.items() if name.startswith(part)]
            gone = [x for x in changed if x.startswith(part) and "." in x.removeprefix(part)]
            if gone and own and not any(id(p) in lost for p in own):
                break
        else:
            return False
        norms, step = list(dict.fromkeys(map(_norm_of, gone))), run.measured(LoadClock).steps(save.clock)
        self.see(
            f"Files{place_of(save)} have all {len(own)} parameters of "
            f"{f'the part {part[:-1]!r} of ' * bool(part)}the model, but none has the running statistics of "
            f"{len(norms)} batch norms, which the training has changed: {join_names(norms, 4)}. A model that "
            "is loaded from these normalizes with mean 0 and variance 1 in eval mode.",
            at=norms[0],
            when=step,
            value=float(len(gone)),
            limit=0.0,
            causes=(PARAMETERS,),
            next_steps=("Save model.state_dict(), and load it with strict=True",),
        )
        return True

    def _note_head(self, run: Run, named: dict[str, nn.Parameter], files: "Files", save: Save) -> None:
        """Keeps what is saved and what is not, until the order of the layers is known."""
        moved = run.measured(Parameters).moved
        params = {name: p for name, p in named.items() if p.requires_grad and moved.get(name)}
        lost = tuple(files.names[id(p)] for p in files.lost(params.values()))
        kept = tuple(name for name in params if name not in lost)
        share = sum(params[name].numel() for name in kept) / max(sum(p.numel() for p in params.values()), 1)
        if 0 < share <= MAX_HEAD and not heard(Saves).misses_safe:
            self._head = kept, lost, share, place_of(save), run.measured(LoadClock).steps(save.clock)

    def findings(self, run: Run) -> Iterator[Result]:
        kept, lost, share, where, step = self._head or ((), (), 0.0, "", 0)
        places = [[_place(run, name) for name in names] for names in (kept, lost)]
        if not (kept and None not in places[0] and None not in places[1]):
            yield from super().findings(run)
            return
        if min(x for x in places[0] if x is not None) <= max(x for x in places[1] if x is not None):
            yield from super().findings(run)
            return
        yield self.finding(
            f"All that was saved of the model{where} is {join_names(kept, 4)}. The training has changed "
            f"{len(lost)} parameters before these, and they are in no file: {join_names(lost, 4)}.",
            when=step,
            value=share,
            limit=MAX_HEAD,
            causes=("the state_dict of the head was saved, instead of that of the model",),
            next_steps=("Save model.state_dict(); or freeze the layers before, if only the head is trained",),
        )


class Files:
    """Weights in all files that were saved."""

    def __init__(self, dicts: list[Dict], named: dict[str, nn.Parameter]) -> None:
        self.names, memory = {id(p): name for name, p in named.items()}, memory_of(named.values())
        self._items = [item for x in dicts for item in x.shapes.items()]
        self._live = set().union(*(x.memory for x in dicts))
        self._copies = [item for x in dicts if not x.memory & memory for item in x.shapes.items()]

    def has(self, name: str, x: Tensor) -> bool:
        """Whether a file has a statistic: its memory, or a copy by its name."""
        return x.data_ptr() in self._live or any(_is_copy(name, x, *item) for item in self._items)

    def lost(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Parameters that are in no file: neither their memory, nor a copy by their name."""
        return [p for p in params if p.data_ptr() not in self._live and not self._has_copy(p)]

    def _has_copy(self, p: Tensor) -> bool:
        name = self.names.get(id(p), "")
        return any(_is_copy(name, p, other, shape) for other, shape in self._copies)


def _norm_of(name: str) -> str:
    return name.rpartition(".")[0]


def _place(run: Run, name: str) -> int | None:
    return run.params[name].place_of_layer if name in run.params else None


def _trained(held: list[Tensor], opt: Optimizer) -> list[Tensor]:
    return [p for p in held if p.requires_grad and (p.grad is not None or opt.state.get(p))]


def _has_copies(save: Save, named: dict[str, nn.Parameter]) -> bool:
    return any(
        tuple(named[name].shape) == shape
        for x in save.dicts
        for name, shape in x.shapes.items()
        if name in named
    )


def _is_copy(name: str, p: Tensor, other: str, shape: tuple[int, ...]) -> bool:
    is_named = not name or name == other or name.endswith(f".{other}") or other.endswith(f".{name}")
    return tuple(p.shape) == shape and is_named
