"""Orders of callbacks have names in one module, and a table is made from these."""

import ast
import copy
import pickle
import re
from pathlib import Path

import pytest

import hookcb
from docs.orders import COMMAND, END, PAGE, main, reasons, with_table
from hookcb import EMA, Callback, GradientClip, Recorder, synth_learner
from hookcb.core import orders
from tests.support import in_turn

PACKAGE = Path(hookcb.__file__).parent


def unnamed(source, file="a file"):
    """Where an order is set to a number that has no name; a variable is let pass."""
    found = []
    for node in ast.walk(ast.parse(source)) if re.search(r"\border\b.* = ", source) else ():
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            to = node.targets if isinstance(node, ast.Assign) else [node.target]
            is_order = any(ast.unparse(x).split(".")[-1] == "order" for x in to)
            if is_order and any(isinstance(x, ast.Constant) for x in ast.walk(node.value)):
                value = ast.unparse(node.value)
                found.append(f"{file}:{node.lineno}: order = {value}; give it a name in core/orders.py")
    return found


def test_every_order_in_the_package_has_a_name():
    files = list(PACKAGE.rglob("*.py"))
    assert [place for path in files for place in unnamed(path.read_text("utf-8"), path.name)] == []


@in_turn(
    "code",
    [
        "class A(Callback):\n    order = 5",
        "class A(Callback):\n    order = -5",
        "class A(Callback):\n    order: int = 5",
        "class A(Callback):\n    order = orders.CLIP\nclass B(A):\n    order = 3",
        "class A(Callback):\n    order = orders.LAST + 1",
        "def f(cb):\n    cb.order = 1000",
    ],
)
def test_a_planted_number_is_found(code):
    (found,) = unnamed(code)
    assert "give it a name in core/orders.py" in found


def test_every_name_says_why_it_is_there_and_is_used():
    names = [name for name in vars(orders) if name.isupper()]
    assert list(reasons()) == names
    used = "\n".join(path.read_text("utf-8") for path in PACKAGE.rglob("*.py"))
    assert [name for name in names if f"orders.{name}\n" not in used and f"orders.{name}," not in used] == []
    numbers = [getattr(orders, name) for name in names]
    assert numbers == sorted(numbers)


def test_a_name_without_a_reason_is_refused():
    with pytest.raises(ValueError, match="add a string below CLIP that gives the reason"):
        reasons('FREEZE = -90\n"""Early."""\nCLIP = 20\nEMA = 30\n"""Late."""\n')


def test_the_table_in_the_page_is_current():
    assert PAGE.read_text("utf-8") == with_table(PAGE.read_text("utf-8")), f"run {COMMAND}"


def test_check_tells_a_table_that_is_old_and_writes_nothing(tmp_path, monkeypatch, capsys):
    page = tmp_path / "training.md"
    old = PAGE.read_text("utf-8").replace("| 40 | `Recorder`", "| 41 | `Recorder`")
    page.write_text(old, "utf-8")
    monkeypatch.setattr("docs.orders.PAGE", page)
    assert main(["--check"]) == 1
    assert COMMAND in capsys.readouterr().err
    assert page.read_text("utf-8") == old
    assert main([]) == 0
    assert main(["--check"]) == 0
    assert page.read_text("utf-8") == PAGE.read_text("utf-8")
    with pytest.raises(ValueError, match="the table belongs between them"):
        with_table(old.replace(END, ""))


class Own(Callback):
    order = 5


def test_an_order_is_a_plain_number_that_others_may_be_compared_with():
    for kind in (EMA, GradientClip, Recorder, Callback):
        assert type(kind.order) is type(kind().order) is int
    first, last = Own(), Own(name="last")
    last.order = GradientClip.order + 1
    learn = synth_learner(cbs=[last, GradientClip(), first, EMA()])
    ours = [cb.name for cb in learn.cbs if cb.order in (5, 20, 21, 30)]
    assert ours == ["own", "gradient_clip", "last", "ema"]


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda cb: pickle.loads(pickle.dumps(cb))])
def test_a_copy_has_the_order_that_was_set(again):
    changed = GradientClip()
    changed.order = 25
    assert again(changed).order == 25
    assert again(GradientClip()).order == orders.CLIP == 20
    assert again(Own()).order == 5
