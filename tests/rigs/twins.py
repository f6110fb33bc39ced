"""Twins that run one program: as a geartrain graph, and row by row in plain PyTorch.

    Streams               the twin that builds a graph
    Lists                 the twin that computes at once: a stream is a list of rows

A program (``random_programs``) calls their verbs, and does not know which of them it is.
"""

from __future__ import annotations

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
