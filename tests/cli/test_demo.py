"""The training of the demo is cheap."""

import pytest
import torch

from hookcb import Learner
from hookcb.cli.demo import train_digits


@pytest.mark.parametrize("ends", [None, KeyboardInterrupt])
def test_the_demo_trains_on_one_thread_as_others_would_only_wait(ends, monkeypatch):
    seen = []

    def fit_one_cycle(learn, *args, **kwargs):
        seen.append(torch.get_num_threads())
        if ends:
            raise ends

    monkeypatch.setattr(Learner, "fit_one_cycle", fit_one_cycle)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        if ends:
            with pytest.raises(ends):
                train_digits()
        else:
            train_digits()
        assert (seen, torch.get_num_threads()) == ([1], 3)
    finally:
        torch.set_num_threads(before)
