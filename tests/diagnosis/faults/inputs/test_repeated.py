"""input.repeated: the same batch again and again."""

from types import SimpleNamespace

import pytest
import torch

from hookcb.diagnosis.faults.inputs.repeated import RepeatedInputs
from hookcb.diagnosis.run import Passed, Run, Skipped


def result(numbers):
    """What is found of batches with these numbers, each of which is noted."""
    part, run = RepeatedInputs(), Run(loop=SimpleNamespace(xb=(), train_iter=0))
    for step, x in enumerate(numbers):
        run.loop.train_iter, run.loop.xb = step, (torch.full((2, 3), float(x)),)
        part.on_batch(run)
    part.tell(run)
    part.freeze()
    (found,) = part.findings(run)
    return found


def test_a_batch_that_comes_again_after_others_is_a_warning_at_its_first_step():
    found = result([*range(40), *[40] * 30, *range(50, 60)])
    assert (found.code, found.severity, found.step, found.last_step) == ("input.repeated", "warning", 40, 69)
    assert "the same in all 30 batches that were noted from step 40 to 69" in found.message


def test_one_batch_from_the_beginning_or_several_steps_on_each_are_meant():
    assert isinstance(result([1] * 60), Passed)
    assert isinstance(result([x for x in range(10) for _ in range(20)]), Passed)
    assert isinstance(result([0, 1] * 10 + [1] * 30), Passed)  # a data set of two batches
    assert isinstance(result([*range(40), *[40] * 5, *range(50, 60)]), Passed)


@pytest.mark.cuda
def test_hashes_leave_a_gpu_without_waiting():
    part, run = RepeatedInputs(), Run(loop=SimpleNamespace(xb=(), train_iter=0))
    x = torch.arange(100, device="cuda").clamp_(max=40).float()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    for step in range(100):
        run.loop.train_iter, run.loop.xb = step, (x[step : step + 1].expand(6),)
        part.on_batch(run)
    torch.cuda.set_sync_debug_mode("default")
    part.tell(run)
    (found,) = part.findings(run)
    assert (found.step, found.last_step) == (40, 99)


def test_few_batches_or_batches_without_tensors_are_not_judged():
    assert isinstance(result(range(10)), Skipped)
    run = Run(loop=SimpleNamespace(xb=("text",), train_iter=0))
    part = RepeatedInputs()
    part.on_batch(run)
    part.tell(run)
    assert [type(x) for x in part.findings(run)] == [Skipped]
