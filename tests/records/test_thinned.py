"""Thinned keeps items evenly over a run of any length, and the newest."""

import pytest

from hookcb.records.thinned import Thinned


@pytest.mark.parametrize("most", [2, 3, 4, 7, 50])
def test_items_that_stay_are_spread_evenly_and_the_newest_is_there(most):
    thinned = Thinned(most)
    for i in range(300):
        before, stride = thinned.items.copy(), thinned.stride
        assert thinned.add(i) == (thinned.stride > stride)
        assert thinned.items == sorted({*range(0, i + 1, thinned.stride), i})
        assert max(1, most // 2) < len(thinned.items) <= most or i < most
        assert set(thinned.items) <= {*before, i}
    assert [thinned.place(i) for i in thinned.items] == list(range(len(thinned.items)))
    assert all(thinned.place(i) is None for i in range(310) if i not in thinned.items)


def test_an_item_that_would_not_stay_need_not_be_made():
    thinned, made = Thinned(4), []
    for i in range(32):
        if thinned.is_due():
            made.append(i)
            thinned.add(i)
    assert thinned.items == [0, 8, 16, 24]
    assert made == [0, 1, 2, 3, 4, 6, 8, 12, 16, 24]
    assert thinned.n == 32
