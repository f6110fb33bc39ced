"""Batches travel as records: what arrives is what was sent, and what does not agree is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from geartrain.errors import ProtocolError, TransportError
from geartrain.frames.message import (
    Backward,
    Forward,
    address,
    join_gradient,
    join_payload,
    ragged_index,
)
from geartrain.transport.batches import (
    ANSWERS,
    BACKWARD,
    FORWARD,
    Accepted,
    to_delivery_parts,
    to_record,
)
from geartrain.transport.record import Bounds, Record, decode, encode

COLUMNS, SLOTS = 3, 50
ACCEPTED = Accepted(frozenset({4, 7}), COLUMNS, SLOTS)


def forward(n: int = 5, *, bundles: bool = False, index: bool = False) -> Forward:
    """Rows with two payload tensors, one of integers; bundles of 0, 1, 2, ... rows."""
    draw = np.random.default_rng(n)
    lengths = np.arange(n) % 3 if bundles else None
    rows = n if lengths is None else int(lengths.sum())
    chosen = draw.permutation(2 * rows)[:rows] if index else None
    there = 2 * rows if index else rows
    payload = (torch.from_numpy(draw.normal(size=(there, 3))), torch.arange(there))
    state = draw.integers(0, SLOTS, (COLUMNS, n))
    return Forward(payload, state, address(7, 100, n), lengths, chosen)


def backward(n: int = 5, *, bundles: bool = False, index: bool = False) -> Backward:
    rows = forward(n, bundles=bundles, index=index)
    return Backward(rows.origin, (rows.payload[0], None), rows.lengths, rows.index)


def travelled(node: int, port: int, batch: Forward | Backward) -> tuple[int, int, Any]:
    frames = encode(to_record(node, port, batch), np.zeros((2, 2), np.int64), 0, 0)
    _, record = decode([bytes(frame) for frame in frames], Bounds(2))
    return to_delivery_parts(record, ACCEPTED)


def require_equal(found: np.ndarray | Tensor | None, given_: np.ndarray | Tensor | None) -> None:
    assert (found is None) == (given_ is None)
    if isinstance(given_, Tensor):
        assert isinstance(found, Tensor) and found.dtype == given_.dtype
        assert torch.equal(found, given_)
    elif given_ is not None:
        assert isinstance(found, np.ndarray) and found.dtype == given_.dtype
        assert np.array_equal(found, given_)


@pytest.mark.parametrize("bundles", [False, True])
@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("n", [0, 1, 5, 3000])
def test_rows_arrive_as_their_receiver_would_have_taken_them(
    n: int, index: bool, bundles: bool
) -> None:
    batch = forward(n, bundles=bundles, index=index)
    node, port, found = travelled(4, 2, batch)
    assert (node, port) == (4, 2)
    assert isinstance(found, Forward) and found.index is None
    for x, expected in zip(found.payload, join_payload([batch]), strict=True):
        require_equal(x, expected)
    require_equal(found.state, batch.state)
    require_equal(found.origin, batch.origin)
    require_equal(found.lengths, batch.lengths)


@pytest.mark.parametrize("bundles", [False, True])
@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("n", [1, 5, 3000])
def test_answers_arrive_with_the_columns_that_they_have(n: int, index: bool, bundles: bool) -> None:
    batch = backward(n, bundles=bundles, index=index)
    node, port, found = travelled(7, ANSWERS, batch)
    assert (node, port) == (7, ANSWERS)
    assert isinstance(found, Backward) and found.index is None
    for x, expected in zip(found.gradient or (), join_gradient([batch]), strict=True):
        require_equal(x, expected)
    require_equal(found.rows, batch.rows)
    require_equal(found.lengths, batch.lengths)


def test_a_gradient_that_is_zero_is_not_one_without_columns() -> None:
    rows = address(7, 0, 3)
    assert travelled(7, ANSWERS, Backward(rows, None))[2].gradient is None
    assert travelled(7, ANSWERS, Backward(rows, ()))[2].gradient == ()


def test_parts_of_batches_and_taken_rows_travel_alone() -> None:
    whole = forward(40, bundles=True)
    rows = np.array([33, 2, 2, 17])
    _, _, found = travelled(4, 0, whole.take(rows))
    inner = ragged_index(whole.lengths, rows)
    require_equal(found.payload[0], whole.payload[0][inner])
    require_equal(found.state, whole.state[:, rows])
    first, others = whole.cut(7)
    for part in (first, others):
        _, _, found = travelled(4, 0, part)
        require_equal(found.payload[0], part.payload[0])
        require_equal(found.state, part.state)
    small = encode(to_record(4, 0, whole.take(rows[:1])), np.zeros((2, 2), np.int64), 0, 0)
    assert sum(map(len, small)) < 400, "nothing travels but what was asked for"


def test_an_index_beyond_the_payload_is_refused_where_it_was_made() -> None:
    batch = Forward((torch.ones(3, 1),), np.zeros((3, 1), np.int64), np.zeros(1, np.int64))
    with pytest.raises(ProtocolError, match=r"rows \[3\]"):
        to_record(4, 0, replace(batch, index=np.array([3])))


ROWS = to_record(4, 2, forward(5))
BUNDLES = to_record(4, 2, forward(5, bundles=True))
GIVEN = to_record(7, ANSWERS, backward(5))
ZERO = to_record(7, ANSWERS, Backward(address(7, 0, 5), None))


def changed(record: Record, place: int, what: Callable[[Any], object]) -> Record:
    arrays = list(record.arrays)
    arrays[place] = what(arrays[place])
    return Record(record.kind, record.ints, record.floats, tuple(arrays))


def with_ints(record: Record, *ints: int) -> Record:
    return Record(record.kind, ints, record.floats, record.arrays)


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (Record(99), "kind is 99, expected 1 or 2"),
        (Record(FORWARD), "0 ints and 0 arrays"),
        (Record(BACKWARD, (7, ANSWERS, 1)), "3 ints and 0 arrays"),
        (with_ints(ROWS, 5, 2), "node is 5, expected one that lives here"),
        (with_ints(GIVEN, 5, ANSWERS, 1), "node is 5"),
        (with_ints(ROWS, 4, ANSWERS), "port is -1"),
        (with_ints(ROWS, 4, 1 << 20), "port is 1048576"),
        (with_ints(GIVEN, 7, 0, 1), "port of answers is 0, given 1"),
        (with_ints(GIVEN, 7, ANSWERS, 2), "given 2"),
        (with_ints(GIVEN, 7, ANSWERS, 0), "gradient is 2 columns, expected none"),
        (changed(ROWS, 0, lambda x: x[:2]), r"state is ndarray of int64 \(2, 5\)"),
        (changed(ROWS, 0, lambda x: x[:, :4]), r"\(3, 4\)"),
        (changed(ROWS, 0, lambda x: x[0]), r"\(5,\)"),
        (changed(ROWS, 0, lambda x: x.astype(np.int32)), "int32"),
        (changed(ROWS, 0, torch.from_numpy), "Tensor of torch.int64"),
        (changed(ROWS, 0, lambda x: None), "state is None"),
        (changed(ROWS, 0, lambda x: x - SLOTS), r"slots of instances is -\d+\.\.-\d+"),
        (changed(ROWS, 0, lambda x: x + SLOTS), r"expected 0\.\.49"),
        (changed(ROWS, 1, lambda x: x[:4]), "state is"),
        (changed(ROWS, 1, lambda x: x.reshape(5, 1)), "origin is"),
        (changed(ROWS, 2, lambda x: np.ones(4, np.int64)), "lengths is 4"),
        (changed(BUNDLES, 2, lambda x: x - 1), r"lengths is 5, -1\.\."),
        (changed(BUNDLES, 2, lambda x: x + 1), "a tensor of 9 rows"),
        (changed(BUNDLES, 2, lambda x: np.full_like(x, 2**62)), r"lengths is 5, 0\.\.4611686"),
        (changed(ROWS, 3, lambda x: x[:4]), "payload is Tensor of torch.float64"),
        (changed(ROWS, 4, lambda x: None), "payload is None"),
        (changed(ROWS, 4, lambda x: x.numpy()), "payload is ndarray"),
        (changed(ROWS, 4, lambda x: x[0]), r"payload is Tensor of torch.int64 \(\)"),
        (changed(GIVEN, 0, lambda x: x.astype(float)), "rows is ndarray of float64"),
        (changed(GIVEN, 2, lambda x: x[:3]), r"gradient is Tensor of torch.float64 \(3, 3\)"),
        (changed(GIVEN, 3, lambda x: np.ones(5)), "gradient is ndarray"),
        (changed(ZERO, 1, lambda x: np.ones(3, np.int64)), "lengths is 3"),
    ],
)
def test_what_does_not_agree_is_refused_with_its_name(record: Record, told: str) -> None:
    with pytest.raises(TransportError, match=told):
        to_delivery_parts(record, ACCEPTED)


def test_bounds_that_are_not_known_are_not_checked() -> None:
    known = Accepted(range(10), None)
    _, _, batch = to_delivery_parts(changed(ROWS, 0, lambda x: x[:1] - SLOTS), known)
    assert batch.state.shape == (1, 5)
    empty = Forward((), np.zeros((COLUMNS, 0), np.int64), np.zeros(0, np.int64))
    assert len(to_delivery_parts(to_record(4, 0, empty), ACCEPTED)[2]) == 0


@given(st.data())
def test_arrays_that_changed_places_are_refused_or_are_a_batch(data: st.DataObject) -> None:
    record = data.draw(st.sampled_from([ROWS, BUNDLES, GIVEN, ZERO]))
    arrays = data.draw(st.permutations([*record.arrays, None, np.arange(5), torch.ones(5, 2)]))
    kind = data.draw(st.sampled_from([FORWARD, BACKWARD]))
    ints = data.draw(st.tuples(st.sampled_from([4, 7]), st.sampled_from([-1, 0]), st.just(1)))
    ints = ints[: 2 if kind == FORWARD else 3]
    try:
        _, _, batch = to_delivery_parts(Record(kind, ints, (), tuple(arrays)), ACCEPTED)
    except TransportError:
        return
    columns = batch.payload if isinstance(batch, Forward) else batch.gradient or ()
    rows = len(batch) if batch.lengths is None else int(batch.lengths.sum())
    assert all(x is None or len(x) == rows for x in columns)
