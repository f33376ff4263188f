"""Generate the orders in docs/guide/training.md from hookcb/core/orders.py: `python docs/orders.py`."""

import ast
import sys
from collections.abc import Sequence
from pathlib import Path

import hookcb
from hookcb.core import orders

PAGE = Path(__file__).with_name("guide") / "training.md"
COMMAND = "python docs/orders.py"
BEGIN, END = "<!-- orders -->\n", "<!-- /orders -->\n"
BASES = ("Callback", "SamplingCallback")  # only their subclasses act


def reasons(source: str = Path(orders.__file__).read_text("utf-8")) -> dict[str, str]:
    """The text below each order, by the order's name.

    Raises:
        ValueError: If an order has no such text.
    """
    body = ast.parse(source).body
    texts = {}
    for node, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)):
                raise ValueError(f"hookcb/core/orders.py: add a string below {name} that gives the reason")
            texts[name] = str(below.value.value)
    return texts


def callbacks() -> dict[str, int]:
    """Order of each public callback, by name."""
    kinds = {name: getattr(hookcb, name) for name in hookcb.__all__ if name not in BASES}
    return {
        name: kind.order
        for name, kind in sorted(kinds.items())
        if isinstance(kind, type) and issubclass(kind, hookcb.Callback) and kind.__name__ == name
    }


def table() -> str:
    """Table in Markdown, one row for each order that a public callback has."""
    why: dict[int, str] = {}
    for name, reason in reasons().items():
        why.setdefault(getattr(orders, name), reason)
    orders_by_name = callbacks()
    rows = ["| order | callback | why there |", "|---:|---|---|"]
    for order in sorted(set(orders_by_name.values())):
        names = ", ".join(f"`{name}`" for name, value in orders_by_name.items() if value == order)
        first = why[order].partition(". ")[0].removesuffix(".")
        rows.append(f"| {order} | {names} | {first[0].lower()}{first[1:]} |")
    return "\n".join(rows) + "\n"


def with_table(text: str) -> str:
    """Page with the current table."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(
            f"docs/guide/training.md has no {BEGIN.strip()} … {END.strip()}; the table belongs between them"
        )
    return before + BEGIN + table() + END + after


def main(argv: Sequence[str] | None = None) -> int:
    """Write the table; with `--check`, only check it and exit with 1 if it is out of date."""
    text = PAGE.read_text("utf-8")
    current = with_table(text)
    if "--check" not in (sys.argv[1:] if argv is None else argv):
        PAGE.write_text(current, "utf-8")
    elif text != current:
        sys.stderr.write(f"the table of orders in docs/guide/training.md is out of date; run {COMMAND}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
