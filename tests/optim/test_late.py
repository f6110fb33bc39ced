"""What a part and a loss do on a device, done on the host: what is asked is heard later."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from geartrain.errors import NonFiniteError
from geartrain.ir.frame import Arena, Schema
from geartrain.ir.loss import LossNode, Metric, _Measured, accuracy, cross_entropy
from geartrain.ir.node import Place
from geartrain.native import transfer
from geartrain.optim.part import Clip, Flush, PartState, Rules


class Late:
    """An event that is reached when somebody waits for it."""

    reached = False

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.reached = True


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(transfer, "recorded", lambda device: Late())


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let parts believe that they live on another device."""
    monkeypatch.setattr(PartState, "device", torch.device("cuda", 0))


def test_a_gradient_that_is_nan_leaves_the_weights_and_is_told_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = nn.Linear(2, 2)
    rules = Rules(optimizer=lambda p: torch.optim.SGD(p, lr=1.0), update_every=Flush())
    part = PartState("p", module, rules)
    elsewhere(monkeypatch)
    before = [p.detach().clone() for p in module.parameters()]
    part.rows = 1
    part.gradient.add(module.weight, torch.tensor([[1.0, torch.nan], [1.0, 1.0]]))
    part.gradient.add(module.bias, torch.ones(2))
    assert part.step(0) is not None
    assert all(map(torch.equal, before, module.parameters()))
    with pytest.raises(NonFiniteError, match=r"part 'p': the gradient of \['weight'\] .* 0 upd"):
        part.check_finite()
    part.check_finite()  # it is said once


@pytest.mark.parametrize("norm", [0.5, 100.0])
def test_clipping_there_is_clipping_here(monkeypatch: pytest.MonkeyPatch, norm: float) -> None:
    found = []
    for there in (False, True):
        torch.manual_seed(0)
        module = nn.Linear(3, 2)
        rules = Rules(optimizer=lambda p: torch.optim.SGD(p, lr=1.0), clip=Clip(norm))
        part = PartState("p", module, rules)
        if there:
            elsewhere(monkeypatch)
        part.rows = 1
        part.gradient.add(module.weight, torch.randn(2, 3) * 300)
        part.step(0)
        part.check_finite()
        found.append(module.weight.detach().clone())
    torch.testing.assert_close(found[1], found[0])


class Hidden(torch.Tensor):
    """A mask that says of itself that it lies elsewhere."""

    is_cpu = False  # type: ignore[assignment]


def loss() -> LossNode:
    arena = Arena()
    arena.serial[:4], arena.keys[2] = [4, 5, 6, 7], "the third"
    place = Place(1, "loss", arena, Schema(("instance", "vertex"), (), None, ()))
    return LossNode(place, cross_entropy, None, {"accuracy": Metric(accuracy)})


@pytest.mark.parametrize("tensor", [False, True])
def test_sums_there_are_sums_here_whoever_knows_which_rows_count(tensor: bool) -> None:
    node, state = loss(), np.zeros((2, 4), np.int64)
    state[0] = np.arange(4)
    counts = np.array([True, False, True, True])
    mask = torch.from_numpy(counts).as_subclass(Hidden) if tensor else counts
    there = [
        _Measured("loss", torch.tensor([1.0, 2.0, 3.0, 4.0]), None).where_it_lies(),
        _Measured("some", torch.tensor([1.0, torch.nan, 3.0, 4.0]), mask).where_it_lies(),
    ]
    for _ in range(2):
        node._count_there(there, state, None)
    assert node.peek_sums() == {"loss": (20.0, 8), "some": (16.0, 6)}
    assert node.take_sums() == {"loss": (20.0, 8), "some": (16.0, 6)}
    assert node.take_sums() == {}
    node.check_empty()


def test_a_nan_there_names_the_instance_though_it_has_ended() -> None:
    node, state = loss(), np.zeros((2, 2), np.int64)
    state[0] = [1, 2]
    lengths = np.array([2, 2])
    there = [_Measured("loss", torch.tensor([1.0, 2.0, 3.0, torch.inf]), None).where_it_lies()]
    node._count_there(there, state, lengths)
    node.place.arena.serial[:] = -1
    node.place.arena.keys[:] = None
    with pytest.raises(NonFiniteError, match=r"'loss': loss is inf at .* instance 6 \(the third\)"):
        node.check_empty()
