"""The steps of one way as C has them: each buffer has a slot, and room where it needs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from geartrain.derived.ragged.values import (
    BUNDLES,
    EDGES,
    HELD,
    MEMBERS,
    PAIRS,
    Buffer,
    DraftStep,
    RaggedValue,
)
from geartrain.native.fused import At, Op, Step
from geartrain.native.ragged import ENDS_OF_PAIRS, RaggedStep, RaggedSteps, Way


@final
class RaggedRoutine:
    """One program, and where a call finds its tensors.

    Args:
        drafts: Its steps.
        given: Buffers that lie elsewhere than in room of the call.
        ends: Where bundles begin and end.
        dtype: Of all numbers.

    Attributes:
        slots: By buffer that is not in between.
    """

    def __init__(
        self,
        drafts: Sequence[DraftStep],
        given: set[Buffer],
        ends: Buffer,
        dtype: torch.dtype,
    ) -> None:
        self.slots: dict[Buffer, int] = {}
        self._room: list[int] = []
        self._kinds: list[int] = []
        near = all(map(_is_near, drafts))
        if near:
            self._outer(ends)
        last: dict[Buffer, int] = {}
        for number, draft in enumerate(drafts):
            for buffer in (draft.out.buffer, *draft.read()):
                last[buffer] = number
        ending: dict[int, list[Buffer]] = {}
        for buffer, number in last.items():
            ending.setdefault(number, []).append(buffer)
        free: dict[tuple[int, int], list[int]] = {}
        own: dict[Buffer, int] = {}
        steps = []
        for number, draft in enumerate(drafts):
            places = [self._at(v, own, free, given) for v in (draft.out, *draft.reads)]
            index = -1 if draft.index is None else self._outer(draft.index)
            inside = self._ends(draft.ends)
            cells = -1 if draft.cells is None else self._outer(draft.cells)
            step = Step(
                Op(draft.op), draft.width, tuple(places), draft.many, draft.inner, draft.number
            )
            steps.append(
                RaggedStep(
                    Way(draft.way),
                    step,
                    draft.kind,
                    draft.times,
                    draft.source,
                    draft.source_times,
                    index,
                    inside,
                    cells,
                    draft.other,
                    draft.other_times,
                )
            )
            for buffer in ending.get(number, ()):
                slot = own.pop(buffer, None)
                if slot is not None:
                    free.setdefault((buffer.kind, buffer.entries), []).append(slot)
        self.steps = RaggedSteps(
            steps,
            self._room,
            self._kinds,
            dtype,
            self.slots[ends] if near else -1,
            apart=all(map(_is_local, drafts)),
        )
        self.size = len(self._room)

    def _ends(self, ends: Buffer | None) -> int:
        """The slot of where bundles begin and end, or what stands for it."""
        if ends is None:
            return -1
        return ENDS_OF_PAIRS if ends.role == "pairs" else self._outer(ends)

    def _outer(self, buffer: Buffer) -> int:
        """The slot of what lies elsewhere."""
        found = self.slots.get(buffer)
        if found is None:
            found = self.slots[buffer] = len(self._room)
            self._room.append(0)
            self._kinds.append(0)
        return found

    def _at(
        self,
        value: RaggedValue | None,
        own: dict[Buffer, int],
        free: dict[tuple[int, int], list[int]],
        given: set[Buffer],
    ) -> At:
        if value is None:
            return At()
        buffer = value.buffer
        if buffer.role != "room" or buffer in given:
            slot = self._outer(buffer)
        elif buffer in own:
            slot = own[buffer]
        else:
            unused = free.get((buffer.kind, buffer.entries))
            slot = unused.pop() if unused else len(self._room)
            if slot == len(self._room):
                self._room.append(buffer.entries)
                self._kinds.append(buffer.kind)
            own[buffer] = slot
        return At(slot, value.at, value.row, value.one)


def _is_local(draft: DraftStep) -> bool:
    """Whether a step leads from no bundle to another."""
    if draft.way in (Way.MOVE, Way.RAISE_AT, Way.ADD_TIMES_PARTS, Way.DOT_NAMED):
        return False
    if draft.way is Way.TAKE:
        return draft.source == HELD and draft.kind == MEMBERS
    if draft.way is Way.ADD_AT:
        return draft.source == HELD and draft.kind == MEMBERS
    return draft.kind in (BUNDLES, MEMBERS, PAIRS)


def _is_near(draft: DraftStep) -> bool:
    """Whether it leads from bundle to bundle only where rows are named by number, which C looks
    at."""
    return draft.kind in (BUNDLES, MEMBERS, EDGES, PAIRS)
