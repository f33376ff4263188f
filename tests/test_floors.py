"""The architecture holds: imports point downwards, and importing hookcb stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hookcb

ROOT = Path(hookcb.__file__).parent
FLOORS = [
    {
        "activation_readings",
        "allocator",
        "arguments",
        "backward",
        "batch",
        "checked_zip",
        "console",
        "coverage",
        "display",
        "dryrun",
        "events",
        "fetches",
        "files",
        "folder_lock",
        "freezing",
        "fused",
        "grad_stats",
        "gradient_checks",
        "gradient_flow",
        "gradient_outputs",
        "gradient_reader",
        "gradient_readings",
        "gradient_recorder",
        "gradient_steps",
        "grads",
        "hand_steps",
        "hooks",
        "incidents",
        "layer_ranges",
        "loss_found",
        "lr_curve",
        "failures",
        "memory_growth",
        "memory_readings",
        "memory_sums",
        "memory_watch",
        "metrics",
        "modules",
        "nan_report",
        "nan_search",
        "nan_tracing",
        "own_hooks",
        "optimizer_steps",
        "plots",
        "precision",
        "prepare",
        "printed",
        "profile_ops",
        "profile_places",
        "profile_sums",
        "randomness",
        "readings",
        "reducer",
        "reductions",
        "replay",
        "saved_tensors",
        "stats",
        "step_clock",
        "step_readings",
        "step_store",
        "step_times",
        "stop_signals",
        "storage_ledger",
        "store",
        "tables",
        "taps",
        "tensor_bytes",
        "threads",
        "trace_file",
        "units",
        "untouched",
    },
    {
        "callback",
        "fit_state",
        "monitor",
        "phases",
        "profile_readings",
        "profile_window",
        "rates",
        "sampling",
    },
    {"callbacks"},
    {"diagnosis", "loggers", "lr_find", "report", "resume", "summary"},
    {"followed", "learner", "loop", "watch", "watch_limits", "watch_taps"},
    {"adapters", "cli", "diagnose", "demo", "demo_faults", "script", "testing"},
]


def floor(part: str) -> int:
    return next(i for i, names in enumerate(FLOORS) if part in names)


def modules():
    return [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]


def imported(path: Path) -> set[str]:
    """Dotted names of the parts of hookcb imported at run time, not for type checking."""
    tree = ast.parse(path.read_text())
    typing_only = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    names = set()
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            names.add(node.module)
    return {name for name in names if name.partition(".")[0] == "hookcb"}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_from_lower_floors_only(path):
    own = path.relative_to(ROOT).with_suffix("").parts
    for name in imported(path):
        part, *rest = name.split(".")[1:] or ["hookcb"]
        if own[0] == part == "callbacks":
            assert rest in (["hook"], ["schedule"]) or own == ("callbacks", "__init__"), (
                f"{path.name} imports its sibling {name}"
            )
        elif part != "hookcb":
            assert floor(part) <= floor(own[0]), f"{path.name} is on floor {floor(own[0])} and imports {name}"
            assert (own[0], part) != ("loop", "learner")


def test_every_module_stands_on_a_floor():
    parts = {path.relative_to(ROOT).with_suffix("").parts[0] for path in modules()}
    assert parts == set().union(*FLOORS)


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


def test_a_callback_is_one_short_file():
    for path in (ROOT / "callbacks").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 150, f"{path.name} is too long to read in five minutes"


def test_all_public_names_are_there_and_documented():
    for name in hookcb.__all__:
        assert getattr(hookcb, name).__doc__, f"{name} has no docstring"
