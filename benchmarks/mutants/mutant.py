"""Small faults to put into a package: finding all, choosing some, applying one, and finding it again."""

import ast
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

PAIRS: list[tuple[type[ast.AST], type[ast.AST]]] = [
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.Div),
    (ast.And, ast.Or),
]
OPERATORS = dict(pair for a, b in PAIRS for pair in ((a, b), (b, a)))
OPERATORS |= {ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult}
OPPOSITES = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
TEXT_ONLY = {"__repr__", "__str__", "__rich__", "__rich_console__", "__rich_repr__"}
Node = ast.expr | ast.stmt
LARGE_ROOM = 200  # lines from which a room has at least one mutant
DISTINCT = 25  # characters of a statement that is looked for outside functions of its name


@dataclass(frozen=True)
class Mutant:
    """A change of one statement, which is known by its function and its text, not by its line."""

    file: str  # relative to the package
    function: str  # qualified name; that of the class, or nothing, for a constant
    kind: str
    before: str
    after: str
    occurrence: int = 0  # among the same changes in the function

    @property
    def room(self) -> str:
        """Top-level folder or file of the package."""
        return self.file.split("/")[0]

    @property
    def name(self) -> str:
        """File and function, which `--only` is compared with."""
        return f"{self.file}::{self.function}"


@dataclass(frozen=True)
class Place:
    """A mutant in today's source: the lines of its statement, and a replacement for some bytes."""

    mutant: Mutant
    lines: range
    span: tuple[int, int]
    text: bytes
    constants: tuple[str, ...] = ()  # names that the statement assigns, outside functions

    def apply(self, source: bytes) -> bytes:
        """The source with the fault; all other statements keep their lines."""
        return source[: self.span[0]] + self.text + source[self.span[1] :]


def possible(file: str, source: bytes) -> list[Place]:
    """All mutants of a file, in the order of their lines."""
    return _File(file, source).places


class _File:
    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source, self.places = file, source, list[Place]()
        self.starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]  # of lines, in bytes
        self.n_same: dict[tuple[str, ...], int] = defaultdict(int)
        self.body(ast.parse(source).body, "", None)

    def body(self, statements: list[ast.stmt], scope: str, function: ast.stmt | None) -> None:
        for i, stmt in enumerate(statements):
            if isinstance(stmt, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                if stmt.name not in TEXT_ONLY:
                    inner = None if isinstance(stmt, ast.ClassDef) else stmt
                    self.body(stmt.body, f"{scope}.{stmt.name}".lstrip("."), inner)
                continue
            if function is None:
                self.constants(stmt, scope)
            elif not isinstance(stmt, ast.Raise):  # which is text, but for its type
                for kind, old, new in _of_statement(stmt, function):
                    self.add(kind, stmt, old, new, scope)
                if i and _can_swap(statements[i - 1], stmt) and _has_events(function):
                    self.swap(statements[i - 1], stmt, scope)
            if not (isinstance(stmt, ast.If) and "TYPE_CHECKING" in ast.unparse(stmt.test)):
                for inner_body in _bodies(stmt):
                    self.body(inner_body, scope, function)

    def constants(self, stmt: ast.stmt, scope: str) -> None:
        if isinstance(stmt, ast.Assign | ast.AnnAssign) and stmt.value is not None:
            for node in filter(_is_number, _walk(stmt.value)):
                new = ast.Constant(node.value * 2 or 1)
                self.add("limit", stmt, node, new, scope, tuple(assigned(stmt)))

    def add(
        self, kind: str, stmt: ast.stmt, old: Node, new: Node, scope: str, constants: tuple[str, ...] = ()
    ) -> None:
        text = ast.unparse(ast.fix_missing_locations(new))
        breaks = "\n" * ((old.end_lineno or 0) - old.lineno)
        text = f"({text}{breaks})" if isinstance(old, ast.expr) else text + breaks
        lines = range(stmt.lineno, max((x.end_lineno or 0) for x in _header(stmt)) + 1)
        texts = _text(stmt), _text(stmt, old, new)
        self.keep((scope, kind, *texts), lines, self.span(old, old), text.encode(), constants)

    def swap(self, a: ast.stmt, b: ast.stmt, scope: str) -> None:
        (start, between), (second, end) = self.span(a, a), self.span(b, b)
        parts = self.source[second:end], self.source[between:second], self.source[start:between]
        texts = f"{_text(a)}\n{_text(b)}", f"{_text(b)}\n{_text(a)}"
        lines = range(a.lineno, (b.end_lineno or 0) + 1)
        self.keep((scope, "order", *texts), lines, (start, end), b"".join(parts), ())

    def keep(
        self,
        key: tuple[str, str, str, str],
        lines: range,
        span: tuple[int, int],
        text: bytes,
        constants: tuple[str, ...],
    ) -> None:
        mutant = Mutant(self.file, *key, self.n_same[key])
        self.n_same[key] += 1
        self.places.append(Place(mutant, lines, span, text, constants))

    def span(self, first: Node, last: Node) -> tuple[int, int]:
        """Bytes from the start of one node to the end of another."""
        end = self.starts[(last.end_lineno or 0) - 1] + (last.end_col_offset or 0)
        return self.starts[first.lineno - 1] + first.col_offset, end


def assigned(stmt: ast.Assign | ast.AnnAssign) -> list[str]:
    """Names that a statement assigns."""
    targets = stmt.targets if isinstance(stmt, ast.Assign) else [stmt.target]
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]


