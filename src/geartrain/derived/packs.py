"""Where the operands of a routine lie: as they are, or packed for products.

    a firing begins ─► has torch counted no write to them? ─► they are as they were packed
                       do they lie where they lay? ─► they are packed again, where they were packed
                       else ─► new places

Weights change between firings, and mostly lie where they lay: so do then what is packed of them and
all addresses, and whoever has written these into a table of C's need not do so again.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import TypeAlias, final

import torch
from torch import Tensor, nn

from geartrain.native.fused import Packing
from geartrain.native.steady import firing
from geartrain.nodes.products import matrix

Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Columns of a weight: first and end of those that are neighbours."""
Seen: TypeAlias = dict[int, tuple[object, ...]]
"""By operand, what tells that it lies where it lay."""


def columns_of(weight: Tensor, runs: Runs | None) -> Tensor:
    """Columns of a weight side by side; None: all."""
    if runs is None:
        return weight.contiguous()
    some = [weight[:, first:end] for first, end in runs]
    return torch.cat(some, 1) if len(some) > 1 else some[0].contiguous()


@final
class OperandPlaces:
    """Those of one routine.

    Args:
        slots: How many addresses the routine has.
        dtype: Of what is packed.

    Attributes:
        addresses: Of operands, by slot; nobody else may write to it.
        firing: The firing for which they are.
    """

    __slots__ = (
        "_copies",
        "_held",
        "_looks",
        "_packed_in",
        "_packed_of",
        "_packing",
        "_read",
        "_thread",
        "addresses",
        "firing",
    )

    def __init__(self, slots: int, dtype: torch.dtype) -> None:
        self.addresses = [0] * slots
        self.firing = 0
        self._held: list[Tensor] = []
        self._packing = Packing(dtype)
        self._copies: list[tuple[int, Tensor, Runs]] = []
        self._looks: Seen | None = None
        self._read: Sequence[int] = ()
        self._thread = get_ident()
        self._packed_in = 0  # which pass
        self._packed_of: list[tuple[int, nn.Parameter, int, int]] | None = None

    def add(self, slot: int, x: Tensor) -> None:
        """A tensor that is read where it lies, as it is."""
        self._held.append(x)
        self.addresses[slot] = x.data_ptr()

    def add_packed(
        self, slot: int, number: int, weight: Tensor, runs: Runs | None, *, turned: bool
    ) -> None:
        """A weight that is read packed.

        Args:
            slot: Of it.
            number: Which operand it is.
            weight: As a matrix.
            runs: Its columns that are read; None: all.
            turned: As for ``Packing``.
        """
        read = columns_of(weight, runs)
        own = weight.untyped_storage().data_ptr() != read.untyped_storage().data_ptr()
        if runs is not None and own:
            self._copies.append((number, read, runs))
        self.addresses[slot] = self._packing.add(read, turned=turned)

    def last(self, operands: Sequence[Tensor], read: Sequence[int]) -> None:
        """There is nothing else, so they may be for later firings too.

        Args:
            operands: All.
            read: Which of them are read, all of them contiguous.
        """
        self._read, self._looks = read, {}
        self._look(operands, self._looks)

    def pack(self) -> None:
        """Pack the weights as they are now."""
        self._packing.run()

    def note(self, operands: Sequence[Tensor], read: Sequence[int]) -> None:
        """All is as these operands are now.

        Args:
            operands: All.
            read: Which of them are read.
        """
        self._packed_in, found = firing.of_pass, []
        for k in read:
            p = operands[k]
            if not isinstance(p, nn.Parameter):
                self._packed_of = None  # it may be computed, where another one lay
                return
            found.append((k, p, p._version, p.data_ptr()))
        self._packed_of = found

    def stands(self, operands: Sequence[Tensor]) -> bool:
        """Whether all is as it was noted, in a firing of the same pass and thread: the same
        parameters, where they lay, to which torch has counted no write since.

        Args:
            operands: All.
        """
        known, now = self._packed_of, firing.of_pass
        if known is None or not now or now != self._packed_in or self._thread != get_ident():
            return False
        for k, p, version, at in known:
            if operands[k] is not p or p._version != version or p.data_ptr() != at:
                return False
        return True

    @property
    def nbytes(self) -> int:
        """Of what is packed."""
        return self._packing.nbytes

    def renew(self, operands: Sequence[Tensor], looks: Seen) -> bool:
        """Be for these operands, which may have changed; False: they lie elsewhere, or another
        thread may be reading what is packed.

        Args:
            operands: All.
            looks: Of those that have been looked at in this firing; gets the others.
        """
        before = self._looks
        if before is None or self._thread != get_ident():
            return False
        self._look(operands, looks)
        if not before.items() <= looks.items():
            return False
        for number, copy, runs in self._copies:
            weight, at = matrix(operands[number]), 0
            for first, end in runs:
                copy[:, at : at + end - first] = weight[:, first:end]
                at += end - first
        self.pack()
        if firing.number:  # this one's: later ones look anew
            self._packed_of = None
        else:
            self.note(operands, self._read)
        return True

    def _look(self, operands: Sequence[Tensor], looks: Seen) -> None:
        """Look at those that are read, as far as nobody has."""
        for k in self._read:
            if k not in looks:
                x = operands[k]
                looks[k] = x.data_ptr(), x.dtype, x.shape, x.is_contiguous()
