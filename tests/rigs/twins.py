"""Random programs, run twice: as a geartrain graph, and row by row in plain PyTorch.

    program(dice, twin)   draws motifs and calls the twin's verbs
    Streams               the twin that builds a graph
    Lists                 the twin that computes at once: a stream is a list of rows

Both get the same dice and the same modules, so they make the same program. Whatever the program
does, a wire that it keeps has one row for every vertex of every instance.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph, Stream
from geartrain.graph.region import Run


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


def instance(seed: int) -> Instance:
    """A random graph of 1 to 6 vertices with integer and float columns."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 7))
    m = int(rng.integers(0, 2 * n + 1))
    features = torch.from_numpy(rng.standard_normal((n, 3)))
    order = rng.permutation(n)
    target = rng.integers(0, n, m)
    return Instance(
        inputs={"x": (features[order], order)},
        vertex={
            "kind": rng.integers(0, 4, n),
            "perm": rng.permutation(n),
            "aim": rng.standard_normal((n, 2)),
        },
        edge={
            "source": rng.integers(0, n, m),
            "target": target,
            "type": rng.integers(0, 3, m),
            "into": np.bincount(target, minlength=n)[target],
        },
        value={"turns": int(rng.integers(1, 4)), "goal": rng.standard_normal(2)},
        key=f"seed {seed}",
    )


def new_graph(run: Literal["auto", "steps"] = "auto") -> Graph:
    columns = {"edge": ("type", "into"), "value": ("turns", "goal")}
    return Graph(vertex=("kind", "perm", "aim"), **columns, run=run)


@dataclass(frozen=True, eq=False)
class Wire:
    """A stream or a list of rows, and what is known of it.

    Args:
        at: The twin's own object.
        dims: Width of each payload tensor.
        turns: Columns of the loops that the wire is in.
    """

    at: Any
    dims: tuple[int, ...]
    turns: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, ...]:
        return ("vertex", *self.turns)


class Streams:
    """Builds a graph, whose loops run as it is told."""

    def __init__(self, graph: Graph, run: Run = "auto") -> None:
        self.graph, self._run = graph, run

    def start(self) -> Stream:
        return self.graph.input("x")

    def through(self, s: Stream, module: Any, name: str, **more: Any) -> Stream:
        return s.through(module, name=name, **more)

    def function(self, s: Stream, function: Callable[..., Any]) -> Stream:
        return s.through(function)

    def where(self, s: Stream, predicate: Callable[[Any], Any]) -> tuple[Stream, Stream]:
        return s.where(predicate)

    def route(self, s: Stream, choose: Callable[[Any], Any], ways: int) -> tuple[Stream, ...]:
        return s.route(choose, ways)

    def merge(self, *streams: Stream) -> Stream:
        return self.graph.merge(*streams)

    def move(self, s: Stream, **fields: Any) -> Stream:
        return s.move(**fields)

    def concat(self, *streams: Stream, on: Sequence[str], how: str) -> Stream:
        return self.graph.concat(*streams, on=on, how=how)  # type: ignore[arg-type]

    def split(self, s: Stream, *sizes: int) -> tuple[Stream, ...]:
        return s.split(*sizes)

    def flatmap(self, s: Stream, over: str, count: Any = None) -> Stream:
        return s.flatmap(over, count=count)

    def group(self, s: Stream, by: Any, size: Any, order: Any, how: Any) -> Stream:
        return s.group(by, size, order=order, how=how)

    def ungroup(self, s: Stream, index: str) -> Stream:
        return s.ungroup(index=index)

    def hold(self, s: Stream) -> Stream:
        return s.hold()

    def attend(
        self, s: Stream, held: Stream, key: Sequence[str], module: nn.Module, name: str
    ) -> Stream:
        return s.attend(held, module, name=name)

    def detach(self, s: Stream) -> Stream:
        return s.detach()

    def stop(self, s: Stream) -> None:
        s.stop()

    def loss(self, s: Stream, target: Any, weight: Any = None) -> None:
        s.loss(mse_loss, target, weight=weight)

    def head(self, s: Stream, module: nn.Module, name: str, target: Any) -> Stream:
        return s.head(module, mse_loss, target, name=name)

    def loop(
        self, s: Stream, turn: str, body: Callable[[Stream], Stream], again: Callable[[Any], Any]
    ) -> Stream:
        loop = self.graph.loop(run=self._run)
        loop.join(s.move(**{turn: 0}))
        end = body(loop).move(**{turn: lambda m: getattr(m, turn) + 1})
        more, done = end.where(again)
        loop.join(more)
        return done


@dataclass(frozen=True, eq=False)
class Row:
    """One row: where it is, and its payload without the leading dimension."""

    state: dict[str, int]
    payload: tuple[Tensor, ...]
    lengths: tuple[int, ...] = ()


