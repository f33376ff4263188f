"""Advice that fits how the reader runs hookcb."""

from contextlib import nullcontext
from typing import get_args

from hookcb.core.callback import Callback
from hookcb.diagnosis.reader import ADVICE, SOURCES, Way, also, by_command, way_of, why_unseen
from hookcb.loops.coverage import REFUSED, Facts, WatchCoverage
from tests.support import in_turn

WAYS = get_args(Way)
FOREIGN = {  # words of other ways
    "learner": ("w.", "HookcbCallback", "Trainer", "TrainingArguments"),
    "watch": ("learn.", "HookcbCallback", "Trainer", "TrainingArguments"),
    "lightning": ("w.", "learn.", "cbs=", "Watch", "TrainingArguments", "your loop"),
    "transformers": ("w.", "learn.", "cbs=", "Watch", "gradient_clip_val", "your loop"),
    "command": ("w.", "learn.", "cbs=", "Watch", "HookcbCallback", "Trainer", "Diagnose", "Learner"),
}


def foreign_in(text, way):
    words = text.replace("(", " ").split()
    return [x for x in FOREIGN[way] if (" " in x and x in text) or any(word.startswith(x) for word in words)]


def reasons_in_a_loop(way):
    """Reasons for events that were not seen, in a loop that the reader follows in this way."""
    seen = [{}, {"before_batch": 3}, {"before_train": 1, "before_batch": 3, "before_step": 1}]
    odd = "n_calls n_losses_unfound n_losses_outside n_losses_of_others n_clipped n_elsewhere n_without_grad"
    for name in odd.split():
        facts = Facts(way="watch" if way == "command" else way, **{name: 1})
        for own in seen:
            coverage = WatchCoverage.of(own, facts, 0, 1)
            yield from coverage.missing.values()
            yield from coverage.notes if way != "command" else ()  # which shows none


@in_turn("way", WAYS)
def test_advice_is_in_the_words_of_the_reader(way):
    told = [of[way] for of in ADVICE.values() if way in of]
    told += [why_unseen([need], way) for need in SOURCES]
    with by_command() if way == "command" else nullcontext():
        told += reasons_in_a_loop(way) if way != "learner" else ()
    assert [(text, words) for text in told if (words := foreign_in(text, way))] == []


@in_turn("what", ["rate", "clip", "NaN", "straggler", "coverage"])
def test_each_reader_gets_the_advice_of_a_check(what):
    assert ADVICE[what].keys() == set(WAYS)


def test_a_reader_who_cannot_do_it_gets_no_advice():
    assert also("unclipped", "watch") == "; call w.begin_step(optimizer) before you clip"
    assert also("unclipped", "transformers") == also("epochs", "lightning") == also("loss", "command") == ""


def test_the_command_is_the_way_of_whoever_runs_it_whatever_the_loop():
    assert [way_of(way) for way in ("learner", "watch", "lightning")] == ["learner", "watch", "lightning"]
    with by_command():
        assert way_of("lightning") == way_of("learner") == "command"


def test_what_to_do_instead_of_a_refused_callback_is_in_the_words_of_the_trainer():
    for kind, hints in REFUSED.items():
        assert issubclass(kind, Callback)
        for way, hint in zip(("watch", "lightning", "transformers"), hints, strict=True):
            assert foreign_in(hint.replace("Trainer(", ""), way) == [], hint
