"""Gradients of weights of many rows: on one thread they are multiplied in C, whatever the rows."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import geartrain as gt
from geartrain.native import operations, sums
from geartrain.native.ragged import RowsToLearn
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.products import outer_suits
from geartrain.nodes.slot import Slot, summed

THREADS = torch.get_num_threads()


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    yield
    torch.set_num_threads(THREADS)


def _added(threads: int, n: int, monkeypatch: pytest.MonkeyPatch) -> tuple[float, int]:
    """How far two products added are from torch's, at most; how many were not made in C."""
    torch.set_num_threads(threads)
    asked: list[int] = []
    monkeypatch.setattr(
        "geartrain.nodes.slot.outer_suits",
        lambda d, x: asked.append(d.shape[0]) or outer_suits(d, x),
    )
    random = torch.Generator().manual_seed(n)
    weight = nn.Parameter(torch.zeros(192, 64))
    left, right = (torch.randn(n, k, generator=random) for k in (192, 64))
    into = GradientSum([weight])
    with torch.no_grad():
        for _ in range(2):
            into.add_product(weight, left, right)
        found = into.take(weight)
    assert found is not None
    want = 2 * (left.double().t() @ right.double())
    return float((found - want).abs().max() / want.abs().max()), len(asked)


@pytest.mark.parametrize("n", [352, 1400, 2047])
def test_on_one_thread_many_rows_are_multiplied_in_c(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, elsewhere = _added(1, n, monkeypatch)
    assert error < 1e-5 and elsewhere == (0 if sums.may_sum(torch.float32) else 2)


def test_on_several_threads_torch_multiplies_them(monkeypatch: pytest.MonkeyPatch) -> None:
    error, elsewhere = _added(2, 1400, monkeypatch)
    assert error < 1e-5 and elsewhere == 2


def test_what_waits_is_multiplied_ahead_as_it_is_when_it_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(3)
    weight, bias = nn.Parameter(torch.zeros(48, 33)), nn.Parameter(torch.zeros(48))
    ahead, later = GradientSum([weight, bias]), GradientSum([weight, bias])
    for n in (5, 1, 17):
        left, right = (torch.randn(n, k, generator=random) for k in (48, 33))
        for into in (ahead, later):
            into.add_product(weight, left, right)
            into.add_sum(bias, left)
    one_by_one: list[int] = []
    monkeypatch.setattr(Slot, "multiply", lambda self, left, right: one_by_one.append(len(left)))
    if sums.may_sum(torch.float32):
        ahead.multiply()
        assert not one_by_one
        both = (into.take_each([weight, bias])[0] for into in (ahead, later))
        for found, want in zip(*both, strict=True):
            assert found is not None and want is not None
            assert torch.equal(found, want)


def test_what_is_multiplied_ahead_is_counted_once() -> None:
    weight = nn.Parameter(torch.zeros(48, 33))
    into = GradientSum([weight])
    with operations.Counted() as counted:
        into.add_product(weight, torch.ones(5, 48), torch.ones(5, 33))
        into.multiply()
    assert counted.operations == 2 * 5 * 48 * 33
    assert torch.equal(into.take(weight), torch.full((48, 33), 5.0))


@pytest.mark.parametrize("asked", ["all", "one"])
def test_what_has_been_multiplied_is_not_looked_at_again_until_something_may_be_added(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []

    def seen(slots: list[Slot]) -> float | None:
        looked.append(len(slots))
        return summed(slots)

    monkeypatch.setattr("geartrain.nodes.gradient.summed", seen)
    weight, bias = nn.Parameter(torch.zeros(48, 33)), nn.Parameter(torch.zeros(48))
    into, wanted = GradientSum([weight, bias]), [weight, bias] if asked == "all" else [weight]
    with torch.no_grad():
        for _ in range(2):
            into.add_product(weight, torch.full((5, 48), 2.0), torch.ones(5, 33))
            into.add_sum(bias, torch.ones(5, 48))
            with into.multiplied():
                looked.clear()
                found, squares = into.take_each(wanted)
            assert not looked
            known = sums.may_sum(torch.float32) and len(wanted) == 2
            assert (squares is not None) == known
            assert found[0] is not None and torch.equal(found[0], torch.full((48, 33), 10.0))
            assert squares is None or squares == sum(
                float((x**2).sum()) for x in found if x is not None
            )
            into.take(bias)
        into.add_product(weight, torch.ones(5, 48), torch.ones(5, 33))
        with into.multiplied():
            pass
        into.add(weight, torch.ones(48, 33))
        found, squares = into.take_each([weight, bias])
    assert found[0] is not None and torch.equal(found[0], torch.full((48, 33), 6.0))
    assert squares is None or squares == float((found[0] ** 2).sum())


def _linear(n: int, m: int) -> nn.Linear:
    """Of zeros: torch warns of weights without elements that it is to draw."""
    made = nn.Linear(1, 1)
    made.in_features, made.out_features = n, m
    made.weight, made.bias = nn.Parameter(torch.zeros(m, n)), nn.Parameter(torch.zeros(m))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("middle", [nn.Tanh(), nn.Sequential(_linear(0, 0), nn.ReLU())])
def test_weights_without_elements_train_beside_others(middle, dtype) -> None:
    """To C a width of nothing says that rows are added up, and it writes where there is nothing."""
    torch.manual_seed(0)
    into, out = _linear(3, 0).to(dtype), _linear(0, 2).to(dtype)
    before = out.bias.detach().clone()
    graph = gt.Graph()
    hidden = graph.input("x").through(into, name="into").through(middle.to(dtype), name="middle")
    hidden.through(out, name="out").loss(lambda y: (y - 1).square().sum(1))
    sgd = gt.Rules(
        optimizer=partial(torch.optim.SGD, lr=1.0), update_every=gt.Flush(), average="none"
    )
    data = [gt.Instance({"x": torch.randn(1, 3, dtype=dtype)}) for _ in range(5)]
    gt.Session(graph, rules=sgd, runtime=gt.Threads(1)).fit(data, epochs=1)
    assert_close(before - out.bias.detach(), 10 * (before - 1))


@pytest.mark.parametrize("shape", [(), (4,)])
def test_rows_without_elements_go_back_whatever_their_shape(shape: tuple[int, ...]) -> None:
    table, out = nn.Embedding.from_pretrained(torch.zeros(5, 0), freeze=False), _linear(0, 2)
    graph = gt.Graph()
    words = graph.input("x").through(table, name="table").through(_linear(0, 0), name="middle")
    words.through(out, name="out").loss(lambda y: (y - 1).square().flatten(1).sum(1))
    sgd = gt.Rules(
        optimizer=partial(torch.optim.SGD, lr=1.0), update_every=gt.Flush(), average="none"
    )
    data = [gt.Instance({"x": torch.ones(1, *shape, dtype=torch.int64)}) for _ in range(5)]
    gt.Session(graph, rules=sgd, runtime=gt.Threads(1)).fit(data, epochs=1)
    assert_close(out.bias.detach(), torch.full((2,), 10.0 * torch.Size(shape).numel()))


def test_gradients_without_elements_are_not_for_c() -> None:
    rows, empty = torch.randn(4, 3), torch.zeros(3, 0)
    assert not sums.suits(sums.Unsummed(empty, False, [rows], [torch.zeros(4, 0)]), torch.float32)
    for call in (RowsToLearn(torch.float32), sums.GradientCall(torch.float32)):
        assert not call.may_add(sums.GradientPlace(empty), 4)


@pytest.mark.usefixtures("needs_kernels")
def test_what_lies_somewhere_is_added_where_the_sum_is_now_also_after_another_was_taken_in() -> (
    None
):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(5, 3))
    into, other = GradientSum([weight]), GradientSum([weight])
    left, right = torch.randn(200, 5), torch.randn(200, 3)
    piece = left.data_ptr(), right.data_ptr(), 200
    want = left.T @ right
    for times in (1, 2):
        for one in (into, other, into):
            call, slot = sums.GradientCall(torch.float32), one.slot(weight)
            assert slot.place().at == slot.written().data_ptr()
            assert slot.place() is slot.place()
            call.add(slot.place(), [piece], add=not slot.fresh)
            slot.fresh = False
            call.run()
        another, its = deepcopy((into, weight))
        copied = another.slot(its)
        assert copied.place().at == copied.written().data_ptr() != into.slot(weight).place().at
        found = into.take(weight)
        assert found is not None
        assert_close(found, 2 * want, rtol=1e-4, atol=1e-4)
        into.absorb(other)  # buffers are exchanged
        assert into.slot(weight).place().at != other.slot(weight).place().at
        found = into.take(weight)
        assert found is not None
        assert_close(found, want, rtol=1e-4, atol=1e-4, msg=f"turn {times}")
