"""How often a worker that has work looks for messages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from geartrain.runtime.processes.child import _Work
from geartrain.runtime.processes.looks import RARELY_S, SOON_S, Looks


def waits(looks: Looks, now_s: float) -> float:
    """Milliseconds from now on until it is due, in steps of half of one."""
    steps = 0
    while not looks.due(now_s + steps * 0.0005):
        steps += 1
    return steps / 2


def test_who_finds_nothing_looks_twice_as_rarely_each_time_down_to_a_bound() -> None:
    looks, found = Looks(), []
    assert looks.due(1.0)
    for _ in range(5):
        looks.looked(0.0, wants=False)
        found.append(waits(looks, 0.0))
    assert found == [4, 8, 16, 16, 16] and RARELY_S == 0.016


def test_who_has_found_something_or_wants_more_looks_again_at_once_or_nearly() -> None:
    looks = Looks()
    for _ in range(4):
        looks.looked(0.0, wants=False)
    looks.looked(0.0, wants=True)
    assert waits(looks, 0.0) == 2 and SOON_S == 0.002
    looks.looked(0.0, wants=False)
    assert waits(looks, 0.0) == 4


@pytest.mark.parametrize(
    ("came", "waiting", "second"),
    [([], 3, 1.005), ([], 0, 1.003), ([(0, "record")], 3, 1.003)],
    ids=["nothing", "its stock is used up", "something"],
)
def test_a_worker_that_has_work_polls_when_a_look_is_due(
    came: list[Any], waiting: int, second: float
) -> None:
    now, polled, read = [0.0], list[float](), list[float]()
    worker: Any = SimpleNamespace(
        _pace=SimpleNamespace(
            now=lambda: read.append(now[0]) or now[0], reached=lambda due: due(now[0])
        ),
        transport=SimpleNamespace(poll=lambda: polled.append(now[0]) or came),
        _state=SimpleNamespace(ready=True),
        _stock=SimpleNamespace(waiting=waiting),
        _looks=Looks(),
        _had=[0],
        _over=False,
        _take=lambda _, works: None,
    )
    for now[0] in (1.0, 1.001, 1.003, 1.005):
        _Work._hear(worker)
    assert polled[:2] == [1.0, second] and read == polled
    worker._looks = None  # it waits for rows of others
    _Work._hear(worker)
    _Work._hear(worker)
    assert polled[-2:] == [1.005, 1.005]
