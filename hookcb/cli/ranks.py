"""Several processes: runs the command line on them, and shows their one result."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from hookcb.cli import INTERRUPTED
from hookcb.core.console import show_error
from hookcb.processes.board import Board
from hookcb.processes.patience import PATIENCE
from hookcb.processes.process_group import n_processes

MAX_LINES = 20  # of what failed processes have written
PREFIX = "hookcb "  # of our own messages
OF_TORCHRUN = re.compile(r"[EWI]\d{4} ")  # beginning of its messages: the level and the date
GRACE = 20.0  # seconds in which processes end after Ctrl-C


def own_rank() -> int:
    """Number that torchrun has given this process, whatever group the script opens; 0 if it is alone."""
    return int(os.environ.get("RANK", 0)) if n_processes() > 1 else 0


class Exit:
    """Agrees on the exit code of all processes under torchrun, which ends the others at the first but 0.

    So no process exits with another code before rank 0 has printed, if that comes in time.
    """

    def __init__(self) -> None:
        self._board: Board | None = None
        self._kept: object = None

    def keep(self, script: object) -> None:
        """Keeps the variables of the script to the end, as one of them may host the store."""
        self._kept = script if n_processes() > 1 else None

    def begin(self) -> None:
        """Says that this process is there; once the script has left its group, it might not be heard."""
        if self._board is None and n_processes() > 1:
            self._board = Board("exit", own_rank(), n_processes())
            self._board.post("here", True)

    def others(self) -> dict[int, int]:
        """Exit codes of the other processes, for rank 0; of those that are there and come in time."""
        if self._board is None:
            return {}
        return self._board.wait_patiently("code", self._that_posted("here", self._board), 2 / 3)

    def _that_posted(self, key: str, board: Board) -> dict[int, object]:
        """Notes of other ranks that are there by now."""
        with PATIENCE.waiting(1 / 3) as seconds:
            return board.there(key, range(1, board.world), seconds)

    def settle(self, code: int, otherwise: int = 0) -> int:
        """The exit code of all: what rank 0 gives, once it has printed.

        Args:
            code: that of rank 0 for all, or that of another rank for rank 0.
            otherwise: what another rank exits with if rank 0 does not come.
        """
        if self._board is None:
            return otherwise if own_rank() else code
        board, is_main = self._board, not own_rank()
        board.post("code", code)
        if is_main:  # which may host the store
            board.wait_patiently("read", self._that_posted("code", board))
            return code
        settled: int = board.wait_patiently("code", [0]).get(0, otherwise)
        board.post("read", True)
        with PATIENCE.waiting() as seconds:
            board.flush(seconds)
        return settled


def run_on_ranks(n: int, argv: Sequence[str]) -> int:
    """Runs `hookcb argv…` on `n` processes of this machine by torchrun; only rank 0 prints.

    If they fail, our own message is shown, or else the end of what they have written. Ctrl-C ends them all.

    Returns:
        Exit code: 0, or that of torchrun, or 130 after Ctrl-C.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    command += ["-m", "hookcb", *argv]
    threads = str(max(1, (os.cpu_count() or 1) // n))
    env = {"OMP_NUM_THREADS": threads, **os.environ}
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        # a session of their own, so that Ctrl-C comes here alone, and torchrun is asked to end the others
        process = subprocess.Popen(command, env=env, stderr=errors, start_new_session=True)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            return INTERRUPTED
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun ends its processes
                wait_or_kill(process)
        if code:
            errors.seek(0)
            show_error(summary(errors.read().splitlines(), n))
    return code


def wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    """Waits for a process that was asked to end; kills it if that takes long, or at another Ctrl-C."""
    try:
        process.wait(GRACE)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()


def summary(lines: Sequence[str], n: int) -> str:
    """Messages of ours in what processes have written, each once; if there is none, its last lines.

    The report of torchrun, which follows, is left out.
    """
    end = next((i for i, line in enumerate(lines) if OF_TORCHRUN.match(line) and line[0] == "E"), None)
    written = [line for line in lines[:end] if not OF_TORCHRUN.match(line)]
    if ours := list(dict.fromkeys(line for line in written if line.startswith(PREFIX))):
        return "\n".join(ours)
    return "\n".join([*written[-MAX_LINES:], f"hookcb: torchrun failed on {n} processes; see above"])
