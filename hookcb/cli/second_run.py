"""The second run of a script, in a process of its own, to find the line that makes its first NaN."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hookcb.cli.ranks import wait_or_kill
from hookcb.core.console import show_error
from hookcb.core.randomness import random_state
from hookcb.diagnosis.measurements.origin import LOOK
from hookcb.diagnosis.reader import OPTION
from hookcb.diagnosis.verdict import Finding, Verdict
from hookcb.nans.report import hint_for

MARGIN = 100  # steps around the one of the first run that are followed
WHOLE = 200  # steps of the first run up to which the whole script is followed
ANOMALY = "Begin the script with torch.autograd.set_detect_anomaly(True), which names the operation"
SEED = "Seed the script, torch.manual_seed(0), so that a second run repeats the first"


@dataclass
class Plan:
    """Task of the second run.

    Attributes:
        kind: class of the model.
        step: number of the training batch in which the first run had a NaN.
        is_module: whether the script is a module.
        result: file for the result.
        random: file with the random state in which the script began.
        cuda_seed: seed of the GPUs, None if the script has used none.
    """

    kind: str
    step: int
    is_module: bool
    result: str
    random: str
    cuda_seed: int | None = None

    @property
    def first(self) -> int:
        """Number of the training batch from which on to follow operations; 0 for all of the script."""
        return 0 if self.step <= WHOLE else self.step - MARGIN


class SecondRun:
    """Runs a script again if a verdict on its first run asks for that, and adds what it finds.

    It begins in the state in which the first one did: folder, environment, random numbers, and the position
    in a file that stdin is read from. Made before the first run.

    Args:
        script: the script, or the name of a module.
        args: its arguments.
        is_module: whether it is a module.
        keeps_stdout: whether stdout is for something else than what the script writes.

    Attributes:
        notes: sentences on what it has found that is not in the text of the verdict.
    """

    def __init__(self, script: str, args: Sequence[str], is_module: bool, keeps_stdout: bool) -> None:
        self._command, self._is_module, self._keeps_stdout = [script, *args], is_module, keeps_stdout
        self._folder, self._environment = os.getcwd(), dict(os.environ)
        self._random = random_state()
        self.notes: list[str] = []
        self._stdin: int | None = None
        with suppress(OSError):
            self._stdin = os.lseek(0, 0, os.SEEK_CUR)

    def explain(self, verdict: Verdict, kind: str) -> Verdict:
        """The verdict, with the line in its finding of a NaN, or why that was not found.

        Args:
            verdict: the verdict on the first run.
            kind: class of the model.
        """
        asking = next((f for f in verdict.findings if asks_for_trace(f)), None)
        if asking is None:
            return verdict
        told = _with_result(asking, self._result(kind, asking.step or 0))
        if verdict.primary != asking:  # the text of the verdict names it only
            self.notes.append(f"{told.name}: {told.message}")
        findings = tuple(told if f is asking else f for f in verdict.findings)
        return replace(
            verdict, findings=findings, primary=told if verdict.primary == asking else verdict.primary
        )

    def _result(self, kind: str, step: int) -> dict[str, Any]:
        show_error(
            "hookcb diagnose: the script runs a second time now, to find the line that makes the NaN; "
            "Ctrl-C ends that"
        )
        with tempfile.TemporaryDirectory(prefix="hookcb-") as folder:
            files = {name: os.path.join(folder, name) for name in ("plan", "result", "random")}
            torch.save(self._random, files["random"])
            seed = torch.cuda.initial_seed() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
            plan = Plan(kind, step, self._is_module, files["result"], files["random"], seed)
            Path(files["plan"]).write_text(json.dumps(asdict(plan)), encoding="utf-8")
            ended = self._run(files["plan"])
            try:
                result: dict[str, Any] = json.loads(Path(files["result"]).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                return {"reason": ended}
            return result

    def _run(self, plan: str) -> str:
        """Runs the script; returns how it ended."""
        sys.stdout.flush()
        if self._stdin is not None:
            os.lseek(0, self._stdin, os.SEEK_SET)
        command = [sys.executable, "-m", "hookcb.cli.traced_script", plan, *self._command]
        env = self._environment | {"TORCHDYNAMO_DISABLE": "1"}  # no operation of compiled code is seen
        stdout = 2 if self._keeps_stdout else None
        try:
            process = subprocess.Popen(command, cwd=self._folder, env=env, stdout=stdout)
        except OSError as error:
            return f"could not be started: {error}"
        try:
            return f"ended with exit code {process.wait()}"
        except KeyboardInterrupt:  # which it got, too
            wait_or_kill(process)
            return "was ended by Ctrl-C"


def asks_for_trace(finding: Finding) -> bool:
    """Whether a finding advises to run the script a second time."""
    return any(OPTION in step for step in finding.next_steps)


def _with_result(finding: Finding, result: dict[str, Any]) -> Finding:
    if "told" not in result:
        text = f"{finding.message.rstrip('.')}. A second run of the script {result['reason']}."
        steps = (SEED if result["reason"].startswith("had none") else ANOMALY,)
        return replace(finding, message=text, next_steps=steps)
    noticed = finding.message.partition(". ")[0].rstrip(".")  # the first sentence
    cause, _, remedy = hint_for(result["op"]).partition(": ")
    return replace(
        finding,
        message=f"{noticed}. {result['told']}.",
        causes=(cause,) if cause else finding.causes,
        next_steps=(remedy or LOOK,),
    )