def _of_statement(stmt: ast.stmt, function: ast.stmt) -> Iterator[tuple[str, Node, Node]]:
    """Kind, node and replacement of each change of a statement in a function, without its body."""
    if isinstance(stmt, ast.AugAssign) and type(stmt.op) in OPERATORS:
        yield "operator", stmt, ast.AugAssign(stmt.target, OPERATORS[type(stmt.op)](), stmt.value)
    if isinstance(stmt, ast.If) and (test := _negated(stmt.test)):
        yield "negated if", stmt.test, test
    if isinstance(stmt, ast.Return) and stmt.value is not None and ast.unparse(stmt.value) != "None":
        is_bool = ast.unparse(getattr(function, "returns", None) or ast.Constant(0)) == "bool"
        if new := _negated(stmt.value) if is_bool else ast.Constant(None):
            yield "return", stmt.value, new
    for part in _header(stmt):
        for node in _walk(part):
            yield from _of_node(node)


def _of_node(node: ast.AST) -> Iterator[tuple[str, ast.expr, ast.expr]]:
    """Kind, node and replacement of each change of an expression."""
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            ops: list[ast.cmpop] = [*node.ops[:i], OPERATORS[type(op)](), *node.ops[i + 1 :]]
            yield "operator", node, ast.Compare(node.left, ops, node.comparators)
        for side in filter(_is_number, (node.left, *node.comparators)):
            more = side.value + 1 if isinstance(side.value, int) else side.value * 2 or 1.0
            yield "limit", side, ast.Constant(more)
    elif isinstance(node, ast.BoolOp):
        yield "operator", node, ast.BoolOp(OPERATORS[type(node.op)](), node.values)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        if not any(_is_text(side) for side in (node.left, node.right)):
            yield "operator", node, ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "operator", node, node.operand


