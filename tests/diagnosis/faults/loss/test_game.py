"""Two networks that train against each other, on made-up numbers."""

import pytest

from hookcb.diagnosis.faults.loss.game import MAX_FALL, Balance
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.run import Param, Passed, Run, Series, Skipped
from tests.support import in_turn

N = 40
STAYS, FALLS = [1.0] * N, [1.0] * 10 + [1e-3] * (N - 10)
WINS, HIGHER = [0.7] * 10 + [0.01] * (N - 10), [0.7] * 10 + [5.0] * (N - 10)


def series(values):
    return Series.of(range(len(values)), values)


def weight(name, optimizer, norms):
    stats = {"norm": series(norms)}
    return Param(f"{name}.0.weight", f"{name}.0", "Linear", "", 0, (4, 4), stats=stats, optimizer=optimizer)


def game(generator=FALLS, discriminator=STAYS, loss_of_generator=HIGHER, loss_of_discriminator=WINS):
    params = [weight("generator", 0, generator), weight("discriminator", 1, discriminator)]
    losses = {0: series(loss_of_generator), 1: series(loss_of_discriminator)}
    run = Run(params={p.name: p for p in params})
    run.measured(Curves).losses = losses
    return run


def test_a_discriminator_that_has_won_is_found_at_the_generator():
    (found,) = Balance().findings(game())
    assert (found.code, found.severity, found.layer) == ("gan.balance", "warning", "generator")
    assert (found.step, found.limit) == (10, MAX_FALL)
    assert found.value == pytest.approx(1000)


@in_turn(
    "changed",
    [
        {"generator": STAYS},
        {"generator": [1.0] * 10 + [0.02] * (N - 10)},
        {"loss_of_discriminator": [0.7] * N},
        {"loss_of_generator": WINS},  # both have learned what there is to learn
    ],
)
def test_a_game_that_goes_on_is_fine(changed):
    (found,) = Balance().findings(game(**changed))
    assert isinstance(found, Passed)


def test_without_two_players_it_cannot_look():
    alone = game()
    del alone.params["discriminator.0.weight"]
    (found,) = Balance().findings(alone)
    assert isinstance(found, Skipped)
