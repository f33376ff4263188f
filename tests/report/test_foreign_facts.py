"""What is wrong with weights and curves of other programs, on a terminal, as a page, and as exit code."""

import json
import math

import pytest
import torch
from torch import nn

from hookcb import load_report
from hookcb.cli.main import main
from hookcb.records.series import Series
from hookcb.report.foreign_facts import facts_of, of_curves


def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model(torch.randn(5, 3))
    return model


def told(tmp_path, state):
    torch.save(state, tmp_path / "a.pt")
    facts = facts_of(tmp_path / "a.pt")
    return [(severity, text) for severity, text in facts.told]


def changed(**changes):
    state = {name: x.clone() for name, x in net().state_dict().items()}
    for name, change in changes.items():
        change(state[name.replace("_", ".", 1)])
    return state


def test_right_weights_are_silent(tmp_path):
    mask = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), -math.inf)
    ids = torch.arange(4).expand(2, 4)
    assert told(tmp_path, changed() | {"mask": mask, "ids": ids, "empty": torch.ones(0, 3)}) == []


def test_nan_and_inf_are_errors_by_weight(tmp_path):
    state = changed(**{"0_weight": lambda x: x[0].fill_(math.nan), "2_bias": lambda x: x[0].fill_(-math.inf)})
    assert told(tmp_path, state) == [
        ("error", "0.weight has 3 NaN in 12 elements."),
        ("error", "2.bias has 1 inf in 2 elements."),
    ]
    opt = {"state": {0: {"exp_avg": torch.full((3,), math.nan)}}, "param_groups": [{"params": [0]}]}
    found = told(tmp_path, {"model": changed(), "optimizer": opt})
    assert found == [("error", "optimizer: exp_avg of parameter 0 has 3 NaN in 3 elements.")]


def test_zero_constant_and_mixed_weights(tmp_path):
    state = changed(**{"0_weight": lambda x: x.zero_(), "2_weight": lambda x: x.fill_(0.5)})
    state["2.bias"] = state["2.bias"].bfloat16()
    assert told(tmp_path, state) == [
        ("warning", "All elements are zero in 0.weight."),
        ("warning", "All elements are the same in 2.weight (0.5)."),
        ("info", "The tensors have several dtypes: float32 (7), bfloat16 (1)."),
    ]


def test_batch_norm_that_has_seen_nothing(tmp_path):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.BatchNorm2d(2, track_running_stats=False))
    ((severity, text),) = told(tmp_path, model.state_dict())
    assert severity == "warning"
    assert "mean 0 and variance 1 and num_batches_tracked is 0, in 1: no batch" in text


def curves(**named):
    return {
        name.replace("__", "/"): Series(list(range(len(values))), values) for name, values in named.items()
    }


def told_of(tmp_path, **named):
    return of_curves(tmp_path / "a.csv", curves(**named), "epoch")


def test_what_curves_show(tmp_path):
    n = range(40)
    facts = told_of(
        tmp_path,
        train__loss=[1 / (1 + i) for i in n],
        val__loss=[1 / (1 + i) + max(0, i - 10) * 0.02 for i in n],
        acc=[min(i, 30) / 40 for i in n],
        lr=[0.1] * 40,
    )
    ((severity, text),) = facts.told
    assert severity == "warning"
    assert text.startswith(
        "val/loss rises since epoch 10, from 0.09091 to 0.605, while train/loss falls, to 0.025"
    )
    assert any("acc: from 0 to 0.75; best 0.75 at epoch 30" in line for line in facts.lines)
    assert not facts.has_error


def test_a_noisy_end_is_not_a_rise(tmp_path):
    g = torch.Generator().manual_seed(0)
    noise = (0.05 * torch.randn(40, generator=g)).tolist()
    facts = told_of(
        tmp_path,
        train_loss=[1 / (1 + i) for i in range(40)],
        val_loss=[0.3 + 0.7 / (1 + i) + x for i, x in enumerate(noise)],
    )
    assert facts.told == []


