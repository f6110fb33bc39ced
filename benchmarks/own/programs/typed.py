"""Expression trees whose five operators are modules of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from benchmarks.own.programs.program import (
    AbstractProgram,
    Item,
    Levels,
    binary_tree,
    heights,
    joined,
    tokens,
)

UNARY, BINARY = 2, 3


class Unary(nn.Module):
    """One operand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.inner = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x))
        return gate * torch.tanh(self.inner(x)) + (1 - gate) * x


class Binary(nn.Module):
    """Two operands, left and right."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(2 * width, width), nn.Linear(width, width)

    def forward(self, pair: Tensor) -> Tensor:
        return torch.tanh(self.outer(torch.relu(self.inner(pair.flatten(1)))) + pair.mean(1))


def squared(prediction: Tensor, target: Tensor) -> Tensor:
    """Squared errors of predictions ``(n, 1)``."""
    return (prediction.squeeze(1) - target).square()


def value_of(op: int, left: float, right: float) -> float:
    """What an operator computes: -x, tanh 2x, mean, product, maximum."""
    match op:
        case 0:
            return -left
        case 1:
            return float(np.tanh(2 * left))
        case 2:
            return (left + right) / 2
        case 3:
            return left * right
    return max(left, right)


@final
class Typed(AbstractProgram):
    name = "typed"
    told = "five typed operators, expression trees"

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        width = width or self.width
        self.leaf = nn.Sequential(nn.Linear(1, width), nn.Tanh())
        self.operators = nn.ModuleList(Unary(width) for _ in range(UNARY))
        self.operators.extend(Binary(width) for _ in range(BINARY))
        self.readout = nn.Linear(width, 1)

    def generate(self, n: int, seed: int) -> list[Item]:
        random = np.random.default_rng(seed)
        return [self._expression(random) for _ in range(n)]

    def _expression(self, random: np.random.Generator) -> Item:
        """A binary tree, with unary operators on some of its edges."""
        leaves = int(random.integers(5, 16))
        parent, slot = binary_tree(random, leaves)
        n = parent.size
        above = np.flatnonzero(random.random(n) < 0.35)  # these get a unary operator above them
        keep = np.arange(n) + np.searchsorted(above, np.arange(n))  # and come before it
        total = n + above.size
        new_parent, new_slot = np.full(total, -1), np.zeros(total, np.int64)
        op = np.full(total, -1)
        new_parent[keep] = np.where(parent < 0, -1, keep[parent])
        new_slot[keep] = slot
        op[keep[leaves:]] = random.integers(UNARY, UNARY + BINARY, n - leaves)
        extra = keep[above] + 1
        new_parent[extra], new_slot[extra] = new_parent[keep[above]], new_slot[keep[above]]
        new_parent[keep[above]], new_slot[keep[above]] = extra, 0
        op[extra] = random.integers(0, UNARY, above.size)
        value = np.zeros(total, np.float64)
        value[op < 0] = random.uniform(-1, 1, leaves)
        operands = np.zeros((total, 2))
        for v in range(total):
            if op[v] >= 0:
                value[v] = value_of(int(op[v]), *operands[v])
            if new_parent[v] >= 0:
                operands[new_parent[v], new_slot[v]] = value[v]
        return {
            "parent": new_parent,
            "slot": new_slot,
            "op": op,
            "siblings": np.where(op[new_parent] < UNARY, 1, 2),
            "level": heights(new_parent),
            "x": value[op < 0].astype(np.float32)[:, None],
            "leaves": np.flatnonzero(op < 0),
            "target": np.float32(value[-1]),
        }

    def graph(self) -> gt.Graph:
        graph = gt.Graph(vertex=("parent", "slot", "op", "siblings"), value=("result",))
        nodes = graph.loop(name="nodes")
        nodes.join(graph.input("x").through(self.leaf, name="leaf"))
        inner, root = nodes.where(lambda m: m.parent >= 0)
        alone, paired = inner.where(lambda m: m.siblings == 1)
        ones = alone.move(vertex=lambda m: m.parent).route(lambda m: m.op, UNARY)
        pairs = paired.group(by={"vertex": lambda m: m.parent}, size=2, order="slot")
        twos = pairs.route(lambda m: m.op - UNARY, BINARY)
        for k, (operands, module) in enumerate(zip((*ones, *twos), self.operators, strict=True)):
            nodes.join(operands.through(module, name=f"operator {k}"))
        root.through(self.readout, name="readout").loss(squared, target="result")
        return graph

    def instance(self, item: Item, dtype: torch.dtype = torch.float32) -> gt.Instance:
        return gt.Instance(
            {"x": (torch.from_numpy(item["x"]).to(dtype), item["leaves"])},
            {name: item[name] for name in ("parent", "slot", "op", "siblings")},
            value={"result": item["target"]},
        )

    def plain(self, item: Item) -> Tensor:
        n = item["parent"].size
        operands: list[list[Tensor | None]] = [[None, None] for _ in range(n)]
        leaves = iter(torch.from_numpy(item["x"]).to(self.dtype).split(1))
        for v, (p, slot, op) in enumerate(
            zip(item["parent"], item["slot"], item["op"], strict=True)
        ):
            if op < 0:
                state = self.leaf(next(leaves))
            elif op < UNARY:
                state = self.operators[op](operands[v][0])
            else:
                state = self.operators[op](torch.stack(operands[v], 1))
            if p >= 0:
                operands[p][slot] = state
        return squared(self.readout(state), torch.tensor([item["target"]], dtype=self.dtype))[0]

    def hand(self, items: Sequence[Item]) -> Tensor:
        """Level by level, and in each by type."""
        levels, op, slot = Levels(items), joined(items, "op"), joined(items, "slot")
        x = torch.from_numpy(joined(items, "x")).to(self.dtype)
        number = np.cumsum(op < 0) - 1
        levels.send(0, self.leaf(x.index_select(0, tokens(number[levels.rows(0)]))))
        for k in range(1, levels.count):
            rows, coming = levels.rows(k), levels.coming(k)
            to = levels.at(levels.parent[coming])
            (states,) = levels.receive(k)
            member = np.zeros((rows.size, 2), np.int64)
            member[to, slot[coming]] = np.arange(coming.size)
            made, where = [], []
            for kind, module in enumerate(self.operators):
                here = np.flatnonzero(op[rows] == kind)
                if not here.size:
                    continue
                if kind < UNARY:
                    operands = states.index_select(0, tokens(member[here, 0]))
                else:
                    chosen = states.index_select(0, tokens(member[here].ravel()))
                    operands = chosen.view(here.size, 2, -1)
                made.append(module(operands))
                where.append(here)
            back = np.argsort(np.concatenate(where))
            levels.send(k, torch.cat(made).index_select(0, tokens(back)))
        target = np.array([item["target"] for item in items])[levels.item]
        target = torch.from_numpy(target[levels.coming(levels.count)]).to(self.dtype)
        (roots,) = levels.receive(levels.count)
        return squared(self.readout(roots), target).sum()
