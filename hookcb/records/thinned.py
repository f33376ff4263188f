"""Thinned: items of a run of any length, in bounded memory."""

from typing import Generic, TypeVar

T = TypeVar("T")


class Thinned(Generic[T]):
    """At most `most` items, 2 or more, spread evenly over all that were added, and the newest of all.

    When there would be more, every second one is dropped, and from then on every second (fourth, eighth …) is
    kept. The newest is there until the next is added.

    Attributes:
        n: number of items that were added; they are numbered from 0.
        stride: items whose number is a multiple of it are kept.
        items: the kept items in order.

    >>> thinned = Thinned(4)
    >>> for i in range(10):
    ...     _ = thinned.add(i)
    >>> thinned.items
    [0, 4, 8, 9]
    """

    def __init__(self, most: int) -> None:
        self.most, self.stride, self.n = most, 1, 0
        self.items: list[T] = []
        self._has_extra = False  # whether the newest is there only until the next is added

    def add(self, item: T) -> bool:
        """Adds an item; returns whether every second one of those before was dropped."""
        is_thinned = False
        if self._has_extra:
            self.items[-1] = item
        else:
            if len(self.items) == self.most:
                self.items, self.stride, is_thinned = self.items[::2], 2 * self.stride, True
            self.items.append(item)
        self._has_extra = self.n % self.stride > 0
        self.n += 1
        return is_thinned

    def is_due(self) -> bool:
        """Whether the next item would stay; if not, it counts as added, and need not be made."""
        is_due = self.n % self.stride == 0
        self.n += not is_due
        return is_due

    def place(self, number: int) -> int | None:
        """Place in `items` of the item with a number; None if it is not kept."""
        if self._has_extra and number == self.n - 1:
            return len(self.items) - 1
        place, rest = divmod(number, self.stride)
        return place if not rest and place < len(self.items) - self._has_extra else None
