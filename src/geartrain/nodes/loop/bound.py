"""Which modules of a loop C calls in a turn, and how: found by what they read, or as in the turn
before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias, cast, final

import numpy as np
import torch
from torch import Tensor

from geartrain.frames.message import Payload
from geartrain.native import calls
from geartrain.native.calls import CallForm, SeveralForm
from geartrain.nodes.call import read_columns
from geartrain.nodes.chance import row_seeds
from geartrain.nodes.kernel import AbstractKernel
from geartrain.nodes.loop.buffers import FiringTensors
from geartrain.nodes.loop.layout import CallLayout, kinds_of
from geartrain.nodes.loop.module import TurnModule
from geartrain.nodes.loop.plan import Called, CallStage, RowNumbers, StoreStage
from geartrain.nodes.loop.reads import ReadTensor, Whence
from geartrain.nodes.loop.rooms import AnyModule
from geartrain.nodes.loop.several import SeveralLayout, SeveralModule
from geartrain.nodes.loop.tables import Tables
from geartrain.nodes.loop.turn import Inner, Turn
from geartrain.nodes.memory import AbstractMemoryKernel
from geartrain.nodes.remembering import Remembering, RememberingRead

Chosen: TypeAlias = Callable[[int, Payload], AbstractKernel | None]
"""The kernel of a module, by number, for rows like these; None: it is not known, or not for C."""
Stage: TypeAlias = CallStage | StoreStage
AnyKernel: TypeAlias = AbstractKernel | AbstractMemoryKernel

STORES: Final = 16
"""Places of a loop at which rows are copied; at more, they are copied one by one."""


@final
class CalledModules:
    """Those of one turn.

    Args:
        turn: The turn.
        held: Its tensors, which are buffers.
        tables: Of the loop.
        inner: The modules of the loop.
        able: Of each whether it may be called so.
        chosen: Gives their kernels.
        expected: By module, how many rows it is expected to have, where that is not planned.
        most: How many modules there may be; copies have numbers behind those.
        left: Of a turn that is over, to be used again.

    Attributes:
        found: By number; None: C cannot call it.
        given_up: Those that C has called, and cannot call any more.
        dtype: Of all of them, once there is one.
        width: Of the payload of what was looked at last.
        ahead: Whether all calls are known before.
        draws: Whether rows of some of them have seeds.
    """

    def __init__(
        self,
        turn: Turn,
        held: FiringTensors,
        tables: Tables,
        inner: Sequence[Inner],
        able: list[bool],
        chosen: Chosen,
        expected: Mapping[int, int],
        most: int,
        left: dict[int, AnyModule],
    ) -> None:
        self._turn, self._held, self._tables, self._inner = turn, held, tables, inner
        self._able, self.chosen, self._expected = able, chosen, expected
        self._most, self._left = most, left
        self.found: dict[int, AnyModule | None] = {}
        self.given_up: set[int] = set()
        self.dtype: torch.dtype | None = None
        self.width = 1
        self.ahead = self.draws = False

    def __getitem__(self, number: int) -> AnyModule:
        module = self.found[number]
        assert module is not None
        return module

    @property
    def callable(self) -> list[AnyModule]:
        """Those that C can call."""
        return [module for module in self.found.values() if module is not None]

    def more(self) -> None:
        """The modules of the loop have become more, which may be called so."""
        self._able += [True] * (len(self._inner) - len(self._able))

    def may(self, called: Called) -> bool:
        stage = called.stage
        if isinstance(stage, CallStage):
            inner = self._inner[stage.number]
            if called.lengths is None:
                return self._able[stage.number] and not inner.call.inside
            pools = stage.pools and inner.call.inside
            answers = self.ahead and not stage.pools and inner.reads is None
            return self._able[stage.number] and (pools or answers)
        if called.lengths is not None and not self.ahead:
            return False
        return self.number(stage) < self._most + STORES

    def looks_inside(self, stage: Stage) -> bool:
        """Whether a module sees that bundles are such."""
        return isinstance(stage, CallStage) and self._inner[stage.number].call.inside

    def recalls(self, stage: Stage) -> bool:
        """Whether a module reads a memory that is held in the loop."""
        reads = self._inner[stage.number].reads if isinstance(stage, CallStage) else None
        return reads is not None and reads.value >= 0

    def number(self, stage: Stage) -> int:
        """Of a module; copies have numbers behind those."""
        if isinstance(stage, CallStage):
            return stage.number
        return self._most + stage.number

    def made_of(self, stage: Stage, rows: RowNumbers) -> list[ReadTensor] | None:
        """What the arguments are made of that rows bring to a module; None: C cannot be told."""
        if not isinstance(stage, CallStage):
            return stage.source.reads(self._held, rows.numbers)
        inner = self._inner[stage.number]
        payload = inner.source.reads(self._held, rows.numbers)
        if payload is None:
            return None
        self.width = len(payload)
        return [payload[j] for j in inner.call.taken(len(payload))]

    def columns(self, stage: Stage, rows: RowNumbers) -> list[Tensor]:
        """What it reads of their columns."""
        if not isinstance(stage, CallStage):
            return []
        inner = self._inner[stage.number]
        lengths = stage.source.lengths(self._turn.plan.numbers, rows.numbers)
        return read_columns(inner.call, inner.place, rows.state, lengths, None)

    def shaped(
        self, stage: Stage, tensors: Sequence[ReadTensor], columns: Sequence[Tensor], rows: int
    ) -> AnyModule | None:
        """A module whose rows, so many, are made of such; None: C cannot call it."""
        number, kernel = self.number(stage), None
        form: CallForm | SeveralForm | None = None
        if isinstance(stage, CallStage):
            samples = self._tables.samples(number, tensors, columns)
            kernel, form = self._form_of(number, samples, rows)
        else:
            floating = [t.dtype for t in tensors if t.dtype.is_floating_point]
            dtype = self.dtype or next(iter(floating), torch.float32)
            usual = set(floating) <= {dtype} and calls.available(dtype)
            form = self._tables.copying(number, tensors, dtype) if usual else None
        layout = self._laid_out(stage, form, tensors, columns)
        if layout is None:
            return None
        if isinstance(stage, CallStage):
            self._inner[number].width = self.width
        return self._begun(number, kernel, layout)

    def _form_of(
        self, number: int, samples: Payload, rows: int
    ) -> tuple[AnyKernel | None, CallForm | SeveralForm | None]:
        """The kernel of a module and its programs, for rows like these, so many; None: it has
        none."""
        inner = self._inner[number]
        if inner.reads is None and not inner.call.inside:
            found = self.chosen(number, samples)
            return found, None if found is None else found.listed(rows)
        kernel: AnyKernel = inner.twin or inner.kernel
        if isinstance(kernel, RememberingRead) and inner.reads is not None:
            return kernel, kernel.listed(samples, inner.reads.memory(self._held).payload())
        if isinstance(kernel, Remembering) and inner.call.inside:
            return kernel, kernel.listed_inside(samples)
        return kernel, None

    def _begun(
        self, number: int, kernel: AnyKernel | None, layout: CallLayout | SeveralLayout
    ) -> AnyModule:
        """A module that C calls so, with the memory of the turn before if that called it so."""
        left = self._left.pop(number, None)
        inner = self._inner[number] if number < self._most else None
        module: AnyModule
        outputs: Sequence[Tensor]
        if isinstance(layout, SeveralLayout):
            outputs = layout.outputs
            assert inner is not None
            assert isinstance(kernel, Remembering | RememberingRead)
            if isinstance(left, SeveralModule) and left.layout is layout:
                module = left
                module.renew(inner, kernel)
            else:
                module = SeveralModule(number, inner, kernel, layout)
        else:
            outputs = layout.form.outputs
            own = cast("AbstractKernel | None", kernel)  # a look would ask the class at each call
            self.draws = self.draws or layout.form.draws
            if isinstance(left, TurnModule) and left.layout is layout:
                module = left
                module.renew(inner, own)
            else:
                module = TurnModule(number, inner, own, layout)
        which = None if isinstance(layout, SeveralLayout) else layout.which
        self._held.reserve(layout.into, module.name, outputs, which)
        return module

    def _laid_out(
        self,
        stage: Stage,
        form: CallForm | SeveralForm | None,
        tensors: Sequence[ReadTensor],
        columns: Sequence[Tensor],
    ) -> CallLayout | SeveralLayout | None:
        """How C calls what has these programs; None: it cannot, beside what it has called."""
        if form is None or self.dtype not in (None, form.dtype):
            return None
        number, into = self.number(stage), stage.into.number
        asked = stage.source.as_asked(self._turn.plan.numbers)
        which = stage.which if isinstance(stage, CallStage) else None
        rest = number, form, tensors, columns, into
        layout: CallLayout | SeveralLayout | None
        if isinstance(form, SeveralForm):
            reads = self._inner[number].reads
            memory = -1 if reads is None else reads.value
            layout = self._tables.layout(SeveralLayout, *rest, self._held, memory, as_asked=asked)
        else:
            layout = self._tables.layout(CallLayout, *rest, which, self._held, as_asked=asked)
        if layout is not None:
            self.dtype = form.dtype
        return layout

    def of(
        self, found: Sequence[Called], rows: RowNumbers
    ) -> list[tuple[AnyModule, list[Whence] | None]]:
        """The modules of calls that read these rows, one call after the other, and which stored
        rows each reads; None: those that it is asked for. Nothing: C cannot make some of them."""
        modules: list[tuple[AnyModule, list[Whence] | None]] = []
        tensors: list[ReadTensor] | None = None
        whence: list[list[Whence]] | None = None
        for called in found:
            k, some = self.number(called.stage), None
            known = k in self.found
            module = self.found[k] if known else self._left.get(k)
            if module is not None and not module.layout.as_asked:
                whence = whence or self.whence(called.stage, rows)
                some = None if whence is None else _picked(whence, module)
            told = module is not None and (module.layout.as_asked or some is not None)
            if not known and told:
                told = self.may(called) and self._is_called_again(
                    called.stage, max(len(called.rows), self._expected.get(k, 0))
                )
            if not told and not (known and module is None):
                if tensors is None:
                    tensors = self.made_of(called.stage, rows) if self.may(called) else None
                module = None if tensors is None else self._fitting(called, k, tensors)
                if module is not None and tensors is not None and not module.layout.as_asked:
                    some = _told(module, tensors)
            if module is None or k in self.given_up:
                return []
            if not module.accepts(called.rows, called.lengths, self._held):
                return []
            if known:  # one that begins has just reserved them
                self._held.reserve_rows(module.layout.into)
            modules.append((module, some))
        return modules

    def again(
        self, stage: Stage, rows: RowNumbers
    ) -> tuple[Sequence[Whence], Sequence[Tensor]] | None:
        """Which stored rows each read of a module reads, and the columns that it reads besides, if
        C calls it with all of these rows as in the turn before, where they were no bundles either;
        it begins then. None: it does not."""
        left = self._left.get(self.number(stage))
        if not isinstance(left, TurnModule):
            return None
        layout = left.layout
        if layout.as_asked is not stage.source.as_asked(self._turn.plan.numbers):
            return None
        kinds = layout.kinds[layout.payload :]
        columns = self.columns(stage, rows) if kinds else []
        some: list[Whence] | None = [Whence.of(np.ascontiguousarray(rows.numbers))]
        if not layout.as_asked:
            some = self.whence_of(left, stage, rows)
        if some is None or kinds != kinds_of((), columns):
            return None
        return (some, columns) if self._is_called_again(stage, len(rows)) else None

    def _is_called_again(self, stage: Stage, rows: int) -> bool:
        """Whether C calls a module as in the turn before, of so many rows that are told in the same
        way; if so it begins."""
        k, held = self.number(stage), self._held
        left = self._left[k]
        layout = left.layout
        if not held.alike:
            return False
        kernel: AnyKernel | None = left.kernel
        form: CallForm | SeveralForm | None = layout.form
        if isinstance(stage, CallStage):
            kernel, form = self._form_of(k, layout.samples, rows)
        if form is not layout.form or self.dtype not in (None, layout.form.dtype):
            return False
        self.dtype = layout.form.dtype
        self._tables.put(k, layout)
        if left.inner is not None:
            self._inner[k].width = left.inner.width  # it may be of another fit
        self.found[k] = self._begun(k, kernel, layout)
        return True

    def whence(self, stage: Stage, rows: RowNumbers) -> list[list[Whence]] | None:
        """Which stored rows the arguments are made of that rows bring to a module."""
        payload = stage.source.whence(self._held, rows.numbers)
        if payload is None or not isinstance(stage, CallStage):
            return payload
        return [payload[j] for j in self._inner[stage.number].call.taken(len(payload))]

    def whence_of(self, module: AnyModule, stage: Stage, rows: RowNumbers) -> list[Whence] | None:
        """Which stored rows each read of a module reads; None: it has not been told of such."""
        payload = self.whence(stage, rows)
        return None if payload is None else _picked(payload, module)

    def seed(self, records: Sequence[Sequence[int]]) -> None:
        """Seeds for the rows of some calls, as if each were made by itself."""
        runs: list[tuple[TurnModule, int, int]] = []
        for k, n, begin, *_ in records:
            module = self[k]
            if not isinstance(module, TurnModule) or not module.draws:
                continue
            before, its, had = runs[-1] if runs else (None, 0, 0)
            if before is module and its + had == begin:
                runs[-1] = module, its, had + n
            else:
                runs.append((module, begin, n))
        if runs:
            sizes = [n for _, _, n in runs]
            seeds = row_seeds(sum(sizes)).split_with_sizes(sizes)
            for (module, begin, _), mine in zip(runs, seeds, strict=True):
                module.seed(begin, mine)

    def _fitting(self, called: Called, k: int, tensors: Sequence[ReadTensor]) -> AnyModule | None:
        """The module of a call whose arguments are made of such; None: C cannot make it."""
        if k not in self.found:
            columns = self.columns(called.stage, called.rows)
            n = max(len(called.rows), self._expected.get(k, 0))
            self.found[k] = self.shaped(called.stage, tensors, columns, n)
        module = self.found[k]
        if module is None or module.layout.payload != len(tensors):
            return None
        kinds = module.layout.kinds
        mine = [(t.dtype, t.tail) for t in tensors]
        return module if mine == kinds[: len(mine)] else None


def _picked(whence: Sequence[Sequence[Whence]], module: AnyModule) -> list[Whence] | None:
    """Those of all reads of a module, in order; None: other rows lie side by side than before."""
    layout = module.layout
    found = [whence[i][j] for i, j in layout.told]
    return found if [one.many for one in found] == layout.many else None


def _told(module: AnyModule, tensors: Sequence[ReadTensor]) -> list[Whence]:
    """The rows of all reads of a module, in order."""
    reads = [read for read, _ in module.layout.arranged(tensors)]
    return [Whence.of(read.rows, read.many, read.starts) for read in reads]
