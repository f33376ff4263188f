"""Ignite's engines, watched: what is their own, beside the table."""

import pytest
import torch

from hookcb import ActivationStats, Callback, GradientHealth, assert_no_hooks, watch
from tests.interop import trainers
from tests.interop.trainers import BS, EPOCHS, N_TRAIN, N_VALID, Net, loaders, loss_func, optimizer, quiet

with quiet():
    from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer


@pytest.fixture(autouse=True)
def leave_out_warnings_of_others():
    with quiet():
        yield


def test_accumulation_of_the_supervised_trainer_gives_a_step_for_several_batches():
    model = Net()
    opt = optimizer(model)
    trainer = create_supervised_trainer(model, opt, loss_func, gradient_accumulation_steps=2)
    with watch(model, opt, ActivationStats, GradientHealth) as w:
        trainer.run(loaders()[0], max_epochs=EPOCHS)
    assert len(w.activation_stats.stats) == EPOCHS * N_TRAIN
    assert len(w.gradient_health.stats) == EPOCHS * N_TRAIN // 2


def test_a_validation_in_the_middle_of_an_epoch_divides_its_training():
    model = Net()
    opt = optimizer(model)
    trainer = create_supervised_trainer(model, opt, loss_func)
    evaluator = create_supervised_evaluator(model)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2), lambda: evaluator.run(loaders()[1]))
    seen = []
    probe = Callback(name="probe", before_validate=lambda cb: seen.append(cb.train_iter))
    with watch(model, opt, probe) as w:
        trainer.run(loaders()[0], max_epochs=EPOCHS)
    assert seen == [2, 4, 6, 8]
    assert w.coverage.seen["before_batch"] == EPOCHS * N_TRAIN + 4 * N_VALID


def test_the_optimizer_is_found_where_the_engine_hides_it():
    model = Net()
    trainer = create_supervised_trainer(model, optimizer(model), loss_func)
    with watch(model, GradientHealth()) as w:
        trainer.run(loaders()[0], max_epochs=1)
    assert len(w.gradient_health.stats) == N_TRAIN


@pytest.mark.parametrize("ends", ["terminate", "error", "interrupt"])
def test_hooks_come_off_however_an_engine_ends(ends):
    model = Net(fails_at=2 if ends == "error" else None)
    opt = optimizer(model)
    trainer = create_supervised_trainer(model, opt, loss_func)

    @trainer.on(Events.ITERATION_COMPLETED(once=2))
    def end():
        if ends == "interrupt":
            raise KeyboardInterrupt
        if ends == "terminate":
            trainer.terminate()

    w = watch(model, opt, ActivationStats, GradientHealth)
    try:
        with w:
            trainer.run(loaders()[0], max_epochs=EPOCHS)
    except (trainers.Planted, KeyboardInterrupt):
        assert ends != "terminate"
    assert_no_hooks(model)
    assert len(w.activation_stats.stats) == len(w.gradient_health.stats) == 2


def test_a_gan_of_two_engines_steps_is_watched_net_by_net():
    torch.manual_seed(0)
    nets = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
    opts = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]

    def step(engine, batch):
        for sign, opt in zip((-1, 1), opts, strict=True):
            opt.zero_grad()
            (sign * nets[1](nets[0](torch.randn(BS, 3))).mean()).backward()
            opt.step()

    with watch(nets[0], opts[0], GradientHealth()) as a, watch(nets[1], opts[1], GradientHealth()) as b:
        Engine(step).run(range(5), max_epochs=1)
    assert len(a.gradient_health.stats) == len(b.gradient_health.stats) == 5
    assert a.gradient_health.names == ["weight", "bias"]
