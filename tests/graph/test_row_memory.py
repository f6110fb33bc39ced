"""Rows that are written to memory which several tensors have in one piece."""

from __future__ import annotations

import pytest
import torch

from geartrain.nodes.loop.arenas import Block, RowMemory

SOURCES = {
    "as they lie": lambda x: x,
    "of another dtype": lambda x: x.double(),
    "that do not lie side by side": lambda x: torch.stack([x, x], -1)[..., 0],
}


@pytest.mark.parametrize("source", SOURCES)
def test_rows_are_written_and_their_neighbours_stay(source: str) -> None:
    memory = RowMemory([Block(torch.int64, ()), Block(torch.float32, (3,))], 7)
    memory.clear()
    rows = torch.rand(2, 3, generator=torch.Generator().manual_seed(0))
    memory.write(1, 4, 2, SOURCES[source](rows))
    memory.write(0, 1, 2, torch.tensor([5, 6]))
    found = memory.view(1, 0, 7)
    assert torch.equal(found[4:6], rows)
    assert not found[:4].any() and not found[6:].any()
    assert memory.view(0, 0, 7).tolist() == [0, 5, 6, 0, 0, 0, 0]


@pytest.mark.parametrize("rows", [torch.ones(3, 3), torch.ones(2, 4)])
def test_other_numbers_of_rows_or_entries_are_refused(rows: torch.Tensor) -> None:
    memory = RowMemory([Block(torch.float32, (3,)), Block(torch.float32, (3,))], 5)
    memory.clear()
    with pytest.raises(RuntimeError, match="size"):
        memory.write(0, 3, 2, rows)
    assert not memory.view(0, 0, 5).any() and not memory.view(1, 0, 5).any()
