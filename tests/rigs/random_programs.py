"""Random programs of motifs, for both twins (``twins``).

    Program(seed, length).run(twin)   draws motifs and calls the twin's verbs

Both twins get the same dice and the same modules, so they make the same program. Whatever the
program does, a wire that it keeps has one row for every vertex of every instance.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.rigs.twins import Lists, Streams, Wire


class Pair(nn.Module):
    """Two tensors in, two out, each out of both: no kernel, several payloads."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(a + b, a), nn.Linear(a + b, b)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat((x, y), -1)
        return torch.tanh(self.left(both)), torch.tanh(self.right(both))


class First(nn.Module):
    """Uses the first of two tensors: the second gets no gradient from here."""

    def __init__(self, a: int, out: int) -> None:
        super().__init__()
        self.map = nn.Linear(a, out)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(self.map(x))


class Second(nn.Module):
    """Uses the second of two tensors."""

    def __init__(self, b: int, out: int) -> None:
        super().__init__()
        self.map = nn.Linear(b, out)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(self.map(y))


class Fork(nn.Module):
    """One tensor in, two out."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(a, a), nn.Linear(a, b)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.left(x)), torch.tanh(self.right(x))


class Squash(nn.Module):
    """A linear map and tanh; ``(n, ..., a)``, flattened first if it has parts."""

    def __init__(self, a: int, out: int) -> None:
        super().__init__()
        self.map = nn.Linear(a, out)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.map(x.flatten(1)))


class Typed(nn.Module):
    """A linear map whose offset is an embedding of an integer column."""

    def __init__(self, a: int, out: int, sparse: bool) -> None:
        super().__init__()
        self.map, self.offset = nn.Linear(a, out), nn.Embedding(8, out, sparse=sparse)

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        return torch.tanh(self.map(x) + self.offset(kind))


class Inner(nn.Module):
    """Bundles: every row sees the mean of its bundle and the sum over its incoming edges."""

    def __init__(self, a: int, out: int) -> None:
        super().__init__()
        self.map = nn.Linear(3 * a, out)

    def forward(self, x: Tensor, inside: Any) -> Tensor:
        n = inside.lengths.numel()
        total = x.new_zeros(n, x.shape[1]).index_add(0, inside.segment, x)
        mean = total / inside.lengths[:, None]
        edges = x.new_zeros(x.shape).index_add(0, inside.edges["target"], x[inside.edges["source"]])
        return torch.tanh(self.map(torch.cat((x, mean[inside.segment], edges), -1)))


class Pool(nn.Module):
    """Bundles: one row for each, a gated sum."""

    def __init__(self, a: int, out: int) -> None:
        super().__init__()
        self.gate, self.map = nn.Linear(a, out), nn.Linear(a, out)

    def forward(self, x: Tensor, inside: Any) -> Tensor:
        rows = torch.sigmoid(self.gate(x)) * torch.tanh(self.map(x))
        n = inside.lengths.numel()
        return rows.new_zeros(n, rows.shape[1]).index_add(0, inside.segment, rows)


class Reads(nn.Module):
    """Rows that read a memory, by a gate of their own for each row of it."""

    def __init__(self, a: int, memory: int, out: int) -> None:
        super().__init__()
        self.gate, self.map = nn.Linear(a, memory), nn.Linear(a + memory, out)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        weight = torch.sigmoid((memory * self.gate(x)[:, None]).sum(-1)) * mask
        read = (memory * weight[..., None]).sum(1)
        return torch.tanh(self.map(torch.cat((x, read), -1)))


def _kind(m: Any) -> Any:
    return m.kind % 3


def _sign(m: Any) -> Any:
    return (m.payload[0].sum(1) > 0).long() + (m.payload[0][:, 0] > 0).long()


class Program:
    """A random program; equal seeds draw equal programs, whichever twin runs them.

    Args:
        seed: Of the motifs and of the weights.
        length: How many motifs.
        columns: Whether its control flow looks at columns alone, and nothing keeps whole messages.
        looks: Whether it looks at payloads all the same, as often as can be.
    """

    def __init__(
        self, seed: int, length: int, *, columns: bool = False, looks: bool = False
    ) -> None:
        self._seed, self._length, self._columns = seed, length, columns
        self._looks = looks
        self.modules: dict[str, nn.Module] = {}
        self.told: list[str] = []

    def run(self, twin: Streams | Lists) -> None:
        self._dice = random.Random(self._seed)
        self._count = 0
        self._turn = 0
        self._twin: Any = twin
        self.told = []
        wires = [Wire(twin.start(), (3,))]
        wires = self._motifs(wires, self._length, 2)
        for wire in wires:
            self._end(wire)

    def _motifs(self, wires: list[Wire], n: int, depth: int) -> list[Wire]:
        names = [
            "squash", "typed", "fork", "cell", "function", "where", "early", "route", "broadcast",
            "concat", "tuple", "split", "edges", "copies", "stacked", "bundle", "instance",
            "detach", "head", "perm", "reuse", "unpack", "nested", "memory",
        ]  # fmt: skip
        if self._columns:
            names = [name for name in names if name not in _OF_MESSAGES]
        if self._looks:
            names += ["early", "early", "early", "route"]
        for _ in range(n):
            name = self._dice.choice([*names, "loop", "loop"] if depth else names)
            self.told.append(name)
            wire = self._dice.choice(wires)
            made = getattr(self, f"_{name}")(wire, wires, depth)
            if self._dice.random() < 0.7:
                wires.remove(wire)  # else it is read again: a broadcast
            wires.extend(made)
            while len(wires) > 3:
                self._end(wires.pop(0))
        return wires

    def _module(self, kind: Callable[..., nn.Module], *args: Any) -> tuple[nn.Module, str]:
        self._count += 1
        name = f"{kind.__name__.lower()} {self._count}"
        if name not in self.modules:
            torch.manual_seed(1000 * self._seed + self._count)
            self.modules[name] = kind(*args).double()
        return self.modules[name], name

    def _keep(self) -> str:
        return self._dice.choice(("auto", "auto", "inputs", "inputs" if self._columns else "graph"))

    def _width(self) -> int:
        return self._dice.choice((2, 3))

    def _run(self, wire: Wire, out: int, at: Any = None, flat: bool = True) -> Any:
        """The wire, or rows of its kind, through a fresh module of one output."""
        at = wire.at if at is None else at
        if len(wire.dims) == 2:
            kind, d = self._dice.choice(((First, wire.dims[0]), (Second, wire.dims[1])))
            module, name = self._module(kind, d, out)
        elif flat and self._dice.random() < 0.3:
            module, name = self._module(nn.Linear, wire.dims[0], out)
        else:
            module, name = self._module(Squash, wire.dims[0], out)
        return self._twin.through(at, module, name, keep=self._keep())

    def _single(self, wire: Wire) -> Wire:
        if len(wire.dims) == 1:
            return wire
        d = self._width()
        return Wire(self._run(wire, d), (d,), wire.turns)

    def _end(self, wire: Wire) -> None:
        if self._dice.random() < 0.2:
            self._twin.stop(wire.at)
            return
        target, weight = self._dice.choice((("aim", None), ("goal", None), ("aim", "kind")))
        self._twin.loss(self._run(wire, 2), target, weight)

    def _squash(self, wire: Wire, wires: list[Wire], depth: int) -> list[Wire]:
        d = self._width()
        return [Wire(self._run(wire, d), (d,), wire.turns)]

    def _typed(self, wire: Wire, wires: list[Wire], depth: int) -> list[Wire]:
        wire = self._single(wire)
        d = self._width()
        module, name = self._module(Typed, wire.dims[0], d, self._dice.random() < 0.5)
        at = self._twin.through(wire.at, module, name, read=("kind",), keep=self._keep())
        return [Wire(at, (d,), wire.turns)]

    def _fork(self, wire: Wire, wires: list[Wire], depth: int) -> list[Wire]:
        wire = self._single(wire)
        d = self._width()
        module, name = self._module(Fork, wire.dims[0], d)
        at = self._twin.through(wire.at, module, name, keep=self._keep())
        return [Wire(at, (wire.dims[0], d), wire.turns)]

    def _cell(self, wire: Wire, wires: list[Wire], depth: int) -> list[Wire]:
        if len(wire.dims) == 1:
            return self._fork(wire, wires, depth)
        module, name = self._module(Pair, *wire.dims)
        at = self._twin.through(wire.at, module, name, keep=self._keep())
        return [Wire(at, wire.dims, wire.turns)]

    def _function(self, wire: Wire, wires: list[Wire], depth: int) -> list[Wire]:
        kind = self._dice.randrange(3)
        if kind == 0:  # the very same tensors: outputs lie where the inputs do
            at = self._twin.function(wire.at, _same)
        elif kind == 1:
            at = self._twin.function(wire.at, _doubled)
        else:
            wire = self._single(wire)
            at = self._twin.function(wire.at, torch.sin)
        return [Wire(at, wire.dims, wire.turns)]

    def _where(self, wire: Wire, wires: list[Wire], depth: int) -> list[Wire]:
        kind = self._dice.randrange(4)
        return self._both(wire, *self._twin.where(wire.at, lambda m: m.kind < kind))

    def _early(self, wire: Wire, wires: list[Wire], depth: int) -> list[Wire]:
        return self._both(wire, *self._twin.where(wire.at, lambda m: m.payload[0].sum(1) > 0))

    def _both(self, wire: Wire, yes: Any, no: Any) -> list[Wire]:
        d = self._width()
        if self._dice.random() < 0.3:  # one branch goes on twice: a broadcast behind a route
            self._end(Wire(yes, wire.dims, wire.turns))
        left, right = self._run(wire, d, yes), self._run(wire, d, no)
        return [Wire(self._twin.merge(left, right), (d,), wire.turns)]

    def _route(self, wire: Wire, wires: list[Wire], depth: int) -> list[Wire]:
        d = self._width()
        ways = self._twin.route(wire.at, _sign if self._looks else _kind, 3)
        done = [self._run(wire, d, way) for way in ways]
        return [Wire(self._twin.merge(*done), (d,), wire.turns)]

    def _broadcast(self, wire: Wire, wires: list[Wire], depth: int) -> list[Wire]:
        d, e = self._width(), self._width()
        a, b = self._run(wire, d), self._run(wire, e)
        return [Wire(a, (d,), wire.turns), Wire(b, (e,), wire.turns)]

    def _concat(self, wire: Wire, wires: list[Wire], depth: int) -> list[Wire]:
        other = self._single(self._dice.choice(wires))
        first = self._single(wire)
        at = self._twin.concat(first.at, other.at, on=first.key, how="features")
        d = self._width()
        joined = Wire(at, (first.dims[0] + other.dims[0],), wire.turns)
        return [Wire(self._run(joined, d), (d,), wire.turns)]

    def _tuple(self, wire: Wire, wires: list[Wire], depth: int) -> list[Wire]:
        other = self._single(self._dice.choice(wires))
        first = self._single(wire)
        at = self._twin.concat(first.at, other.at, on=first.key, how="tuple")
        return [Wire(at, (first.dims[0], other.dims[0]), wire.turns)]

    def _split(self, wire: Wire, wires: list[Wire], depth: int) -> list[Wire]:
        first = Wire(self._run(wire, 5), (5,), wire.turns)
        a, b = self._twin.split(first.at, 2, 3)
        if self._dice.random() < 0.4:
            self._twin.stop(b)
            return [Wire(a, (2,), wire.turns)]
        return [Wire(a, (2,), wire.turns), Wire(b, (3,), wire.turns)]

    def _edges(self, wire: Wire, wires: list[Wire], depth: int) -> list[Wire]:
        d = self._width()
        many = self._twin.flatmap(wire.at, "edge")
        if self._dice.random() < 0.5:
            ways = self._twin.route(many, lambda m: m.type, 3)
            many = self._twin.merge(*(self._run(wire, d, way) for way in ways))
        else:
            many = self._run(wire, d, many)
        how = self._dice.choice(("sum", "mean", "max"))
        if self._dice.random() < 0.5:
            many = self._twin.move(many, vertex=_reader("target"))
            sums = self._twin.group(many, wire.key, "in_degree", None, how)
        else:
            by = {"vertex": _reader("target"), **{t: _reader(t) for t in wire.turns}}
            sums = self._twin.group(many, by, "into", None, how)
        has, none = self._twin.where(wire.at, lambda m: m.in_degree > 0)
        one = self._single(Wire(has, wire.dims, wire.turns))
        joined = self._twin.concat(one.at, sums, on=wire.key, how="features")
        both = Wire(joined, (one.dims[0] + d,), wire.turns)
        done = self._twin.merge(self._run(both, d), self._run(wire, d, none))
        return [Wire(done, (d,), wire.turns)]

    def _copies(self, wire: Wire, wires: list[Wire], depth: int) -> list[Wire]:
        """Copies whose number comes from the data, none included; sums of those that have some."""
        d = self._width()
        column = f"copy{self._new()}"
        many = self._twin.flatmap(wire.at, column, lambda m: m.kind)
        wire1 = self._single(Wire(many, wire.dims, wire.turns))
        module, name = self._module(Typed, wire1.dims[0], d, False)
        many = self._twin.through(wire1.at, module, name, read=(column,), keep=self._keep())
        how = self._dice.choice(("sum", "mean", "max"))
        some = self._twin.group(many, wire.key, "kind", column, how)
        has, none = self._twin.where(wire.at, lambda m: m.kind > 0)
        self._twin.stop(has)
        done = self._twin.merge(some, self._run(wire, d, none))
        return [Wire(done, (d,), wire.turns)]

    def _stacked(self, wire: Wire, wires: list[Wire], depth: int) -> list[Wire]:
        """A fixed number of copies, stacked; then read whole, or cut up and stacked again."""
        k = self._dice.choice((1, 2, 3))
        wire = self._single(wire)
        column = f"copy{self._new()}"
        many = self._twin.flatmap(wire.at, column, lambda m: np.full(len(m), k))
        module, name = self._module(Typed, wire.dims[0], 2, False)
        many = self._twin.through(many, module, name, read=(column,), keep=self._keep())
        at = self._twin.group(many, wire.key, k, column, "stack")
        if self._dice.random() < 0.5 and not self._columns:
            parts = self._run(Wire(None, (2,)), 2, self._twin.ungroup(at, column))
            at = self._twin.group(parts, wire.key, k, column, "stack")
        return [Wire(self._run(Wire(at, (2 * k,)), 2, flat=False), (2,), wire.turns)]

    def _bundle(self, wire: Wire, wires: list[Wire], depth: int) -> list[Wire]:
        wire = self._single(wire)
        d = self._width()
        key = ("instance", *wire.turns)
        at = self._twin.group(wire.at, key, "size", None, "bundle")
        module, name = self._module(Inner, wire.dims[0], d)
        at = self._twin.through(at, module, name, inside=True, keep=self._keep())
        if self._dice.random() < 0.5:
            module, name = self._module(Pool, d, 2)
            pooled = self._twin.through(at, module, name, inside=True, pool=True, keep=self._keep())
            self._twin.loss(pooled, "goal")
        return [Wire(self._twin.ungroup(at, "vertex"), (d,), wire.turns)]

    def _instance(self, wire: Wire, wires: list[Wire], depth: int) -> list[Wire]:
        """A reduction over the instance, and back to every vertex."""
        wire = self._single(wire)
        how = self._dice.choice(("sum", "mean", "max"))
        at = self._twin.group(wire.at, ("instance", *wire.turns), "size", None, how)
        if self._dice.random() < 0.4:
            at = self._twin.detach(at)
        column = f"copy{self._new()}"
        many = self._twin.flatmap(at, column, lambda m: m.size)
        many = self._twin.move(many, vertex=_reader(column))
        return [Wire(many, wire.dims, wire.turns)]

    def _memory(self, wire: Wire, wires: list[Wire], depth: int) -> list[Wire]:
        """The rows of an instance are held; each of them reads all, some in a loop, some before."""
        wire = self._single(wire)
        d, key = wire.dims[0], ("instance", *wire.turns)
        held = self._twin.hold(self._twin.group(wire.at, key, "size", None, "bundle"))
        at = self._twin.ungroup(held, "vertex")
        if self._dice.random() < 0.5:
            at = self._twin.attend(at, held, key, *self._module(Reads, d, d, d))
        if self._dice.random() < 0.5:
            yes, no = self._twin.where(at, lambda m: m.kind < 2)
            yes = self._twin.attend(yes, held, key, *self._module(Reads, d, d, d))
            at = self._twin.merge(yes, no)
        self._turn += 1
        turn, reads = f"turn{self._turn}", self._module(Reads, d, d, d)
        at = self._twin.loop(
            at,
            turn,
            lambda s: self._twin.attend(s, held, key, *reads),
            lambda m: getattr(m, turn) < m.turns,
        )
        return [Wire(at, (d,), wire.turns)]

    def _detach(self, wire: Wire, wires: list[Wire], depth: int) -> list[Wire]:
        return [Wire(self._twin.detach(wire.at), wire.dims, wire.turns)]

    def _nested(self, wire: Wire, wires: list[Wire], depth: int) -> list[Wire]:
        """Stacks, tuples and the very same tensors, detached at once: nothing may be read late."""
        wire = self._single(wire)
        column = f"copy{self._new()}"
        many = self._twin.flatmap(wire.at, column, lambda m: np.full(len(m), 2))
        at = self._twin.group(many, wire.key, 2, column, "stack")
        at = self._twin.detach(at)
        d = self._width()
        return [Wire(self._run(Wire(at, (2 * wire.dims[0],)), d, flat=False), (d,), wire.turns)]

    def _head(self, wire: Wire, wires: list[Wire], depth: int) -> list[Wire]:
        wire = self._single(wire)
        module, name = self._module(Squash, wire.dims[0], 2)
        return [Wire(self._twin.head(wire.at, module, name, "aim"), wire.dims, wire.turns)]

    def _perm(self, wire: Wire, wires: list[Wire], depth: int) -> list[Wire]:
        return [Wire(self._twin.move(wire.at, vertex=lambda m: m.perm), wire.dims, wire.turns)]

    def _reuse(self, wire: Wire, wires: list[Wire], depth: int) -> list[Wire]:
        """The same module twice: tied weights."""
        wire = self._single(wire)
        d = wire.dims[0]
        module, name = self._module(Squash, d, d)
        at = self._twin.through(wire.at, module, name)
        at = self._twin.through(at, module, f"{name} again")
        return [Wire(at, (d,), wire.turns)]

    def _unpack(self, wire: Wire, wires: list[Wire], depth: int) -> list[Wire]:
        """Two payloads in a bundle, ungrouped; readers that use one of them, or none."""
        if len(wire.dims) == 1:
            (wire,) = self._fork(wire, wires, depth)
        at = self._twin.group(wire.at, ("instance", *wire.turns), "size", None, "bundle")
        at = self._twin.ungroup(at, "vertex")
        whole = Wire(at, wire.dims, wire.turns)
        yes, no = self._twin.where(at, lambda m: m.kind % 2 == 0)
        for _ in range(self._dice.randrange(3)):
            self._end(Wire(yes, wire.dims, wire.turns))
        self._twin.stop(yes)
        self._end(Wire(no, wire.dims, wire.turns))
        return [whole]

    def _loop(self, wire: Wire, wires: list[Wire], depth: int) -> list[Wire]:
        turn = f"turn{self._new()}"
        turns = (*wire.turns, turn)
        length = self._dice.randrange(3)
        state = self._dice.getstate()
        count = (self._count, self._turn)
        last = count
        after: Any = state

        def body(at: Any) -> Any:
            nonlocal after, last
            self._dice.setstate(state)  # a body that is run again draws the same motifs
            self._count, self._turn = count
            inner = self._motifs([Wire(at, wire.dims, turns)], length, depth - 1)
            for extra in inner[1:]:
                self._end(extra)
            first = inner[0]
            if len(wire.dims) == 2:
                first = self._single(first)
                module, name = self._module(Fork, first.dims[0], wire.dims[1])
                out = self._twin.through(first.at, module, name)
                out = self._shrink(out, (first.dims[0], wire.dims[1]), wire.dims)
            else:
                out = self._run(first, wire.dims[0])
            after, last = self._dice.getstate(), (self._count, self._turn)
            return out

        done = self._twin.loop(wire.at, turn, body, lambda m: getattr(m, turn) < m.turns)
        self._dice.setstate(after)
        self._count, self._turn = last
        return [Wire(done, wire.dims, wire.turns)]

    def _shrink(self, at: Any, have: tuple[int, int], want: tuple[int, ...]) -> Any:
        if have == want:
            return at
        module, name = self._module(Shape, *have, *want)
        return self._twin.through(at, module, name)

    def _new(self) -> int:
        self._turn += 1
        return self._turn


_OF_MESSAGES = ("early", "bundle", "unpack", "memory")


class Shape(nn.Module):
    """Two tensors in, two of other widths out."""

    def __init__(self, a: int, b: int, c: int, d: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(a, c), nn.Linear(b, d)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(y)


def _same(*xs: Tensor) -> tuple[Tensor, ...]:
    return xs


def _doubled(*xs: Tensor) -> tuple[Tensor, ...]:
    return tuple(2 * x for x in xs)


def _reader(column: str) -> Callable[[Any], Any]:
    return lambda m: getattr(m, column)
