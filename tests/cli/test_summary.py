"""`hookcb summary` shows the layers of a model that a module or a file has."""

import pytest

from hookcb.cli.main import main
from tests.support import in_turn

MODELS = """
import torch
from torch import nn

class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 2)

    def forward(self, tokens):
        return self.head(self.embed(tokens))

class Two(nn.Module):
    def forward(self, a, b):
        return a @ b

def image():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.LazyLinear(2))

ready = nn.Linear(4, 2)
number = 7

def wrong():
    return 7
"""


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "summarized.py").write_text(MODELS)


@pytest.mark.parametrize(
    ("where", "inputs", "shown"),
    [
        ("summarized:image", ["1,3,8,8"], ["1×8×6×6", "802 parameters"]),
        ("summarized.py:image", ["4,3,8,8"], ["4×8×6×6"]),
        ("summarized.py:Text", ["1,5:int64"], ["1×5×2", "50 parameters"]),
        ("summarized.py:Two", ["2,3", "3,4"], ["2×4"]),
        ("summarized.py:ready", ["1,4:float64"], []),
        ("summarized.py:ready", ["1,4"], ["10 parameters"]),
    ],
)
def test_a_model_is_found_and_shown(where, inputs, shown, capsys):
    code = main(["summary", where, *(arg for size in inputs for arg in ("--input", size))])
    out = capsys.readouterr()
    assert code == (0 if shown else 1), out.err
    assert [text for text in shown if text not in out.out] == []


@in_turn(
    ("args", "told"),
    [
        (["summarized.py:Tex"], "has no 'Tex'; it has Text, Two, image, wrong"),
        (["summarized.py:wrong"], "summarized.py:wrong is no model, but a int"),
        (["summarized.py:number"], "summarized.py:number is no model, but a int"),
        (["summarized.py:Two"], "as --input 8,3,32,32"),
        (["summarized.py"], "names no model; type package.module:name or file.py:name"),
        (["nowhere.py:x"], "FileNotFoundError"),
        (["nowhere_at_all:x"], "No module named 'nowhere_at_all'"),
        (["summarized.py:Text", "--input", "1,5"], "the input was 1,5:float32; a shape has the batch"),
        (["summarized.py:Text", "--input", "1,5:float7"], "torch has no dtype 'float7'"),
    ],
)
def test_what_cannot_be_shown_is_said(args, told, capsys):
    assert main(["summary", *args]) == 1
    assert told in capsys.readouterr().err


def test_a_size_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["summary", "summarized.py:Text", "--input", "1,x"])
    assert "such as 1,3,224,224 or 1,128:int64, got '1,x'" in capsys.readouterr().err
