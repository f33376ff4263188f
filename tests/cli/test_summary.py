"""`hookcb summary` shows a model of a file or module, and says what is wrong with a name or an input."""

import sys

import pytest

from hookcb.cli.main import main

MODELS = """
import torch
from torch import nn

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 2)

    def forward(self, tokens, mask):
        return self.head((self.embed(tokens) * mask[..., None]).sum(1))

def make_net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))

net = make_net()
needs = lambda width: nn.Linear(width, 1)
number = 5
def gives_none(): return None
"""


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo" / "cage.py").write_text(MODELS)
    (tmp_path / "zoo" / "broken.py").write_text("{}['key']")
    (tmp_path / "zoo" / "lacking.py").write_text("import a_package_that_is_not_there")
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("zoo", "cage", "broken", "lacking")]:
        del sys.modules[name]


@pytest.mark.parametrize("target", ["zoo/cage.py:make_net", "zoo.cage:make_net", "zoo.cage:net"])
def test_a_function_or_a_model_of_a_file_or_module_is_shown(target, capsys):
    path = sys.path[:]
    assert main(["summary", target, "--input", "1,3,8,8"]) == 0
    out = capsys.readouterr().out
    assert "Conv2d" in out
    assert "1×4×6×6" in out
    assert "402" in out  # 3·4·9 + 4 + 144·2 + 2 parameters
    assert sys.path == path


def test_several_inputs_have_dtypes_of_their_own(capsys):
    assert main(["summary", "zoo.cage:Words", "--input", "2,5:int64", "--input", "2,5"]) == 0
    assert "2×5×4" in capsys.readouterr().out


def test_depth_folds_rows(capsys):
    main(["summary", "zoo.cage:make_net", "--input", "1,3,8,8", "--depth", "0"])
    assert "Conv2d" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "target", "inputs", "parts"),
    [
        (1, "zoo.cage:net", ["1,1,8,8"], ["--input 1,1,8,8", "RuntimeError", "in 0 (Conv2d)", "Conv2d(3, 4"]),
        (1, "zoo.cage:net", [], ["with no --input", "Conv2d(3, 4"]),
        (1, "zoo.cage:Words", ["2,5:int64"], ["--input 2,5:int64", "mask", "one --input each"]),
        (2, "zoo.cage:make_nett", [], ["has no 'make_nett'; similar: make_net"]),
        (2, "zoo.cage:number", [], ["must be a model, or a function", "got 5"]),
        (1, "zoo.cage:needs", [], ["without arguments", "'width'"]),
        (1, "zoo.cage:gives_none", [], ["NoneType, not an nn.Module"]),
        (2, "zoo/cag.py:net", [], ["there is no file 'zoo/cag.py'; similar: zoo/cage.py"]),
        (2, "zoo.cagee:net", [], ["there is no module 'zoo.cagee'; similar: zoo.cage"]),
        (1, "zoo.broken:net", [], ["zoo.broken cannot be imported: KeyError"]),
        (1, "zoo/lacking.py:net", [], ["cannot be imported: ModuleNotFoundError", "a_package_that_is"]),
        (2, "zoo/cage.py", [], ["must be module:name", "try: hookcb summary zoo/cage.py:NAME"]),
    ],
)
def test_what_is_wrong_is_told_with_what_to_type(code, target, inputs, parts, capsys):
    assert main(["summary", target, *(word for text in inputs for word in ("--input", text))]) == code
    err = capsys.readouterr().err
    assert err.startswith("hookcb summary: ")
    for part in parts:
        assert part in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "part"), [("1,x", "whole numbers"), ("1,2:int46", "similar: int64"), ("", "whole numbers")]
)
def test_a_wrong_input_exits_with_2(text, part, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["summary", "zoo.cage:net", "--input", text])
    assert ended.value.code == 2
    assert part in capsys.readouterr().err
