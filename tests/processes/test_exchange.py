import pytest
import torch
from torch import distributed

from hookcb.core.alone import ALONE
from hookcb.processes.exchange import Exchange, RankError
from tests.core.support import fake_group


def test_before_ranks_have_met_each_is_on_its_own():
    with fake_group(8, rank=3):
        ranks = Exchange(distributed.group.WORLD)
        assert (ranks.sum([1.5]), ranks.mean(1.5, 4), ranks.gather("x")) == ([1.5], 1.5, ["x"])
        assert ranks.of_main(lambda: "x") == "x"
        assert ranks.missing_at("here") == []
        assert ranks.are_all_at("here")
        assert ranks.find_failure() == ""


def test_a_known_failure_ends_every_wait():
    ranks = Exchange()
    ranks.failure = "rank 1 raised ValueError"
    for use in (lambda: ranks.wait(None), ranks.check_failure, lambda: ranks.start(torch.ones(1))):
        with pytest.raises(RankError, match=r"^rank 1 raised ValueError"):
            use()


def test_what_communicates_by_itself_gets_no_group_alone_and_its_errors_stay_its_own():
    assert [ranks.run(lambda group: group) for ranks in (ALONE, Exchange())] == [None, None]

    def fail(group):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as caught:
        Exchange().run(fail)
    assert not isinstance(caught.value, RankError)
