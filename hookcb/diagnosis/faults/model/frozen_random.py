"""param.frozen_random, param.frozen_late, param.frozen_adapters: parameters that are frozen by mistake."""

import math
import re
from collections.abc import Iterator

from hookcb.core.text import as_layer, join_names
from hookcb.diagnosis.fault import Fault, Result, Site, fault, findings_of
from hookcb.diagnosis.frame import Frame
from hookcb.diagnosis.measurements.flags import Flags
from hookcb.diagnosis.run import Passed, Run, Skipped

MIN_LAYERS, MIN_SHARE = 2, 0.5  # frozen at random; of the elements of all weights
MIN_IDLE = 5  # inspected steps in a row
ADAPTER = re.compile(r"(^|\.)(lora_|ia3_|hada_|adapters?\b|prompt_embeddings)")


@fault(
    "param.frozen_random",
    Site.MODULES,
    needs="gradients activations batches",
    leads_to="loss.* train.unfinished unit.* valid.*",
    exact=True,
)
class FrozenRandom(Fault):
    """A large frozen part that was neither loaded nor trained: a random trunk, or a random head.

    Formula: two or more linear, convolutional or recurrent layers with half of the elements of all weights,
    or the last layer that is called, are frozen from the beginning to the end; they look as they were
    initialized, by their kurtosis, the sizes of their rows and columns, and a standard deviation of
    torch.nn.init; and no other parameter began with the same numbers. A warning if all loads of the program
    are known, which hookcb hears only from its start under the command, and none of them has written these;
    else a note.

    Source: the distribution of the sizes of rows of random numbers; torch.nn.init.
    """

    headline = "A frozen part is still random"
    uses = (Flags,)
    severity = "info"

    def findings(self, run: Run) -> Iterator[Result]:
        flags, sizes = run.measured(Flags), run.measured(Frame).frozen
        trained = [p for p in run.params.values() if p.is_weight and p.stats]
        if not trained:
            yield Skipped("no weight had a gradient at a step")
            return
        random = {name.rpartition(".")[0] for name in flags.random}
        layers = [x for name, x in run.layers.items() if name in random and name in sizes]
        n_random = sum(sizes[x.name] for x in layers)
        share = n_random / (sum(sizes.values()) + sum(math.prod(p.shape) for p in trained))
        last = max([p.place_of_layer or 0 for p in trained])
        ends = bool(layers) and layers[-1].place > last
        if not (ends or (len(layers) >= MIN_LAYERS and share >= MIN_SHARE)):
            yield Passed(f"layers that are frozen at random ({share:.0%} of the weights)", share, MIN_SHARE)
            return
        first, is_known, n = layers[-1 if ends else 0], flags.knows_loads, len(layers)
        what = f"{n} layers, {share:.0%} of the weights, are" if n > 1 else "The last layer is"
        how = "neither loaded by load_state_dict nor trained" if is_known else "not trained"
        yield self.finding(
            f"{what} frozen, {how}, and as random as layers are initialized: "
            f"{join_names([as_layer(x.name) for x in layers], 4)}.",
            "warning" if is_known else "info",
            at=first,
            value=share,
            limit=MIN_SHARE,
            causes=(
                "a head that was replaced before everything was frozen"
                if ends
                else "pretrained weights that were not loaded, or do not match by name",
            ),
            next_steps=(
                f"Train it: model.get_submodule({first.name!r}).requires_grad_(True)"
                if ends
                else "Print what load_state_dict returns, or train these layers, too",
            ),
        )


@fault(
    "param.frozen_late",
    Site.OPTIMIZER,
    needs="batches optimizers",
    leads_to="loss.* param.not_stepped update.* train.unfinished",
    exact=True,
)
class FrozenLate(Fault):
    """Parameters that were frozen after the first step, or an optimizer that has only frozen ones.

    Exact: in five inspected steps in a row `requires_grad` of all parameters of the optimizer that steps is
    False and their `grad` is None: a warning. A note if parameters in an optimizer were trained in the first
    step and are frozen at the end, as that may be planned.
    """

    headline = "Parameters are frozen that an optimizer has"
    uses = (Flags,)
    severity = "info"

    def findings(self, run: Run) -> Iterator[Result]:
        flags = run.measured(Flags)
        if findings_of("param.frozen", run):
            yield Skipped("no parameter of the model is trained")
        elif flags.n_idle >= MIN_IDLE:
            yield self.finding(
                f"The optimizer goes on making steps, but all of its {flags.n_of_idle} parameters are frozen "
                f"(requires_grad is False) and without a gradient since step {flags.idle_since}.",
                "warning",
                when=flags.idle_since,
                value=float(flags.n_of_idle),
                limit=0.0,
                causes=("requires_grad_(False), as for another model's step or a validation, is not undone",),
                next_steps=("Call requires_grad_(True) on them before the backward",),
            )
        elif flags.late:
            step, names = min(flags.late.values()), list(flags.late)
            yield self.finding(
                f"{len(names)} parameter{'s' * (len(names) != 1)} that the optimizer has "
                f"{'were' if len(names) > 1 else 'was'} trained, and frozen from step {step} on: "
                f"{join_names(names, 4)}.",
                at=names[0].rpartition(".")[0],
                param=names[0],
                when=step,
                value=float(len(names)),
                limit=0.0,
                causes=("a freeze by plan, or one that is not undone",),
                next_steps=("If they should be trained, call requires_grad_(True) on them",),
            )
        else:
            seen = run.n_steps >= MIN_IDLE
            yield (
                Passed("parameters that were frozen late")
                if seen
                else Skipped("there were fewer than 5 steps")
            )


@fault(
    "param.frozen_adapters",
    Site.MODULES,
    needs="gradients batches",
    leads_to="loss.* train.unfinished",
    exact=True,
)
class FrozenAdapters(Fault):
    """Adapters that are all frozen, while something else is trained, as after loading them for inference.

    Exact: all parameters whose names have `lora_`, `ia3_`, `hada_` or `adapter` are frozen from the beginning
    to the end, and at least one other parameter gets gradients. A warning if an optimizer has them, or one of
    them is all zeros, as an adapter before its training; else a note, as another part may be trained on top.
    """

    headline = "All adapters are frozen"
    uses = (Flags,)

    def findings(self, run: Run) -> Iterator[Result]:
        flags, trained = run.measured(Flags), [p.name for p in run.params.values() if p.stats]
        adapters = sorted(name for name in flags.frozen if ADAPTER.search(name))
        if not trained:
            yield Skipped("no parameter had a gradient at a step")
            return
        if not adapters or any(map(ADAPTER.search, run.params)):
            yield Passed("adapters that are frozen")
            return
        held, zero = flags.held.intersection(adapters), flags.zero.intersection(adapters)
        why = f"; {len(held)} of them are in the optimizer" if held else ""
        why += f"; {join_names(sorted(zero), 1)} is still zero, as before any training" if zero else ""
        yield self.finding(
            f"All {len(adapters)} parameters of adapters are frozen, while {join_names(trained, 2)} "
            f"{'are' if len(trained) > 1 else 'is'} trained{why}.",
            "warning" if held or zero else "info",
            at=adapters[0].rpartition(".")[0],
            param=adapters[0],
            value=float(len(adapters)),
            limit=0.0,
            causes=("adapters that were loaded for inference, which freezes them",),
            next_steps=(
                "Call requires_grad_() on them before the optimizer is created; PEFT does it with "
                "from_pretrained(…, is_trainable=True)",
            ),
        )
