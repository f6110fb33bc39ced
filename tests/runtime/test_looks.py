"""How often a worker that has work looks for messages."""

from __future__ import annotations

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
