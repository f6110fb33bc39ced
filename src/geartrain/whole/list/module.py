"""Recurrent networks over whole lists: all steps of many lists in one firing.

    tokens of a bundle ─► cell, along the bundle ─► the state behind its last vertex

``Recurrent`` makes a firing of every step, whose rows may meet other weights at each; here the
steps of one call see the same weights, and a list costs no message a step. The module looks inside
bundles: use it with ``input(..., bundle=True)`` and ``through(..., inside=True, pool=True)``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.device import uploads
from geartrain.frames.message import Gradient, IntArray, Payload
from geartrain.graph.admission import Brought, check_of
from geartrain.native.maps import map_backward, map_forward
from geartrain.native.rows import take
from geartrain.nn.cells import TokenRNN
from geartrain.nn.elementwise import relu_backward, tanh_backward, tanh_into
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from geartrain.nodes.kernel import AbstractKernel, gathered, kernel_of
from geartrain.nodes.products import affine, times
from geartrain.whole.list.loader import lists_backward, lists_forward, require_tokens
from geartrain.whole.wanted import add_wanted


@final
class WholeList(nn.Module):
    """A cell along every list of a batch, from states of zero.

    Inputs: what the cell reads at each vertex, tokens int64 ``(rows,)`` or features
    ``(rows, in)``, lists one below the other; and an ``Inside`` with their lengths. Output: the
    state behind the last vertex of each list, ``(lists, hidden)`` (that of an empty list is zero),
    with ``every`` behind each vertex, ``(rows, hidden)``; a tuple where the cell has several.

    Args:
        cell: ``nn.RNNCell``, ``nn.GRUCell`` or ``nn.LSTMCell``, called as torch has them; any other
            as in ``Recurrent``: ``(state, x) -> state``, with several states ``(*states, x)``.
        every: Whether the state behind each vertex is wanted; the node must not pool then.
        hidden: Width of a state; None: the cell's ``hidden``, ``hidden_size`` or ``weight``.
        states: How many states a cell of your own has.

    ``TokenRNN`` and ``nn.RNNCell`` have a bundle kernel, which keeps the states and does all steps
    in one call of C; with other cells the module runs again for the gradient.

    Raises:
        DataError: From the kernel: a token is none of the cell's.
        ValueError: The width is not known, or ``states`` is not positive.
    """

    def __init__(
        self,
        cell: nn.Module,
        *,
        every: bool = False,
        hidden: int | None = None,
        states: int = 1,
    ) -> None:
        super().__init__()
        if states < 1:
            raise ValueError(f"WholeList(states={states}): give 1 or more")
        self.cell, self.every = cell, every
        self.states = 2 if isinstance(cell, nn.LSTMCell) else states
        self.hidden = _width(cell) if hidden is None else hidden

    def forward(self, x: Tensor, inside: Inside) -> Tensor | tuple[Tensor, ...]:
        at = _StepByStep(inside, x.device)
        x = x.index_select(0, at.rows)
        like = next((p for p in self.cell.parameters() if p.is_floating_point()), x)
        state = tuple(
            torch.zeros(at.lists, self.hidden, dtype=like.dtype, device=x.device)
            for _ in range(self.states)
        )
        none = tuple(s[:1] for s in state)
        made: list[tuple[Tensor, ...]] = []  # behind each step, of the lists that have it
        for v in at.steps:
            state = self._step(x[v], tuple(s[: v.stop - v.start] for s in state))
            made.append(state)
        made.append(none)  # of a list without a vertex
        where = at.place if self.every else at.last
        found = tuple(torch.cat(s).index_select(0, where) for s in zip(*made, strict=True))
        return found[0] if len(found) == 1 else found

    def check_instances(self, brought: Brought) -> None:
        """What the cell demands of what it reads, given to it as a column.

        Raises:
            DataError: One of the instances brings something else.
        """
        check = check_of(self.cell)
        if check is not None and brought.payload is not None:
            check(Brought(brought.lengths, None, {"x": brought.payload[0].numpy()}))

    def bundle_kernel(self) -> AbstractKernel | None:
        """Keeps what the cell read and the states; None for a cell without one."""
        cell = self.cell
        if isinstance(cell, TokenRNN) and type(cell) is TokenRNN:
            table = kernel_of(cell.embedding)
            return None if table is None else _ListKernel(_Tokens(cell, table), every=self.every)
        if type(cell) is nn.RNNCell:
            return _ListKernel(_Features(cell), every=self.every)
        return None

    def _step(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        cell: Callable[..., Any] = self.cell
        if isinstance(cell, nn.LSTMCell):
            return tuple(cell(x, state))
        made = cell(x, *state) if isinstance(cell, nn.RNNCellBase) else cell(*state, x)
        return (made,) if isinstance(made, Tensor) else tuple(made)


def _width(cell: nn.Module) -> int:
    for name in ("hidden", "hidden_size"):
        if isinstance(found := getattr(cell, name, None), int):
            return found
    if isinstance(weight := getattr(cell, "weight", None), Tensor) and weight.ndim == 2:
        return int(weight.shape[0])
    raise ValueError(
        f"WholeList({type(cell).__name__}): how wide is its state? The cell has no 'hidden' nor "
        "'hidden_size'; give WholeList(..., hidden=...)"
    )


@final
class _StepByStep:
    """Lists step by step, the longest first, as tensors where the rows are: in one copy.

    Attributes:
        lists: How many there are.
        order: ``rows`` as an array.
        steps: For each step which of the order are in it: of fewer lists from step to step.
        rows: int64 ``(rows,)``, the vertices step by step.
        place: int64 ``(rows,)``, where in that order each vertex is.
        last: int64 ``(lists,)``, where in that order the last vertex of each list is; of an empty
            list the number of rows.
        before: int64, where in that order the vertex before each is, but for the first of lists.
    """

    def __init__(self, inside: Inside, device: torch.device) -> None:
        lengths = inside.lengths_on_host()
        self.lists, total = lengths.size, int(lengths.sum())
        longest = np.argsort(-lengths, kind="stable")
        going = self.lists - np.bincount(lengths, minlength=1).cumsum()[:-1]
        ends = going.cumsum()
        self.steps = [
            slice(end - n, end) for end, n in zip(ends.tolist(), going.tolist(), strict=True)
        ]
        number = np.empty_like(longest)
        number[longest] = np.arange(self.lists)
        # Vertex k of a list is behind all of the steps before, at the number of the list.
        step = np.arange(total) - (lengths.cumsum() - lengths).repeat(lengths)
        place = (ends - going)[step] + number.repeat(lengths)
        rows = np.empty_like(place)
        rows[place] = np.arange(total)
        last = np.full(self.lists, total)
        some = np.flatnonzero(lengths)
        last[some] = place[(lengths.cumsum() - 1)[some]]
        first = int(going[0]) if going.size else 0
        before = np.arange(first, total) - going[:-1].repeat(going[1:])
        self.order = rows
        self.rows, self.place, self.last, self.before = uploads((rows, place, last, before), device)


class _AbstractDrive(ABC):
    """The cell h' = f(x + W h), and what x is of what it reads.

    Attributes:
        weight: W, ``(H, H)``.
        is_tanh: Whether f is tanh; else relu.
    """

    weight: Tensor
    is_tanh: bool

    def table(self, rows: int) -> int | None:
        """Rows of the table that x is looked up in for so many vertices; None: a row for each."""
        return None

    @abstractmethod
    def driven(self, read: Tensor, table: int | None) -> Tensor:
        """x, ``(table, H)`` or ``(rows, H)``.

        Args:
            read: What the vertices bring, ``(rows, ...)``.
            table: As ``table(rows)`` says.
        """

    @abstractmethod
    def back(
        self, d: Tensor, read: Tensor, table: int | None, into: GradientSum, *, wanted: bool
    ) -> Tensor | None:
        """From the gradient of x to those of the parameters but W, and of what was read."""

    @abstractmethod
    def learn(self, d_weight: Tensor, into: GradientSum) -> None:
        """Add the gradient of W."""


@final
class _Tokens(_AbstractDrive):
    """Of ``TokenRNN``; where there are fewer tokens than rows, x is made once for each token."""

    def __init__(self, cell: TokenRNN, embedding: AbstractKernel) -> None:
        self._cell, self._embedding = cell, embedding
        self.weight, self.is_tanh = cell.weight, cell.nonlinearity == "tanh"

    def table(self, rows: int) -> int | None:
        embedding = self._cell.embedding
        n = embedding.num_embeddings
        return None if embedding.sparse or n > rows else n

    def driven(self, read: Tensor, table: int | None) -> Tensor:
        cell = self._cell
        x = cell.embedding.weight if table is not None else self._looked_up(read)
        if cell.input_weight is None:
            return x + cell.bias
        made = map_forward(x, cell.input_weight, cell.bias) if table is not None else None
        return affine(x, cell.input_weight, cell.bias) if made is None else made

    def back(
        self, d: Tensor, read: Tensor, table: int | None, into: GradientSum, *, wanted: bool
    ) -> None:
        cell, weight = self._cell, self._cell.input_weight
        embedding = cell.embedding.weight
        if weight is None:
            add_wanted(cell.bias, d.sum(0), into, given=True)
        else:
            x = embedding.detach() if table is not None else self._looked_up(read)
            learns = embedding.requires_grad
            found = map_backward(d, x, weight, wanted=learns) if table is not None else None
            if found is None:
                found = times(d, weight) if learns else None, d.t() @ x, d.sum(0)
            d_read, d_weight, d_bias = found
            add_wanted(weight, d_weight, into, given=True)
            add_wanted(cell.bias, d_bias, into, given=True)
            if d_read is None:
                return
            d = d_read
        if table is None:
            self._embedding.backward((d,), (read,), None, into)
        else:
            add_wanted(embedding, d, into, given=True)

    def learn(self, d_weight: Tensor, into: GradientSum) -> None:
        add_wanted(self._cell.weight, d_weight, into, given=True)

    def _looked_up(self, read: Tensor) -> Tensor:
        require_tokens(read, self._cell.embedding.num_embeddings)
        (x,), _ = self._embedding.forward((read,))
        return x


@final
class _Features(_AbstractDrive):
    """Of ``nn.RNNCell``."""

    def __init__(self, cell: nn.RNNCell) -> None:
        self._cell = cell
        self.weight, self.is_tanh = cell.weight_hh, cell.nonlinearity == "tanh"

    def driven(self, read: Tensor, table: int | None) -> Tensor:
        cell = self._cell
        return affine(read, cell.weight_ih, cell.bias_ih + cell.bias_hh if cell.bias else None)

    def back(
        self, d: Tensor, read: Tensor, table: int | None, into: GradientSum, *, wanted: bool
    ) -> Tensor | None:
        cell = self._cell
        if cell.weight_ih.requires_grad:
            into.add_product(cast(nn.Parameter, cell.weight_ih), d, read)
        if cell.bias:
            add_wanted(cell.bias_ih, d.sum(0), into, given=True)
            add_wanted(cell.bias_hh, d.sum(0), into, given=True)
        return times(d, cell.weight_ih) if wanted else None

    def learn(self, d_weight: Tensor, into: GradientSum) -> None:
        add_wanted(self._cell.weight_hh, d_weight, into, given=True)


@final
class _ListKernel(AbstractKernel):
    """All steps of a cell h' = f(x + W h); keeps what it read and the states.

    Gradients are those of the states of then, with the weights, and the tokens' vectors, of now.
    """

    residuals = 2
    looks_up = True
    room_for = 1

    def __init__(self, drive: _AbstractDrive, *, every: bool) -> None:
        self._drive, self._every = drive, every

    def forward(
        self, inputs: Payload, inside: Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        assert inside is not None
        (read,) = inputs
        drive, n = self._drive, read.shape[0]
        table = drive.table(n)
        x, tokens = drive.driven(read, table), read if table is not None else None
        kept = x.new_empty((n, x.shape[1])) if room is None else room
        last = lists_forward(x, tokens, inside.lengths, drive.weight, kept, is_tanh=drive.is_tanh)
        if last is None:
            last = self._steps(x, tokens, _StepByStep(inside, x.device), kept)
        return (kept.clone() if self._every else last,), (read, kept)

    def backward(
        self,
        gradients: Gradient,
        kept: Payload,
        rows: IntArray | None,
        into: GradientSum,
        inside: Inside | None = None,
        *,
        wanted: bool = True,
    ) -> Gradient:
        assert inside is not None
        (dy,), (read, states) = gradients, kept
        if dy is None:
            return (None,)
        drive = self._drive
        table = drive.table(states.shape[0] if rows is None else rows.size)
        tokens = read if table is not None else None
        found = lists_backward(
            dy.contiguous(),
            states,
            tokens,
            rows,
            inside.lengths,
            drive.weight,
            table or 0,
            is_tanh=drive.is_tanh,
            every=self._every,
        )
        if table is None or found is None:
            (read,) = gathered((read,), rows)
        if found is None:
            at = _StepByStep(inside, dy.device)
            (states,) = take((states,), at.order if rows is None else rows[at.order])
            found = self._steps_back(dy, read, states, at, table)
        d, d_weight = found
        drive.learn(d_weight, into)
        return (drive.back(d, read, table, into, wanted=wanted),)

    def _steps(self, x: Tensor, tokens: Tensor | None, at: _StepByStep, kept: Tensor) -> Tensor:
        """What ``lists_forward`` does, in torch."""
        if tokens is not None:
            require_tokens(tokens, x.shape[0])
        drive, f = self._drive, "tanh" if self._drive.is_tanh else "relu"
        x = x.index_select(0, at.rows if tokens is None else tokens.index_select(0, at.rows))
        made = x.new_zeros((x.shape[0] + 1, x.shape[1]))  # the last one is of lists without any
        turned = drive.weight.t()
        h = x.new_zeros((at.lists, x.shape[1]))
        for v in at.steps:
            h = torch.addmm(x[v], h[: v.stop - v.start], turned, out=made[v])
            _squash(h, f)
        kept.index_copy_(0, at.rows, made[:-1])
        return made.index_select(0, at.last)

    def _steps_back(
        self, dy: Tensor, read: Tensor, kept: Tensor, at: _StepByStep, table: int | None
    ) -> tuple[Tensor, Tensor]:
        """What ``lists_backward`` does, in torch; kept is in the order of steps."""
        weight, f = self._drive.weight, "tanh" if self._drive.is_tanh else "relu"
        d = dy.new_zeros((kept.shape[0] + 1, dy.shape[1]))
        if self._every:
            torch.index_select(dy, 0, at.rows, out=d[:-1])
        else:
            d.index_copy_(0, at.last, dy)
        d, first = d[:-1], 0
        for k in reversed(range(len(at.steps))):
            v = at.steps[k]
            d[v] = _unsquashed(d[v], kept[v], f)
            first = v.stop
            if k:
                start = at.steps[k - 1].start
                d[start : start + v.stop - v.start].addmm_(d[v], weight)
        d_weight = d[first:].t() @ kept.index_select(0, at.before)
        d = d.index_select(0, at.place)
        if table is None:
            return d, d_weight
        return d.new_zeros((table, d.shape[1])).index_add_(0, read, d), d_weight


def _squash(y: Tensor, nonlinearity: str) -> None:
    """relu or tanh in place."""
    if nonlinearity == "relu":
        y.relu_()
    else:
        tanh_into(y, y)


def _unsquashed(dy: Tensor, y: Tensor, nonlinearity: str) -> Tensor:
    """The gradient before the relu or tanh that made y; a new tensor."""
    return relu_backward(dy, y) if nonlinearity == "relu" else tanh_backward(dy, y)


__all__ = ["WholeList"]
