"""The seam of sharing: a way of one's own, and what every way must be able to say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import pytest
import torch
from torch.testing import assert_close

import geartrain as gt
from geartrain.frames.frame import Arena
from geartrain.frames.message import IntArray
from geartrain.graph.through import Through
from geartrain.parts.part import PartState
from geartrain.sharing.assignment import AbstractAssignment
from geartrain.sharing.locks import MakeLock, NoLock
from geartrain.sharing.share import AbstractShare
from geartrain.sharing.shared_weights import share
from geartrain.sharing.sharing import AbstractSharing, AbstractSharingState
from tests.rigs.pairs import graph_of_pairs, pairs

WAYS = [gt.Alone(), gt.PartCopies(2), gt.SharedWeights(), gt.Neighbours(copies=2)]


class ByTurns(AbstractAssignment):
    """Instances go to one copy after the other."""

    def __init__(self, copies: int) -> None:
        super().__init__()
        self._next, self._copies = 0, copies

    def begin(self, trained: int, *, training: bool) -> None:
        self._next = trained if training else 0

    def first_turn(self, copy: int, trained: int) -> int:
        return trained

    def number(self, copy: int) -> int:
        return self._next

    def admit(self, arena: Arena, slots: IntArray, copy: int) -> None:
        self._next += slots.size
        self.active += slots.size
        arena.copy[slots] = arena.serial[slots] % self._copies

    def finish(self, arena: Arena, slots: IntArray) -> IntArray:
        self.active -= slots.size
        return arena.copy[slots]


class TurnsState(AbstractSharingState):
    name, apart = "by turns", True

    def __init__(self, parts: Mapping[str, PartState], copies: int, lock: MakeLock) -> None:
        super().__init__()
        self.parts, self.copies, self._lock = parts, copies, lock

    def weights(self, name: str, nodes: Sequence[Through]) -> Sequence[AbstractShare]:
        return share(self.parts[name], self.copies, self._lock)

    def assignment(self) -> AbstractAssignment:
        return ByTurns(self.copies)


class Turns(AbstractSharing):
    """Every worker has the graph, and the weights that all have; instances go by turns."""

    def make(
        self,
        graph: gt.Graph,
        parts: Mapping[str, PartState],
        workers: int = 1,
        lock: MakeLock | None = NoLock,
    ) -> AbstractSharingState:
        assert lock is not None
        return TurnsState(parts, workers, lock)


@pytest.mark.parametrize("runtime", [gt.Simulated(3, jitter=0.5), gt.Threads(2)])
def test_a_way_of_one_s_own_needs_no_other_file(runtime) -> None:
    rules = gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.1), update_every=gt.Flush())
    found, fired = [], set()

    class Sees(gt.AbstractInstrument):
        wants_firings = True

        def on_fired(self, event) -> None:
            fired.add((event.worker, event.node.partition("#")[2] or "0"))

    for sharing, where in ((gt.Alone(), gt.Simulated(1)), (Turns(), runtime)):
        fired.clear()
        session = gt.Session(
            graph_of_pairs(), rules=rules, runtime=where, sharing=sharing, instruments=[Sees()]
        )
        session.fit(pairs(30), epochs=2, valid=pairs(4))
        found.append([p.detach() for part in session.parts.values() for p in part.parameters])
    assert fired == {(w, str(w)) for w in range(runtime.workers)}
    for a, b in zip(*found, strict=True):
        assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sharing", WAYS, ids=lambda way: type(way).__name__)
def test_every_way_evaluates_with_the_modules_of_the_user(sharing) -> None:
    graph = graph_of_pairs()
    own = {id(p) for module in graph.modules() for p in module.parameters()}
    session = gt.Session(graph, runtime=gt.Simulated(2), sharing=sharing)
    session.fit(pairs(12), epochs=1)
    state = session.state.sharing
    assert own <= {id(p) for part in state.consensus.parts.values() for p in part.parameters}
    assert state.consensus.consensus is state.consensus
    assert session.state.ready(session._source(pairs(2), shuffle=False)).sharing is state.consensus


@pytest.mark.parametrize(("copies", "told"), [({"first": 0}, r"\{'first': 0\}"), (0, r"\(0\): ")])
def test_numbers_of_copies_that_cannot_be_are_refused(copies, told) -> None:
    with pytest.raises(ValueError, match=told):
        gt.PartCopies(copies)


@pytest.mark.parametrize("sharing", [gt.SharedWeights, True, "ring"])
def test_what_is_no_way_to_share_is_refused(sharing) -> None:
    with pytest.raises(TypeError, match=r"sharing=.*: give a way .* SharedWeights\(\)"):
        gt.Session(graph_of_pairs(), sharing=sharing)


def test_copies_of_a_part_that_is_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match=r"names \['third'\]; .* \['first', 'last'\]"):
        gt.Session(graph_of_pairs(), sharing=gt.PartCopies({"third": 2}))
