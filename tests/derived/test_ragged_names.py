"""Integers of a memory, which name entries of the rows that read it: what is copied, or chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from geartrain.derived.operands import Operands
from geartrain.derived.ragged.calls import call_of_memory
from geartrain.derived.ragged.derivation import derive_memory
from geartrain.derived.ragged.program import RaggedProgram
from geartrain.errors import GraphError
from tests.rigs.ragged import check_memory

H, NAMES = 6, 9
Forward = Callable[["Reads", Tensor, Tensor, Tensor, Tensor], Tensor]


pytestmark = pytest.mark.usefixtures("needs_kernels", "in_float64")


class Reads(nn.Module):
    """Reads a memory with names in a way of its own."""

    def __init__(self, way: Forward) -> None:
        super().__init__()
        self.way = way
        self.query, self.own, self.gate = (nn.Linear(H, k) for k in (H, NAMES, 1))

    def share(self, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
        score = (m @ self.query(h)[:, :, None])[..., 0]
        return score.masked_fill(~mask, -1e9).softmax(1)

    def forward(self, h: Tensor, m: Tensor, names: Tensor, mask: Tensor) -> Tensor:
        return self.way(self, h, m, names, mask)


def copied(s: Reads, h: Tensor, m: Tensor, names: Tensor, mask: Tensor) -> Tensor:
    gate = torch.sigmoid(s.gate(h))
    own = gate * s.own(h).softmax(1)
    return own.scatter_add(1, names, (1 - gate) * s.share(h, m, mask)).log()


def nothing_else(s: Reads, h: Tensor, m: Tensor, names: Tensor, mask: Tensor) -> Tensor:
    """The last axis, of zeros."""
    return h.new_zeros(len(h), NAMES).scatter_add(-1, names, s.share(h, m, mask)) * s.own(h)


def chosen(s: Reads, h: Tensor, m: Tensor, names: Tensor, mask: Tensor) -> Tensor:
    """What a row thinks of each name is the score of the members that are called so."""
    share = s.own(h).gather(1, names).masked_fill(~mask, -1e9).softmax(1)
    return h + (share[..., None] * m).sum(1)


def both(s: Reads, h: Tensor, m: Tensor, names: Tensor, mask: Tensor) -> Tensor:
    seen = torch.zeros_like(s.own(h)).scatter_add(1, names, mask.to(h.dtype))
    return copied(s, h, m, names, mask) / (1 + seen) + chosen(s, h, m, names, mask).sum(1, True)


WAYS: Mapping[str, Forward] = {f.__name__: f for f in (copied, nothing_else, chosen, both)}


@pytest.mark.parametrize("lengths", [[2, 1, 4], [1], [3] * 200, [300, 2]], ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_members_are_called_by_names(name: str, lengths: list[int]) -> None:
    torch.manual_seed(0)
    check_memory(Reads(WAYS[name]), lengths, H, NAMES)


@pytest.mark.parametrize("wrong", [-1, NAMES])
@pytest.mark.parametrize("name", ["nothing_else", "chosen"])
def test_a_name_that_is_not_there_is_refused(name: str, wrong: int) -> None:
    module, m = Reads(WAYS[name]), torch.randn(5, H)
    h, names = torch.randn(2, H), torch.tensor([0, 1, 2, 3, NAMES - 1])
    program = RaggedProgram(derive_memory(module, (h,), (m, names), 0), Operands(module))
    names[3] = wrong
    for starts, fits in (([0, 1], True), ([0, 2], False)):
        each = np.array(starts), np.array([1, 2])
        call = call_of_memory((h,), 0, (m, names), *each)
        if fits:
            program.forward(call)
            continue
        with pytest.raises(IndexError, match="not there"):
            program.forward(call)


def _compared(s: Reads, h: Tensor, m: Tensor, names: Tensor, mask: Tensor) -> Tensor:
    return h + ((names == 2) * s.share(h, m, mask)).sum(1, keepdim=True)


def _of_a_table(s: Reads, h: Tensor, m: Tensor, names: Tensor, mask: Tensor) -> Tensor:
    return h + (s.share(h, m, mask)[..., None] * s.own.weight[names]).sum(1)


def _of_members(s: Reads, h: Tensor, m: Tensor, names: Tensor, mask: Tensor) -> Tensor:
    return h + m.gather(2, names[..., None]).sum((1, 2))[:, None]


@pytest.mark.parametrize(
    ("way", "why"),
    [
        (_compared, "integers of a memory are computed with"),
        (_of_a_table, "numbers that are computed"),
        (_of_members, "integers of a memory"),
    ],
)
def test_what_else_is_made_of_them_is_left_to_torch(way: Forward, why: str) -> None:
    names = torch.randint(H, (5,))
    with pytest.raises(GraphError, match=why):
        derive_memory(Reads(way), (torch.randn(2, H),), (torch.randn(5, H), names), 0)


def test_truths_of_a_memory_are_left_to_torch() -> None:
    def of_truths(s: Reads, h: Tensor, m: Tensor, names: Tensor, mask: Tensor) -> Tensor:
        return h + (m * names[..., None]).sum(1)

    given = torch.randn(5, H), torch.rand(5) > 0.5
    with pytest.raises(GraphError, match=r"its memory holds torch\.bool"):
        derive_memory(Reads(of_truths), (torch.randn(2, H),), given, 0)
