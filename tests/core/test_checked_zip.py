"""A file that has changed since it was written is refused, by the name of what has changed in it."""

import random

import pytest
import torch
from torch import nn

from hookcb import ActivationStats, Checkpoint, GradientHealth, Learner
from hookcb.core.files import read_saved, save_whole
from tests.support import fit, make_learner, same, weights
from tests.training.checkpoint.support import differing, go_on, learner, outcome, train

CPU = torch.device("cpu")
STATE = {"model": {"a": torch.linspace(-1, 1, 9), "b": torch.arange(4)}, "opt": None, "rows": [(0.5, "x")]}


@pytest.fixture
def file(tmp_path):
    return save_whole(STATE, tmp_path / "file.pt")


def alike(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


def flip(file, bit):
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def flip_in(file, x):
    """Changes a bit in the values of a tensor."""
    at = file.read_bytes().index(x.detach().contiguous().numpy().tobytes())
    flip(file, 8 * at + 6)


def test_a_file_with_any_single_bit_changed_is_refused_or_reads_as_it_was(file):
    good = file.read_bytes()
    bits = random.Random(0).sample(range(8 * len(good)), 300)
    refusals = []
    for bit in bits:
        file.write_bytes(good)
        flip(file, bit)
        try:
            read = read_saved(file, CPU)
        except ValueError as error:
            refusals.append(str(error))
        else:
            assert alike(STATE, read), f"bit {bit}"
    assert len(refusals) > 100
    assert [said for said in refusals if not said.startswith(f"{file} ")] == []


def test_a_tensor_that_is_marked_as_a_folder_is_refused(file):
    """Torch takes it for one without bytes, and gives whatever was in memory."""
    content = bytearray(file.read_bytes())
    entry = content.rindex(b"archive/data/0") - 46  # in the table of contents
    assert content[entry : entry + 4] == b"PK\x01\x02"
    content[entry + 38] ^= 0x10  # external attributes
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"file.pt is damaged: model\.a"):
        read_saved(file, CPU)


def test_a_part_of_zeros_is_refused(file):
    content = bytearray(file.read_bytes())
    at = content.index(STATE["model"]["a"].numpy().tobytes())
    content[at : at + 36] = bytes(36)
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"file.pt is damaged: model\.a does not match its checksum"):
        read_saved(file, CPU)


@pytest.mark.parametrize("tail", [b"\0", b"tail" * 10_000, bytes(100_000)], ids=len)
def test_bytes_added_at_the_end_are_refused(file, tail):
    with file.open("ab") as opened:
        opened.write(tail)
    with pytest.raises(ValueError, match=r"file.pt is truncated, or has bytes at its end"):
        read_saved(file, CPU)


def test_a_file_that_was_twice_written_into_is_refused(file):
    file.write_bytes(2 * file.read_bytes())
    with pytest.raises(ValueError, match=r"file.pt"):
        read_saved(file, CPU)


def test_all_tensors_that_have_changed_are_named(tmp_path):
    shared = torch.rand(5)
    state = {"model": {"x": shared, "y": shared, "z": torch.rand(6)}, "opt": [torch.rand(7)]}
    file = save_whole(state, tmp_path / "file.pt")
    flip_in(file, shared)
    flip_in(file, state["opt"][0])
    with pytest.raises(ValueError, match=r"damaged: model\.x, opt\.0 does not"):
        read_saved(file, CPU)


def test_a_tensor_is_not_named_wrongly_beside_one_that_cannot_be_told(tmp_path):
    state = {"sparse": torch.eye(3).to_sparse(), "dense": torch.rand(6)}
    file = save_whole(state, tmp_path / "file.pt")
    assert torch.equal(read_saved(file, CPU)["dense"], state["dense"])
    flip_in(file, state["dense"])
    with pytest.raises(ValueError, match=r"damaged: data/2 does not"):
        read_saved(file, CPU)


def test_checksums_are_written_where_torch_was_told_to_leave_them_out(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        file = save_whole(STATE, tmp_path / "file.pt")
        assert not torch.serialization.get_crc32_options()
        torch.save(STATE, tmp_path / "without.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert alike(STATE, read_saved(file, CPU))
    with pytest.warns(UserWarning, match=r"without.pt has no checksums"):
        assert alike(STATE, read_saved(tmp_path / "without.pt", CPU))


def test_files_of_torch_save_as_versions_before_wrote_them_are_read(tmp_path):
    with (tmp_path / "old.pt").open("wb") as opened:
        torch.save(STATE, opened)
    assert alike(STATE, read_saved(tmp_path / "old.pt", CPU))


# ---- each kind of file


def test_damaged_weights_are_refused_and_change_nothing(tmp_path):
    learn = fit(make_learner())
    file = learn.save(tmp_path / "weights.pt")
    flip_in(file, next(learn.model.parameters()))
    learn = make_learner()
    before = weights(learn.model)
    name = next(name for name, _ in learn.model.named_parameters())
    with pytest.raises(ValueError, match=rf"weights.pt is damaged: model\.{name} does not match"):
        learn.load(file)
    assert same(weights(learn.model), before)


def test_a_damaged_checkpoint_is_refused_by_name_and_passed_over_for_the_one_before(tmp_path):
    learn = train(learner, 2, Checkpoint(tmp_path))
    file = tmp_path / "epoch-0002.pt"
    flip_in(file, learn.model.stem.weight)
    said = r"epoch-0002.pt is damaged: model\.stem\.weight does not match"
    with pytest.raises(ValueError, match=said):
        go_on(learner, 3, resume=file)
    with pytest.warns(UserWarning, match=rf"{said}.*resuming from .*epoch-0001.pt"):
        resumed = go_on(learner, 3, Checkpoint(tmp_path), resume="latest")
    assert differing(outcome(train(learner, 3)), outcome(resumed)) == []


@pytest.mark.parametrize("kind", [ActivationStats, GradientHealth])
def test_damaged_records_are_refused(tmp_path, kind):
    records = kind()
    model = nn.Linear(3, 1)
    fit(Learner([torch.ones(2, 3)] * 4, model, torch.mean, torch.optim.SGD, cbs=records))
    file = records.save(tmp_path / "records.pt")
    kind.load(file)
    content = file.read_bytes()
    state = torch.load(file, weights_only=True)
    x = next(x for x in found_tensors(state) if x.numel() > 1)
    flip(file, 8 * content.index(x.contiguous().numpy().tobytes()))
    with pytest.raises(ValueError, match=r"records.pt is damaged: \w+"):
        kind.load(file)


def found_tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from found_tensors(item)
