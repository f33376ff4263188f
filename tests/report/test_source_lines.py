"""The line of the source at which a layer is made."""

import subprocess
import sys

import pytest
from torch import nn

from hookcb.report.source_lines import line_of


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.twice = nn.Linear(8, 8)
        self.twice = nn.Linear(8, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(8, 8),
            nn.ReLU(),
            Block(),
        )
        self.made = make()
        self.other: nn.Module = nn.Linear(8, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])


class Derived(Net):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 2)


def make():
    return nn.Linear(8, 8)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("head", "self.head = nn.Linear(8, 2)"),
        ("body.0", "nn.Linear(8, 8),"),
        ("body.1", "nn.ReLU(),"),
        ("body.2", "Block(),"),
        ("body.2.inner", "self.inner = nn.Linear(8, 8)"),
        ("made", "self.made = make()"),
        ("other", "self.other: nn.Module = nn.Linear(8, 8)"),
        ("layers.1", "self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])"),
    ],
)
def test_the_line_in_a_class_is_found(name, line):
    found = line_of(Derived(), name)
    assert found.line == line
    file, _, number = found.place.partition(":")
    assert file == "test_source_lines.py"
    with open(__file__, encoding="utf-8") as own:
        assert own.read().splitlines()[int(number) - 1].strip() == line


def test_no_line_is_named_that_may_be_another():
    net = Derived()
    assert line_of(net, "body.2.twice") is None  # two lines make it
    net.other = nn.ReLU()  # from elsewhere, and no longer what the class says
    assert line_of(net, "other") is None
    assert line_of(net, "gone") is None
    assert line_of(nn.Sequential(nn.Linear(8, 8)), "0") is None
    assert line_of(nn.TransformerEncoderLayer(8, 2, 8), "self_attn.out_proj") is None


SCRIPT = """
from torch import nn
from hookcb.report.source_lines import line_of
model = nn.Sequential(
    nn.Linear(8, 8),
    nn.Sequential(nn.ReLU(),
                  nn.Linear(8, 4)),
)
model[0] = nn.Linear(8, 8, bias=False)
print(line_of(model, "0"), line_of(model, "1.1"), sep="\\n")
"""


def test_the_line_in_a_script_is_found_and_a_later_one_counts(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    first, second = done.stdout.splitlines()
    assert "train.py:9" in first
    assert "model[0] = nn.Linear(8, 8, bias=False)" in first
    assert "train.py:7" in second
