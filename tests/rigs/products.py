"""Several parameters without all their products: cases in which any two values meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def in_pairs(**axes: Sequence[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """``pytest.mark.parametrize`` of so many cases that any two values of two parameters meet.

    Args:
        axes: Values of each parameter, or names and values.
    """
    named = [_named(axis) for axis in axes.values()]
    cases = covering([len(axis) for axis in named])
    return pytest.mark.parametrize(
        tuple(axes),
        [
            pytest.param(
                *(axis[k][1] for axis, k in zip(named, case, strict=True)),
                id="-".join(axis[k][0] for axis, k in zip(named, case, strict=True)),
            )
            for case in cases
        ],
    )


def halved(**axes: Sequence[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """``pytest.mark.parametrize`` of all products, of which every other case is slow.

    As the black squares of a board, so that each value of each parameter is in a case that is not.

    Args:
        axes: Values of each parameter, or names and values.
    """
    every = [_named(axis) for axis in axes.values()]
    return pytest.mark.parametrize(
        tuple(axes),
        [
            pytest.param(
                *(value for _, (_, value) in case),
                id="-".join(name for _, (name, _) in case),
                marks=[pytest.mark.slow] * (sum(number for number, _ in case) % 2),
            )
            for case in product(*map(enumerate, every))
        ],
    )


def covering(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Rows of numbers below ``sizes``, chosen one by one for the most pairs that are new."""
    every = [*product(*map(range, sizes))]
    if len(sizes) < 3:
        return every
    left = {pair for case in every for pair in _pairs(case)}
    chosen: list[tuple[int, ...]] = []
    while left:
        best = max(every, key=lambda case: len(left.intersection(_pairs(case))))
        left.difference_update(_pairs(best))
        chosen.append(best)
    return chosen


def _named(axis: Sequence[Any] | Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [*axis.items()] if isinstance(axis, Mapping) else [(str(each), each) for each in axis]


def _pairs(case: Sequence[int]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    return [*combinations(enumerate(case), 2)]
