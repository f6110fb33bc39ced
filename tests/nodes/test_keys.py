"""Tables from keys to slots against a dictionary."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.nodes.keys import DirectTable, HashTable


@settings(max_examples=30)
@given(data=st.data())
@pytest.mark.parametrize("columns", [0, 1, 3])
def test_a_table_is_a_dictionary(columns, data):
    table = HashTable(columns) if columns else DirectTable()
    numbers = st.integers(-(2**62), 2**62) if columns else st.integers(0, 5000)
    few = data.draw(st.lists(numbers, min_size=1, max_size=6))
    key = st.tuples(*[st.sampled_from(few)] * max(columns, 1))
    model: dict[tuple[int, ...], int] = {}
    made = 0
    for _ in range(data.draw(st.integers(1, 12))):
        if model and data.draw(st.booleans()):
            gone = data.draw(st.lists(st.sampled_from(sorted(model)), min_size=1, unique=True))
            table.remove(np.array(gone, np.int64).T)
            for k in gone:
                del model[k]
            continue
        keys = data.draw(st.lists(key, min_size=1, max_size=20))
        fresh: list[int] = []

        def allocate(rows, keys=keys, fresh=fresh):
            nonlocal made
            start = made
            made += rows.size
            for i, row in enumerate(rows.tolist()):
                assert keys[row] not in model
                model[keys[row]] = start + i
                fresh.append(row)
            return start

        before = set(model)
        slots = table.slots(np.array(keys, np.int64).T.copy(), allocate)
        assert slots.tolist() == [model[k] for k in keys]
        assert len(fresh) == len(set(keys) - before)


@pytest.mark.parametrize("columns", [1, 2])
def test_a_table_grows_and_forgets(columns):
    table, made = HashTable(columns), 0

    def allocate(rows):
        nonlocal made
        made += rows.size
        return made - rows.size

    for wave in range(6):
        keys = np.stack([np.arange(1000) * 7919 + wave, np.arange(1000)])[:columns]
        slots = table.slots(keys, allocate)
        assert sorted(slots.tolist()) == list(range(1000 * wave, 1000 * (wave + 1)))
        assert (table.slots(keys[:, ::-1].copy(), allocate) == slots[::-1]).all()
        table.remove(keys)
    assert made == 6000
    assert table._entry.size <= 16384  # removed entries do not pile up


def test_removing_what_is_not_there_is_our_own_bug():
    table = HashTable(1)
    table.slots(np.array([[1, 2]]), lambda rows: 0)
    with pytest.raises(AssertionError, match="not there"):
        table.remove(np.array([[3]]))
