"""Rows of many instances as one tensor: whether all have equally many or not."""

from __future__ import annotations

import pytest
import torch

from geartrain.frames.stacking import stacked

KNOWN = torch.Size((2,)), torch.float32


def _rows(*counts: int) -> list[torch.Tensor]:
    return [k + torch.rand(n, 2) for k, n in enumerate(counts)]


@pytest.mark.parametrize("counts", [(1, 1, 1), (3, 3), (2, 1, 4), (1, 0, 1), (0, 2)])
def test_rows_lie_below_one_another_in_the_order_of_instances(counts: tuple[int, ...]) -> None:
    given = _rows(*counts)
    found = stacked(given, KNOWN)
    assert found is not None and found.payload is not None
    assert torch.equal(found.payload, torch.cat(given))
    assert found.lengths.tolist() == list(counts)
    assert found.at.tolist() == [k for n in counts for k in range(n)]
    given[-1].fill_(7)  # the user's own
    assert not (found.payload == 7).any()


@pytest.mark.parametrize(
    "other",
    [
        torch.rand(1, 3),
        torch.rand(2),
        torch.rand(1, 2, 1),
        torch.tensor(1.0),
        torch.rand(1, 2, dtype=torch.float64),
    ],
)
@pytest.mark.parametrize("first", [False, True])
def test_what_is_not_alike_wants_a_closer_look(other: torch.Tensor, first: bool) -> None:
    given = _rows(1, 1)
    given.insert(0 if first else 2, other)
    assert stacked(given, KNOWN) is None


def test_no_rows_at_all_do_too() -> None:
    assert stacked(_rows(0, 0), KNOWN) is None


def test_what_learns_is_data_to_those_that_it_is_fed_to() -> None:
    found = stacked([x.requires_grad_() for x in _rows(1, 1)], KNOWN)
    assert found is not None and found.payload is not None
    assert not found.payload.requires_grad
