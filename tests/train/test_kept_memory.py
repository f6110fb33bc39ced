"""What an engine has kept goes with it."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import torch

import geartrain as gt
from geartrain.frames.rows import RowStore
from tests.rigs.called import cell, sets, turning
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
