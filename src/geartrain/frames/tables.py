"""Tables that one worker reads while another may step them: rows are read under a guard.

A table's gradient is rows, and a step writes just those, in place. A copy of the table for each
version would cost far more than the step; so who reads rows of it, and who steps it, take turns.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor, nn

_GUARD: Final = "_geartrain_guard"


def sparse_tables(module: nn.Module) -> list[Tensor]:
    """The weights of embeddings inside that ask for gradients of rows."""
    embeddings = (inner for inner in module.modules() if isinstance(inner, nn.Embedding))
    return [embedding.weight for embedding in embeddings if embedding.sparse]


def guard_table(table: Tensor, guard: AbstractContextManager[Any]) -> None:
    """Have ``look_up`` hold a guard while it reads this one."""
    setattr(table, _GUARD, guard)


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """Rows ``table[index]``, ``(*index.shape, d)``, as no step has half written them.

    Args:
        table: ``(v, d)``.
        index: Integers.
    """
    guard: AbstractContextManager[Any] | None = getattr(table, _GUARD, None)
    if guard is None:
        return torch.embedding(table, index)
    with guard:
        return torch.embedding(table, index)
