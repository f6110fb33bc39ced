"""Small faults that can be put into a source: each is one place, and what stands there instead.

    f(x)            does nothing, or is done twice
    self.n = x      does nothing; n += x does nothing, is done twice, or takes away
    3, a < b        one off: 4, a <= b
    if a:           the other way round
    a + b           a - b

Annotations, defaults, messages of errors and what ``__init__`` only keeps are left alone.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

OFF_BY_ONE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
OPPOSITE = {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is}
OPPOSITE |= {ast.In: ast.NotIn, ast.NotIn: ast.In}
SIGN = {ast.Add: ast.Sub, ast.Sub: ast.Add}
LEFT_ALONE = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
IDEMPOTENT = ("init__", "check", "clear", "copy_", "discard", "fill_", "require", "sort", "zero_")
"""How the names of calls begin that do nothing the second time."""
RAN = "a_statement_runs"
TOLD = "marks"
"""The module that has it, of which the source that tells is given a copy."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        path: Of the file, in the tree.
        span: What is replaced: line, column in bytes, last line, column behind the end.
        text: By what.
        name: Module and function, with dots; the lines without, and with it, each on one line.
        first: Line where its statement begins; None: it is outside of functions.
    """

    path: str
    span: tuple[int, int, int, int]
    text: str
    name: tuple[str, str, str]
    first: int | None

    def put_into(self, source: str) -> str:
        return _replaced(source, self.span, self.text)


def faults_of(root: Path, path: str) -> list[Fault]:
    """All that can be put into one file, in the order of its lines."""
    source, found, seen = (root / path).read_text(), [], Counter[tuple[str, str, str]]()
    lines = source.splitlines()
    for node, text, place, first in _faults(ast.parse(source), Path(path).stem, None):
        span = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
        before, behind = lines[span[0] - 1 : span[2]], len(lines) - span[2]
        changed = _replaced(source, span, text).splitlines()
        after = changed[span[0] - 1 : len(changed) - behind]
        name = (place, _on_one_line(before), _on_one_line(after))
        seen[name] += 1
        if seen[name] > 1:
            name = (f"{place} #{seen[name]}", *name[1:])
        found.append(Fault(path, span, text, name, first))
    return found


def _faults(
    node: ast.AST, place: str, first: int | None
) -> Iterator[tuple[ast.AST, str, str, int | None]]:
    """What is replaced and by what, where it is, and the line of its statement."""
    if isinstance(node, LEFT_ALONE):
        return
    if isinstance(node, ast.stmt) and first is not None:
        first = node.lineno
    for replaced, text in _here(node, making=".__init__" in place):
        yield replaced, text, place, first
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        place = f"{place}.{node.name}"
        first = node.lineno if isinstance(node, ast.FunctionDef) else first
        inside = node.body
    elif isinstance(node, ast.AnnAssign):
        inside = [node.value] if node.value else []
    else:
        inside = list(ast.iter_child_nodes(node))
    for child in inside:
        yield from _faults(child, place, first)


def _here(node: ast.AST, *, making: bool) -> Iterator[tuple[ast.AST, str]]:
    match node:
        case ast.Expr(value=ast.Call(func=called)):
            yield node, "pass"
            if not ast.unparse(called).split(".")[-1].lstrip("_").startswith(IDEMPOTENT):
                yield node, f"{ast.unparse(node)}; {ast.unparse(node)}"
        case ast.Assign(targets=[*targets]) if not making:
            if any(isinstance(t, (ast.Attribute, ast.Subscript)) for t in targets):
                yield node, "pass"
        case ast.AnnAssign(target=ast.Attribute(), value=ast.expr()) if not making:
            yield node, "pass"
        case ast.AugAssign(op=op):
            yield node, "pass"
            if type(op) in SIGN:
                yield node, f"{ast.unparse(node)}; {ast.unparse(node)}"
                yield node, _with(node, op=SIGN[type(op)]())
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield from _negated(test)
        case ast.comprehension(ifs=tests):
            yield from chain.from_iterable(map(_negated, tests))
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield node, str(value + 1)
        case ast.Compare(ops=ops):
            for k, op in enumerate(ops):
                if other := (OFF_BY_ONE | OPPOSITE).get(type(op)):
                    yield node, _with(node, ops=[*ops[:k], other(), *ops[k + 1 :]])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SIGN:
            if not (_is_sequence(left) or _is_sequence(right)):
                yield node, _with(node, op=SIGN[type(op)]())


def _negated(test: ast.expr) -> Iterator[tuple[ast.AST, str]]:
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield test, f"({ast.unparse(operand)})"
        case ast.Compare(ops=[op]) if type(op) in OPPOSITE:
            pass  # it has an opposite of its own
        case _:
            yield test, f"(not ({ast.unparse(test)}))"


def _with(node: ast.AST, **fields: object) -> str:
    changed = copy.copy(node)
    for field, value in fields.items():
        setattr(changed, field, value)
    return ast.unparse(changed)


def _is_sequence(node: ast.expr) -> bool:
    text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return text or isinstance(node, (ast.JoinedStr, ast.List, ast.Tuple))


def _replaced(source: str, span: Sequence[int], text: str) -> str:
    lines = source.encode().splitlines(keepends=True)
    line, column, last, end = span
    head, tail = lines[line - 1][:column], lines[last - 1][end:]
    return b"".join([*lines[: line - 1], head, text.encode(), tail, *lines[last:]]).decode()


def _on_one_line(lines: Sequence[str]) -> str:
    return " ".join(" ".join(lines).split())


def telling(source: str, path: str) -> str:
    """The same source, which calls ``RAN(path, line)`` before each statement of a function."""
    tree = ast.parse(source)
    head = next((k for k, s in enumerate(tree.body) if not _must_be_first(s)), len(tree.body))
    tree.body.insert(head, ast.parse(f"from {TOLD} import {RAN}").body[0])
    for function in [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]:
        for node in ast.walk(function):
            if isinstance(node, ast.ClassDef):
                continue
            for name in ("body", "orelse", "finalbody"):
                block = getattr(node, name, None)
                if isinstance(block, list) and not any(map(_tells, block)):
                    told = ([_call(s, path), s] for s in block)
                    setattr(node, name, list(chain.from_iterable(told)))
    return ast.unparse(ast.fix_missing_locations(tree))


def _must_be_first(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(value=ast.Constant()) | ast.ImportFrom(module="__future__"):
            return True
    return False


def _call(statement: ast.stmt, path: str) -> ast.stmt:
    return ast.parse(f"{RAN}({path!r}, {statement.lineno})").body[0]


def _tells(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and ast.unparse(statement).startswith(RAN)


def explained(text: str) -> dict[tuple[str, str, str], str]:
    """Faults that no test can see, and why: blocks of place, ``- before``, ``+ after``, reason."""
    found = {}
    for block in text.split("\n\n"):
        lines = [line.strip() for line in block.splitlines() if line and line[0] != "#"]
        if lines:
            place, before, after, *why = lines
            if before[:2] != "- " or after[:2] != "+ " or not why:
                raise ValueError(f"expected a place, '- before', '+ after' and why: {lines}")
            found[place, before[2:], after[2:]] = " ".join(why)
    return found
