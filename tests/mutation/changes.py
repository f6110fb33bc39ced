"""Small faults that can be put into a source: each is one place, and what stands there instead.

    f(x)            does nothing, or is done twice
    self.n = x      does nothing; n += x does nothing, is done twice, or takes away
    3, a < b        one off: 4, a <= b
    if a:           the other way round
    a + b           a - b

Annotations, messages of errors and what only holds attributes in ``__init__`` are left alone.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
}
OFF_BY_ONE = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
SAME_WHEN_TWICE = ("_init__", "check", "clear", "copy_", "discard", "fill_", "require", "sort", "zero_")
"""How calls begin that do nothing the second time."""

Span = tuple[int, int, int, int]  # line, column in bytes, last line, column behind the end


@dataclass(frozen=True)
class Change:
    """One fault.

    Attributes:
        path: Of the file, in the tree.
        span: What is replaced.
        text: By what.
        place: Module and function, with dots; with ``before`` and ``after`` its name.
        before, after: The lines without and with it, each on one line.
        first: Line where its statement begins; who runs that runs this.
        at_import: It is outside of functions.
    """

    path: str
    span: Span
    text: str
    place: str
    before: str
    after: str
    first: int
    at_import: bool

    @property
    def key(self) -> tuple[str, str, str]:
        return self.place, self.before, self.after

    def applied(self, source: str) -> str:
        return _replaced(source, self.span, self.text)


def changes_of(root: Path, path: str) -> list[Change]:
    """All that can be made in one file, in the order of its lines."""
    source = (root / path).read_text()
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    stem, lines, found, seen = Path(path).stem, source.splitlines(), [], {}
    for span, text, qualified, first, at_import in sorted(finder.found):
        before = _joined(lines[span[0] - 1 : span[2]])
        shorter = span[0] - 1, len(lines) - span[2]
        changed = _replaced(source, span, text).splitlines()
        after = _joined(changed[shorter[0] : len(changed) - shorter[1]])
        key = (qualified, before, after)
        seen[key] = seen.get(key, 0) + 1
        place = f"{stem}.{qualified}" + (f" #{seen[key]}" if seen[key] > 1 else "")
        found.append(Change(path, span, text, place, before, after, first, at_import))
    return found


RAN = "a_statement_runs"


def telling(source: str, path: str) -> str:
    """The same source, which calls ``RAN(path, line)`` before each statement of a function."""
    return ast.unparse(ast.fix_missing_locations(_Telling(path).visit(ast.parse(source))))


class _Telling(ast.NodeTransformer):
    def __init__(self, path: str) -> None:
        self._path, self._inside = path, False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        before, self._inside = self._inside, True
        self.generic_visit(node)
        self._inside = before
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if self._inside and not isinstance(node, ast.ClassDef):
            for field in ("body", "orelse", "finalbody"):
                block = getattr(node, field, None)
                if isinstance(block, list):
                    told = [(self._call(s.lineno), s) for s in block if not _is_words(s)]
                    words = [s for s in block if _is_words(s)]
                    setattr(node, field, [*words, *(s for pair in told for s in pair)])
        return node

    def _call(self, line: int) -> ast.stmt:
        return ast.parse(f"{RAN}({self._path!r}, {line})").body[0]


def _is_words(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


class _Finder(ast.NodeVisitor):
    def __init__(self, source: str) -> None:
        self.source = source
        self.found: list[tuple[Span, str, str, int, bool]] = []
        self._names: list[str] = []
        self._first = 1
        self._depth = 0

    def _add(self, node: ast.AST, text: str) -> None:
        span = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        self.found.append((span, text, ".".join(self._names) or "<module>", self._first, not self._depth))

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self._first = node.lineno
        super().visit(node)

    def _all(self, nodes: Sequence[ast.AST | None]) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    # what has a name, and what is left alone

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._names.append(node.name)
        self._all(node.body)
        self._names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._all([*node.args.defaults, *node.args.kw_defaults])
        self._depth += 1
        self.visit_ClassDef(node)
        self._depth -= 1

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if isinstance(node.target, ast.Attribute) and node.value and "__init__" not in self._names:
            self._add(node, "pass")
        self._all([node.value])

    def _nothing(self, node: ast.AST) -> None:
        """Not looked into."""

    visit_Raise = visit_Assert = visit_JoinedStr = visit_Import = visit_ImportFrom = _nothing

    # statements

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._add(node, "pass")
            called = ast.unparse(node.value.func).split(".")[-1].removeprefix("_")
            if not called.startswith(SAME_WHEN_TWICE):
                self._add(node, f"{ast.unparse(node)}; {ast.unparse(node)}")
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        kept = any(isinstance(t, (ast.Attribute, ast.Subscript)) for t in node.targets)
        if kept and "__init__" not in self._names:
            self._add(node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add(node, "pass")
        if type(node.op) in OTHER:
            self._add(node, f"{ast.unparse(node)}; {ast.unparse(node)}")
            self._swap(node)
        self.generic_visit(node)

    # conditions

    def _negate(self, test: ast.expr) -> None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self._add(test, f"({ast.unparse(test.operand)})")
        else:
            self._add(test, f"(not ({ast.unparse(test)}))")

    def _visit_test(self, node: ast.If | ast.While | ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    visit_If = visit_While = visit_IfExp = _visit_test

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negate(test)
        self.generic_visit(node)

    # expressions

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            self._add(node, str(node.value + 1))

    def visit_Compare(self, node: ast.Compare) -> None:
        alone = len(node.ops) == 1 and self._negated(node)
        for k, op in enumerate(node.ops):
            if type(op) in OTHER and not (alone and type(op) not in OFF_BY_ONE):
                changed = copy.deepcopy(node)
                changed.ops[k] = OTHER[type(op)]()
                self._add(node, ast.unparse(changed))
        self.generic_visit(node)

    def _negated(self, node: ast.AST) -> bool:
        """Whether it is a whole condition, which has been turned round already."""
        place = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        return any(f[0] == place and f[1].startswith("(not (") for f in self.found)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in OTHER and not any(map(_is_text, (node.left, node.right))):
            self._swap(node)
        self.generic_visit(node)

    def _swap(self, node: ast.BinOp | ast.AugAssign) -> None:
        changed = copy.deepcopy(node)
        changed.op = OTHER[type(node.op)]()
        self._add(node, ast.unparse(changed))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, (ast.JoinedStr, ast.List, ast.Tuple)) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _replaced(source: str, span: Span, text: str) -> str:
    lines = source.encode().splitlines(keepends=True)
    line, column, last, end = span
    head, tail = lines[line - 1][:column], lines[last - 1][end:]
    return b"".join([*lines[: line - 1], head, text.encode(), tail, *lines[last:]]).decode()


def _joined(lines: Sequence[str]) -> str:
    return " ".join(" ".join(lines).split())


def explained(text: str) -> Iterator[tuple[tuple[str, str, str], str]]:
    """Blocks of a list of faults that no test can see: place, ``- before``, ``+ after``, why."""
    for block in text.split("\n\n"):
        lines = [line.strip() for line in block.splitlines() if line and not line.startswith("#")]
        if lines:
            place, before, after, *why = lines
            if before[:2] != "- " or after[:2] != "+ " or not why:
                raise ValueError(f"a place, '- before', '+ after' and a reason: not {lines}")
            yield (place, before[2:], after[2:]), " ".join(why)
