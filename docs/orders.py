"""README's table of the orders of callbacks: `python docs/orders.py` makes it from hookcb/core/orders.py."""

import ast
import sys
from collections.abc import Sequence
from pathlib import Path

import hookcb
from hookcb.core import orders

README = Path(__file__).parents[1] / "README.md"
COMMAND = "python docs/orders.py"
BEGIN, END = "<!-- orders -->\n", "<!-- /orders -->\n"
BASES = ("Callback", "SamplingCallback")  # which act by what is derived from them


def reasons(source: str = Path(orders.__file__).read_text("utf-8")) -> dict[str, str]:
    """By name of an order, the text below it.

    Raises:
        ValueError: if there is none.
    """
    body = ast.parse(source).body
    found = {}
    for node, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)):
                raise ValueError(f"hookcb/core/orders.py: say below {name} why it is there")
            found[name] = str(below.value.value)
    return found


def callbacks() -> dict[str, int]:
    """The public callbacks, by name, and their orders."""
    kinds = {name: getattr(hookcb, name) for name in hookcb.__all__ if name not in BASES}
    return {
        name: kind.order
        for name, kind in sorted(kinds.items())
        if isinstance(kind, type) and issubclass(kind, hookcb.Callback) and kind.__name__ == name
    }


def table() -> str:
    """The table in Markdown, one row for each order that a public callback has."""
    why: dict[int, str] = {}
    for name, reason in reasons().items():
        why.setdefault(getattr(orders, name), reason)
    found = callbacks()
    rows = ["| order | callback | why there |", "|---:|---|---|"]
    for order in sorted(set(found.values())):
        names = ", ".join(f"`{name}`" for name, its in found.items() if its == order)
        first = why[order].partition(". ")[0].removesuffix(".")
        rows.append(f"| {order} | {names} | {first[0].lower()}{first[1:]} |")
    return "\n".join(rows) + "\n"


def with_table(text: str) -> str:
    """A README with the table as it should be."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"README.md has no {BEGIN.strip()} … {END.strip()}, between which the table belongs")
    return before + BEGIN + table() + END + after


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the table, or with `--check` tells whether it is current: exit code 1 where it is not."""
    text = README.read_text("utf-8")
    current = with_table(text)
    if "--check" not in (sys.argv[1:] if argv is None else argv):
        README.write_text(current, "utf-8")
    elif text != current:
        sys.stderr.write(f"the table of orders in README.md is not current; run {COMMAND}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
