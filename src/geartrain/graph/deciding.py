"""Whether a function that decides where rows go, or how many they are, looks at their payload."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from types import CodeType

import numpy as np

from geartrain.graph.operator import AbstractOperator
from geartrain.graph.operators import Flatmapping, Moving, Routing


def functions_of(operator: AbstractOperator) -> list[object]:
    """The functions by which an operator decides which way rows go, and how many."""
    if isinstance(operator, Routing):
        return [operator.choose]
    if isinstance(operator, Moving):
        return list(operator.fields.values())
    return [operator.count] if isinstance(operator, Flatmapping) else []


def reads_payload(function: object) -> bool:
    """Whether a function of a ``View`` asks for its payload, as far as that can be seen."""
    while isinstance(function, partial):
        function = function.func
    if not callable(function):
        return False
    if not hasattr(function, "__code__"):
        function = function.__call__
    code = getattr(function, "__code__", None)
    if code is not None and _names_payload(code):
        return True
    asked = _Asked()
    with suppress(Exception):  # it wants real values; only what it asks for is of interest
        function(asked)
    return asked._payload


def _names_payload(code: CodeType) -> bool:
    inner = (c for c in code.co_consts if isinstance(c, CodeType))
    return "payload" in (*code.co_names, *code.co_consts) or any(map(_names_payload, inner))


class _Asked:
    """Answers every column with zeros, and knows whether the payload was among them."""

    _payload = False

    def __len__(self) -> int:
        return 3

    def __getattr__(self, name: str) -> object:
        if name in ("payload", "lengths"):
            self._payload = True
        return np.zeros(3, np.int64)
