"""What C reads of the modules of a loop, made once and kept from firing to firing.

    CallLayout    of one module: its words, in ``layout.py``
    Tables        of all modules of a loop, and of its values

From firing to firing the words stay, and addresses are written anew.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any, Final, Protocol, TypeVar, final

import numpy as np
import torch
from torch import Tensor

from geartrain.native import calls
from geartrain.native.calls import CallForm
from geartrain.native.rows import pointer
from geartrain.nodes.loop.buffers import FiringTensors
from geartrain.nodes.loop.layout import Like, Table, kinds_of
from geartrain.nodes.loop.reads import ReadTensor

MOST_LAYOUTS: Final = 2
"""Of one module that are kept: a program may have two forwards."""


class AbstractLayout(Protocol):
    """How C calls a module: ``CallLayout``, or ``SeveralLayout`` of rows of several kinds."""

    possible: bool

    def __init__(self, form: Any, *rest: Any, as_asked: bool) -> None: ...

    def holds(self, form: Any, tensors: Any, columns: Any) -> bool: ...

    def write(self, words: Table) -> None: ...


AnyLayout = TypeVar("AnyLayout", bound=AbstractLayout)


@final
class Tables:
    """Of all modules and values of a loop.

    Args:
        modules, values: How many.
    """

    def __init__(self, modules: int, values: int) -> None:
        self.modules = np.zeros((modules, calls.MODULE_WORDS), np.int64)
        self.values = np.zeros((values, calls.VALUE_WORDS), np.int64)
        self.at_modules, self.at_values = pointer(self.modules), pointer(self.values)
        self._layouts: dict[int, list[AbstractLayout]] = {}
        self._written: dict[int, AbstractLayout] = {}
        self._columns: dict[int, tuple[Table, int]] = {}  # and where it lies
        self._samples: dict[int, tuple[list[Like], tuple[Tensor, ...]]] = {}
        self._copies: dict[int, tuple[Hashable, CallForm]] = {}

    def samples(
        self, number: int, tensors: Sequence[ReadTensor], columns: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Tensors like the arguments of a module, without a row."""
        kinds = kinds_of(tensors, columns)
        before, found = self._samples.get(number, (None, ()))
        if before != kinds:
            found = tuple([torch.empty((0, *tail), dtype=dtype) for dtype, tail in kinds])
            self._samples[number] = kinds, found
        return found

    def copying(self, number: int, tensors: Sequence[ReadTensor], dtype: torch.dtype) -> CallForm:
        """Programs that do nothing, of rows that are copied."""
        key = dtype, tuple([(t.dtype, t.tail) for t in tensors])
        before, form = self._copies.get(number, (None, None))
        if form is None or before != key:
            likes = [torch.empty((0, *t.tail), dtype=t.dtype) for t in tensors]
            form = calls.copying(likes, dtype)
            self._copies[number] = key, form
        return form

    def layout(
        self, kind: type[AnyLayout], number: int, form: Any, *rest: Any, as_asked: bool
    ) -> AnyLayout | None:
        """That of a module, as before if nothing has changed; None: C cannot call it.

        Args:
            kind: Of the layout.
            number: Of the module.
            form: Its programs.
            rest: The other arguments of a layout.
            as_asked: The last one.
        """
        known = self._layouts.setdefault(number, [])
        mine = (each for each in known if isinstance(each, kind))
        found = next((each for each in mine if each.holds(form, rest[0], rest[1])), None)
        if found is None:
            found = kind(form, *rest, as_asked=as_asked)
            known.insert(0, found)
            del known[MOST_LAYOUTS:]
        if not found.possible:
            return None
        self.put(number, found)
        return found

    def put(self, number: int, layout: AbstractLayout) -> None:
        """Let the words of a module be those of a layout.

        Turns that are in flight may have different ones: where some of its programs are for few
        rows and some for many, or its weights have changed in between.
        """
        if self._written.get(number) is not layout:
            layout.write(self.modules[number])
            self._written[number] = layout

    def write_value(
        self, number: int, held: FiringTensors, read: Collection[int] | None
    ) -> list[Tensor | None]:
        """Write where the gradients of a value are, and who has got one; they.

        Args:
            number: Of the value.
            held: Has them.
            read: Columns of it that are still read; None: all.
        """
        found = held.zeros(number, read)
        columns, at = self._columns.get(number, (None, 0))
        if columns is None or columns.size != len(found):
            columns = np.zeros(len(found), np.int64)
            at = pointer(columns)
            self._columns[number] = columns, at
        columns[:] = [0 if g is None else g.data_ptr() for g in found]
        reached = pointer(held.reach_places(number))
        self.values[number] = reached, held.came(number), at
        return found
