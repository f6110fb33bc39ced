"""Edges have the numbers that their instance gives them, in whatever order their sources come."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import geartrain as gt

RUNS: tuple[Literal["auto", "steps"], ...] = ("auto", "steps")


def crossed(k: int) -> gt.Instance:
    """Every edge has one that leads back; sources in no order; lengths as numbers."""
    source, target = np.array([2, 0, 1, 1, 2, 0]), np.array([0, 2, 2, 0, 1, 1])
    back = np.array([1, 0, 4, 5, 2, 3])
    length = (10.0 * np.arange(6) + k).astype(np.float32)
    edge = {"source": source, "target": target, "back": back, "length": length}
    return gt.Instance({"x": torch.arange(3.0)[:, None]}, {"label": [0, 1, 0]}, edge)


def columns() -> gt.Columns:
    some = [crossed(k) for k in range(2)]
    return gt.Columns(
        [3, 3],
        {"x": torch.cat([i.inputs["x"] for i in some])},  # type: ignore[misc]
        {"label": np.concatenate([i.vertex["label"] for i in some])},
        edge={name: np.concatenate([i.edge[name] for i in some]) for name in some[0].edge},
        edge_lengths=[6, 6],
    )


class Both(nn.Module):
    """What an edge and the one back have sent, beside what is said of it."""

    def forward(self, sent: Tensor, back: Tensor, length: Tensor, edge: Tensor) -> Tensor:
        return torch.cat([sent, back, length[:, None], edge[:, None].float()], 1)


class Lengths(nn.Module):
    """Of the edges of each bundle, as they come."""

    def forward(self, x: Tensor, inside: gt.Inside) -> Tensor:
        return inside.edges["length"].view(len(inside.lengths), -1)


@pytest.mark.parametrize("given", [[crossed(0), crossed(1)], columns()], ids=["list", "columns"])
@pytest.mark.parametrize("run", RUNS)
def test_a_row_is_moved_to_the_edge_of_that_number(
    run: Literal["auto", "steps"], given: list[gt.Instance]
) -> None:
    graph = gt.Graph(vertex=("label",), edge=("back", "length"), run=run)
    rounds = graph.loop(name="rounds")
    rounds.join(graph.input("x", step=0))
    going, done = rounds.where(lambda m: m.step < 1)
    done.stop()
    sent = going.flatmap("edge")
    back = sent.move(edge=lambda m: m.back)
    rounds.join(back.move(step=lambda m: m.step + 1))
    both = graph.concat(sent, back, on="edge", how="tuple")
    both.through(Both(), name="side by side", read=("length", "edge")).output("both")
    session = gt.Session(graph, runtime=gt.Threads(1, kernel_threads=1))
    for k, rows in enumerate(session.predict(given)):
        assert isinstance(rows, Tensor)
        rows = rows[rows[:, 3].argsort()]
        assert rows[:, 0].tolist() == [2, 0, 1, 1, 2, 0]  # from where the edge leads
        assert rows[:, 1].tolist() == [0, 2, 2, 0, 1, 1]  # what the one that leads back has sent
        assert rows[:, 2].tolist() == [10 * e + k for e in range(6)]


@pytest.mark.parametrize("given", [[crossed(0), crossed(1)], columns()], ids=["list", "columns"])
def test_a_module_sees_edges_as_they_were_given(given: list[gt.Instance]) -> None:
    graph = gt.Graph(vertex=("label",), edge=("back", "length"))
    bundles = graph.input("x", bundle=True)
    bundles.through(Lengths(), name="see", inside=True, pool=True).output("lengths")
    session = gt.Session(graph, runtime=gt.Threads(1, kernel_threads=1))
    for k, rows in enumerate(session.predict(given)):
        assert isinstance(rows, Tensor)
        assert rows.tolist() == [[10 * e + k for e in range(6)]]