class Inside:
    """What a module may know of one bundle."""

    def __init__(self, n: int, edges: dict[str, np.ndarray]) -> None:
        self.lengths = torch.tensor([n])
        self.segment = torch.zeros(n, dtype=torch.int64)
        self.edges = {k: torch.from_numpy(v) for k, v in edges.items()}


class Look:
    """The rows of a list as a predicate sees them."""

    def __init__(self, twin: Lists, rows: Sequence[Row]) -> None:
        self._twin, self._rows = twin, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getattr__(self, name: str) -> Any:
        return np.array([self._twin.column(row, name) for row in self._rows])

    @property
    def payload(self) -> tuple[Tensor, ...]:
        return tuple(torch.stack(c) for c in zip(*(r.payload for r in self._rows), strict=True))


class Lists:
    """Computes at once, without geartrain."""

    def __init__(self, data: Sequence[Instance]) -> None:
        self.data = [self._sorted(i) for i in data]
        self.total: Tensor = torch.zeros((), dtype=torch.float64)
        self.losses = 0

    @staticmethod
    def _sorted(given: Instance) -> dict[str, Any]:
        order = np.argsort(np.asarray(given.edge["source"]), kind="stable")
        edge = {k: np.asarray(v)[order] for k, v in given.edge.items()}
        n = len(given.vertex["kind"])
        degree = {
            "in_degree": np.bincount(edge["target"], minlength=n),
            "out_degree": np.bincount(edge["source"], minlength=n),
        }
        return {
            "inputs": given.inputs["x"],
            "vertex": {**given.vertex, **degree},
            "edge": edge,
            "value": {**given.value, "size": n},
        }

    def column(self, row: Row, name: str) -> Any:
        if name in row.state:
            return row.state[name]
        given = self.data[row.state["instance"]]
        if name in given["vertex"]:
            return given["vertex"][name][row.state["vertex"]]
        if name in given["edge"]:
            return given["edge"][name][row.state["edge"]]
        return given["value"][name]

    def start(self) -> list[Row]:
        return [
            Row({"instance": i, "vertex": int(v)}, (x,))
            for i, given in enumerate(self.data)
            for x, v in zip(*given["inputs"], strict=True)
        ]

    def through(self, s: list[Row], module: Any, name: str, **more: Any) -> list[Row]:
        if not s:
            return []
        if more.get("inside") or (s and s[0].lengths):
            return [self._bundle(row, module, more) for row in s]
        read = more.get("read", ())
        columns = [torch.stack(c) for c in zip(*(r.payload for r in s), strict=True)]
        columns += [torch.from_numpy(getattr(Look(self, s), c)) for c in read]
        found = module(*columns)
        found = found if isinstance(found, tuple) else (found,)
        return [Row(r.state, tuple(c[i] for c in found)) for i, r in enumerate(s)]

    def _bundle(self, row: Row, module: Any, more: dict[str, Any]) -> Row:
        args: list[Any] = list(row.payload)
        if more.get("inside"):
            edges = self.data[row.state["instance"]]["edge"]
            args.append(Inside(row.lengths[0], edges))
        found = module(*args)
        if more.get("pool"):
            return Row(row.state, (found[0],))
        return Row(row.state, (found,), row.lengths)

    def function(self, s: list[Row], function: Callable[..., Any]) -> list[Row]:
        return self.through(s, function, "")

    def where(self, s: list[Row], predicate: Callable[[Any], Any]) -> tuple[list[Row], list[Row]]:
        if not s:
            return [], []
        yes = np.asarray(predicate(Look(self, s)), np.bool_)
        return (
            [r for r, y in zip(s, yes, strict=True) if y],
            [r for r, y in zip(s, yes, strict=True) if not y],
        )

    def route(self, s: list[Row], choose: Callable[[Any], Any], ways: int) -> tuple[list[Row], ...]:
        ports = choose(Look(self, s)) if s else []
        return tuple([r for r, p in zip(s, ports, strict=True) if p == k] for k in range(ways))

    def merge(self, *streams: list[Row]) -> list[Row]:
        return [r for s in streams for r in s]

    def move(self, s: list[Row], **fields: Any) -> list[Row]:
        look = Look(self, s)
        new = {
            k: (f(look) if callable(f) else np.full(len(s), f)) if s else []
            for k, f in fields.items()
        }
        return [
            Row({**r.state, **{k: int(new[k][i]) for k in new}}, r.payload, r.lengths)
            for i, r in enumerate(s)
        ]

    def concat(self, *streams: list[Row], on: Sequence[str], how: str) -> list[Row]:
        def key(row: Row) -> tuple[int, ...]:
            return (row.state["instance"], *(row.state[c] for c in on))

        others = [{key(r): r for r in s} for s in streams[1:]]
        assert all(o.keys() == {key(r) for r in streams[0]} for o in others)
        joined = []
        for row in streams[0]:
            pieces = [row.payload, *(o[key(row)].payload for o in others)]
            flat = tuple(x for p in pieces for x in p)
            joined.append(Row(row.state, flat if how == "tuple" else (torch.cat(flat, -1),)))
        return joined

    def split(self, s: list[Row], *sizes: int) -> tuple[list[Row], ...]:
        cut = [r.payload[0].split(list(sizes), -1) for r in s]
        return tuple(
            [Row(r.state, (c[k],)) for r, c in zip(s, cut, strict=True)] for k in range(len(sizes))
        )

    def flatmap(self, s: list[Row], over: str, count: Any = None) -> list[Row]:
        if count is not None:
            counts = count(Look(self, s)) if s else []
            return [
                Row({**r.state, over: k}, r.payload)
                for r, n in zip(s, counts, strict=True)
                for k in range(n)
            ]
        return [
            Row({**r.state, "edge": int(e)}, r.payload)
            for r in s
            for e in np.flatnonzero(
                self.data[r.state["instance"]]["edge"]["source"] == r.state["vertex"]
            )
        ]

    def group(self, s: list[Row], by: Any, size: Any, order: Any, how: str) -> list[Row]:
        look = Look(self, s)
        names = list(by) if isinstance(by, dict) else [by] if isinstance(by, str) else list(by)
        moved = {k: f(look) for k, f in by.items()} if isinstance(by, dict) and s else {}
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, row in enumerate(s):
            key = tuple(int(moved[k][i]) if k in moved else row.state[k] for k in names)
            groups.setdefault((row.state["instance"], *key), []).append(i)
        made = []
        for key, members in groups.items():
            rows = [s[i] for i in members]
            if order is None:
                rows.sort(key=lambda r: (r.state["vertex"], r.state.get("edge", 0)))
            else:
                rows.sort(key=lambda r: r.state[order])
            state = {"instance": key[0], **dict(zip(names, key[1:], strict=True))}
            columns = [torch.stack(c) for c in zip(*(r.payload for r in rows), strict=True)]
            if how in ("stack", "bundle"):
                payload = tuple(columns)
            elif how == "max":
                payload = tuple(c.amax(0) for c in columns)
            else:
                payload = tuple(c.sum(0) if how == "sum" else c.mean(0) for c in columns)
            state.setdefault("vertex", 0)
            made.append(Row(state, payload, (len(rows),) if how == "bundle" else ()))
        return made

    def ungroup(self, s: list[Row], index: str) -> list[Row]:
        return [
            Row({**r.state, index: k}, tuple(x[k] for x in r.payload))
            for r in s
            for k in range(r.payload[0].shape[0])
        ]

    def hold(self, s: list[Row]) -> list[Row]:
        return s

    def attend(
        self, s: list[Row], held: list[Row], key: Sequence[str], module: nn.Module, name: str
    ) -> list[Row]:
        bundles = {tuple(r.state[c] for c in key): r.payload for r in held}
        made = []
        for row in s:
            memory = [x[None] for x in bundles[tuple(row.state[c] for c in key)]]
            mask = torch.ones(1, memory[0].shape[1], dtype=torch.bool)
            found = module(*(x[None] for x in row.payload), *memory, mask)
            made.append(Row(row.state, (found[0],)))
        return made

    def detach(self, s: list[Row]) -> list[Row]:
        return [Row(r.state, tuple(x.detach() for x in r.payload), r.lengths) for r in s]

    def stop(self, s: list[Row]) -> None:
        """Nothing follows."""

    def loss(self, s: list[Row], target: Any, weight: Any = None) -> None:
        look = Look(self, s)
        for i, row in enumerate(s):
            wanted = torch.from_numpy(np.asarray(self.column(row, target)))
            each = (row.payload[0] - wanted).square().mean()
            if weight is not None:
                each = each * float(getattr(look, weight)[i])
            self.total = self.total + each
            self.losses += 1

    def head(self, s: list[Row], module: nn.Module, name: str, target: Any) -> list[Row]:
        self.loss(self.through(s, module, name), target)
        return s

    def loop(
        self,
        s: list[Row],
        turn: str,
        body: Callable[[list[Row]], list[Row]],
        again: Callable[[Any], Any],
    ) -> list[Row]:
        rows = self.move(s, **{turn: 0})
        finished: list[Row] = []
        while rows:
            rows = self.move(body(rows), **{turn: lambda m: getattr(m, turn) + 1})
            rows, done = self.where(rows, again)
            finished += done
        return finished


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
