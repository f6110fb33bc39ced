"""Nodes that run a module on rows (the paper's parameterised and plain transforms).

    forward   x  ─► y = f(x; θ)          keep residuals and return addresses in the row store
    backward  dy ─► dx = (∂f/∂x)ᵀ dy     gather the residuals of those rows, add (∂f/∂θ)ᵀ dy

What is kept decides the class: ``RowNode`` keeps a kernel's residuals (``keep="activations"``), or
the inputs alone and runs the module again (``keep="inputs"``: exact at the weights of now).
``GraphNode`` keeps autograd's own graph of one whole message (``keep="graph"``: exact at the
weights of then).

A node computes where its weights are: rows and gradients from other devices are copied there. One
without weights computes where its rows are.

Source: PPT and NPT of Gaunt et al. 2017, arXiv:1705.09786.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.errors import GraphError
from geartrain.ir.bundle import AbstractBundleKernel, Inside
from geartrain.ir.collector import allocate_ragged, release_ragged
from geartrain.ir.frame import edges_inside
from geartrain.ir.gradient import GradientSum
from geartrain.ir.kernel import AbstractRowKernel
from geartrain.ir.message import (
    INSTANCE,
    ROW_MASK,
    Backward,
    Forward,
    Gradient,
    IntArray,
    Payload,
    address,
    device_of,
    join_arrays,
    join_column,
    join_columns,
    join_gradient,
    join_lengths,
    join_origins,
    join_states,
    ranges,
)
from geartrain.ir.node import AbstractNode, Emission, Place
from geartrain.ir.products import GRAIN
from geartrain.ir.rows import RowStore
from geartrain.ir.weights import AbstractWeights
from geartrain.native.rows import take
from geartrain.native.transfer import upload

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
    """

    function: Callable[..., Any]
    read: tuple[str, ...] = ()
    inside: bool = False
    pool: bool = False
    take: tuple[int, ...] | None = None
    alone: bool = False

    def taken(self, width: int) -> tuple[int, ...] | range:
        """Of so many payload tensors, those that the module gets."""
        return range(width) if self.take is None else self.take

    def answer(self, gradient: Gradient, width: int) -> Gradient:
        """Gradients of the module's arguments as those of so many payload tensors."""
        if self.take is None:
            return gradient[:width]
        found = dict(zip(self.take, gradient, strict=False))
        return tuple(found.get(j) for j in range(width))


@final
class Recompute:
    """A kernel for any module: keeps the inputs, and runs the module again for the gradient.

    The gradient is exactly that of f at today's weights for that input, whatever weights made the
    output. Inputs of integers get none.
    """

    def __init__(self, function: Callable[..., Any], parameters: Sequence[nn.Parameter]) -> None:
        self._function = function
        self._parameters = [p for p in parameters if p.requires_grad]

    def forward(self, *inputs: Tensor, inside: Inside | None = None) -> tuple[Payload, Payload]:
        with torch.no_grad():
            return as_payload(_call(self._function, inputs, inside)), inputs

    def backward(
        self,
        gradients: Gradient,
        residuals: Payload,
        into: GradientSum | None,
        inside: Inside | None = None,
    ) -> Gradient:
        # Run f again rather than keep its graph: an optimiser step in between would make a kept
        # graph raise, and one through ``.data`` would silently mix old activations with the new θ.
        inputs = [x.detach().requires_grad_() if x.is_floating_point() else x for x in residuals]
        with torch.enable_grad():
            outputs = as_payload(_call(self._function, inputs, inside))
        wanted = [x for x in inputs if x.requires_grad]
        found = _differentiate(outputs, gradients, [*wanted, *self._parameters])
        if into is not None:
            for parameter, d in zip(self._parameters, found[len(wanted) :], strict=True):
                if d is not None:
                    into.add(parameter, d)
        answers = iter(found[: len(wanted)])
        return tuple(next(answers) if x.requires_grad else None for x in inputs)


