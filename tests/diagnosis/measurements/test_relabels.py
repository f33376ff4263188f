"""Relabels: samples that come again with another target."""

import torch
import torch.nn.functional as F
from torch import nn

from hookcb import Diagnose, watch
from hookcb.diagnosis.measurements.relabels import N_KNOWN, Relabels

N, SIZE = 512, 32  # samples, and of a batch
INPUTS = torch.randn(N, 5, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(10, (N,), generator=torch.Generator().manual_seed(1))


def after(labels_of, inputs_of=lambda step, x: x, n=200):
    """Relabels after `n` batches of shuffled epochs; `labels_of(step, indices)` gives the targets."""
    relabels, own, step = Relabels(), torch.Generator().manual_seed(2), 0
    while step < n:
        for indices in torch.randperm(N, generator=own).split(SIZE):
            relabels.add(step, inputs_of(step, INPUTS[indices]), labels_of(step, indices))
            step += 1
    return relabels


def test_targets_that_belong_to_other_samples_are_found_at_their_first_batch():
    order = torch.randperm(N, generator=torch.Generator().manual_seed(3))
    found = after(lambda step, i: LABELS[i] if step < 100 else LABELS[order[i]]).found
    assert (found.step, found.last, found.of) == (100, 99, "targets")
    assert found.text.endswith("samples that come again from step 100 on have another target than before")
    few = after(lambda step, i: torch.where((i % 8 == 0) & (step >= 100), LABELS[i] + 1, LABELS[i])).found
    assert 100 <= few.step < 104
    assert few.last == few.step - 1


def test_fixed_targets_augmented_inputs_and_some_odd_batches_are_no_shift():
    assert after(lambda step, i: LABELS[i]).found is None
    noisy = torch.Generator().manual_seed(4)
    other = lambda step, i: LABELS[i] if step < 100 else (LABELS[i] + 1) % 10  # noqa: E731
    assert after(other, lambda _, x: x + 1e-3 * torch.randn(x.shape, generator=noisy)).found is None
    assert after(lambda step, i: LABELS[i] + (step in (100, 101))).found is None
    drawn = torch.Generator().manual_seed(5)  # as of a teacher, or with dropout
    assert after(lambda step, i: torch.rand(len(i), generator=drawn)).found is None


def test_samples_are_known_at_any_place_of_a_batch_and_by_each_dtype():
    for kind in (torch.float16, torch.float64, torch.int32, torch.bool, torch.complex64):
        x = INPUTS.to(kind) if kind is not torch.bool else INPUTS > 0
        if kind is torch.complex64:
            x = torch.view_as_real(x)
        relabels = Relabels()
        relabels.add(0, x, LABELS)
        for step in range(1, 12):
            order = torch.randperm(N, generator=torch.Generator().manual_seed(step))
            relabels.add(step, x[order], LABELS[order])
        assert relabels.count(x[::8].flip(0), LABELS[::8].flip(0)) == (64, 0)  # read of the first batch
        assert relabels.count(x[::8], LABELS[::8] + 1) == (64, 64)


def test_large_samples_are_known_by_elements_all_over_them_without_a_copy():
    x = torch.zeros(8, 30, 200, 3)
    x[:, 13:17] = torch.rand(8, 4, 200, 3, generator=torch.Generator().manual_seed(0))  # nothing at the edges
    relabels, views = Relabels(), (x, x.permute(0, 3, 1, 2))
    for view in views:
        assert len({*relabels._hashes(view, torch.arange(8))[0].tolist()}) == 8


def test_what_is_known_of_many_samples_is_bounded():
    relabels = Relabels()
    x = torch.arange(50_000).view(-1, 1)
    for _ in range(2):
        for rows in x.split(64):
            relabels.add(0, rows, rows % 7)
    assert N_KNOWN / 4 < len(relabels._known) <= N_KNOWN
    for step, rows in enumerate(x.split(64), 1):
        relabels.add(step, rows, rows % 5)
    assert 1 <= relabels.found.step < 8


def test_odd_shapes_are_left_out():
    relabels = Relabels()
    for x, y in [((), ()), ((1, 3), (1,)), ((4, 0), (4,)), ((4, 3), (3,)), ((4, 3), (0,)), ((4, 3), (2, 4))]:
        relabels.add(0, torch.zeros(x), torch.zeros(y))
    assert not relabels._known


def test_a_batch_with_other_labels_is_named_and_so_are_labels_that_stay_others():
    for is_one, said in ((True, "samples that come again have another target"), (False, "from about step")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 10))
        opt, step = torch.optim.Adam(model.parameters(), 1e-2), 0
        with watch(model, opt, Diagnose(show=False)) as w:
            while step < 300:
                for i in torch.randperm(N).split(SIZE):
                    y = (LABELS[i] + (step == 240 if is_one else step >= 240)) % 10
                    opt.zero_grad()
                    F.cross_entropy(model(INPUTS[i]), y).backward()
                    opt.step()
                    step += 1
        (found,) = [f for f in w.diagnose().findings if f.code == "loss.spike"]
        assert found.step == 240
        assert said in found.message, found.message
