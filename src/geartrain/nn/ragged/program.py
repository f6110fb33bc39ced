"""Calls of a ragged cut: what goes where, forward and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.errors import ProtocolError
from geartrain.frames.message import Gradient, IntArray, Payload
from geartrain.native.fused import packed
from geartrain.native.steady import firing
from geartrain.nn.program import Operands
from geartrain.nn.ragged.cut import RaggedCut, RaggedRoutine, RaggedTerm, Tensors
from geartrain.nn.ragged.values import Buffer
from geartrain.nodes.gradient import GradientSum

@final
@dataclass(frozen=True, slots=True)
class RaggedCall:
    """What a call is given.

    Args:
        sizes: Bundles, their members, edges, rows of a memory.
        inputs: By number; None: a tensor of a memory, or a mask.
        ends: int64 ``(bundles + 1,)``, where bundles begin and end.
        cells: int64 ``(members,)``, where they lie in a memory, or None.
        held: By input, the memory's tensors.
        counted: Kind of the rows that updates are told for, and the owner of each row of another
            kind among them, by kind.
    """

    sizes: tuple[int, int, int, int]
    inputs: Sequence[Tensor | None]
    ends: IntArray
    cells: IntArray | None
    held: dict[int, Tensor]
    counted: tuple[int, Callable[[int], IntArray]]


@final
@dataclass(frozen=True, slots=True)
class RaggedKept:
    """What a call has left for its way back.

    Args:
        call: It.
        ints, floats: Row numbers that were counted, and the same as floats.
        residuals: Side by side.
        seen: Of the weights.
    """

    call: RaggedCall
    ints: tuple[Tensor, ...]
    floats: dict[int, Tensor]
    residuals: Tensor
    seen: tuple[tuple[int, int], ...] = ()


@final
class RaggedProgram:
    """A cut and the operands that it is called with.

    Args:
        cut: What it does.
        operands: Of the function.
    """

    def __init__(self, cut: RaggedCut, operands: Operands) -> None:
        self._cut, self._operands = cut, operands
        self._like = torch.empty(0, dtype=cut.dtype)
        self._places = {node: k for k, node in enumerate(cut.ints)}
        self._firing, self._always = 0, {}  # type: int, dict[RaggedRoutine, tuple[list[int], Any]]
        self._plans: dict[RaggedRoutine, list[tuple[Buffer, int]]] = {}
        for routine in (cut.forward, cut.back, cut.without):
            steady = ("operand", "weight", "turned")
            self._plans[routine] = [
                (b, slot) for b, slot in routine.slots.items() if b.role not in steady
            ]
        self._widths = [(b, b.kind, b.entries) for b in cut.residuals]

    def forward(self, call: RaggedCall) -> tuple[Payload, RaggedKept]:
        """Outputs, and what ``backward`` wants.

        Raises:
            IndexError: A row is asked for that is not there.
        """
        cut, sizes = self._cut, call.sizes
        ints = cut.count(*call.inputs) if cut.ints else ()
        floats: dict[int, Tensor] = {}
        total = sum([entries * sizes[kind] for _, kind, entries in self._widths])
        kept = RaggedKept(call, ints, floats, self._like.new_empty(total))
        found = self._residuals(kept)
        outputs: list[Tensor] = []
        for y in cut.outputs:
            if isinstance(y, int):
                outputs.append(cast(Tensor, call.inputs[y]))
            else:
                made = found[y.buffer] = self._made(y, sizes)
                outputs.append(made)
        self._run(cut.forward, kept, found, {})
        return tuple(outputs), kept

    def backward(
        self,
        kept: RaggedKept,
        gradients: Gradient,
        into: GradientSum,
        sums: dict[int, Tensor] | None = None,
    ) -> Gradient:
        """Gradients of the inputs.

        Args:
            kept: What ``forward`` left.
            gradients: By output; None is zero.
            into: Gets the gradients of the parameters.
            sums: By input, what gets the gradients of a memory; None: nobody wants them.
        """
        cut, call = self._cut, kept.call
        came, dys = self._tangents(gradients, call.sizes)
        answers: list[Tensor | None] = [None] * len(call.inputs)
        for j, y in enumerate(cut.outputs):
            if isinstance(y, int) and gradients[j] is not None and j not in cut.tangents:
                raise ProtocolError("a gradient came for integers")
        if not came:
            return tuple(answers)
        found = self._residuals(kept)
        for t in cut.made:
            found[t.buffer] = self._made(t, call.sizes)
        numbers = {len(call.inputs) + k: d for k, d in enumerate(dys)}
        routine = cut.without if sums is None else cut.back
        self._run(routine, kept, found, numbers, sums or {})
        for i, (t, of) in cut.gradients.items():
            if of & came:
                answers[i] = self._shaped(t, kept, found, numbers)
        self._learn(kept, came, found, numbers, into)
        return tuple(answers)

    def touched(self, gradients: Gradient) -> list[bool]:
        """Of each tensor of a memory, whether it gets a gradient."""
        came = self._came(gradients)
        return [bool(of & came) for of in self._cut.held.values()]

    @property
    def held(self) -> Sequence[int]:
        """Inputs of a memory that have gradients."""
        return list(self._cut.held)

    def _came(self, gradients: Gradient) -> frozenset[int]:
        some = enumerate(self._cut.tangents)
        return frozenset(k for k, j in some if gradients[j] is not None)

    def _tangents(
        self, gradients: Gradient, sizes: Sequence[int]
    ) -> tuple[frozenset[int], list[Tensor]]:
        """Which came, and all, with zeros in place of the others."""
        found = []
        for j in self._cut.tangents:
            d, y = gradients[j], self._cut.outputs[j]
            if d is None:
                if isinstance(y, int):
                    raise ProtocolError("an output that is an input has no gradient by itself")
                d = self._like.new_zeros((sizes[y.buffer.kind], *y.tail))
            found.append(d)
        return self._came(gradients), found

    def _made(self, t: Tensors, sizes: Sequence[int]) -> Tensor:
        buffer = t.buffer
        n = sizes[buffer.kind]
        rows = n * buffer.entries // max(int(np.prod(t.tail)), 1)
        return self._like.new_empty((rows, *t.tail))

    def _residuals(self, kept: RaggedKept) -> dict[Buffer, Tensor]:
        found, at = {}, 0
        for buffer, kind, entries in self._widths:
            n = entries * kept.call.sizes[kind]
            found[buffer] = kept.residuals[at : at + n]
            at += n
        return found

    def _shaped(
        self,
        t: Tensors,
        kept: RaggedKept,
        found: dict[Buffer, Tensor],
        numbers: dict[int, Tensor],
    ) -> Tensor:
        buffer = t.buffer
        x = found.get(buffer)
        if x is None:
            x = numbers.get(buffer.number)
            x = cast(Tensor, kept.call.inputs[buffer.number]) if x is None else x
        return x.reshape(-1, *t.tail)

    def _run(
        self,
        routine: RaggedRoutine,
        kept: RaggedKept,
        found: dict[Buffer, Tensor],
        numbers: dict[int, Tensor],
        sums: dict[int, Tensor] | None = None,
    ) -> None:
        call, dtype = kept.call, self._cut.dtype
        addresses = self._operand_addresses(routine).copy()
        held: list[Tensor] = []
        for buffer, slot in self._plans[routine]:
            role = buffer.role
            if role == "room":
                addresses[slot] = found[buffer].data_ptr()
            elif role == "given":
                k = buffer.number
                x = numbers[k] if k >= len(call.inputs) else call.inputs[k]
                n = call.sizes[buffer.kind] * buffer.entries
                if x is None or x.dtype is not dtype or x.numel() != n:
                    raise ProtocolError(f"a tensor of {n} numbers of {dtype} was expected")
                if not x.is_contiguous():
                    x = x.contiguous()
                    held.append(x)
                addresses[slot] = x.data_ptr()
            elif role == "ints":
                x = kept.ints[self._places[cast(Any, buffer.node)]]
                if x.numel() != call.sizes[buffer.kind] * buffer.entries:
                    raise ProtocolError("as many row numbers as rows were expected")
                if not x.is_contiguous():
                    x = x.contiguous()
                    held.append(x)
                addresses[slot] = x.data_ptr()
            elif role == "as_float":
                at = self._places[cast(Any, buffer.node)]
                if at not in kept.floats:
                    kept.floats[at] = kept.ints[at].to(dtype).contiguous()
                addresses[slot] = kept.floats[at].data_ptr()
            elif role == "ends":
                addresses[slot] = call.ends.ctypes.data
            elif role == "cells":
                addresses[slot] = cast(IntArray, call.cells).ctypes.data
            else:
                x = call.held[buffer.number] if role == "held" else (sums or {})[buffer.number]
                if x.dtype is not dtype or not x.is_contiguous():
                    raise ProtocolError(f"a memory of {dtype} was expected")
                addresses[slot] = x.data_ptr()
        routine.steps.run(call.sizes, addresses)

    def _operand_addresses(self, routine: RaggedRoutine) -> list[int]:
        """Where weights lie, for the length of a firing."""
        number = firing.number
        if number != self._firing or not number:
            self._always, self._firing = {}, number
        known = self._always.get(routine)
        if known is None:
            operands, found, held = self._operands.tensors(), [0] * routine.size, []
            for buffer, slot in routine.slots.items():
                if buffer.role == "operand":
                    held.append(operands[buffer.number].contiguous())
                elif buffer.role in ("weight", "turned"):
                    turned = buffer.role == "turned"
                    held.append(packed(operands[buffer.number].contiguous(), turned=turned))
                else:
                    continue
                if held[-1].dtype is not self._cut.dtype:
                    raise ProtocolError(f"a weight is {held[-1].dtype}, and was {self._cut.dtype}")
                found[slot] = held[-1].data_ptr()
            known = self._always[routine] = found, held
        return known[0]

    def _learn(
        self,
        kept: RaggedKept,
        came: frozenset[int],
        found: dict[Buffer, Tensor],
        numbers: dict[int, Tensor],
        into: GradientSum,
    ) -> None:
        """Add what the way back has found for the weights."""
        operands, call = self._operands.tensors(), kept.call
        several = None
        if into.of_several:
            kind, owners = call.counted
            several = into.updates_of(call.sizes[kind])
        for term in self._cut.terms:
            parameter = operands[term.operand]
            if not term.tangents & came or not parameter.requires_grad:
                continue
            tensors = [self._shaped(t, kept, found, numbers) for t in term.tensors]
            kind = term.tensors[0].buffer.kind
            if several is None or kind == call.counted[0]:
                self._add(term, cast(nn.Parameter, parameter), tensors, kept, into)
                continue
            each = several[call.counted[1](kind)]
            with into.of_updates(each):
                self._add(term, cast(nn.Parameter, parameter), tensors, kept, into)

    def _add(
        self,
        term: RaggedTerm,
        parameter: nn.Parameter,
        tensors: Sequence[Tensor],
        kept: RaggedKept,
        into: GradientSum,
    ) -> None:
        if term.how == "product":
            into.add_product(parameter, tensors[0], tensors[1])
        elif term.how == "sum":
            into.add_sum(parameter, tensors[0])
        else:
            rows, ids = tensors[0], kept.ints[self._places[cast(Any, term.index)]]
            if term.padding >= 0:
                rows = rows.masked_fill((ids == term.padding)[:, None], 0.0)
            if self._operands.sparse[term.operand]:
                into.add_rows(parameter, ids, rows)
            else:
                into.add_at(parameter, ids, rows)