def test_nan_at_the_end_of_a_loss_is_an_error_and_in_between_a_warning(tmp_path):
    loss = [1.0, 0.5, math.nan, math.nan]
    assert told_of(tmp_path, loss=loss).told == [("error", "loss is NaN from epoch 2 on.")]
    facts = told_of(tmp_path, loss=[1.0, math.inf, 0.5], acc=[0.1] * 3)
    assert facts.told == [("warning", "loss is infinite at epoch 1.")]


def test_a_curve_that_never_moves(tmp_path):
    facts = told_of(tmp_path, acc=[0.1] * 6, epoch_time=[3.0] * 6)
    assert facts.told == [("warning", "acc never moves: it is 0.1 in all 6 rows.")]


@pytest.mark.parametrize(("fill", "code"), [(math.nan, 1), (0.0, 0)])
def test_the_command_prints_at_80_columns_and_writes_a_page_if_asked(
    tmp_path, capsys, monkeypatch, fill, code
):
    monkeypatch.setenv("COLUMNS", "80")
    torch.save({"epoch": 1, "model": changed(**{"0_weight": lambda x: x.fill_(fill)})}, tmp_path / "a.pt")
    assert main(["report", str(tmp_path / "a.pt")]) == code
    assert [file.name for file in tmp_path.iterdir()] == ["a.pt"]
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert ("ERROR" if code else "WARNING") in shown
    assert main(["report", str(tmp_path / "a.pt"), "-o", str(tmp_path / "a.html")]) == code
    assert load_report(tmp_path / "a.html").headline.startswith("ERROR" if code else "WARNING")


def test_the_page_of_a_table_has_its_curves(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("epoch,loss\n" + "".join(f"{i},{1 / (i + 1)}\n" for i in range(6)))
    assert main(["report", str(tmp_path / "a.csv"), "-o", str(tmp_path / "a.html")]) == 0
    data = load_report(tmp_path / "a.html")
    assert data.epochs["loss"].steps == list(range(6))
    assert data.headline.startswith("nothing wrong was found")
    assert "Nothing wrong was found." in capsys.readouterr().out


def shards(folder, drop_file=False, drop_key=False, **more):
    """A model in two files, with an index of Hugging Face."""
    state = list(net().state_dict().items())
    parts = {"pytorch_model-1-of-2.bin": dict(state[:3]), "pytorch_model-2-of-2.bin": dict(state[3:])}
    index = {name: file for file, part in parts.items() for name in part} | more
    file = folder / "pytorch_model.bin.index.json"
    file.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": index}))
    for name, part in list(parts.items())[drop_file:]:
        torch.save(dict(list(part.items())[drop_key:]), folder / name)
    return file


def test_the_files_of_an_index_are_one_model(tmp_path):
    file = shards(tmp_path)
    for path in (file, tmp_path):
        facts = facts_of(path)
        assert "9 tensors" in facts.summary
        assert "in 2 files" in facts.summary
        assert facts.told == []


def test_missing_files_and_tensors_of_an_index_are_errors(tmp_path):
    facts = facts_of(shards(tmp_path, drop_file=True, drop_key=True))
    (_, gone), (_, lacking) = facts.told
    assert gone == ("1 of 2 files of the index is missing, with 3 of 9 tensors: pytorch_model-1-of-2.bin.")
    assert lacking == "The index has tensors that are not in its files (1): 1.bias."
    assert facts.has_error
    assert main(["report", str(tmp_path)]) == 1


def test_tensors_that_an_index_lacks_are_told(tmp_path):
    file = shards(tmp_path)
    index = json.loads(file.read_text())
    del index["weight_map"]["2.bias"]
    file.write_text(json.dumps(index))
    assert facts_of(file).told == [
        ("warning", "The files have tensors that are not in the index (1): 2.bias.")
    ]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../b.bin"}}'])
def test_an_index_that_is_damaged_or_leaves_its_folder_is_refused(tmp_path, text):
    file = tmp_path / "model.safetensors.index.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"weight_map|outside"):
        facts_of(file)
