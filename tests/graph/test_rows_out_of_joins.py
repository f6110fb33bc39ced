"""Rows that go on out of a join lie where the module made them: they are not copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.nodes.loop.listing import Listing
from geartrain.nodes.loop.plan import StoreStage
from tests.graph.test_rows_that_go_past import copied as copied
from tests.rigs.passes import Order, accumulate, assert_same_gradients

FEW = Order(max_active=3)
Pick = Callable[..., Tensor]
STEPS = 4


def linear(into: int, out: int) -> nn.Linear:
    return nn.Linear(into, out).double()


class Verdict(nn.Module):
    """Two tensors of what a whole has come to, or one."""

    def __init__(self, width: int, *, both: bool) -> None:
        super().__init__()
        self.inner, self.both = linear(width, width), both

    def forward(self, mean: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        made = torch.tanh(self.inner(mean))
        return (made, made.abs()) if self.both else made


def judged(
    run: Any, pick: Pick, seen: list[int], *, sides: str = "rows first", both: bool = False
) -> gt.Graph:
    """Vertices that go round until their whole says that it is enough, or a few times; ``seen``
    gets the steps that they come to."""
    torch.manual_seed(1)
    graph = gt.Graph(value=("label",))
    rows = graph.loop(name="rows", run=run)
    rows.join(graph.input("x", step=0).through(linear(3, 4), name="first"))
    new = rows.through(nn.Sequential(linear(4, 4), nn.Tanh()), name="cell")
    mean = new.group(by=("step",), size=lambda m: m.size, how="mean", name="mean")
    verdict = mean.through(Verdict(4, both=both), name="verdict")
    told = verdict.flatmap("vertex", count=lambda m: m.size)
    ports = (new, told) if sides == "rows first" else (told, new)
    met = graph.concat(*ports, on=("vertex", "step"), how="tuple")
    at = 1 if sides == "rows first" else 0

    def stops(m: gt.View) -> Any:
        seen.append(int(m.step.max()))
        return (m.payload[at][:, 0] > 0.42).numpy() | (m.step >= STEPS - 1)

    done, more = met.where(stops)
    rows.join(more.through(pick, name="on").move(step=lambda m: m.step + 1))
    ended = done.through(pick, name="end").through(linear(4, 2), name="readout")
    last = ended.group(by="instance", size=lambda m: m.size, how="mean", name="last")
    last.loss(gt.cross_entropy, target="label")
    return graph


def instances(n: int = 7) -> list[gt.Instance]:
    """Of one to five vertices each."""
    random = torch.Generator().manual_seed(3)
    return [
        gt.Instance(
            {"x": torch.randn(1 + k % 5, 3, generator=random, dtype=torch.float64)},
            value={"label": k % 2},
        )
        for k in range(n)
    ]


CASES: dict[str, tuple[dict[str, Any], Pick, bool]] = {
    "the first port": ({}, lambda h, told: h, False),
    "the second port": ({"sides": "rows second"}, lambda told, h: h, False),
    "a port beside one of two tensors": ({"both": True}, lambda h, told, size: h, True),
    "what all were told": ({}, lambda h, told: told, False),
}
"""How a graph is made, what it picks, and whether rows are copied."""


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_they_learn_what_they_learn_by_steps(
    name: str, native: bool, copied: list[StoreStage], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(Listing, "pays", False)
    options, pick, copies = CASES[name]
    seen: list[int] = []
    found = [
        accumulate(judged(run, pick, seen, **options), instances(), FEW)
        for run in ("whole", "steps")
    ]
    assert_same_gradients(*[each.gradients for each in found])
    assert bool(copied) == copies
    assert max(seen) > 0  # some have gone round
