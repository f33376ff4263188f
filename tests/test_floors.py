"""Importing hookcb stays light, and all that it offers is documented."""

import subprocess
import sys

import hookcb


def test_importing_hookcb_imports_no_optional_package():
    code = (
        "import sys, torch, fastcore.foundation, rich.console; before = set(sys.modules); import hookcb;"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names);"
        "print(*sorted(new))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {
        "hookcb",
        "torch",
        "fastcore",
        "rich",
        "pygments",
        "markdown_it",
        "mdurl",
    }


def test_all_public_names_are_there_and_documented():
    for name in hookcb.__all__:
        assert getattr(hookcb, name).__doc__, f"{name} has no docstring"
