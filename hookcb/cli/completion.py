"""`hookcb completion`: the completion script for a shell, by shtab."""

import argparse
from pathlib import Path
from typing import Any

from hookcb.core.console import attempt, show_error

SHELLS = ("bash", "zsh", "tcsh")
OF_FILES = ("file", "run", "runs", "script", "checkpoint", "html", "output")


def show_completion(parser: argparse.ArgumentParser, shell: str) -> int:
    """Prints the script that completes the commands, options and files of a parser in a shell.

    Returns:
        Exit code: 0, or 1 if shtab is not installed.
    """
    try:
        import shtab
    except ModuleNotFoundError:
        show_error("hookcb completion: shtab is not installed; pip install 'hookcb[completion]'")
        return 1
    commands: Any = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    for command in commands.choices.values():
        for action in command._actions:
            if action.dest in OF_FILES or action.type is Path:
                action.complete = shtab.FILE
    script = shtab.complete(parser, shell)
    attempt(lambda: print(script))  # noqa: T201  # rich would wrap it and replace :names:
    return 0
