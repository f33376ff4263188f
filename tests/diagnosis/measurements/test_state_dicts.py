"""A change of names that lets a state dict fit is found."""

import pytest

from hookcb.diagnosis.measurements.state_dicts import renaming


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ("module.{}", "strip", "module."),
        ("model.encoder.{}", "strip", "model.encoder."),
        ("_orig_mod.module.{}", "strip", "_orig_mod.module."),
    ],
)
def test_a_prefix_is_found_in_both_directions(given, kind, text):
    names = {"a.weight": (2, 3), "a.bias": (2,), "b.weight": (1, 2)}
    longer = {given.format(name): shape for name, shape in names.items()}
    assert renaming(names, longer)[:2] == (kind, text)
    found = renaming(longer, names)
    assert found[:2] == ("add", text)
    assert found.fits == set(longer)


def test_a_wrapper_within_names_is_found_and_other_shapes_are_none():
    names = {"a.0.weight": (2, 3), "b.0.weight": (1, 2)}
    inside = {"a._orig_mod.0.weight": (2, 3), "b._orig_mod.0.weight": (1, 2)}
    assert renaming(names, inside)[:2] == ("remove", "_orig_mod.")
    assert renaming({"a.weight": (2, 3)}, {"module.a.weight": (2, 4)}) is None
    assert renaming({"head.weight": (2, 3)}, {"fc.weight": (2, 3)}) is None
