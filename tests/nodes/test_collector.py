"""Waiting for several answers to one row: sums, widths, and what is refused."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geartrain.errors import LeakError, ProtocolError
from geartrain.frames.message import Backward
from geartrain.nodes.collector import Collector
from geartrain.nodes.structure import Cells


def rows(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_the_sum_has_a_column_for_every_payload_whatever_order_readers_answer_in():
    for order in permutations(range(3)):
        waiting = Collector(1, "twice")
        at = waiting.expect(rows(40, 41), 3, None)
        one = torch.tensor([[1.0], [2.0]])
        answers = [Backward(at, (one, None)), Backward(at, None), Backward(at, (one, None))]
        done = [d for i in order for d in waiting.collect([answers[i]])]
        assert len(done) == 1
        assert len(done[0].gradient) == 2
        torch.testing.assert_close(done[0].gradient[0], 2 * one)
        assert done[0].rows.tolist() == [40, 41]
        waiting.check_empty()


def test_parts_of_which_only_the_first_payload_got_a_gradient_keep_their_width():
    cells = Cells(1, "cut")
    at = cells.expect(rows(7), rows(2))
    one = torch.ones(1, 3)
    assert cells.collect([Backward(at[:1], (one, None))]) == []
    ((origin, gradient, lengths),) = cells.collect([Backward(at[1:], None)])
    assert origin.tolist() == [7] and lengths.tolist() == [2]
    assert len(gradient) == 2 and gradient[1] is None
    assert gradient[0].tolist() == [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]


@given(data=st.data())
def test_sums_are_those_of_a_dictionary(data):
    n = data.draw(st.integers(1, 6))
    readers = data.draw(st.lists(st.integers(1, 4), min_size=n, max_size=n))
    bundled = data.draw(st.booleans())
    lengths = np.array(data.draw(st.lists(st.integers(1, 3), min_size=n, max_size=n)), np.int64)
    widths = data.draw(st.lists(st.integers(2, 2 + bundled), min_size=n, max_size=n))
    waiting = Collector(3, "sums")
    at = waiting.expect(np.arange(n) + 100, np.array(readers), lengths if bundled else None)
    pending = [i for i, k in enumerate(readers) for _ in range(k)]
    order = data.draw(st.permutations(pending))
    want: dict[int, list[torch.Tensor | None]] = {i: [None, None] for i in range(n)}
    got: dict[int, Backward] = {}
    generator = torch.Generator().manual_seed(0)
    while order:
        k = data.draw(st.integers(1, len(order)))
        batch, order = order[:k], order[k:]
        mask = data.draw(st.integers(0, 3))
        answers = []
        for width in sorted({widths[row] for row in batch}):  # bundles of a shape come together
            some = [row for row in batch if widths[row] == width]
            here = np.array(some, np.int64)
            sizes = lengths[here] if bundled else np.ones(len(some), np.int64)
            gradient = None
            if mask:
                columns = [
                    torch.randn(int(sizes.sum()), width, generator=generator, dtype=torch.float64)
                    if mask >> j & 1
                    else None
                    for j in range(2)
                ]
                gradient = tuple(columns)
                ends = np.cumsum(sizes)
                for i, row in enumerate(some):
                    for j, column in enumerate(columns):
                        if column is not None:
                            piece = column[ends[i] - sizes[i] : ends[i]]
                            old = want[row][j]
                            want[row][j] = piece.clone() if old is None else old + piece
            sizes = sizes if bundled and gradient is not None else None
            answers.append(Backward(at[here], gradient, sizes))
        for done in waiting.collect(answers):
            for i in range(len(done)):
                one = done.take(np.array([i]))
                assert int(one.rows[0]) - 100 not in got
                got[int(one.rows[0]) - 100] = one
    assert sorted(got) == list(range(n))
    for row, columns in want.items():
        gradient = got[row].gradient
        for j, column in enumerate(columns):
            found = None
            if gradient is not None and gradient[j] is not None:
                index = got[row].index
                found = gradient[j] if index is None else gradient[j][torch.from_numpy(index)]
            if column is None:
                assert found is None or not found.any()
            else:
                torch.testing.assert_close(found, column)
    waiting.check_empty()


def test_bundles_of_several_shapes_and_types_wait_beside_each_other():
    """Minibatches of sequences: the second comes while the first waits for its other reader."""
    waiting = Collector(1, "credit")
    short = waiting.expect(rows(7), 2, rows(2))
    long = waiting.expect(rows(8), 2, rows(2))
    first, second = torch.ones(2, 3), torch.ones(2, 5, 4, dtype=torch.float64)
    assert not waiting.collect([Backward(short, (first,), rows(2))])
    assert not waiting.collect([Backward(long, (second,), rows(2))])
    assert waiting.nbytes() >= first.nbytes + second.nbytes
    (answer,) = waiting.collect([Backward(long, None)])
    assert answer.rows.tolist() == [8] and torch.equal(answer.gradient[0], second)
    (answer,) = waiting.collect([Backward(short, (first,), rows(2))])
    assert answer.rows.tolist() == [7] and torch.equal(answer.gradient[0], 2 * first)
    waiting.check_empty()


def test_an_answer_too_many_is_refused_and_names_the_node():
    waiting = Collector(1, "phi")
    at = waiting.expect(rows(5, 6), 2, None)
    with pytest.raises(ProtocolError, match=r"'phi': rows \[0\] came back but do not wait"):
        waiting.collect([Backward(np.concatenate([at[:1]] * 3), None)])


def test_rows_that_are_left_are_a_leak():
    waiting = Collector(1, "phi")
    at = waiting.expect(rows(5, 6), 1, None)
    waiting.collect([Backward(at[1:], None)])
    with pytest.raises(LeakError, match=r"'phi': 1 rows were never answered, first \[0\]"):
        waiting.check_empty()