@final
class RowNode(AbstractNode):
    """Run a module on rows that may come back apart.

    Args:
        place: Number, name, frames.
        call: The module and how it is called.
        kernel: Computes it: a hand-written kernel (one for bundles if the call looks inside), or
            ``Recompute``.
        weights: The part, or None where there are no parameters.
    """

    def __init__(
        self,
        place: Place,
        call: Call,
        kernel: AbstractRowKernel | AbstractBundleKernel | Recompute,
        weights: AbstractWeights | None,
    ) -> None:
        super().__init__(place)
        self._call, self._kernel, self._weights = call, kernel, weights
        self.alone = call.alone
        self.part_name = None if weights is None else weights.name
        self._rows = RowStore(place.name, ("origin", "version", "start", "length", "instance"))
        self._cells: RowStore | None = None
        self._width = 1
        self._device: torch.device | None = None  # None: the host, and so is everything
        self._kept_input: dict[int, int] = {}  # residual j is input i itself: joined in place

    def forward(self, port: int, batches: Sequence[Forward], train: bool) -> Emission:
        state, origin = join_states(batches), join_origins(batches)
        lengths = join_lengths(batches)
        if self.place.spread:
            self._device = where_it_computes(self._call, self._weights, batches)
        inside = self._inside(state[INSTANCE], lengths) if self._call.inside else None
        if not train:
            inputs = self._inputs(batches, state, lengths, {})
            outputs, _ = self._run(inputs, inside)
            return self._emit(outputs, state, origin, lengths)
        n = origin.size
        start = self._rows.allocate(n)
        store, end = self._rows, start + n
        store["origin"][start:end] = origin
        if self._weights is not None:
            store["version"][start:end] = self._weights.version
            self._weights.sent(n)
        if self._call.inside:
            store["instance"][start:end] = state[INSTANCE]
        buffers, first, total = self._rows, start, n
        if lengths is not None:
            buffers = self._cells = self._cells or RowStore(f"{self.name} payload", ())
            starts = allocate_ragged(buffers, lengths)
            total = int(lengths.sum())
            first = int(starts[0])
            store["start"][start:end], store["length"][start:end] = starts, lengths
        taken = self._call.taken(len(batches[0].payload))
        in_place = {
            i: kept[first : first + total]
            for i, j in self._kept_input.items()
            if (kept := buffers.existing(j)) is not None
            and (i >= len(taken) or _fits(kept, batches, taken[i]))
        }
        inputs = self._inputs(batches, state, lengths, in_place)
        room = self._room(buffers, first, total)
        outputs, residuals = self._run(inputs, inside, room)
        if in_place:  # a function may return its very input: rows of the store are for this node
            stored = {x.untyped_storage().data_ptr() for x in in_place.values()}
            outputs = tuple(
                y.clone() if y.untyped_storage().data_ptr() in stored else y for y in outputs
            )
        for j, residual in enumerate(residuals):
            if residual is room:
                continue
            i = next((i for i, x in enumerate(inputs) if x is residual), None)
            if i is not None and i in in_place and self._kept_input.get(i) == j:
                continue
            buffers.buffer(j, residual)[first : first + total] = residual
            if i is not None:
                self._kept_input.setdefault(i, j)
        return self._emit(outputs, state, address(self.id, start, n), lengths)

    def backward(self, batches: Sequence[Backward]) -> Emission:
        emission = Emission()
        zero = [b.rows for b in batches if b.gradient is None]
        some = [b for b in batches if b.gradient is not None]
        if zero:
            self._answer_zero(join_arrays(zero) & ROW_MASK, emission)
        if not some:
            return emission
        rows = join_arrays([b.rows for b in some]) & ROW_MASK
        store = self._rows
        origin, versions = store["origin"][rows], store["version"][rows]
        lengths, cells, inside = None, rows, None
        if self._cells is not None:
            lengths = store["length"][rows]
            cells = ranges(store["start"][rows], lengths)
        if self._call.inside:
            inside = self._inside(store["instance"][rows], lengths)
        gradient = self._back(join_gradient(some, self._device), cells, inside)
        if self._weights is not None:
            self._weights.received(cells.size, versions, lengths)
        self._release(rows)
        gradient = self._call.answer(gradient, self._width)
        quiet = all(g is None for g in gradient)
        emission.backward.append(
            Backward(origin, None) if quiet else Backward(origin, gradient, lengths)
        )
        return emission

    @property
    def bundled(self) -> bool:
        return self._cells is not None

    @property
    def grain(self) -> int:
        return 1 if self._weights is None or self._cells is not None else GRAIN

    def check_empty(self) -> None:
        self._rows.check_empty()

    def story(self) -> list[str]:
        n = self._rows.waiting
        return [f"'{self.name}' waits for the gradients of {n} rows"] if n else []

    def nbytes(self) -> int:
        return (self._cells or self._rows).nbytes()

    def _inputs(
        self,
        batches: Sequence[Forward],
        state: IntArray,
        lengths: IntArray | None,
        in_place: Mapping[int, Tensor],
    ) -> Payload:
        self._width = len(batches[0].payload)
        return gather_inputs(
            self._call, self.place, batches, state, lengths, in_place, self._device
        )

    def _run(
        self, inputs: Payload, inside: Inside | None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        if isinstance(self._kernel, Recompute):
            return self._kernel.forward(*inputs, inside=inside)
        with torch.no_grad():
            if isinstance(self._kernel, AbstractBundleKernel):
                assert inside is not None
                return self._kernel.forward(*inputs, inside=inside, room=room)
            if room is not None:
                return self._kernel.forward_with_room(room, *inputs)
            return self._kernel.forward(*inputs)

    def _room(self, buffers: RowStore, first: int, total: int) -> Tensor | None:
        """Where in the store the kernel may write its residual."""
        if isinstance(self._kernel, Recompute) or self._kernel.room_for is None:
            return None
        buffer = buffers.existing(self._kernel.room_for)
        return None if buffer is None else buffer[first : first + total]

    def _back(self, gradient: Gradient, cells: IntArray, inside: Inside | None) -> Gradient:
        into = None if self._weights is None else self._weights.gradient
        kept = (self._cells or self._rows).buffers()
        if isinstance(self._kernel, Recompute):
            return self._kernel.backward(gradient, take(kept, cells), into, inside)
        into = into or GradientSum(())
        with torch.no_grad():
            if isinstance(self._kernel, AbstractBundleKernel):
                assert inside is not None
                return self._kernel.backward(gradient, take(kept, cells), into, inside)
            return self._kernel.backward_rows(gradient, kept, cells, into)

    def _emit(
        self, outputs: Payload, state: IntArray, origin: IntArray, lengths: IntArray | None
    ) -> Emission:
        if self._call.pool:
            lengths = None
        require_rows(self.name, outputs, origin.size if lengths is None else int(lengths.sum()))
        return Emission([(0, Forward(outputs, state, origin, lengths))])

    def _answer_zero(self, rows: IntArray, emission: Emission) -> None:
        emission.backward.append(Backward(self._rows["origin"][rows], None))
        if self._weights is not None:
            self._weights.dropped(self._rows["version"][rows])
        self._release(rows)

    def _release(self, rows: IntArray) -> None:
        starts, lengths = self._rows["start"][rows], self._rows["length"][rows]
        self._rows.release(rows)
        if self._cells is not None:
            release_ragged(self._cells, starts, lengths)

    def _inside(self, slots: IntArray, lengths: IntArray | None) -> Inside:
        return look_inside(self.place, slots, lengths, self._device)


@final
class GraphNode(AbstractNode):
    """Run a module on one whole message at a time and keep autograd's graph of it.

    For bundles that stay together (minibatches): no forward runs twice, batch normalisation and
    dropout work, and the gradient is that of the weights that made the output.

    Args:
        place: Number, name, frames.
        call: The module and how it is called; must be an ``nn.Module`` if it has parameters.
        weights: The part, or None where there are no parameters.
    """

    alone = True

    def __init__(self, place: Place, call: Call, weights: AbstractWeights | None) -> None:
        super().__init__(place)
        self._call, self._weights = call, weights
        self.part_name = None if weights is None else weights.name
        self._rows = RowStore(place.name, ("origin", "version"))
        self._graphs: dict[int, _Kept] = {}
        self._device: torch.device | None = None

    def forward(self, port: int, batches: Sequence[Forward], train: bool) -> Emission:
        return Emission([(0, self._forward_one(one, train)) for one in _one_by_one(batches)])

    def _forward_one(self, one: Forward, train: bool) -> Forward:
        width = len(one.payload)
        if self.place.spread:
            self._device = where_it_computes(self._call, self._weights, [one])
        device = self._device
        columns = [[(one.payload[j], one.index)] for j in self._call.taken(width)]
        inputs = [join_column(column, None, device) for column in columns]
        inputs += _read(self._call, self.place, one.state, one.lengths, device)
        inside = None
        if self._call.inside:
            inside = look_inside(self.place, one.state[INSTANCE], one.lengths, device)
        lengths = None if self._call.pool else one.lengths
        if not train:
            with torch.no_grad():
                outputs = as_payload(_call(self._call.function, inputs, inside))
            return Forward(outputs, one.state, one.origin, lengths)
        inputs = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
        function, parameters, leaves = self._stashed()
        with torch.enable_grad():
            outputs = as_payload(_call(function, inputs, inside))
        row = self._rows.allocate(1)
        self._rows["origin"][row] = one.origin[0]
        if self._weights is not None:
            self._rows["version"][row] = self._weights.version
            self._weights.sent(1)
        self._graphs[row] = _Kept(inputs, outputs, parameters, leaves, one.lengths, width)
        sent = tuple(y.detach() for y in outputs)
        return Forward(sent, one.state, address(self.id, row, 1), lengths)

    def backward(self, batches: Sequence[Backward]) -> Emission:
        return Emission(backward=[self._backward_one(one) for one in _one_by_one(batches)])

    def _backward_one(self, one: Backward) -> Backward:
        row = int(one.rows[0] & ROW_MASK)
        rows = np.array([row], np.int64)
        origin, versions = self._rows["origin"][rows], self._rows["version"][rows]
        self._rows.release(rows)
        kept = self._graphs.pop(row)
        if one.gradient is None:
            if self._weights is not None:
                self._weights.dropped(versions)
            return Backward(origin, None)
        wanted = [x for x in kept.inputs if x.requires_grad]
        gradient = join_gradient([one], self._device)
        found = _differentiate(kept.outputs, gradient, [*wanted, *kept.leaves])
        if self._weights is not None:
            for parameter, d in zip(kept.parameters, found[len(wanted) :], strict=True):
                if d is not None:
                    self._weights.gradient.add(parameter, d)
            self._weights.received(kept.inputs[0].shape[0], versions, kept.lengths)
        answers = iter(found[: len(wanted)])
        gradient = tuple(next(answers) if x.requires_grad else None for x in kept.inputs)
        gradient = self._call.answer(gradient, kept.width)
        if all(g is None for g in gradient):
            return Backward(origin, None)
        return Backward(origin, gradient, kept.lengths)

    def check_empty(self) -> None:
        self._rows.check_empty()

    def story(self) -> list[str]:
        n = self._rows.waiting
        return [f"'{self.name}' waits for the gradients of {n} messages"] if n else []

    def nbytes(self) -> int:
        return sum(
            x.nelement() * x.element_size()
            for kept in self._graphs.values()
            for x in (*kept.inputs, *kept.outputs)
        )

    def _stashed(self) -> tuple[Callable[..., Any], list[nn.Parameter], list[Tensor]]:
        """The module at the weights of now, whatever steps follow before its backward."""
        module = self._call.function
        if self._weights is None or not isinstance(module, nn.Module):
            return module, [], []
        aliases = self._weights.aliases()
        named = dict(module.named_parameters(remove_duplicate=False))
        stash = {name: aliases[p] for name, p in named.items()}

        def function(*args: object) -> object:
            return torch.func.functional_call(module, stash, args)

        wanted = [p for p in dict.fromkeys(named.values()) if p.requires_grad]
        return function, wanted, [aliases[p] for p in wanted]


@final
@dataclass(frozen=True, slots=True)
class _Kept:
    """Autograd's graph of one message."""

    inputs: list[Tensor]
    outputs: Payload
    parameters: list[nn.Parameter]
    leaves: list[Tensor]
    lengths: IntArray | None
    width: int


def where_it_computes(
    call: Call, weights: AbstractWeights | None, batches: Sequence[Forward]
) -> torch.device:
    """The device that a node computes on."""
    if weights is not None:
        return weights.device
    if isinstance(call.function, nn.Module):
        buffer = next(call.function.buffers(), None)
        if buffer is not None:
            return buffer.device
    return device_of(batches)


def look_inside(
    place: Place, slots: IntArray, lengths: IntArray | None, device: torch.device | None
) -> Inside:
    """Lengths, segments and edges of bundles, as tensors."""
    if lengths is None:
        lengths = np.ones(slots.size, np.int64)
    edges: dict[str, IntArray] = {}
    if place.arena.has_edges:
        edges = edges_inside(place.arena, slots, lengths, place.arena.edge_names)
    segment = np.repeat(np.arange(lengths.size), lengths)
    return Inside(
        upload(lengths, device),
        upload(segment, device),
        {name: upload(column, device) for name, column in edges.items()},
        edges,
    )


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
    for j, column in enumerate(_read(call, place, state, lengths, device), len(inputs)):
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
                f"'{name}': output {j} has shape {tuple(y.shape)} for {n} rows; a module "
                "maps rows to rows, leading dimension first"
            )


