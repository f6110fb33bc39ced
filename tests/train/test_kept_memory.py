"""What an engine has kept goes with it."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch

import geartrain as gt
from geartrain.frames.rows import RowStore
from tests.rigs.called import Beside, cell, random_trees, sets, tree, turning
from tests.rigs.pairs import graph_of_pairs, pairs

SGD = partial(torch.optim.SGD, lr=0.1)
ADAM = gt.Rules(optimizer=partial(torch.optim.Adam, lr=1e-2), update_every=4)


def test_what_a_pass_has_kept_in_its_nodes_goes_with_it_and_not_with_garbage(monkeypatch) -> None:
    """Stores are the memory of an engine; each fit and each evaluation has another engine."""
    stores: list[weakref.ref[RowStore]] = []
    made = RowStore.__init__

    def making(self: RowStore, *given: Any, **named: Any) -> None:
        made(self, *given, **named)
        stores.append(weakref.ref(self))

    monkeypatch.setattr(RowStore, "__init__", making)
    session = gt.Session(graph_of_pairs(), rules=ADAM, runtime=gt.Threads(1), max_active=4)
    whole = gt.Session(
        turning(cell, "whole"), rules=gt.Rules(optimizer=SGD), runtime=gt.Threads(1), max_active=4
    )
    gc.collect()
    gc.disable()
    try:
        for one, data in ((session, pairs(20)), (whole, sets())):
            one.fit(data, epochs=1)
            before = len(stores)
            one.fit(data, epochs=2)
            one.evaluate(data)
            last = [x for x in stores[:before] if x() is not None]
            assert stores and not last
            del stores[:]
    finally:
        gc.enable()


def experts(state: gt.Stream, graph: gt.Graph) -> gt.Stream:
    """Two that are taken together."""
    ways = state.where(lambda m: m.payload[0][:, 0] > 0, name="sign")
    made = [
        way.through(Beside().double(), name=f"expert {k}", keep="activations")
        for k, way in enumerate(ways)
    ]
    return graph.merge(*made)


RINGS = {
    "a loop by steps": (graph_of_pairs, partial(pairs, 20)),
    "a loop": (partial(turning, cell, "whole"), sets),
    "a loop with groups": (partial(tree, "sum", "whole"), partial(random_trees, None)),
    "experts": (partial(turning, experts, "whole"), sets),
}


@pytest.mark.parametrize("name", RINGS)
def test_nothing_of_a_fit_waits_for_garbage_to_be_collected(name: str) -> None:
    """Stages of a loop lead to one another, calls are taken together, programs are told to C."""
    graph, data = RINGS[name]
    session = gt.Session(
        graph(), rules=gt.Rules(optimizer=SGD), runtime=gt.Threads(1), max_active=4
    )
    session.fit(data(), epochs=2)  # in which modules are traced
    session.evaluate(data())
    gc.collect()
    gc.disable()
    try:
        session.fit(data(), epochs=3)
        session.evaluate(data())
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        ours = {type(x).__qualname__ for x in gc.garbage if _is_ours(x)}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not ours


def _is_ours(x: object) -> bool:
    return type(x).__module__.startswith("geartrain")
