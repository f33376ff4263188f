"""Mutants are found in a source, chosen by seed and room, applied, and found again where they have moved."""

from mutant import choose, find, possible, quotas

from tests.support import in_turn

SOURCE = b'''"""More than 1 < 2."""
from typing import TYPE_CHECKING

LIMIT, RATE = 8, 0.5  # \xc3\xa9 is two bytes
if TYPE_CHECKING:
    OTHER = 3


class Loop:
    patience: int = 2

    def after_batch(self, n: "int < 3" = 4) -> bool:
        """Whether n < 3."""
        if n < LIMIT and not (
            self.ended
            or n % 2 == 1
        ):
            self.keep(n)
            self.emit("after_batch")
            raise ValueError(f"{n + 1}" if n < 3 else "")
        return n is not None

    def __repr__(self):
        return f"{self.n < 3}"
'''


def changes(source, kind):
    return {(p.mutant.before, p.mutant.after) for p in possible("a.py", source) if p.mutant.kind == kind}


def test_limits_are_of_constants_and_comparisons():
    assert changes(SOURCE, "limit") == {
        ("LIMIT, RATE = (8, 0.5)", "LIMIT, RATE = (16, 0.5)"),
        ("LIMIT, RATE = (8, 0.5)", "LIMIT, RATE = (8, 1.0)"),
        ("patience: int = 2", "patience: int = 4"),
        (IF, IF.replace("== 1", "== 2")),
    }


IF = "if n < LIMIT and (not (self.ended or n % 2 == 1)):"


def test_operators_conditions_returns_and_order_are_changed_but_no_text():
    assert {after for _, after in changes(SOURCE, "operator")} == {
        "if n <= LIMIT and (not (self.ended or n % 2 == 1)):",
        "if n < LIMIT or not (self.ended or n % 2 == 1):",
        "if n < LIMIT and (self.ended or n % 2 == 1):",
        "if n < LIMIT and (not (self.ended and n % 2 == 1)):",
        "if n < LIMIT and (not (self.ended or n % 2 != 1)):",
        "if n < LIMIT and (not (self.ended or n * 2 == 1)):",
        "return n is None",
    }
    assert changes(SOURCE, "negated if") == {(IF, f"if not ({IF[3:-1]}):")}
    assert changes(SOURCE, "order") == {
        ("self.keep(n)\nself.emit('after_batch')", "self.emit('after_batch')\nself.keep(n)")
    }
    # `not n is not None` is `n is None`, which is there
    assert changes(SOURCE, "return") == set()
    assert changes(b"def f():\n    return 1 + x\n", "return") == {("return 1 + x", "return None")}


def test_what_needs_another_statement_is_not_swapped_with_it():
    body = b"def before_fit(self):\n    x = self.make()\n    self.use(x)\n"
    assert changes(body, "order") == set()
    assert changes(body.replace(b"(x)", b"(y)"), "order") != set()
    assert changes(body.replace(b"(x)", b"(y)").replace(b"before_fit", b"fit"), "order") == set()


@in_turn("place", possible("a.py", SOURCE), ids=lambda place: place.mutant.after[:40])
def test_an_applied_mutant_is_one_change_and_moves_no_line(place):
    changed = place.apply(SOURCE)
    compile(changed, "a.py", "exec")
    before, after = SOURCE.splitlines(), changed.splitlines()
    assert len(before) == len(after)
    differ = {i for i, (a, b) in enumerate(zip(before, after, strict=True), 1) if a != b}
    assert differ
    assert differ <= set(place.lines)


def place_of(after, source=SOURCE):
    return next(p for p in possible("core/a.py", source) if p.mutant.after == after)


def test_it_is_found_again_by_function_and_text_where_lines_layout_file_or_class_have_moved():
    mutant = place_of("if n < LIMIT or not (self.ended or n % 2 == 1):").mutant
    moved = b"import sys\n\n" + SOURCE.replace(b"(\n            self.ended\n", b"(self.ended\n")
    found = find(mutant, possible("core/a.py", moved))
    assert found.mutant == mutant
    assert found.lines.start == 16
    assert find(mutant, possible("loops/b.py", SOURCE)).mutant.file == "loops/b.py"
    assert (
        find(mutant, possible("b.py", SOURCE.replace(b"Loop", b"Other"))).mutant.function
        == "Other.after_batch"
    )
    renamed = SOURCE.replace(b"def after_batch", b"def batch_ended")
    assert find(mutant, possible("b.py", renamed)).mutant.function == "Loop.batch_ended"


def test_it_is_not_found_if_the_text_has_changed_or_several_have_it():
    mutant = place_of("return n is None").mutant
    assert find(mutant, possible("core/a.py", SOURCE.replace(b"n is not", b"m is not"))) is None
    # too short to be known in another function
    assert find(mutant, possible("core/a.py", SOURCE.replace(b"after_batch", b"batch_ended"))) is None
    both = [p for file in ("core/b.py", "core/c.py") for p in possible(file, SOURCE)]
    assert find(mutant, both) is None
    assert find(mutant, [*both, *possible("core/a.py", SOURCE)]).mutant == mutant


def test_the_same_change_twice_in_a_function_is_told_apart():
    places = possible("a.py", b"def f(x):\n    g(x < 1)\n    g(x < 1)\n")
    assert [p.mutant.occurrence for p in places if p.mutant.kind == "operator"] == [0, 1]
    assert [find(p.mutant, places) for p in places] == places
    once = possible("a.py", b"def f(x):\n    g(x < 1)\n")
    assert find(places[0].mutant, once) is once[0]


def test_rooms_have_mutants_by_their_lines_and_large_ones_at_least_one():
    assert quotas({"core": 9000, "small": 250, "tiny": 10, "loops": 3000}, 12) == {
        "core": 8,
        "small": 1,
        "tiny": 0,
        "loops": 3,
    }


def test_the_choice_is_seeded_and_leaves_out_what_no_test_executes_and_counts_it():
    places = [p for file in ("core/a.py", "loops/a.py") for p in possible(file, SOURCE)]
    first, unseen = choose(places, {"core": 3, "loops": 2}, lambda p: True, seed=0)
    assert [p.mutant.room for p in first] == ["loops"] * 2 + ["core"] * 3
    assert len({p.mutant for p in first}) == 5
    assert not unseen
    assert choose(places, {"core": 3, "loops": 2}, lambda p: True, seed=0) == (first, {})
    assert choose(places, {"core": 3, "loops": 2}, lambda p: True, seed=1)[0] != first
    in_core, unseen = choose(places, {"core": 3, "loops": 2}, lambda p: p.mutant.room == "core", seed=0)
    assert [p.mutant.room for p in in_core] == ["core"] * 5
    assert unseen["loops"] == len(places) // 2
