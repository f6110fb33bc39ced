"""Letters between copies as messages between processes: they come back, or are refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geartrain.errors import TransportError
from geartrain.runtime.processes.letters import Expected, letter_to_record, record_to_letter
from geartrain.runtime.processes.messages import text
from geartrain.sharing.letters import Letter
from geartrain.transport.record import Record

EXPECTED = Expected({"map": {(5, 2), (3,)}, "word": {(9, 4)}}, copies=4, here=range(1, 4, 2))


def rows_of(shape: tuple[int, ...], rows: list[int]) -> torch.Tensor:
    values = torch.arange(len(rows) * shape[1], dtype=torch.float32).reshape(len(rows), shape[1])
    return torch.sparse_coo_tensor([rows], values, shape, check_invariants=True)


DENSE = Letter(
    *("map", 0, 3, "gradient", (torch.randn(5, 2), None, torch.randn(3).double())),
    version=7,
    round=5,
    weight=0.1,
    seen=4,
    nbytes=64,
    progress=11,
)
SPARSE = Letter("word", 2, 1, "gradient", (rows_of((9, 4), [8, 0, 8]),), hops=6, collective=True)
EMPTY = Letter("map", 3, 1, "elsewhere", (), count=3)


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.is_sparse == b.is_sparse and a.to_dense().equal(b.to_dense())


@pytest.mark.parametrize("letter", [DENSE, SPARSE, EMPTY])
def test_a_letter_comes_back_with_all_that_it_says(letter: Letter) -> None:
    found = record_to_letter(letter_to_record(letter), EXPECTED)
    for field in dataclasses.fields(Letter):
        if field.name != "tensors":
            assert getattr(found, field.name) == getattr(letter, field.name), field.name
    assert len(found.tensors) == len(letter.tensors)
    assert all(map(same, found.tensors, letter.tensors))


def with_int(letter: Letter, at: int, value: int) -> Record:
    record = letter_to_record(letter)
    ints = [*record.ints]
    ints[at] = value
    return dataclasses.replace(record, ints=tuple(ints))


def with_array(letter: Letter, at: int, change: Callable[[Any], Any]) -> Record:
    record = letter_to_record(letter)
    arrays = [*record.arrays]
    arrays[at] = change(arrays[at])
    return dataclasses.replace(record, arrays=tuple(arrays))


def saying(*said: Any) -> Record:
    return with_array(SPARSE, 0, lambda _: text(list(said)))


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (Record(73), "0 ints, 0 floats, 0 arrays"),
        (dataclasses.replace(letter_to_record(EMPTY), floats=()), "0 floats"),
        (with_int(DENSE, 0, 4), r"sender is 4, expected 0\.\.3"),
        (with_int(DENSE, 0, -1), "sender is -1"),
        (with_int(DENSE, 1, 2), "receiver is 2, expected a copy that lives here"),
        (with_int(DENSE, 2, -1), "numbers is"),
        (with_int(DENSE, 7, 2), "collective 0 or 1"),
        (with_int(DENSE, 9, -2), "progress is -2"),
        (with_array(DENSE, 0, lambda _: None), "text is None"),
        (with_array(DENSE, 0, lambda x: x[:-1]), "expected JSON"),
        (with_array(DENSE, 0, lambda x: np.zeros(2 << 20, np.uint8)), "bytes long"),
        (saying("word", "gradient"), "part, kind and forms"),
        (saying("other", "gradient", [[9, 4]]), "part is 'other'"),
        (saying(["word"], "gradient", [[9, 4]]), "part is"),
        (saying("word", 3, [[9, 4]]), "a word and a list"),
        (saying("word", "gradient", []), "tensors is 2 arrays, expected 0"),
        (saying("word", "gradient", [None, [9, 4]]), "expected 3 for 2"),
        (saying("word", "gradient", [[10**9, 4]]), "that of a parameter"),
        (saying("word", "gradient", ["nine"]), "that of a parameter"),
        (saying("word", "gradient", [[9.0, 4]]), "that of a parameter"),
        (with_array(SPARSE, 1, lambda x: x + 1), r"rows of a sparse tensor is 1\.\.9, expected 0"),
        (with_array(SPARSE, 1, lambda x: x - 1), r"is -1\.\."),
        (with_array(SPARSE, 1, lambda x: x.float()), "expected int64"),
        (with_array(SPARSE, 1, lambda x: x[None]), "one dimension"),
        (with_array(SPARSE, 2, lambda x: x[:2]), r"values of a sparse tensor .* expected \(3, 4\)"),
        (with_array(SPARSE, 2, lambda x: None), "values of a sparse tensor is None"),
        (with_array(DENSE, 1, lambda x: x.numpy()), "tensor is ndarray"),
    ],
)
def test_what_does_not_agree_is_refused_with_its_name(record: Record, told: str) -> None:
    with pytest.raises(TransportError, match=told):
        record_to_letter(record, EXPECTED)


@given(st.data())
def test_letters_that_were_changed_are_refused_or_are_letters(data: st.DataObject) -> None:
    record = letter_to_record(data.draw(st.sampled_from([DENSE, SPARSE, EMPTY])))
    more = [None, np.arange(5), torch.ones(9, 4), torch.tensor([0, 3])]
    arrays = data.draw(st.permutations([*record.arrays, *more]))[: len(record.arrays)]
    ints = [data.draw(st.one_of(st.just(x), st.integers(-2, 5))) for x in record.ints]
    said = bytearray(record.arrays[0])  # type: ignore[arg-type]
    said[data.draw(st.integers(0, len(said) - 1))] = data.draw(st.integers(0, 255))
    first = data.draw(st.sampled_from([record.arrays[0], np.frombuffer(said, np.uint8)]))
    changed = Record(record.kind, tuple(ints), record.floats, (first, *arrays[1:]))
    try:
        found = record_to_letter(changed, EXPECTED)
    except TransportError:
        return
    assert found.part in EXPECTED.shapes and found.receiver in EXPECTED.here
    for x in found.tensors:
        if x is not None and x.is_sparse:
            assert tuple(x.shape) in EXPECTED.shapes[found.part]
            assert x.to_dense().shape == x.shape
