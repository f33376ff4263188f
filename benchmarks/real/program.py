"""Faulty programs with their repairs: how they are written down, trained and judged."""

import contextlib
import io
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb import Diagnose, Learner, diagnose, watch
from hookcb.diagnosis.verdict import Verdict

Loop = Callable[["Training"], None]
Build = Callable[[bool], "Training"]


@dataclass
class Training:
    """A script up to its loop.

    Attributes:
        model, loss_func, opt: as the script makes them.
        batches: a loader, or a list of batches; the last item of a batch is the target.
        n_epoch: number of passes over the batches.
        score: function of the trained model in eval mode; higher is better.
        loop: the script's own loop, which runs under `watch`; None for a `Learner`.
    """

    model: nn.Module
    loss_func: Callable[..., Tensor]
    opt: Optimizer
    batches: Iterable[Any]
    n_epoch: int
    score: Callable[[nn.Module], float]
    loop: Loop | None = None


@dataclass(frozen=True)
class Program:
    """A faulty program and its repair.

    Attributes:
        name: what the script is about.
        fault: class of its fault.
        codes: codes that name the fault, set down before the first run; empty if none does.
        goal: score that the repaired program reaches, and the faulty one does not.
        build: function of whether to repair the program.
    """

    name: str
    fault: str
    codes: frozenset[str]
    goal: float
    build: Build


def program(to: list[Program], fault: str, name: str, codes: str, goal: float) -> Callable[[Build], Build]:
    """Add a program to the list `to`; `codes` are separated by spaces."""

    def add(build: Build) -> Build:
        to.append(Program(name, fault, frozenset(codes.split()), goal, build))
        return build

    return add


@dataclass(frozen=True)
class Outcome:
    """Outcome of one version of a program with one seed.

    Attributes:
        program, fault, seed, is_repaired: which version of which program.
        status: status of the verdict after the training.
        primary: code of its primary finding, or "".
        findings: severity and code of each finding.
        before: code of the primary finding before the training, or "".
        is_alarm: whether there is an error or a warning.
        is_found: whether there is one, or a note that names the fault.
        is_first: whether the primary finding names the fault, or a note if nothing else is found.
        is_found_before: `is_found` of the check before the training.
        score: score of the trained model.
        is_as_meant: whether a repaired program reaches its goal, or a faulty one does not.
        error: exception that the training raised, or "".
        text: verdict as it is printed.
    """

    program: str
    fault: str
    seed: int
    is_repaired: bool
    status: str
    primary: str
    findings: tuple[str, ...]
    before: str
    is_alarm: bool
    is_found: bool
    is_first: bool
    is_found_before: bool
    score: float
    is_as_meant: bool
    error: str
    text: str


def outcome(program: Program, seed: int, is_repaired: bool) -> Outcome:
    """Check one version of a program, train it, and compare both verdicts with its fault."""
    with _quiet():
        before = _preflight(built(program, seed, is_repaired))
        training = built(program, seed, is_repaired)
        verdict, error = train(training)
        score = scored(training)
    primary = "" if verdict.primary is None else verdict.primary.code
    return Outcome(
        program.name,
        program.fault,
        seed,
        is_repaired,
        verdict.status,
        primary,
        tuple(f"{finding.severity} {finding.code}" for finding in verdict.findings),
        "" if before is None or before.primary is None else before.primary.code,
        is_alarm=is_alarm(verdict),
        is_found=is_alarm(verdict) or is_named(program, verdict),
        is_first=primary in program.codes if primary else is_named(program, verdict),
        is_found_before=before is not None and (is_alarm(before) or is_named(program, before)),
        score=score,
        is_as_meant=(score >= program.goal) == is_repaired,
        error=error,
        text=str(verdict),
    )


def built(program: Program, seed: int, is_repaired: bool) -> Training:
    """Build one version of a program; its data, weights and order of samples follow from the seed."""
    torch.manual_seed(seed)
    return program.build(is_repaired)


def train(training: Training) -> tuple[Verdict, str]:
    """Run the script's own loop under `watch`, or a Learner; return the verdict and the exception raised."""
    t, watching = training, Diagnose(show=False)
    error = ""
    if t.loop is None:
        learn = Learner(t.batches, t.model, t.loss_func, t.opt)
        try:
            with learn.no_logging():
                learn.fit(t.n_epoch, cbs=[watching])
        except Exception as raised:  # some faults make torch refuse; the verdict should say why
            error = one_line(raised)
        return learn.diagnose(), error
    w = watch(t.model, t.opt, watching)
    try:
        with w:
            t.loop(t)
    except Exception as raised:
        error = one_line(raised)
    return w.diagnose(), error


def scored(training: Training) -> float:
    """Score of a trained model."""
    training.model.eval()
    with torch.no_grad():
        return float(training.score(training.model))


def plain_loop(training: Training) -> None:
    """Train as in the tutorials of PyTorch."""
    t = training
    for _ in range(t.n_epoch):
        for *xb, y in t.batches:
            t.opt.zero_grad()
            loss = t.loss_func(t.model(*xb), y)
            loss.backward()
            t.opt.step()


def is_alarm(verdict: Verdict) -> bool:
    return any(finding.severity != "info" for finding in verdict.findings)


def is_named(program: Program, verdict: Verdict) -> bool:
    return any(finding.code in program.codes for finding in verdict.findings)


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _preflight(training: Training) -> Verdict | None:
    """Verdict before the training; None if there is none, as the model or the loss raises."""
    try:
        return diagnose(training.model, next(iter(training.batches)), training.loss_func)
    except Exception:  # an exception that no finding explains
        return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
