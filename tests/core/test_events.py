"""Events, the methods of a callback and what the loop emits: the same list, said three times."""

import inspect

import hookcb.core.events
from hookcb import Callback, Event, synth_learner
from hookcb.core.events import LEVELS, outermost


def methods(cls):
    return [name for name, _ in vars(cls).items() if name.startswith(("before_", "after_"))]


def test_a_callback_has_a_method_for_each_event_in_firing_order():
    assert methods(Callback) == list(Event)


def test_the_loop_emits_all_events_and_no_others():
    seen = set()

    def watch(event):
        return lambda cb: seen.add(event)

    def cancel(level):
        def act(cb):
            raise level.cancel

        return act

    for level in LEVELS.values():
        watcher = Callback(name="watcher", **{str(event): watch(str(event)) for event in Event})
        canceller = Callback(name="canceller", **{level.before: cancel(level)})
        learn = synth_learner()
        with learn.no_logging():
            learn.fit(1, cbs=[watcher, canceller])
    assert seen == set(Event)


def test_events_without_a_cancel_fire_in_the_order_of_the_list():
    fired = []

    def watch(event):
        return lambda cb: fired.append(event)

    learn = synth_learner(n_train=1, n_valid=1)
    with learn.no_logging():
        learn.fit(1, cbs=Callback(**{str(event): watch(event) for event in Event}))
    in_training = fired[: fired.index(Event.BEFORE_VALIDATE)]
    assert in_training == [event for event in Event if event in in_training]
    assert fired[len(in_training) :] == [
        "before_validate",
        *("before_batch", "after_pred", "after_loss", "after_batch"),
        *("after_validate", "after_epoch", "after_fit"),
    ]


def test_the_pseudocode_names_every_event_but_those_of_cancels():
    text = inspect.getdoc(hookcb.core.events)
    pseudocode, tables = text.split("A level is the part", 1)
    for event in Event:
        if event.startswith("after_cancel_"):
            assert event in tables
        else:
            assert event.upper() in pseudocode


def test_the_table_has_a_line_for_each_cancel():
    first_words = [
        line.split()[0] for line in inspect.getdoc(hookcb.core.events).splitlines() if line.strip()
    ]
    for level in LEVELS.values():
        assert first_words.count(level.cancel.__name__) >= 1


def test_the_outermost_of_several_cancels_wins_and_the_first_of_equals():
    cancels = [level.cancel() for level in reversed(LEVELS.values())]
    assert outermost(cancels) is cancels[-1]
    assert outermost(cancels[:1] * 2 + [type(cancels[0])()]) is cancels[0]
