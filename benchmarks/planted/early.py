"""By how many steps faults of large models are told before the loss shows them.

`python benchmarks/planted/early.py --seeds 0 1 2` trains each fault, and the same training repaired. It asks
for the verdict after each 10 batches of both. The loss shows a fault once the median of 10 losses in a row is
5 % above that of the repaired training at the same steps.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from statistics import median

import torch
from case import Callbacks, Run, follow
from experts import MixtureModel, train_experts
from faults_language import outlier_channel
from faults_large import below_eps, growing_logits, negative_z_loss, shut_out, stale_moment, unbalanced
from faults_numbers import in_float16, large_features, small_loss
from language import LanguageModel, adamw, character_batches, warm_up
from large_controls import balanced, fresh_moment, no_z_loss, normalized, small_eps
from nets import Mlp, token_loss
from spikes import N_STEP, fast_for_good, scale_after, scale_between, wrong_momentum
from torch import nn

from hookcb import Callback, Diagnose, Verdict

EACH, WINDOW, ABOVE = 10, 10, 1.05
Train = Callable[[int, Callbacks], Run]


# ---- repaired trainings that are no controls of `make planted`


def two_of_eight(seed: int, cbs: Callbacks) -> Run:
    return train_experts(MixtureModel(k=2), seed, cbs, coefficient=1e-2, lr=3e-3)


def plain_norms(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel()
    opt = adamw(model)
    batches = character_batches(seed, n_step=80)
    return follow(model, token_loss, opt, batches, cbs, seed, clip=1.0, schedule=warm_up(opt))


def plain_loss(seed: int, cbs: Callbacks) -> Run:
    run = in_float16(Mlp(), seed, cbs, lr=0.1)
    run.losses = [1e-4 * x for x in run.losses]  # in the unit of the fault
    return run


def plain_features(seed: int, cbs: Callbacks) -> Run:
    features = nn.Linear(64, 64, bias=False).requires_grad_(False)
    model = nn.Sequential(features, nn.LayerNorm(64), nn.Linear(64, 10))
    return in_float16(model, seed, cbs, lr=0.05)


def one_rate(seed: int, cbs: Callbacks) -> Run:
    model = LanguageModel()
    return follow(model, token_loss, adamw(model, lr=3e-3), character_batches(seed, N_STEP), cbs, seed)


# code, what is planted, and the training with it and without
PAIRS: Sequence[tuple[str, str, Train, Train]] = (
    ("attn.logits", "a rate of 0.04", growing_logits, normalized),
    ("head.logits", "a z-loss of the wrong sign", negative_z_loss, no_z_loss),
    ("moe.imbalance", "no load-balancing loss", unbalanced, balanced),
    ("moe.dead", "no load-balancing loss", unbalanced, balanced),
    ("moe.dead", "two experts that are shut out", shut_out, two_of_eight),
    ("update.spike", "clipping that ends at step 200, β₂ of 0.999", stale_moment, fresh_moment),
    ("adam.eps", "gradients far below eps", below_eps, small_eps),
    ("act.outliers", "a channel of a norm ×30", outlier_channel, plain_norms),
    ("precision.underflow", "float16 and a loss of 1e-4", small_loss, plain_loss),
    ("precision.overflow", "float16 and large features", large_features, plain_features),
    ("loss.spike", "a rate ×50 from step 120 on", fast_for_good, one_rate),
    ("loss.spike", "Adam's first moment ×100 at step 120", wrong_momentum, one_rate),
    ("loss.spike", "a scale that is lowered in step 120", scale_between, scale_after),
)


# ---- one training


class Asking(Callback):
    """Asks for the verdict after each 10 batches; `asked` and `told` have the first step of each code.

    `told` is what hookcb tells by itself, while the training goes on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, int] = {}
        self.told: dict[str, int] = {}
        self.diagnose = Diagnose(self._tell, show=False)

    def after_batch(self) -> None:
        if self.train_iter % EACH == EACH - 1:
            for finding in self.diagnose.judge().findings:
                self.asked.setdefault(finding.code, self.train_iter)

    def _tell(self, verdict: Verdict) -> None:
        if verdict.primary is not None:  # which the warning names
            self.told.setdefault(verdict.primary.code, self.train_iter)


@cache
def trained(train: Train, seed: int) -> tuple[list[float], Asking]:
    """Losses of a training, and when it was told what."""
    asking = Asking()
    torch.manual_seed(seed)
    return train(seed, [asking.diagnose, asking]).losses, asking


def departure(losses: Sequence[float], repaired: Sequence[float]) -> int | None:
    """First step at which the median of the last 10 losses is 5 % above the repaired one; None if none is."""
    for i in range(min(len(losses), len(repaired)) - WINDOW + 1):
        mine, usual = (median(x[i : i + WINDOW]) for x in (losses, repaired))
        if not mine <= ABOVE * usual:  # it may be NaN
            return i + WINDOW - 1
    return None


@dataclass(frozen=True)
class Lead:
    """Steps of one fault with one seed, None if it did not come to that.

    Attributes:
        asked: first one after which the verdict has the code, if it is asked for.
        told: that at which hookcb tells it by itself, before the end.
        shown: that at which the loss shows it.
        wrong: first one after which the verdict on the repaired training has the code.
    """

    asked: int | None
    told: int | None
    shown: int | None
    wrong: int | None

    @property
    def lead(self) -> int | None:
        """Number of steps by which it was known before the loss showed it."""
        return None if self.asked is None or self.shown is None else self.shown - self.asked


def lead_of(code: str, fault: Train, repaired: Train, seed: int) -> Lead:
    losses, asking = trained(fault, seed)
    usual, of_repaired = trained(repaired, seed)
    shown = departure(losses, usual)
    return Lead(asking.asked.get(code), asking.told.get(code), shown, of_repaired.asked.get(code))


# ---- the command


def cell(steps: Sequence[int | None]) -> str:
    return ", ".join("–" if x is None else f"{x}" for x in steps)


def main() -> int:
    """Prints the table, as Markdown."""
    parser = argparse.ArgumentParser(prog="benchmarks/planted/early.py", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", default="*", metavar="GLOB", help="codes that match")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| fault | planted | known at step | told by itself | loss shows it | steps before | if repaired |")
    print("|---|---|---|---|---|---|---|")
    for code, what, fault, repaired in PAIRS:
        if fnmatch(code, args.only):
            leads = [lead_of(code, fault, repaired, seed) for seed in args.seeds]
            names = "asked", "told", "shown", "lead", "wrong"
            columns = (cell([getattr(x, name) for x in leads]) for name in names)
            print(f"| `{code}` | {what} | {' | '.join(columns)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
