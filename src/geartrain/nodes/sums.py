"""Sums of losses and metrics over a pass, added up where the values are.

on the host      values ─► sum, looked at in every firing
on a device      values ─► sum that stays there ─► read when somebody asks
                   └ finite? ─► answered some firings later; nobody waits for it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from geartrain.device import Verdicts, moved, read, upload
from geartrain.errors import NonFiniteError
from geartrain.frames.frame import Arena
from geartrain.frames.message import IntArray


@final
@dataclass(frozen=True, slots=True)
class Measured:
    """What is averaged under a name.

    Args:
        name: ``loss``, another label, or a metric's; None: it is looked at, but not averaged.
        values: One a row.
        mask: Rows that count, booleans in an array or a tensor; None: all.
        counted: How many those are, where only the device knows.
    """

    name: str | None
    values: Tensor
    mask: Any
    counted: Tensor | None = None

    def where_it_lies(self) -> Measured:
        """For values on a device: only those that count, or zeros in place of the others."""
        values, mask = self.values, self.mask
        if mask is None:
            return self
        if not isinstance(mask, Tensor) or mask.is_cpu:
            # How many they are is known here: nobody need ask the device.
            rows = upload(np.flatnonzero(np.asarray(mask)), values.device)
            return Measured(self.name, values.index_select(0, rows), mask)
        mask = moved(mask, values.device)
        return Measured(self.name, values.masked_fill(~mask, 0), mask, mask.sum())


@final
class Sums:
    """Name to (sum, rows) of one loss.

    Args:
        node: The loss, for errors.
        arena: Names the instances there.
    """

    def __init__(self, node: str, arena: Arena) -> None:
        self._node, self._arena = node, arena
        self._here: dict[str, list[float]] = {}
        self._there: dict[tuple[str, int], Tensor] = {}  # what a device adds to [sum, rows]
        self._unasked: list[Measured] = []
        self._verdicts = Verdicts()

    def add(
        self,
        name: str | None,
        values: Tensor,
        mask: Any,
        slots: IntArray,
        lengths: IntArray | None,
    ) -> None:
        """Add a value a row; what lies on a device is put by, for ``ask``.

        Args:
            name: Under which they are averaged; None: they only have to be finite.
            values: ``(n,)``, of any dtype.
            mask: Rows that count, booleans in an array or a tensor ``(n,)``; None: all.
            slots: int64, the instance of each message.
            lengths: int64, rows of each message; None: one.

        Raises:
            NonFiniteError: One of those that count is NaN or infinite, or their sum is.
        """
        if not values.is_cpu:
            self._unasked.append(Measured(name, values, mask).where_it_lies())
            return
        if mask is not None:
            mask = torch.as_tensor(mask)
            values = values[mask if mask.is_cpu else mask.cpu()]
        total = float(values.sum())
        if total - total != 0.0:
            self._refuse(Measured(name, values, mask), self._names(slots, lengths))
        if name is not None:
            self._count(name, total, values.shape[0])

    def ask(self, slots: IntArray, lengths: IntArray | None) -> None:
        """End a firing: add up what was put by, and have the device say later if it is finite.

        Raises:
            NonFiniteError: A value of an earlier firing was not.
        """
        there, self._unasked = self._unasked, []
        if not there:
            return
        totals = [m.values.sum(dtype=torch.float64) for m in there]
        for measured, total in zip(there, totals, strict=True):
            if measured.name is not None:
                self._count_later(measured.name, measured, total)
        names = self._names(slots, lengths)

        def tell(bad: list[bool]) -> None:
            self._refuse(there[bad.index(True)], names)

        here = [moved(total, totals[0].device) for total in totals]
        self._verdicts.ask(~torch.isfinite(torch.stack(here)), tell)
        self._verdicts.look()

    def take(self) -> dict[str, tuple[float, float]]:
        """Name to (sum, rows) since the last call; waits for a device that adds up."""
        found = self.peek()
        self._here, self._there = {}, {}
        return found

    def peek(self) -> dict[str, tuple[float, float]]:
        """The same, and nothing is taken."""
        sums = {name: [s, n] for name, (s, n) in list(self._here.items())}
        there = dict(self._there)
        for (name, k), value in zip(there, read(list(there.values())), strict=True):
            sums[name][k] += value
        return {name: (s, n) for name, (s, n) in sums.items()}

    def put(self, sums: Mapping[str, Sequence[float]]) -> None:
        """What has been added up elsewhere since the pass began, in place of what is here.

        Args:
            sums: Name to (sum, rows).
        """
        self._here = {name: list(pair) for name, pair in sums.items()}

    def forget(self) -> None:
        """A pass begins: nothing has been added up, and no answer is awaited."""
        self._here, self._there, self._unasked = {}, {}, []
        self._verdicts.forget()

    def check_finite(self) -> None:
        """Wait for what a device has still to say.

        Raises:
            NonFiniteError: A value was NaN or infinite.
        """
        self._verdicts.look(wait=True)

    def _count(self, name: str, total: float, rows: int) -> None:
        sums = self._here.setdefault(name, [0.0, 0.0])
        sums[0] += total
        sums[1] += rows

    def _count_later(self, name: str, measured: Measured, total: Tensor) -> None:
        self._count(name, 0.0, measured.values.shape[0] * (measured.counted is None))
        self._count_there((name, 0), total)
        if measured.counted is not None:
            self._count_there((name, 1), measured.counted)

    def _count_there(self, key: tuple[str, int], total: Tensor) -> None:
        found = self._there.get(key)
        if found is None:
            self._there[key] = total.to(torch.float64, copy=True)
        else:
            found.add_(moved(total, found.device))

    def _names(self, slots: IntArray, lengths: IntArray | None) -> Callable[[int], str]:
        """What gives the instance of a payload row a name, also when the instance has ended."""
        describe = self._arena.describer(slots)
        return lambda row: describe(row if lengths is None else _message_of(row, lengths))

    def _refuse(self, measured: Measured, names: Callable[[int], str]) -> None:
        values, name = measured.values.cpu(), measured.name or "loss"
        broken = ~torch.isfinite(values)
        if not broken.any():
            raise NonFiniteError(
                f"'{self._node}': the sum of {name} over {len(values)} rows, up to "
                f"{float(values.abs().max()):.3g} each, overflows {values.dtype}; lower the "
                "learning rate, or clip the gradient"
            )
        mask = None if measured.mask is None else torch.as_tensor(measured.mask).cpu()
        bad = row = int(torch.nonzero(broken)[0, 0])
        if mask is not None and measured.counted is None:  # those that do not count are not there
            row = int(torch.nonzero(mask)[bad, 0])
        raise NonFiniteError(
            f"'{self._node}': {name} is {float(values[bad])} at a row of {names(row)}; "
            "lower the learning rate, clip the gradient, or look at this instance"
        )


def add_sums(
    a: Mapping[str, tuple[float, float]], b: Mapping[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """Sums and rows, name by name."""
    total = dict(a)
    for name, (s, n) in b.items():
        old = total.get(name, (0.0, 0.0))
        total[name] = (old[0] + s, old[1] + n)
    return total


def _message_of(row: int, lengths: IntArray) -> int:
    """The message that a payload row belongs to."""
    return int(np.searchsorted(np.cumsum(lengths), row, "right"))