def _negated(test: ast.expr) -> ast.expr | None:
    """The opposite of a condition; None if changing its operator is the same."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return None
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], OPPOSITES):
        return None
    return ast.UnaryOp(ast.Not(), test)


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _has_events(function: ast.AST) -> bool:
    """Whether a function handles an event, or emits one."""
    return getattr(function, "name", "").startswith(("before_", "after_")) or any(
        isinstance(node, ast.Attribute) and node.attr == "emit" for node in ast.walk(function)
    )


def _can_swap(a: ast.stmt, b: ast.stmt) -> bool:
    """Whether both call something, and neither needs a name that the other assigns."""
    if not all(isinstance(x, ast.Expr | ast.Assign | ast.AugAssign | ast.Delete) for x in (a, b)):
        return False
    acts = [any(isinstance(n, ast.Call) for n in ast.walk(x)) for x in (a, b)]
    stored, loaded = ([_names(x, how) for x in (a, b)] for how in ((ast.Store, ast.Del), (ast.Load,)))
    return all(acts) and not (stored[0] & (loaded[1] | stored[1]) or stored[1] & loaded[0])


def _names(stmt: ast.stmt, contexts: tuple[type, ...]) -> set[str]:
    return {n.id for n in ast.walk(stmt) if isinstance(n, ast.Name) and isinstance(n.ctx, contexts)}


def _bodies(stmt: ast.stmt) -> Iterator[list[ast.stmt]]:
    for part in (stmt, *getattr(stmt, "handlers", ()), *getattr(stmt, "cases", ())):
        for field in ("body", "orelse", "finalbody"):
            yield getattr(part, field, [])


def _header(stmt: ast.stmt) -> list[ast.expr]:
    """The expressions of a statement, without those of its body and without annotations."""
    parts = [stmt.value] if isinstance(stmt, ast.AnnAssign) else list(ast.iter_child_nodes(stmt))
    items = [x.context_expr for x in getattr(stmt, "items", ())]
    return [x for x in (*parts, *items) if isinstance(x, ast.expr)]


def _walk(node: ast.expr) -> Iterator[ast.AST]:
    """Nodes of an expression outside of f-strings, which are text."""
    if not isinstance(node, ast.JoinedStr):
        yield node
        for inner in ast.iter_child_nodes(node):
            yield from _walk(inner)  # type: ignore[arg-type]


def _text(stmt: ast.stmt, old: Node | None = None, new: Node | None = None) -> str:
    """A statement without its body, in the layout of `ast.unparse`; with a node replaced."""
    if stmt is old:
        return ast.unparse(new or stmt)
    empty = {"body", "orelse", "handlers", "finalbody", "cases"}
    fields = {name: [] if name in empty else value for name, value in ast.iter_fields(stmt)}
    bare = ast.copy_location(type(stmt)(**fields), stmt)
    _Replace(old, new).visit(bare)
    text = ast.unparse(bare)
    _Replace(new, old).visit(bare)  # which has its nodes in common with the statement
    return text


class _Replace(ast.NodeTransformer):
    def __init__(self, old: Node | None, new: Node | None) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST | None:
        return self.new if node is self.old else self.generic_visit(node)


# ---- choosing some, and finding them again


def quotas(n_lines: Mapping[str, int], n: int) -> dict[str, int]:
    """Number of mutants of each room, in proportion to its lines, with at least one for a large room."""
    exact = {room: n * lines / sum(n_lines.values()) for room, lines in n_lines.items()}
    quota = {room: max(int(exact[room]), int(n_lines[room] >= LARGE_ROOM)) for room in n_lines}
    by_lack = sorted(n_lines, key=lambda room: quota[room] - exact[room])
    for room in by_lack[: max(0, n - sum(quota.values()))]:
        quota[room] += 1
    return quota


def choose(
    places: Sequence[Place], quota: Mapping[str, int], is_executed: Callable[[Place], bool], seed: int
) -> tuple[list[Place], dict[str, int]]:
    """Draw mutants, all kinds alike; also how many were drawn by room on lines that no test executes.

    What a room lacks is drawn from the next larger one.
    """
    rng, chosen, unexecuted = random.Random(seed), list[Place](), dict[str, int]()
    n = 0
    for room in sorted(quota, key=lambda room: (quota[room], room)):
        n += quota[room]
        left = defaultdict[str, list[Place]](list)
        for place in places:
            if place.mutant.room == room:
                left[place.mutant.kind].append(place)
        while len(chosen) < n and any(left.values()):
            of_kind = left[rng.choice(sorted(kind for kind in left if left[kind]))]
            place = of_kind.pop(rng.randrange(len(of_kind)))
            if is_executed(place):
                chosen.append(place)
            else:
                unexecuted[room] = unexecuted.get(room, 0) + 1
    return chosen, unexecuted


def find(mutant: Mutant, places: Sequence[Place]) -> Place | None:
    """The place of a mutant, where its function or file may have moved; None if that is unclear."""
    change = (mutant.kind, mutant.before, mutant.after)
    same = [p for p in places if (p.mutant.kind, p.mutant.before, p.mutant.after) == change]
    last = mutant.function.rpartition(".")[2]
    groups: list[list[Place]] = [
        [p for p in same if p.mutant.name == mutant.name],
        [p for p in same if p.mutant.function == mutant.function],
        [p for p in same if p.mutant.function.rpartition(".")[2] == last],
        same if len(mutant.before) >= DISTINCT else [],
    ]
    group = next(filter(None, groups), [])
    if len({p.mutant.name for p in group}) != 1:
        return None
    if len(group) == 1:
        return group[0]
    return next((p for p in group if p.mutant.occurrence == mutant.occurrence), None)