def _read(
    call: Call,
    place: Place,
    state: IntArray,
    lengths: IntArray | None,
    device: torch.device | None,
) -> list[Tensor]:
    """The columns that a module reads, one entry a payload row."""
    if not call.read:
        return []
    view = place.row_view(state, lengths)
    return [upload(getattr(view, name), device) for name in call.read]


def _one_by_one(batches: Sequence[B]) -> Iterator[B]:
    """Every message as a batch of its own."""
    for batch in batches:
        if len(batch) == 1:
            yield batch
        else:
            yield from (batch.take(np.array([i], np.int64)) for i in range(len(batch)))


def _fits(kept: Tensor, batches: Sequence[Forward], j: int) -> bool:
    """Whether payload j can be written where it is kept (``out=`` would cast and broadcast)."""
    return all(
        b.payload[j].shape[1:] == kept.shape[1:] and b.payload[j].dtype == kept.dtype
        for b in batches
    )


def as_payload(outputs: object) -> Payload:
    """What a module returned, as a tuple of tensors.

    Raises:
        GraphError: It returned something else.
    """
    if isinstance(outputs, Tensor):
        return (outputs,)
    if isinstance(outputs, (tuple, list)) and all(isinstance(y, Tensor) for y in outputs):
        return tuple(outputs)
    raise GraphError(
        f"a module returned {type(outputs).__name__}; it must return a tensor or a tuple of "
        "tensors, each with one row for every row that came in"
    )


def _call(function: Callable[..., Any], inputs: Sequence[Tensor], inside: Inside | None) -> object:
    return function(*inputs) if inside is None else function(*inputs, inside)


def _differentiate(
    outputs: Payload, gradients: Gradient, wanted: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Vector-Jacobian product; None for what the outputs do not depend on."""
    pairs = [
        (y, g) for y, g in zip(outputs, gradients, strict=True) if g is not None and y.requires_grad
    ]
    if not pairs or not wanted:
        return (None,) * len(wanted)
    ys, gs = zip(*pairs, strict=True)
    return torch.autograd.grad(ys, wanted, gs, allow_unused=True)
