"""A table's rows that meet a weight first meet it once a row of the table, not once a row.

    W cat(h, T[id]) + b     ─►   W₁ h + (T W₂ᵀ + b)[id]            there, once a firing
    d ─► dW₂ = dᵀ T[id]          s[v] = sum of d where id = v
         dT[id] += d W₂     ─►   dW₂ = sᵀ T, dT = s W₂             back, once a step

Tags, letters, operators, small vocabularies: there are far fewer rows of the table than rows that
come. What a table's rows are added to before the weight, if those are of tables too, is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor, fx

from geartrain.derived.steps.places import Like
from geartrain.derived.terms import How, Term
from geartrain.derived.traces.counted import SIZES, needed_by
from geartrain.nodes.products import affine, times

aten = torch.ops.aten

Columns: TypeAlias = tuple[int, int]
"""The first, and the one after the last."""

Entry: TypeAlias = tuple[fx.Node, fx.Node, fx.Node, Columns, tuple[fx.Node, ...]]
"""Weight, table, row numbers, which columns of the weight, and what is added to each row."""


def times_columns(d: Tensor, weight: Tensor, first: int, end: int) -> Tensor:
    """``d @ weight[:, first:end]``; d ``(n, out)``, weight ``(out, in)``."""
    return torch.mm(d, weight[:, first:end])


def affine_columns(x: Tensor, weight: Tensor, bias: Tensor | None, first: int, end: int) -> Tensor:
    """``x @ weight[:, first:end].T + bias``; weight ``(out, in)``."""
    turned = weight[:, first:end].t()
    return torch.mm(x, turned) if bias is None else torch.addmm(bias, x, turned)


def looked_up(
    rest: Tensor | None,
    weight: Tensor | None,
    runs: Sequence[Columns],
    entries: Sequence[tuple[Tensor, Tensor, Tensor, Columns, Sequence[Tensor]]],
) -> Tensor:
    """A sum of rows ``(n, out)`` of tables after a weight, and of other rows after another.

    Args:
        rest: The other rows, or None.
        weight, runs: What they meet: these columns of it, one after the other.
        entries: Weight, table, row numbers, columns, and what is added to each row.
    """
    found = [
        torch.mm(table, its[:, first:end].t())[ids] + sum(biases)
        for its, table, ids, (first, end), biases in entries
    ]
    if rest is not None and weight is not None:
        found.append(torch.mm(rest, torch.cat([weight[:, a:b] for a, b in runs], 1).t()))
    total: Tensor = torch.stack(found).sum(0)
    return total


_AFFINE: Final = (affine, affine_columns)


@final
@dataclass(frozen=True, slots=True)
class Summand:
    """A ``Term``, and its tensors."""

    operand: int
    how: How
    tensors: tuple[fx.Node, ...]
    tangents: frozenset[int]
    padding: int = -1
    weight: int = -1
    weighs: bool = False
    bias: int = -1
    columns: tuple[Columns, ...] | None = None
    table: int = 0

    def term(self, first: int) -> Term:
        """With its tensors from there on."""
        return Term(
            self.operand,
            self.how,
            first,
            self.tangents,
            self.padding,
            self.weight,
            self.weighs,
            self.bias,
            self.columns,
            self.table,
        )


@final
class _Claim:
    """What is looked up, and meets a weight."""

    def __init__(self, summand: Summand, weight: fx.Node, table: fx.Node) -> None:
        self.summand, self.weight, self.table = summand, weight, table
        self.weighs, self.bias = False, -1

    def is_of(self, d: fx.Node, weight: fx.Node, columns: Columns) -> bool:
        """Whether nobody has said so yet that the weight's gradient is by this."""
        own, rows = self.summand.columns, self.summand.tensors[0]
        same = self.weight is weight and rows is d and own in (None, (columns,))
        return same and not self.weighs


