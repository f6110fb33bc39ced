"""Recurrent layers of torch over rows that are short sequences, told as cells, step after step.

    gru(x (n, t, d), h (1, n, e), weights)  ─►  x W, once;  t cells, each with the state before it

Such layers have states of which the first axis counts layers, and not rows (``layers.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor
from torch.nn import functional

from geartrain.derived.told.layers import Layers

MOST_STEPS: Final = 48
"""Cells of all layers, both ways, that a row is worth: every one has steps of its own."""
_State: TypeAlias = tuple[Tensor, ...] | None
"""What a cell has of the one before it; None: zeros."""
_Weights: TypeAlias = Sequence[Tensor | None]


# Cells: what of the input has met its weight, the state, its weight and bias.


def _met(state: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    return bias if state is None else functional.linear(state, weight, bias)


def _sum(a: Tensor, b: Tensor | None) -> Tensor:
    return a if b is None else a + b


def _gated(own: Tensor, state: _State, weight: Tensor, bias: Tensor | None) -> _State:
    """As of ``nn.GRU``."""
    h = None if state is None else state[0]
    had, size = _met(h, weight, bias), own.shape[-1] // 3
    if h is None and had is not None:
        had = own.new_zeros(own.shape) + had
    gates = _sum(own[..., : 2 * size], None if had is None else had[..., : 2 * size]).sigmoid()
    reset, update = gates[..., :size], gates[..., size:]
    new = own[..., 2 * size :]
    new = torch.tanh(new if had is None else new + reset * had[..., 2 * size :])
    return (new - update * new if h is None else new + update * (h - new),)


def _long_short(
    own: Tensor, state: _State, weight: Tensor, bias: Tensor | None, less: Tensor | None = None
) -> _State:
    """As of ``nn.LSTM``; a projection may make less of what it says."""
    h, c = (None, None) if state is None else state
    gates = _sum(own, _met(h, weight, bias))
    size = own.shape[-1] // 4
    into, forget, new, out = (gates[..., k * size : (k + 1) * size] for k in range(4))
    fresh = into.sigmoid() * new.tanh()
    c = fresh if c is None else forget.sigmoid() * c + fresh
    h = out.sigmoid() * c.tanh()
    return (h if less is None else functional.linear(h, less)), c


def _plain(bend: Callable[[Tensor], Tensor]) -> Callable[..., _State]:
    """As of ``nn.RNN``."""

    def cell(own: Tensor, state: _State, weight: Tensor, bias: Tensor | None) -> _State:
        h = None if state is None else state[0]
        return (bend(_sum(own, _met(h, weight, bias))),)

    return cell


def _nothing(x: Tensor, weight: Tensor, *, several: bool) -> _State:
    """Zeros for each row: their weight's gradient is nothing, but there is one."""
    h = x.new_zeros((x.shape[0], weight.shape[1]))
    return (h, x.new_zeros((x.shape[0], weight.shape[0] // 4))) if several else (h,)


@final
class _Recurrent:
    """A layer of torch by its cells."""

    def __init__(self, cell: Callable[..., _State], several: bool = False) -> None:
        self._cell, self._several = cell, several

    def __call__(
        self,
        layers: Layers,
        x: Tensor,
        hx: Any,
        weights: Any,
        has_biases: Any,
        num_layers: Any,
        dropout: Any,
        train: Any,
        bidirectional: Any,
        batch_first: Any,
    ) -> tuple[Tensor, ...] | None:
        plain = isinstance(weights, (list, tuple)) and type(has_biases) is bool and x.ndim == 3
        if not plain or not x.is_cpu:
            return None
        ways = 2 if bidirectional else 1
        x = x if batch_first else x.transpose(0, 1)
        if not 0 < x.shape[1] * num_layers * ways <= MOST_STEPS:
            return None
        each = len(weights) // (num_layers * ways)
        some = [weights[k : k + each] for k in range(0, len(weights), each)]
        before = self._states(layers, hx, len(some))
        after: list[Any] = []
        for layer in range(num_layers):
            if layer and dropout and train:
                x = functional.dropout(x, dropout)
            found = []
            for way in range(ways):
                k = layer * ways + way
                ys, last = self._along(x, before[k], some[k], has_biases, backwards=way > 0)
                found.append(torch.stack(ys, 1))
                after.append(last)
            x = found[0] if ways == 1 else torch.cat(found, 2)
        y = x if batch_first else x.transpose(0, 1)
        return y, *[layers.join(parts) for parts in zip(*after, strict=True)]

    def _states(self, layers: Layers, hx: Any, many: int) -> Sequence[_State]:
        given = tuple(hx) if self._several else (hx,)
        if all(layers.are_zero(h) for h in given):
            return [None] * many
        return list(zip(*[layers.parts(h) for h in given], strict=True))

    def _along(
        self, x: Tensor, state: _State, weights: _Weights, biased: bool, *, backwards: bool
    ) -> tuple[list[Tensor], _State]:
        """What comes of each step, in order, and the last state."""
        first, second, *rest = weights
        assert first is not None
        biases = rest[:2] if biased else [None, None]
        assert second is not None
        own = functional.linear(x, first, biases[0])
        if state is None and (backwards or x.shape[1] == 1):  # perhaps one step alone is read
            state = _nothing(x, second, several=self._several)
        found: dict[int, Tensor] = {}
        steps = range(x.shape[1])
        for k in reversed(steps) if backwards else steps:
            state = self._cell(own[:, k], state, second, biases[1], *rest[2 if biased else 0 :])
            assert state is not None
            found[k] = state[0]
        return [found[k] for k in steps], state


def _one_cell(cell: Callable[..., _State], several: bool = False) -> Callable[..., Any]:
    """A cell of torch that begins with zeros; else it has steps as it is."""

    def way(
        layers: Layers,
        x: Tensor,
        hx: Any,
        first: Tensor,
        second: Tensor,
        bias: Tensor | None = None,
        other: Tensor | None = None,
    ) -> Any:
        given = tuple(hx) if several else (hx,)
        if x.ndim != 2 or not all(layers.are_zero(h) for h in given):
            return None
        state = _nothing(x, second, several=several)
        found = cell(functional.linear(x, first, bias), state, second, other)
        assert found is not None
        return found if several else found[0]

    return way


UNROLLED: Final[Mapping[Any, Callable[..., Any]]] = {
    torch.gru: _Recurrent(_gated),
    torch.lstm: _Recurrent(_long_short, several=True),
    torch.rnn_tanh: _Recurrent(_plain(torch.tanh)),
    torch.rnn_relu: _Recurrent(_plain(torch.relu)),
    torch.gru_cell: _one_cell(_gated),
    torch.lstm_cell: _one_cell(_long_short, several=True),
    torch.rnn_tanh_cell: _one_cell(_plain(torch.tanh)),
    torch.rnn_relu_cell: _one_cell(_plain(torch.relu)),
}
"""What gives the same as a function of torch, of known layers; None, and it is that function's."""
