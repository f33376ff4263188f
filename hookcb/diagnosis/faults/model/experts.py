"""moe.imbalance, moe.dead: routers that send too many tokens to few experts, and none to others."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import takewhile

from hookcb.core.text import as_layer, join_names
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.figure import over_names, over_steps
from hookcb.diagnosis.measurements.routers import Load, Routers
from hookcb.diagnosis.rules import median, ratio, series_of
from hookcb.diagnosis.run import Passed, Run, Skipped
from hookcb.diagnosis.verdict import Finding

MIN_STEPS, LATE = 100, 1 / 8  # a router may be uneven at first; looks from this share of the steps on count
MIN_LOOKS = 4  # of these
MIN_EXPECTED = 64.0  # tokens that each expert would get in one of them, if all got as many
BUSIEST = "tokens of the busiest expert / an even share"
# looks of an uneven router, and tokens that each expert would get in all of them
MIN_UNEVEN, MIN_TOKENS = 2, 16.0
MAX_BUSIEST, OF_MOST = 4.0, 0.8  # times the share of an expert, and share of the most that is possible
MANY = 0.75  # share of the experts that a router uses
IDLE, MIN_MISSED = 2, 32.0  # looks without a token of an expert, and tokens that it would have had as before


class _OfExperts(Fault):
    """A fault that the loads of experts show."""

    severity = "warning"
    uses = (Routers,)

    def findings(self, run: Run) -> Iterator[Result]:
        of_routers = {layer: late(loads) for layer, loads in run.measured(Routers).loads.items()}
        known = {layer: loads for layer, loads in of_routers.items() if loads}
        found = [x for layer, loads in known.items() if (x := self.of_router(run, layer, loads)) is not None]
        enough = [many for loads in known.values() if len(many := with_tokens(loads)) >= MIN_LOOKS]
        if found:
            yield from self.told(run, sorted(found, key=lambda x: -x.value))
        elif enough:
            yield self.ruled_out(enough)
        else:
            few = Skipped(f"too few tokens, or fewer than {MIN_STEPS} batches, were seen by routers")
            yield few if of_routers else run.why_not("experts")

    def of_router(self, run: Run, layer: str, loads: Sequence[Load]) -> Finding | None:
        raise NotImplementedError

    def ruled_out(self, loads: Sequence[Sequence[Load]]) -> Passed:
        raise NotImplementedError


@fault(
    "moe.imbalance",
    Site.MODULES,
    needs="batches",
    leads_to="moe.dead loss.* update.* grad.* param.unreachable",
    subject="experts",
)
class UnevenExperts(_OfExperts):
    """A router that sends most tokens to few experts.

    Formula: tokens of the busiest expert / those it would get if all got as many, in inspected batches after
    the first eighth of 100 steps or more, on all ranks together. Limit: 4, or 0.8 of the most that is
    possible if that is less: n / k for k of n experts per token. It is above the limit in the last two looks
    or more, which have the same busiest expert, and in which each would get 16 tokens or more. A note if the
    entropy of the loads is still that of three quarters of the experts or more, as where one expert is among
    the k of most tokens, and the others share the rest.

    Source: Fedus et al., "Switch Transformers", 2021, for the load-balancing loss; Wang et al.,
    "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024, for the measure, which is
    their maximal violation plus 1.
    """

    headline = "A router sends most tokens to few experts"

    def of_router(self, run: Run, layer: str, loads: Sequence[Load]) -> Finding | None:
        last, limit = loads[-1], limit_of(loads[-1])
        uneven = _trailing(loads, lambda x: x.busiest > limit and x.favorite == last.favorite)
        if len(uneven) < MIN_UNEVEN or sum(x.expected for x in uneven) < MIN_TOKENS:
            return None
        n, usual, used = len(last.counts), median(x.busiest for x in uneven), effective(last)
        return self.finding(
            f"The router {as_layer(layer) or 'of the model'} sends {usual:.2g} times an even share of the "
            f"tokens to its busiest expert (limit {limit:.2g}); it uses its {n} experts as if they were "
            f"{used:.2g}.",
            "info" if used >= MANY * n else "warning",
            at=layer,
            when=(uneven[0].step, last.step),
            value=usual,
            limit=limit,
            causes=_causes(run),
            next_steps=_next_steps(run),
            figure=over_steps(BUSIEST, {BUSIEST: series_of((x.step, x.busiest) for x in loads)}, limit),
        )

    def ruled_out(self, loads: Sequence[Sequence[Load]]) -> Passed:
        shares = [(median(x.busiest for x in each), limit_of(each[-1])) for each in loads]
        value, limit = max(shares, key=lambda x: x[0] / x[1])
        return Passed(f"uneven loads of experts (busiest {value:.2g} times its share)", value, limit)


@fault(
    "moe.dead",
    Site.MODULES,
    needs="batches",
    leads_to="loss.* param.unreachable unit.dead",
    subject="experts",
)
class DeadExperts(_OfExperts):
    """Experts that get no token any more, so they are never trained and their weights are wasted.

    Formula: number of experts of a router without a token in the last four inspected batches or more, of 100
    steps or more, without the first eighth, on all ranks together; if all experts got as many, each would get
    64 or more in each of them, so chance is ruled out. Or without one in the last two or more, where it would
    have got 32 or more with its share of the inspected batches before. Limit: 0.

    Source: Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer",
    2017, section 4; Fedus et al., "Switch Transformers", 2021.
    """

    headline = "Experts get no tokens"

    def of_router(self, run: Run, layer: str, loads: Sequence[Load]) -> Finding | None:
        n = len(loads[-1].counts)
        dead = {i: looks for i in range(n) if (looks := _without_tokens(loads, i))}
        if not dead:
            return None
        loads = max(dead.values(), key=len)
        n_tokens = sum(sum(x.counts) // x.k for x in loads)
        n_tokens_of = {f"expert {i}": float(sum(x.counts[i] for x in loads)) for i in range(n)}
        which = join_names([str(i) for i in dead], 6)
        return self.finding(
            f"{len(dead)} of the {n} experts of the router {as_layer(layer) or 'of the model'} got none of "
            f"the {n_tokens:,} tokens of the last {len(loads)} inspected batches (limit 0): "
            f"{'expert' if len(dead) == 1 else 'experts'} {which}.",
            at=layer,
            when=(loads[0].step, loads[-1].step),
            value=float(len(dead)),
            limit=0.0,
            causes=_causes(run),
            next_steps=(*_next_steps(run), "Begin the router with small weights, and without a bias"),
            figure=over_names("tokens of each expert in these batches", n_tokens_of),
        )

    def ruled_out(self, loads: Sequence[Sequence[Load]]) -> Passed:
        return Passed("experts without tokens", 0.0, 0.0)


def late(loads: Sequence[Load]) -> list[Load]:
    """Looks after the first eighth of the steps; none if there are few."""
    end = loads[-1].step if loads else 0
    known = [x for x in loads if x.step >= LATE * end]
    return known if end >= MIN_STEPS and len(known) >= MIN_LOOKS else []


def with_tokens(loads: Sequence[Load]) -> list[Load]:
    """Looks in which an expert without a token is no chance."""
    return [x for x in loads if x.expected >= MIN_EXPECTED]


def _without_tokens(loads: Sequence[Load], i: int) -> list[Load]:
    """The last looks, if an expert has no token in them and that is no chance."""
    is_idle = partial(_is_idle, i)
    if len(even := _trailing(with_tokens(loads), is_idle)) >= MIN_LOOKS:
        return even
    idle = _trailing(loads, is_idle)
    before = loads[: len(loads) - len(idle)]
    share = ratio(sum(x.counts[i] for x in before), sum(sum(x.counts) for x in before))
    missed = share * sum(sum(x.counts) for x in idle)
    return idle if len(idle) >= IDLE and missed >= MIN_MISSED else []


def _is_idle(i: int, load: Load) -> bool:
    return not load.counts[i]


def _trailing(loads: Sequence[Load], holds: Callable[[Load], bool]) -> list[Load]:
    """The last looks, as long as something holds for each of them."""
    return [*takewhile(holds, reversed(loads))][::-1]


def limit_of(load: Load) -> float:
    """Largest load of an expert, in units of an even one, that is no finding."""
    return min(MAX_BUSIEST, OF_MOST * len(load.counts) / load.k)


def effective(load: Load) -> float:
    """Number of experts with equal loads that would have the entropy of these."""
    shares = [x / sum(load.counts) for x in load.counts if x]
    return math.exp(-sum(p * math.log(p) for p in shares))


def _causes(run: Run) -> tuple[str, ...]:
    if run.measured(Routers).lacks_balance:
        return ("config.output_router_logits is False, so transformers adds no load-balancing loss",)
    return (
        "a load-balancing loss that is missing, too small, of the wrong sign, or not added to the loss",
        "a bias of each expert that is moved the wrong way",
    )


def _next_steps(run: Run) -> tuple[str, ...]:
    add = "Add a load-balancing loss with a coefficient of 1e-2, and a z-loss of the router of 1e-3"
    if run.measured(Routers).lacks_balance:
        add = "Set config.output_router_logits = True, so that router_aux_loss_coef counts"
    return (add, "Check that the loss that is trained has it, and lower the learning rate of the router")
