"""A function and its gradient, recorded as one graph.

``torch.func.vjp`` under ``functionalize`` gives it: documented functions of torch that exist since
2.0, while the compilers' own partitioners and symbolic shapes are internal and change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from geartrain.derived.traces.counted import Function
from geartrain.derived.traces.indexed import RowsOfTables
from geartrain.derived.traces.record import Trace, record
from geartrain.nodes.call import differentiate


def trace(
    function: Function,
    operands: Sequence[Tensor],
    learns: Sequence[bool],
    inputs: Sequence[Tensor],
    tangents: Sequence[Tensor],
    *,
    composed: bool = False,
    windows: bool = True,
    lengths: int | None = None,
) -> Trace:
    """A function and its gradient; ``composed`` and ``windows`` as of ``record``; ``lengths`` too,
    among the inputs."""
    floats = [x.is_floating_point() for x in inputs]

    def joint(*flat: Tensor) -> list[Tensor]:
        theta, xs = flat[: len(operands)], flat[len(operands) :][: len(inputs)]
        dys = flat[len(operands) + len(inputs) :]

        def outputs(learned: list[Tensor], real: list[Tensor]) -> tuple[Any, Any]:
            # Copies, as autograd lets nobody write into a leaf; the graph loses them again.
            own = [x.clone() for x in _merged(xs, floats, real)]
            given = _merged(theta, learns, learned)
            with RowsOfTables(given, rows=not composed):
                ys = function(given, own)
            floating = tuple(y for y in ys if y.is_floating_point())
            # Here and not by what ``vjp`` returns: that imports a compiler, for a second or two.
            found = differentiate(floating, dys, [*learned, *real])
            wanted = zip([*learned, *real], found, strict=True)
            return floating, (ys, [torch.zeros_like(x) if d is None else d for x, d in wanted])

        found: tuple[Any, ...] = torch.func.vjp(
            outputs, _selected(theta, learns), _selected(xs, floats), has_aux=True
        )
        ys, gradients = found[2]
        return [*ys, *gradients]

    given = [*operands, *inputs, *tangents]
    whole = torch.func.functionalize(joint)
    at = None if lengths is None else len(operands) + lengths
    return record(whole, given, composed=composed, windows=windows, lengths=at)


def _merged(all_: Sequence[Tensor], which: Sequence[bool], own: Iterable[Tensor]) -> list[Tensor]:
    """``all_`` with those of ``which`` replaced by ``own``, in order."""
    given = iter(own)
    return [next(given) if yes else x for x, yes in zip(all_, which, strict=True)]


def _selected(all_: Sequence[Tensor], which: Sequence[bool]) -> list[Tensor]:
    return [x for x, yes in zip(all_, which, strict=True) if yes]
