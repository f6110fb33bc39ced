"""What calls of ragged programs are given, as numbers side by side."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from geartrain.derived.ragged.calls import address_of
from geartrain.errors import ProtocolError


def test_numbers_are_where_they_lie_or_in_a_copy_that_somebody_keeps() -> None:
    x, copies = torch.arange(6.0).view(2, 3), list[Tensor]()
    assert address_of(x, 6, copies) == x.data_ptr() and not copies
    found = address_of(x.t(), 6, copies)
    assert [found] == [each.data_ptr() for each in copies]
    assert copies[0].flatten().tolist() == [0, 3, 1, 4, 2, 5]


def test_fewer_numbers_than_a_step_reads_are_refused() -> None:
    with pytest.raises(ProtocolError, match=r"\(2, 3\) came where 7 numbers were expected"):
        address_of(torch.zeros(2, 3), 7, [])
