"""Tree of the events of a training loop, for a terminal."""

from collections.abc import Callable, Iterator

from rich.tree import Tree

from hookcb.core.events import BATCH_EVENTS, LEVELS, Event


def loop_tree(title: str, acting: Callable[[bool, str], list[str]]) -> Tree:
    """Tree of the events of a training loop, each with the names of the callbacks that act at it.

    Args:
        title: title of the root.
        acting: called as `acting(training, event)`; returns the names of the callbacks that act.
    """
    branches = [Tree(f"[bold]{title}[/]")]
    for training, event in _events_of_an_epoch():
        side, _, level = event.partition("_")
        if level in LEVELS and side == "before":
            branches.append(branches[-1].add(f"[bold]{level}[/]"))
        names = acting(training, event)
        if names or not level.startswith("cancel_"):
            branches[-1].add(f"{event}  [cyan]{', '.join(names)}[/]" if names else event)
        if level in LEVELS and side == "after":
            branches.pop()
    return branches[0]


def _events_of_an_epoch() -> Iterator[tuple[bool, str]]:
    """(training, event) in firing order; a validation has the events of a batch except backward and step."""
    in_validation = [e for e in Event if e in BATCH_EVENTS and not e.endswith(("_backward", "_step"))]
    for event in Event:
        yield not event.endswith("_validate"), event
        if event is Event.BEFORE_VALIDATE:
            yield from ((False, e) for e in in_validation)
