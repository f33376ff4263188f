"""Source: statements of a file of the user."""

import ast
import linecache
from functools import lru_cache

LOOPS = ast.For | ast.AsyncFor
OF_MODULE = "parameters", "buffers", "modules", "children"  # ends of methods of a module, which fetch nothing


class Source:
    """Statements of a file, found by their lines; without source it knows none."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._first: dict[int, int] = {}  # first line of the innermost statement at a line
        self._loops: list[tuple[range, range]] = []  # head and body of each for statement
        self._nexts: set[int] = set()  # lines of statements that call next
        try:
            tree = ast.parse("".join(lines))
        except (SyntaxError, ValueError):  # as of a cell with commands of IPython
            return
        for node in ast.walk(tree):  # outer statements first
            if isinstance(node, ast.stmt):
                self._add(node)

    def _add(self, node: ast.stmt) -> None:
        head = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        if body := getattr(node, "body", None):
            head = range(node.lineno, max(node.lineno + 1, body[0].lineno))
            if isinstance(node, LOOPS):
                self._loops.append((head, range(body[0].lineno, (body[-1].end_lineno or head.stop) + 1)))
        elif any(_is_next(part) for part in ast.walk(node)):
            self._nexts.update(head)
        self._first |= dict.fromkeys(head, node.lineno)

    def statement(self, line: int) -> tuple[int, str]:
        """First line of the innermost statement at a line, and its text, of one with a body its head's."""
        first = self._first.get(line, line)
        text = " ".join(self._lines[first - 1].split()) if first <= len(self._lines) else ""
        return first, text.removesuffix(":")

    def loops_around(self, line: int) -> list[int]:
        """First lines of the for statements with a line in their body."""
        return [head.start for head, body in self._loops if line in body]

    def calls_next(self, line: int) -> bool:
        """Whether a line is part of a statement that calls `next`, except on parameters of a module."""
        return line in self._nexts


def _is_next(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "next"):
        return False
    source = node.args[0].func if node.args and isinstance(node.args[0], ast.Call) else None
    return not (isinstance(source, ast.Attribute) and source.attr.endswith(OF_MODULE))


@lru_cache(maxsize=64)
def source_of(file: str) -> Source:
    """Statements of a file."""
    return Source(linecache.getlines(file))