@final
class Folding:
    """Changes a graph of a function and its gradient.

    Args:
        graph: Of them.
        operands, inputs: Its placeholders.
        shapes: Of its nodes, with rows.
        of: Which tangents they depend on.
        make: A node with one row for each row: of what, of which arguments, how wide.
        computed: How many operands, the last ones, are computed of others: they stay.
    """

    def __init__(
        self,
        graph: fx.Graph,
        operands: Sequence[fx.Node],
        inputs: Sequence[fx.Node],
        shapes: Mapping[fx.Node, tuple[int, ...]],
        of: Mapping[fx.Node, frozenset[int]],
        make: Callable[[Any, tuple[Any, ...], int], fx.Node],
        computed: int = 0,
    ) -> None:
        self._graph, self._operands, self._inputs = graph, list(operands), inputs
        self._own = self._operands[: len(operands) - computed]
        self._shapes, self._of, self._make = shapes, of, make
        self._cats: dict[tuple[fx.Node, ...], fx.Node] = {}

    # Back.

    def back(self, summands: Sequence[Summand]) -> list[Summand]:
        """Let rows of tables be added up by row of the table.

        Args:
            summands: What the operands get.

        Returns:
            The same, by fewer products.
        """
        found: list[Summand] = []
        claims: list[_Claim] = []
        for summand in summands:
            own = summand.operand < len(self._own)
            if summand.how != "rows" or not (own and self._is_of_table(summand)):
                found.append(summand)
                continue
            if summand.table:  # it is another's rows, of which no weight knows
                found.append(replace(summand, how="looked up"))
                continue
            leaves = list(self._leaves(summand.tensors[0]))
            if not any(self._is_product(leaf) for leaf, _ in leaves):
                leaves = [(summand.tensors[0], None)]
            for leaf, columns in leaves:
                one = self._looked_up(summand, leaf, columns)
                if one.weight < 0:
                    found.append(one)
                else:
                    table = self._operands[one.operand]
                    claims.append(_Claim(one, self._operands[one.weight], table))
        if claims:
            found = [x for summand in found for x in self._without(summand, claims)]
        for claim in claims:
            one = claim.summand
            found.append(
                Summand(
                    *(one.operand, one.how, one.tensors, one.tangents, one.padding, one.weight),
                    weighs=claim.weighs,
                    bias=claim.bias,
                    columns=one.columns,
                )
            )
        return found

    def _is_of_table(self, summand: Summand) -> bool:
        """Whether it is rows of a matrix, one for each row."""
        matrix = len(self._shapes[self._operands[summand.operand]]) == 2
        return (matrix or summand.table > 0) and self._names_rows(summand.tensors[1])

    def _names_rows(self, ids: fx.Node) -> bool:
        """Whether it names one row of a table for each row."""
        return ids.meta.get("like") == Like((), True, torch.int64)

    def _leaves(
        self, x: fx.Node, columns: Columns | None = None
    ) -> Iterable[tuple[fx.Node, Columns | None]]:
        """What x, or these columns of it, is the sum of."""
        args: Any = x.args
        if x.target is aten.add.Tensor and self._adds(x):
            yield from self._leaves(args[0], columns)
            yield from self._leaves(args[1], columns)
        elif (part := self._part(x)) is not None and columns is None:
            yield from self._leaves(*part)
        else:
            yield x, columns

    def _adds(self, x: fx.Node) -> bool:
        """Whether it is the sum of two of its own shape."""
        shape = self._shapes.get(x)
        both = shape is not None and len(x.args) == 2 and not x.kwargs
        return both and all(isinstance(y, fx.Node) and self._shapes.get(y) == shape for y in x.args)

    def _part(self, x: fx.Node) -> tuple[fx.Node, Columns] | None:
        """What x is some columns of, and which."""
        args: Any = x.args
        if x.target is not aten.slice.Tensor or len(args) != 4 or args[1] != 1:
            return None
        source, _, first, end = args
        shape = self._shapes.get(source, ())
        if len(shape) != 2 or not (isinstance(first, int) and isinstance(end, int)):
            return None
        if shape[0] != SIZES[0]:  # several rows for each row
            return None
        return (source, (first, min(end, shape[1]))) if 0 <= first <= end else None

    def _is_product(self, x: fx.Node) -> bool:
        return x.target in (times, times_columns) and x.args[1] in self._own

    def _looked_up(self, summand: Summand, leaf: fx.Node, columns: Columns | None) -> Summand:
        args: Any = leaf.args
        ids = summand.tensors[1]
        if self._is_product(leaf):
            d, its, *own = args
            weight, tensors = self._operands.index(its), (d, ids)
            mine = tuple(own) if columns is None else _moved(columns, own)
            runs = (mine,) if mine else None
        else:
            if columns is not None:
                first, end = columns
                leaf = self._make(aten.slice.Tensor, (leaf, 1, first, end), end - first)
            weight, runs, tensors = -1, None, (leaf, ids)
        of = self._of[leaf]
        return Summand(
            *(summand.operand, "looked up", tensors, of, summand.padding, weight), columns=runs
        )

    def _without(self, summand: Summand, claims: Sequence[_Claim]) -> list[Summand]:
        """A product without what is looked up, if it had any; no sum of rows that are."""
        if summand.how == "sum" and summand.operand < len(self._own):
            for claim in claims:
                if claim.bias < 0 and claim.summand.tensors[0] is summand.tensors[0]:
                    claim.bias = summand.operand
                    return []
        if summand.how != "product":
            return [summand]
        weight, (d, x) = self._operands[summand.operand], summand.tensors
        first = summand.columns[0][0] if summand.columns else 0
        pieces = self._pieces(x, first)
        left = [p for p in pieces if not self._claimed(p, d, weight, claims)]
        if len(left) == len(pieces):
            return [summand]
        if not left:
            return []
        tensors = d, self._joined([y for y, _ in left])
        runs = self._runs([columns for _, columns in left])
        return [Summand(summand.operand, "product", tensors, summand.tangents, columns=runs)]

    def _claimed(
        self, piece: tuple[fx.Node, Columns], d: fx.Node, weight: fx.Node, claims: Sequence[_Claim]
    ) -> bool:
        """Whether claims are there for all of a piece; then they have it."""
        rows, columns = piece
        mine: list[_Claim] = []
        for table, ids in self._tables(rows) or ():
            for claim in claims:
                same = claim.table is table and claim.summand.tensors[1] is ids
                if same and claim not in mine and claim.is_of(d, weight, columns):
                    mine.append(claim)
                    break
            else:
                return False
        for claim in mine:
            claim.weighs = True
        return bool(mine)

    def _pieces(self, x: fx.Node, first: int = 0) -> list[tuple[fx.Node, Columns]]:
        """What lies side by side in x, and where, if x begins there."""
        args: Any = x.args
        if x.target is not aten.cat.default or len(args) != 2 or args[1] not in (1, -1):
            return [(x, (first, first + self._shapes[x][1]))]
        found = []
        for y in args[0]:
            end = first + self._shapes[y][1]
            found.append((y, (first, end)))
            first = end
        return found

    def _runs(self, columns: Sequence[Columns]) -> tuple[Columns, ...]:
        """Those that are neighbours as one."""
        runs: list[Columns] = []
        for first, end in columns:
            if runs and runs[-1][1] == first:
                runs[-1] = runs[-1][0], end
            else:
                runs.append((first, end))
        return tuple(runs)

    def _joined(self, pieces: Sequence[fx.Node]) -> fx.Node:
        """Side by side."""
        known = pieces[0] if len(pieces) == 1 else self._cats.get(tuple(pieces))
        if known is None:
            width = sum(self._shapes[x][1] for x in pieces)
            known = self._make(aten.cat.default, (list(pieces), 1), width)
            self._cats[tuple(pieces)] = known
        return known

    def _tables(self, x: fx.Node) -> list[tuple[fx.Node, fx.Node]] | None:
        """The tables and row numbers that x is the sum of rows of; None: of something else too."""
        args: Any = x.args
        if x.target is aten.embedding.default:
            mine = args[0] in self._own and self._names_rows(args[1])
            return [(args[0], args[1])] if mine else None
        if x.target is not aten.add.Tensor or not self._adds(x):
            return None
        left, right = self._tables(args[0]), self._tables(args[1])
        return None if left is None or right is None else left + right

    def narrow(self, roots: Iterable[fx.Node]) -> None:
        """Let products that are read in part have that part alone.

        Args:
            roots: All that is wanted.
        """
        live = needed_by(roots)
        parts: dict[fx.Node, list[tuple[fx.Node, Columns]]] = {}
        for x in self._graph.nodes:
            part = self._part(x) if x in live else None
            if part is not None:
                parts.setdefault(part[0], []).append((x, part[1]))
        for source, own in parts.items():
            leaves = [leaf for leaf, _ in self._leaves(source)]
            users = [y for y in source.users if y in live]
            if len(users) != len(own) or not all(self._is_product(leaf) for leaf in leaves):
                continue
            if not self._inner_are_of(source, live):
                continue
            runs: list[tuple[list[tuple[fx.Node, Columns]], Columns]] = []
            for x, (first, end) in sorted(own, key=lambda each: each[1]):
                if runs and first <= runs[-1][1][1]:
                    runs[-1][0].append((x, (first, end)))
                    runs[-1] = runs[-1][0], (runs[-1][1][0], max(end, runs[-1][1][1]))
                else:
                    runs.append(([(x, (first, end))], (first, end)))
            if sum(end - first for _, (first, end) in runs) < self._shapes[source][1]:
                for some, columns in runs:
                    self._narrow_run(source, some, columns)

    def _inner_are_of(self, x: fx.Node, live: set[fx.Node]) -> bool:
        """Whether nobody else reads what x is the sum of."""
        if x.target is not aten.add.Tensor:
            return True
        return all(
            [y for y in source.users if y in live] == [x] and self._inner_are_of(source, live)
            for source in x.all_input_nodes
        )

    def _narrow_run(
        self, source: fx.Node, some: Sequence[tuple[fx.Node, Columns]], columns: Columns
    ) -> None:
        narrow = self._narrowed(source, columns)
        for x, (first, end) in some:
            new = narrow
            if (first, end) != columns:
                at = first - columns[0]
                arguments = narrow, 1, at, at + end - first
                new = self._make(aten.slice.Tensor, arguments, end - first)
            x.replace_all_uses_with(new)

    def _narrowed(self, x: fx.Node, columns: Columns) -> fx.Node:
        args: Any = x.args
        width = columns[1] - columns[0]
        if x.target is aten.add.Tensor:
            both = self._narrowed(args[0], columns), self._narrowed(args[1], columns)
            return self._make(aten.add.Tensor, both, width)
        d, weight, *own = args
        return self._make(times_columns, (d, weight, *_moved(columns, own)), width)

    # There.

    def there(self, roots: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
        """Let rows of tables have met weights before they are looked up.

        Args:
            roots: All that is wanted.

        Returns:
            What is in whose place.
        """
        instead: dict[fx.Node, fx.Node] = {}
        live = needed_by(roots)
        for x in list(self._graph.nodes):
            if x in live and x.target in _AFFINE and (new := self._met(x)) is not None:
                x.replace_all_uses_with(new)
                instead[x] = new
        for x in list(self._graph.nodes):
            if instead and x in live and x.target is aten.add.Tensor and self._adds(x):
                new = self._sum(x, {instead.get(y, y) for y in live})
                if new is not None:
                    x.replace_all_uses_with(new)
                    instead[x] = new
        return instead

    def _met(self, x: fx.Node) -> fx.Node | None:
        args: Any = x.args
        rows, weight, bias, *columns_of_it = args
        if weight not in self._own or not (bias is None or bias in self._own):
            return None
        entries: list[Entry] = []
        rest: list[tuple[fx.Node, Columns]] = []
        for piece, columns in self._pieces(rows, *columns_of_it[:1]):
            tables = self._tables(piece)
            if tables is None:
                rest.append((piece, columns))
                continue
            for table, ids in tables:
                biases = () if bias is None or entries else (bias,)
                entries.append((weight, table, ids, columns, biases))
        if not entries:
            return None
        runs = self._runs([columns for _, columns in rest])
        arguments = (self._joined([y for y, _ in rest]), weight) if rest else (None, None)
        return self._make(looked_up, (*arguments, runs, tuple(entries)), self._shapes[x][1])

    def _sum(self, x: fx.Node, live: set[fx.Node]) -> fx.Node | None:
        """What is looked up, and added to other rows after a weight, as one."""
        for one, other in (x.args, x.args[::-1]):
            if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
                continue
            alone = all([y for y in z.users if y in live] == [x] for z in (one, other))
            if not alone or one.target is not looked_up or one.args[0] is not None:
                continue
            entries: Any = one.args[3]
            args: Any = other.args
            width = self._shapes[x][1]
            if other.target is looked_up:
                return self._make(looked_up, (*args[:3], (*args[3], *entries)), width)
            if other.target in _AFFINE and args[1] in self._own:
                rows, weight, bias, *own = args
                if bias is not None and bias not in self._own:
                    continue
                if bias is not None:
                    first, *more = entries
                    entries = ((*first[:4], (*first[4], bias)), *more)
                runs = (_moved((0, self._shapes[rows][1]), own),)
                return self._make(looked_up, (rows, weight, runs, tuple(entries)), width)
        return None


def _moved(columns: Columns, own: Sequence[int]) -> Columns:
    """Some columns of what is itself ``own`` columns of a weight, or all of it, as its own."""
    return (own[0] + columns[0], own[0] + columns[1]) if own else columns
