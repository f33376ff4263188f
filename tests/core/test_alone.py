import torch

from hookcb import CancelBatchException
from hookcb.core.alone import ALONE


def test_a_process_alone_gets_back_what_it_gives():
    assert ALONE.sum([1, 2.5]) == [1, 2.5]
    assert ALONE.max([3]) == [3]
    assert ALONE.mean(1.5, 4) == 1.5
    assert ALONE.gather("x") == ["x"]
    assert ALONE.of_main(lambda: "x") == "x"
    assert list(ALONE.until_one_ends(range(3))) == [0, 1, 2]
    assert list(ALONE.until_all_end(range(3))) == [0, 1, 2]
    assert repr(ALONE) == "Ranks(rank=0, world=1)"


def test_a_process_alone_changes_and_checks_nothing():
    x = torch.ones(2)
    ALONE.average([x])
    ALONE.share(x, x)
    ALONE.wait(ALONE.start(x))
    ALONE.follow_waits(object())
    ALONE.leave_waits(object())
    ALONE.check_alike({"colour": object()})
    assert torch.equal(x, torch.ones(2))


def test_a_process_alone_decides_by_itself():
    error, cancels = ValueError("mine"), [CancelBatchException()]
    with ALONE.together("learn.fit", lambda: "before the fit"):
        ALONE.meet("learn.validate", "")
        ALONE.note_signal(15)
        ALONE.end_batch()
        assert ALONE.decide("after_loss", [], cancels, True) is cancels
        assert (ALONE.is_together, ALONE.signal) == (False, 0)
    assert [ALONE.agree_on_alarm(noticed) for noticed in (False, True)] == [False, True]
    assert ALONE.blame(error, "in the backward") is error
    assert ALONE.find_failure() == ""
