"""What ``keep="auto"`` finds out in worker processes is known to the passes that follow."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.nodes.choice import UNDECIDED
from geartrain.runtime.processes.lived import Lived, take_lived
from tests.rigs.passes import processes

WIDTH = 16


class Waved(nn.Module):
    """Has no written kernel, and a derived one that is faster."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.outer(torch.tanh(self.inner(x)) * torch.sigmoid(x))
        return y


def chain() -> gt.Graph:
    torch.manual_seed(0)
    graph = gt.Graph(value=("label",))
    hidden = graph.input("x").through(Waved(), name="below").through(Waved(), name="above")
    hidden.through(nn.Linear(WIDTH, 2), name="out").loss(gt.cross_entropy, target="label")
    return graph


def points(n: int) -> list[gt.Instance]:
    g = torch.Generator().manual_seed(1)
    rows = torch.randn(n, 1, WIDTH, generator=g)
    return [gt.Instance({"x": x}, value={"label": k % 2}) for k, x in enumerate(rows)]


def session_of(graph: gt.Graph, runtime: gt.Threads | gt.Processes, **more: object) -> gt.Session:
    rules = gt.Rules(optimizer=partial(torch.optim.SGD, lr=1e-2), update_every=gt.Instances(40))
    schedule = gt.Schedule(ramp=gt.Ramp(over=0))
    return gt.Session(
        graph,
        rules=rules,
        runtime=runtime,
        max_active=40,
        schedule=schedule,
        **more,  # type: ignore[arg-type]
    )


def done_of(graph: gt.Graph) -> tuple[int, int]:
    done = next(t for t in graph.throughs() if t.name == "below").experience.done
    return done.firings, done.rows


def test_rows_of_several_passes_and_workers_are_added_up_until_it_is_decided() -> None:
    graph = chain()
    session = session_of(graph, processes(2), sharing=gt.SharedWeights())
    session.fit(points(100), epochs=1)
    assert done_of(graph)[1] == 200  # both modules are of one class, which counts together
    assert str(graph).count("[auto: undecided]") == 2
    session.fit(points(100), epochs=14)
    assert "undecided" not in str(graph)


def test_a_pass_that_trains_nothing_counts_nothing() -> None:
    graph = chain()
    session = session_of(graph, processes(2))
    session.fit(points(100), epochs=1)
    before = done_of(graph)
    assert before[1] == 200
    session.evaluate(points(50))
    session.predict(points(50))
    assert done_of(graph) == before


def test_what_workers_have_chosen_goes_into_checkpoints_and_on_to_threads(tmp_path) -> None:
    graph = chain()
    session = session_of(graph, processes(2))
    session.fit(points(200), epochs=14)
    chosen = {t.name: t.experience.chosen for t in graph.throughs()}
    assert chosen["below"] in ("derived", "again") and chosen["above"] == chosen["below"]
    session.save(tmp_path / "it.safetensors")
    other = chain()
    resumed = session_of(other, gt.Threads(1))
    resumed.load(tmp_path / "it.safetensors")
    assert {t.name: t.experience.chosen for t in other.throughs()} == chosen


@pytest.mark.parametrize("workers", [1, 2])
def test_each_worker_adds_what_is_its_own_and_operators_of_a_class_count_once(workers) -> None:
    here = chain()
    first = next(t for t in here.throughs() if t.name == "below").experience
    first.done.firings, first.done.rows = 5, 50
    for _ in range(workers):
        there = chain()
        its = next(t for t in there.throughs() if t.name == "below").experience
        its.done.firings, its.done.rows = 5, 50
        lived = Lived(there)
        assert lived.document() == {}
        its.done.firings, its.done.rows = 7, 80
        its.chosen, its.story = "again", "runs again"
        take_lived(here, lived.document())
    assert done_of(here) == (5 + 2 * workers, 50 + 30 * workers)
    assert first.chosen == "again"
    above = next(t for t in here.throughs() if t.name == "above").experience
    assert above.chosen is None and above.story == UNDECIDED


def test_settings_that_change_have_it_count_anew_and_never_below_nothing() -> None:
    here, there = chain(), chain()
    for graph in (here, there):
        next(t for t in graph.throughs() if t.name == "below").experience.done.rows = 50
    lived = Lived(there)
    next(t for t in there.throughs() if t.name == "below").experience.done.rows = 10
    for _ in range(2):
        take_lived(here, lived.document())
    assert done_of(here) == (0, 0)
