"""How a node calls its module, and how it reads what comes back.

batch ─► payload that it takes, columns that it reads, inside of bundles ─► module ─► payload
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, final

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.device import upload
from geartrain.errors import GraphError
from geartrain.frames.message import (
    Backward,
    Forward,
    Gradient,
    IntArray,
    Payload,
    device_of,
    join_columns,
)
from geartrain.nodes.inside import Inside
from geartrain.nodes.node import Place
from geartrain.nodes.weights import AbstractWeights

B = TypeVar("B", Forward, Backward)


@final
@dataclass(frozen=True, slots=True)
class Call:
    """How a node calls its module.

    Args:
        function: The module, or any function of rows.
        read: Frame or state columns given to it after the payload, as tensors.
        inside: Whether it gets an ``Inside`` as its last argument.
        pool: Whether it makes one row of every bundle.
        take: The payload tensors that it gets; None: all.
        alone: Whether it gets one message at a time.
        dry_run: What is known of it by trying it; None: there is nothing to be found out.
    """

    function: Callable[..., Any]
    read: tuple[str, ...] = ()
    inside: bool = False
    pool: bool = False
    take: tuple[int, ...] | None = None
    alone: bool = False
    dry_run: AbstractDryRun | None = None

    def taken(self, width: int) -> tuple[int, ...] | range:
        """Of so many payload tensors, those that the module gets."""
        return range(width) if self.take is None else self.take

    def answer(self, gradient: Gradient, width: int) -> Gradient:
        """Gradients of the module's arguments as those of so many payload tensors."""
        if self.take is None:
            return gradient[:width]
        found = dict(zip(self.take, gradient, strict=False))
        return tuple(found.get(j) for j in range(width))


class AbstractDryRun(Protocol):
    """What is known of a function by trying it; ``graph.dry_run`` has it.

    Attributes:
        settled: Whether nothing is left to be found out.
    """

    settled: bool

    def look(
        self,
        call: Call,
        place: Place,
        inputs: Payload,
        state: IntArray,
        lengths: IntArray | None,
        device: torch.device | None,
    ) -> None:
        """Try it on real rows, if there are enough of them; see ``graph.dry_run.DryRun.look``."""


def unsettled(call: Call) -> AbstractDryRun | None:
    """The dry run of a function of which something is still to be found out."""
    return None if call.dry_run is None or call.dry_run.settled else call.dry_run


def where_it_computes(
    call: Call, weights: AbstractWeights | None, batches: Sequence[Forward]
) -> torch.device:
    """The device that a node computes on."""
    return where_its_tensors_lie(call.function, weights) or device_of(batches)


def where_its_tensors_lie(
    function: Callable[..., Any], weights: AbstractWeights | None
) -> torch.device | None:
    """The device of a module's weights, or its buffers; None: it has neither."""
    if weights is not None:
        return weights.device
    buffer = next(function.buffers(), None) if isinstance(function, nn.Module) else None
    return None if buffer is None else buffer.device


def gather_inputs(
    call: Call,
    place: Place,
    batches: Sequence[Forward],
    state: IntArray,
    lengths: IntArray | None,
    in_place: Mapping[int, Tensor],
    device: torch.device | None,
) -> Payload:
    """The arguments of a call: payload tensors that it takes, then columns that it reads.

    Args:
        call: The call.
        place: Of the node.
        batches: Whose rows are joined.
        state, lengths: Theirs, joined.
        in_place: Memory for the arguments that shall lie there, by number.
        device: Where they are to be; None: all are on the host.
    """
    taken = call.taken(len(batches[0].payload))
    inputs = list(
        join_columns(
            [[(b.payload[j], b.index) for b in batches] for j in taken],
            [in_place.get(i) for i in range(len(taken))],
            device,
        )
    )
    for j, column in enumerate(read_columns(call, place, state, lengths, device), len(inputs)):
        out = in_place.get(j)
        inputs.append(column if out is None else out.copy_(column))
    return tuple(inputs)


