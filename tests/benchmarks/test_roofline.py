"""The benchmark of the roofline: what is recorded, counted and done again."""

from __future__ import annotations

import json

import pytest
import torch
from benchmarks.roofline.main import (
    Operand,
    Product,
    _Recorder,
    calls_of,
    fastest,
    markdown,
    operations,
    repeat,
    shares_of,
)

ROW = {
    "task": "sentiment",
    "threads": 2,
    "instances": 10,
    "products": 4,
    "gflop": 60.0,
    "real_s": [2.0, 4.0, 3.0],
    "products_s": {"2 kernel threads": [1.0, 1.0, 1.0], "two Python threads": [2.0, 2.0, 2.0]},
    "peak_gflops": 100.0,
}


def test_products_are_recorded_with_shapes_and_strides_and_others_are_not() -> None:
    recording: list[Product] = []
    x, w, b = torch.ones(3, 4), torch.ones(5, 4), torch.ones(5)
    with _Recorder(recording):
        y = torch.addmm(b, x, w.t())
        torch.mm(y.t(), x, out=torch.empty(5, 4))
        y.tanh()
    assert [p.operator.overloadpacket.__name__ for p in recording] == ["addmm", "mm"]
    assert recording[0].arguments[2] == Operand((4, 5), (1, 4), torch.float32, "2")
    assert [p.operations for p in recording] == [2 * 3 * 4 * 5] * 2


def test_a_linear_map_of_autograd_is_recorded_on_both_ways() -> None:
    recording: list[Product] = []
    x, w = torch.ones(3, 4), torch.ones(5, 4, requires_grad=True)
    with _Recorder(recording):
        torch.nn.functional.linear(x, w).sum().backward()
    assert sum(p.operations for p in recording) == 2 * (2 * 3 * 4 * 5)


def test_operations_of_an_operator_follow_from_its_shapes() -> None:
    assert operations(torch.ops.aten.bmm.default, [(2, 3, 4), (2, 4, 5)]) == 2 * 2 * 3 * 4 * 5
    assert operations(torch.ops.aten.addmm_.default, [(3, 5), (3, 4), (4, 5)]) == 2 * 3 * 4 * 5


def test_a_recording_can_be_done_again_without_the_tensors_that_it_was_made_with() -> None:
    recording: list[Product] = []
    with _Recorder(recording):
        torch.mm(torch.ones(3, 4), torch.ones(4, 5))
        torch.mm(torch.ones(3, 4), torch.ones(4, 5))
    calls = calls_of(recording)
    assert calls[0][1][0] is calls[1][1][0]
    threads = torch.get_num_threads()
    assert repeat(calls, threads) > 0


def test_one_operand_is_never_both_sides_of_a_product() -> None:
    recording: list[Product] = []
    with _Recorder(recording):
        torch.mm(torch.ones(4, 4), torch.ones(4, 4))
    ((_, (left, right), _),) = calls_of(recording)
    assert left is not right


def test_shares_are_of_the_faster_way_by_repeat() -> None:
    assert fastest(ROW)[0] == "2 kernel threads"
    assert shares_of(ROW) == [0.5, 0.25, pytest.approx(1 / 3)]


def test_the_table_compares_with_the_run_and_with_the_peak() -> None:
    document = json.loads(json.dumps({"rows": [ROW]}))
    assert list(markdown(document))[-1] == (
        "| sentiment | 2 | 3.00 | 1.00 (2 kernel threads) | 33% (25% to 50%) | 4 | 60 | 20 | "
        "20% of 100 |"
    )
