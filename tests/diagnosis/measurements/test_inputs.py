"""Numbers of inputs, against plain computations of the same."""

import math
import statistics

import pytest
import torch

from hookcb.diagnosis.measurements.inputs import input_numbers
from tests.support import along, in_turn

NAN = math.nan


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@in_turn(
    ("dtype", "shape"),
    along([torch.float32, torch.float64, torch.bfloat16, torch.float16], [(4, 3), (2, 3, 5, 5), (7,)]),
)
def test_std_and_rms_of_a_batch_are_those_of_its_elements(dtype, shape):
    x = (numbers(*shape) * 300 + 20).to(dtype)
    values = x.double().flatten().tolist()
    std, rms, bad, differs = input_numbers((x,)).tolist()
    assert std == pytest.approx(statistics.pstdev(values), rel=1e-4)
    assert rms == pytest.approx(math.sqrt(statistics.fmean(v * v for v in values)), rel=1e-4)
    assert (bad, differs) == (0.0, 1.0)


def test_a_number_beside_the_inputs_has_no_scale():
    """Such as the number of items in the batch, which the Trainer of Hugging Face gives to the model."""
    ids = torch.arange(12).view(4, 3)
    assert math.isnan(input_numbers({"n": torch.tensor(16.0), "ids": ids})[0])
    assert input_numbers({"n": torch.tensor(16.0), "x": ids.float()})[0] > 3


def test_the_first_float_tensor_counts_wherever_it_is():
    x = 3 * numbers(4, 3)
    for xb in (
        (x,),
        {"ids": torch.ones(4, 2).long(), "x": x},
        ([torch.zeros(4, 1).bool(), x], numbers(4, 2)),
    ):
        assert input_numbers(xb)[0] == pytest.approx(float(x.std(correction=0)))


def test_indices_have_no_size_but_may_differ():
    std, rms, bad, differs = input_numbers((torch.arange(12).view(4, 3),)).tolist()
    assert math.isnan(std)
    assert math.isnan(rms)
    assert (bad, differs) == (0.0, 1.0)


@in_turn("xb", [(), {}, ("text",), (torch.zeros(0, 3),), None, ([], {"n": 3})])
def test_a_batch_without_a_tensor_has_no_numbers(xb):
    assert input_numbers(xb) is None


def test_all_that_is_not_finite_is_counted_in_all_float_tensors():
    a, b = numbers(4, 3), numbers(4, 2)
    a[0, 0], a[1, 2], b[3, 1] = NAN, math.inf, -math.inf
    assert input_numbers((a, torch.arange(4), {"b": b}))[2] == 3


@in_turn(
    ("xb", "differs"),
    [
        ((torch.ones(4, 3),), 0.0),
        ((torch.ones(4, 3) * torch.arange(3),), 0.0),  # columns differ, samples do not
        ((torch.ones(4, 3), torch.arange(4)), 1.0),
        ((torch.full((4, 2), 7),), 0.0),
        ((torch.tensor([True, False]),), 1.0),
        ((torch.ones(1, 3),), NAN),
        ((torch.zeros(4),), NAN),  # may be the features of one sample
        ((torch.arange(4.0),), 1.0),
        ((torch.tensor(1.0),), NAN),
        ((torch.ones(1, 3), torch.ones(2, 1)), 0.0),
    ],
)
def test_samples_differ_where_any_two_of_them_do(xb, differs):
    assert input_numbers(xb)[3].item() == pytest.approx(differs, nan_ok=True)


def test_samples_that_are_all_missing_alike_do_not_differ():
    x = torch.ones(4, 3)
    x[:, 1] = NAN
    assert input_numbers((x,))[3] == 0.0


def test_a_single_sample_with_several_elements_has_a_size():
    assert input_numbers((torch.tensor([[3.0, -3.0]]),))[:2].tolist() == [3.0, 3.0]
