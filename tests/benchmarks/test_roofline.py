"""The benchmark of the roofline: what is recorded, counted and done again."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from benchmarks.firings import Training
from benchmarks.roofline.main import (
    Alone,
    Operand,
    Recording,
    fastest,
    markdown,
    operations,
    record,
    repeat_in_two,
    shares_of,
)

ROW = {
    "task": "sentiment",
    "threads": 2,
    "instances": 10,
    "products": 4,
    "gflop": 60.0,
    "inside": 0.25,
    "real_s": [2.0, 4.0, 3.0],
    "products_s": {"2 kernel threads": [1.0, 1.0, 1.0], "two Python threads": [2.0, 2.0, 2.0]},
    "peak_gflops": 100.0,
}


def test_products_are_recorded_with_shapes_and_strides_and_others_are_not() -> None:
    recording = Recording()
    x, w, b = torch.ones(3, 4), torch.ones(5, 4), torch.ones(5)
    with recording.watched():
        y = torch.addmm(b, x, w.t())
        torch.mm(y.t(), x, out=torch.empty(5, 4))
        y.tanh()
    assert [p.operator.overloadpacket.__name__ for p in recording.products] == ["addmm", "mm"]
    assert recording.products[0].arguments[2] == Operand((4, 5), (1, 4), torch.float32, "2")
    assert [p.operations for p in recording.products] == [2 * 3 * 4 * 5] * 2


def test_a_linear_map_of_autograd_is_recorded_on_both_ways() -> None:
    recording = Recording()
    x, w = torch.ones(3, 4), torch.ones(5, 4, requires_grad=True)
    with recording.watched():
        torch.nn.functional.linear(x, w).sum().backward()
    assert sum(p.operations for p in recording.products) == 2 * (2 * 3 * 4 * 5)


def test_operations_of_an_operator_follow_from_its_shapes() -> None:
    assert operations(torch.ops.aten.bmm.default, [(2, 3, 4), (2, 4, 5)]) == 2 * 2 * 3 * 4 * 5
    assert operations(torch.ops.aten.addmm_.default, [(3, 5), (3, 4), (4, 5)]) == 2 * 3 * 4 * 5


def test_a_recording_can_be_done_again_without_the_tensors_that_it_was_made_with() -> None:
    recording = Recording()
    with recording.watched():
        torch.mm(torch.ones(3, 4), torch.ones(4, 5))
        torch.mm(torch.ones(3, 4), torch.ones(4, 5))
    alone = Alone(recording)
    assert alone.calls[0][1][0] is alone.calls[1][1][0]
    assert alone(torch.get_num_threads()) > 0


def test_one_operand_is_never_both_sides_of_a_product() -> None:
    recording = Recording()
    with recording.watched():
        torch.mm(torch.ones(4, 4), torch.ones(4, 4))
    ((_, (left, right), _),) = Alone(recording).calls
    assert left is not right


def test_a_run_is_recorded_with_the_products_inside_native_kernels() -> None:
    training = Training("listreduce", None, size=60, in_flight=16, epochs=1)
    recording = record(training)
    of_torch, inside = recording.operations
    assert of_torch > 0
    assert len(recording) == len(recording.products) + len(recording.inside)
    halves = recording.halves()
    assert sum(map(len, halves)) == len(recording)
    assert sum(half.operations[1] for half in halves) == inside
    assert repeat_in_two([Alone(half) for half in halves]) > 0


@pytest.mark.usefixtures("needs_kernels")
def test_products_inside_native_kernels_can_be_done_again() -> None:
    kinds = [[7, 5, 20, 4, 0], [7, 5, 1, 4, 0], [20, 300, 9, 4, 1], [1, 7, 5, 8, 0]]
    recording = Recording(inside=[np.array(kinds)])
    assert recording.operations == (0, 2 * (700 + 35 + 54_000 + 35))
    assert Alone(recording)(torch.get_num_threads()) > 0


def test_shares_are_of_the_faster_way_by_repeat() -> None:
    assert fastest(ROW)[0] == "2 kernel threads"
    assert shares_of(ROW) == [0.5, 0.25, pytest.approx(1 / 3)]


def test_the_table_compares_with_the_run_and_with_the_peak() -> None:
    document = json.loads(json.dumps({"rows": [ROW]}))
    assert list(markdown(document))[-1] == (
        "| sentiment | 2 | 3.00 | 1.00 (2 kernel threads) | 33% (25% to 50%) | 4 | 60 | 25% | 20 | "
        "20% of 100 |"
    )
