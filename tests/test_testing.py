"""What people test their callbacks with can tell good from bad."""

import pytest
import torch

from hookcb import (
    assert_no_hooks,
    check_callback,
    count_hooks,
    synth_learner,
)
from tests.support import (
    fit,
    make_model,
    same,
    weights,
)


def test_count_hooks_counts_every_kind_there_is():
    model = make_model()
    model[0].register_forward_hook(lambda m, i, o: None)
    model[0].register_forward_pre_hook(lambda m, i: None)
    model[0].register_full_backward_hook(lambda m, i, o: None)
    model[1].register_full_backward_pre_hook(lambda m, o: None)
    model.register_state_dict_post_hook(lambda *a: None)
    model.register_load_state_dict_post_hook(lambda *a: None)
    assert count_hooks(model) == 6
    model[2].weight.register_hook(lambda g: None)
    model[2].bias.register_post_accumulate_grad_hook(lambda p: None)
    assert count_hooks(model) == 8
    with pytest.raises(AssertionError) as info:
        assert_no_hooks(model)
    for name in ("0", "1", "2.weight", "2.bias"):
        assert name in str(info.value)


def test_synth_learner_is_the_same_each_time_and_leaves_the_generator_alone():
    state = torch.get_rng_state()
    one, two, other = synth_learner(), synth_learner(), synth_learner(seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    for learn in (one, two, other):
        fit(learn, 2)
    assert same(weights(one.model), weights(two.model))
    assert not same(weights(one.model), weights(other.model))
    assert one.recorder.losses[-1] < one.recorder.losses[0]
    assert synth_learner(n_valid=0).dls.valid is None


def test_what_makes_no_callback_is_refused():
    with pytest.raises(TypeError, match=r"make must be a callback's class, .* got 3"):
        check_callback(3)
