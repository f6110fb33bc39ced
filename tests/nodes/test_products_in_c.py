"""Gradients of weights of many rows: on one thread they are multiplied in C, whatever the rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from geartrain.native import operations, sums
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
            known = sums.may_sum(torch.float32) and len(wanted) == 2
            assert len(looked) == (0 if known else 1)
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
