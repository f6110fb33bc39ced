"""Steps over rows that are named by number, and over their parts: what need not be written first.

take, times ─► sum of each part     DOT_NAMED: of the rows where they lie
spread over parts, times            TIMES_PARTS
    take, those, added by number    ADD_TIMES_PARTS: from row to row
take, on the way back               taken once more: edges keep no copies of vertices
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from geartrain.derived.ragged.values import HELD, PAIRS, Buffer, DraftStep, RaggedValue
from geartrain.native.fused import Op
from geartrain.native.ragged import Way

_LEFT_OUT: Final = (Way.TAKE, Way.TIMES_PARTS)


def made_again(drafts: Sequence[DraftStep]) -> list[DraftStep]:
    """Steps of the way forward whose rows the way back does not keep, but makes anew: those of
    pairs, and rows that are but taken by number from what is there."""
    written = Counter(d.out.buffer for d in drafts)
    found = []
    for draft in drafts:
        (source, *_) = draft.reads or [None]
        taken = draft.way is Way.TAKE and draft.source != HELD and source is not None
        lies = taken and source is not None and source.buffer.role in ("room", "given")
        if draft.out.buffer.kind == PAIRS or (lies and written[draft.out.buffer] == 1):
            found.append(draft)
    return found


def by_parts(drafts: Sequence[DraftStep], asked: set[Buffer]) -> list[DraftStep]:
    """The same steps, with products of rows by parts made where these lie.

    Args:
        drafts: The steps.
        asked: Buffers that others read.
    """
    written, read = Counter(d.out.buffer for d in drafts), Counter()  # type: ignore[var-annotated]
    for draft in drafts:
        read.update(draft.read())
    made: dict[Buffer, DraftStep] = {}
    found = []
    for draft in drafts:
        draft = _of_parts(draft, made)
        if draft.way is Way.ADD_AT:
            draft = _added(draft, made, asked, read)
        elif draft.way is Way.DOT:
            draft = _dot_named(draft, made)
        found.append(draft)
        if draft.out.dense and written[draft.out.buffer] == 1:
            made[draft.out.buffer] = draft
    return _without_unread(found, asked)


def _maker(
    value: RaggedValue | None, reader: DraftStep, made: dict[Buffer, DraftStep], way: Way
) -> DraftStep | None:
    """The step that has made all of what another one reads row by row, if it is of this way."""
    maker = made.get(value.buffer) if value is not None and value.dense else None
    if maker is None or maker.way is not way:
        return None
    return maker if (maker.kind, maker.times) == (reader.kind, reader.times) else None


def _taken(
    value: RaggedValue | None, reader: DraftStep, made: dict[Buffer, DraftStep]
) -> DraftStep | None:
    """What has taken the rows by number that a step reads."""
    maker = _maker(value, reader, made, Way.TAKE)
    return None if maker is None or maker.source == HELD or maker.index is None else maker


def _of_parts(draft: DraftStep, made: dict[Buffer, DraftStep]) -> DraftStep:
    """A product of a row, and a number for each of its parts."""
    if draft.way is not Way.PLAIN or draft.op != Op.MUL:
        return draft
    for value, spread in (draft.reads, draft.reads[::-1]):
        maker = _maker(spread, draft, made, Way.PLAIN)
        if maker is None or maker.op != Op.EXPAND or maker.inner != 1 or value is None:
            continue
        (numbers,) = maker.reads
        if numbers is not None and not value.one and not numbers.one:
            both: list[RaggedValue | None] = [value, numbers]
            return replace(
                draft, way=Way.TIMES_PARTS, op=0, reads=both, width=maker.many, many=maker.width
            )
    return draft


def _added(
    draft: DraftStep, made: dict[Buffer, DraftStep], asked: set[Buffer], read: Counter[Buffer]
) -> DraftStep:
    """Such products that are just added to rows by number."""
    (source, *_) = draft.reads
    maker = _maker(source, draft, made, Way.TIMES_PARTS)
    if maker is None or draft.source == HELD or draft.index is None:
        return draft
    if maker.out.buffer in asked or read[maker.out.buffer] > 1:
        return draft
    value, numbers = maker.reads
    found = replace(draft, way=Way.ADD_TIMES_PARTS, op=0, reads=[value, numbers])
    found.width, found.many = maker.width, maker.many
    taken = _taken(value, maker, made)
    return found if taken is None else _named_besides(found, taken, [taken.reads[0], numbers])


def _dot_named(draft: DraftStep, made: dict[Buffer, DraftStep]) -> DraftStep:
    """Sums of products of parts of rows that were taken by number."""
    a, b = draft.reads
    if _taken(a, draft, made) is None:
        a, b = b, a
    first, second = _taken(a, draft, made), _taken(b, draft, made)
    if first is None:
        return draft
    found = replace(draft, way=Way.DOT_NAMED, reads=[first.reads[0], b], index=first.index)
    found.source, found.source_times = first.source, first.source_times
    return found if second is None else _named_besides(found, second, [*first.reads, *second.reads])


def _named_besides(
    draft: DraftStep, taken: DraftStep, reads: list[RaggedValue | None]
) -> DraftStep:
    """A step that reads rows where they were taken from."""
    source, times = taken.source, taken.source_times
    return replace(draft, reads=reads, cells=taken.index, other=source, other_times=times)


def _without_unread(drafts: Sequence[DraftStep], asked: set[Buffer]) -> list[DraftStep]:
    """The steps that are left when others read no more what these have made."""
    wanted, found = set(asked), []
    for draft in reversed(drafts):
        buffer = draft.out.buffer
        spread = draft.way is Way.PLAIN and draft.op == Op.EXPAND
        if buffer in wanted or buffer.role != "room" or not (spread or draft.way in _LEFT_OUT):
            found.append(draft)
            wanted.update(draft.read())
    return found[::-1]