def require_rows(name: str, outputs: Payload, n: int) -> None:
    """Raises:
    GraphError: An output of the node has not n rows.
    """
    for j, y in enumerate(outputs):
        if y.shape[:1] != (n,):
            raise GraphError(
                f"'{name}': output {j} has shape {tuple(y.shape)} for {n} rows; a module maps rows "
                "to rows, leading dimension first, and with pool=True each bundle to one"
            )


def read_columns(
    call: Call,
    place: Place,
    state: IntArray,
    lengths: IntArray | None,
    device: torch.device | None,
) -> list[Tensor]:
    """The columns that a module reads, one entry a payload row.

    They are on the device, but for a module with ``reads_on_host``, which decides by them what it
    computes: that one has them on the host, where they were, and waits for nothing.
    """
    if not call.read:
        return []
    if device is not None and getattr(call.function, "reads_on_host", False):
        device = None
    view = place.row_view(state, lengths)
    return [upload(getattr(view, name), device) for name in call.read]


def one_by_one(batches: Sequence[B]) -> Iterator[B]:
    """Every message as a batch of its own."""
    for batch in batches:
        if len(batch) == 1:
            yield batch
        else:
            yield from (batch.take(np.array([i], np.int64)) for i in range(len(batch)))


def as_payload(outputs: object) -> Payload:
    """What a module returned, as a tuple of tensors.

    Raises:
        GraphError: It returned something else.
    """
    if isinstance(outputs, Tensor):
        return (outputs,)
    if isinstance(outputs, (tuple, list)) and all(isinstance(y, Tensor) for y in outputs):
        return tuple(outputs)
    told = type(outputs).__name__
    if isinstance(outputs, (tuple, list)):
        at, other = next((k, y) for k, y in enumerate(outputs) if not isinstance(y, Tensor))
        told += f" that holds {type(other).__name__} at {at}"
    raise GraphError(
        f"a module returned {told}; it must return a tensor or a tuple of tensors, each with one "
        "row for every row that came in: return h, c for return h, (h, c), and for a dict its "
        "values"
    )


def own_integers(outputs: Payload) -> Payload:
    """The outputs of a user's function, integers copied.

    They may become places in memory further on, and a function may write over what it has returned.
    """
    if all(y.is_floating_point() for y in outputs):
        return outputs
    return tuple(y if y.is_floating_point() else y.clone() for y in outputs)


def run_module(
    function: Callable[..., Any], inputs: Sequence[Tensor], inside: Inside | None
) -> object:
    args = arguments(function, inputs)
    return function(*args) if inside is None else function(*args, inside)


def arguments(function: Callable[..., Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments as the function has them: ``nn.LSTMCell`` takes its two states as a pair."""
    if isinstance(function, nn.LSTMCell) and len(inputs) == 3:
        return inputs[0], tuple(inputs[1:])
    return tuple(inputs)


def differentiate(
    outputs: Payload, gradients: Gradient, wanted: Sequence[Tensor], *, retain: bool = False
) -> tuple[Tensor | None, ...]:
    """Vector-Jacobian product; None for what the outputs do not depend on."""
    pairs = [
        (y, g) for y, g in zip(outputs, gradients, strict=True) if g is not None and y.requires_grad
    ]
    if not pairs or not wanted:
        return (None,) * len(wanted)
    ys, gs = zip(*pairs, strict=True)
    if _ENGINE is None:
        return torch.autograd.grad(ys, wanted, gs, retain_graph=retain, allow_unused=True)
    # As torch asks it, whose look at shapes imports a library for symbols, and takes as long.
    found: tuple[Tensor | None, ...] = _ENGINE.run_backward(
        ys, gs, retain, False, tuple(wanted), True, accumulate_grad=False
    )
    return found


_ENGINE: Final[Any] = getattr(torch.autograd.Variable, "_execution_engine", None)
