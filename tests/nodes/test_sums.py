"""Sums of losses: on the host at once, on a device read later; here a device is only said to be."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from geartrain.errors import NonFiniteError
from geartrain.frames.frame import Arena
from geartrain.nodes.sums import Sums
from tests.rigs.unheard import answer_late

SLOTS = np.arange(4)
COUNTS = np.array([True, False, True, True])


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_late(monkeypatch)


class Hidden(torch.Tensor):
    """Says of itself that it lies elsewhere."""

    is_cpu = False  # type: ignore[assignment]


def there(values: list[float] | torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(values).as_subclass(Hidden)


def empty() -> Sums:
    arena = Arena()
    arena.serial[:4], arena.keys[2] = [4, 5, 6, 7], "the third"
    return Sums("loss", arena)


@pytest.mark.parametrize("on_device", [False, True], ids=["mask on the host", "mask there"])
def test_sums_there_are_sums_here_whoever_knows_which_rows_count(on_device: bool) -> None:
    sums, here = empty(), empty()
    values, some = [1.0, 2.0, 3.0, 4.0], [1.0, torch.nan, 3.0, 4.0]
    mask = there(torch.from_numpy(COUNTS)) if on_device else COUNTS
    for _ in range(2):
        sums.add("loss", there(values), None, SLOTS, None)
        sums.add("some", there(some), mask, SLOTS, None)
        sums.ask(SLOTS, None)
        here.add("loss", torch.tensor(values), None, SLOTS, None)
        here.add("some", torch.tensor(some), COUNTS, SLOTS, None)
    assert here.peek() == sums.peek() == {"loss": (20.0, 8), "some": (16.0, 6)}
    assert sums.take() == {"loss": (20.0, 8), "some": (16.0, 6)}
    assert sums.take() == {}
    sums.check_finite()


@pytest.mark.parametrize("on_device", [False, True], ids=["mask on the host", "mask there"])
def test_a_nan_there_is_told_later_of_the_right_instance(on_device: bool) -> None:
    sums = empty()
    mask = there(torch.from_numpy(COUNTS)) if on_device else COUNTS
    sums.add("some", there([torch.nan] * 4), None, SLOTS, None)
    sums.forget()
    sums.add("some", there([1.0, torch.nan, torch.inf, 1.0]), mask, SLOTS, None)
    sums.ask(SLOTS, None)
    with pytest.raises(NonFiniteError, match=r"'loss': some is inf at .* instance 6 \(the third\)"):
        sums.check_finite()
    sums.check_finite()  # it is said once


def test_a_nan_here_is_told_at_once_of_the_right_instance() -> None:
    values = torch.tensor([1.0, torch.nan, torch.inf, 1.0])
    with pytest.raises(NonFiniteError, match=r"'loss': some is inf at .* instance 6 \(the third\)"):
        empty().add("some", values, COUNTS, SLOTS, None)


def test_a_nan_there_names_the_instance_though_it_has_ended() -> None:
    sums, lengths = empty(), np.array([2, 2])
    sums.add("loss", there([1.0, 2.0, 3.0, torch.inf]), None, np.array([1, 2]), lengths)
    sums.ask(np.array([1, 2]), lengths)
    sums._arena.serial[:] = -1
    sums._arena.keys[:] = None
    with pytest.raises(NonFiniteError, match=r"'loss': loss is inf at .* instance 6 \(the third\)"):
        sums.check_finite()


def test_a_sum_that_overflows_is_told_apart_from_a_value_that_does() -> None:
    with pytest.raises(NonFiniteError, match=r"sum of loss over 2 rows, up to 3e\+38 each, over"):
        empty().add("loss", torch.tensor([3e38, 3e38]), None, SLOTS[:2], None)


@pytest.mark.parametrize("make", [there, torch.tensor], ids=["there", "here"])
def test_a_loss_without_a_name_is_not_counted_but_has_to_be_finite(
    make: Callable[[list[float]], torch.Tensor],
) -> None:
    sums = empty()
    sums.add(None, make([1.0, 2.0, 3.0, 4.0]), None, SLOTS, None)
    sums.ask(SLOTS, None)
    sums.check_finite()
    assert sums.take() == {}
    with pytest.raises(NonFiniteError, match=r"'loss': loss is nan at .* instance 6 \(the third\)"):
        sums.add(None, make([1.0, 2.0, torch.nan, 4.0]), None, SLOTS, None)
        sums.ask(SLOTS, None)
        sums.check_finite()
