"""Additive attention: no kernel is written for it, and what is derived has its numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import geartrain as gt
from geartrain.derived.operands import Operands
from geartrain.derived.ragged.calls import call_of_memory
from geartrain.derived.ragged.derivation import derive_memory
from geartrain.derived.ragged.program import RaggedProgram
from geartrain.errors import GraphError
from geartrain.nodes.memory import memory_kernel_of
from tests.rigs.ragged import check_memory

H = 4
LENGTHS = (3, 1, 5)


pytestmark = pytest.mark.usefixtures("in_float64")


class ByThird(nn.Module):
    """What was read of values that are made of the keys, and the query."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.values = gt.nn.AdditiveAttention(H, H), nn.Linear(H, 3)

    def forward(self, query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        return torch.cat(self.read(query, keys, self.values(keys), mask), 1)


def test_it_reads_values_by_a_layer_over_query_and_key_and_nothing_behind_the_end() -> None:
    read = gt.nn.AdditiveAttention(H, 2)
    query, keys, values = torch.randn(2, H), torch.randn(2, 3, 2), torch.randn(2, 3, 5)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    found, same = read(query, keys, values, mask)
    scores = [read.score @ torch.tanh(read.map.weight @ query[0] + keys[0, k]) for k in range(2)]
    share = torch.stack(scores).softmax(0)
    assert_close(found, torch.stack([share @ values[0, :2], torch.zeros(5)]))
    assert same is query
    assert_close(read(query, keys, mask)[0][0], share @ keys[0, :2])


@pytest.mark.usefixtures("needs_kernels")
def test_a_program_is_derived_of_it() -> None:
    assert memory_kernel_of(gt.nn.AdditiveAttention(H, H)) is None
    check_memory(ByThird(), LENGTHS, H)


@pytest.mark.usefixtures("needs_kernels")
def test_its_program_reads_a_memory_that_is_keys_and_values() -> None:
    read, held, query = gt.nn.AdditiveAttention(H, H), torch.randn(9, H), torch.randn(3, H)
    program = RaggedProgram(derive_memory(read, (query,), (held,), 0), Operands(read))
    starts, lengths = torch.tensor([0, 3, 4]).numpy(), torch.tensor(LENGTHS).numpy()
    (found, _), _ = program.forward(call_of_memory((query,), 0, (held,), starts, lengths))
    for k, (a, size) in enumerate(zip(starts, lengths, strict=True)):
        mask = torch.ones(1, int(size), dtype=torch.bool)
        wanted, _ = read(query[k : k + 1], held[None, a : a + size], mask)
        assert_close(found[k : k + 1], wanted)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ((torch.zeros(2, H), torch.zeros(2, 3, H)), "one query, but rows of several"),
        ((*[torch.zeros(2, 3, H)] * 3,), "3 tensors are held"),
    ],
    ids=["queries", "memories"],
)
def test_more_than_it_reads_is_refused(given: tuple[Tensor, ...], why: str) -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(GraphError, match=why):
        gt.nn.AdditiveAttention(H, H)(torch.zeros(2, H), *given, mask)
