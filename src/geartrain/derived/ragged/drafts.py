"""Of steps that were written one by one: which are needed, and which are one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from geartrain.derived.ragged.values import Buffer, DraftStep, NamedParts
from geartrain.native.fused import Op
from geartrain.native.ragged import Way

_LEAST_PART: Final = 16
"""Parts of rows of a multiple of so many entries are multiplied one by one: of others what is
packed would be filled up with zeros."""


def together(drafts: Sequence[DraftStep], asked: set[Buffer]) -> list[DraftStep]:
    """The same steps, with products that are just added up made and added in one,
    and rows that are just taken and added moved."""
    before = _read_once(drafts, asked)
    gone: set[int] = set()
    found: list[DraftStep] = []
    for draft in drafts:
        source = draft.reads[0] if draft.reads else None
        one = None
        if source is not None and source.dense and source.buffer in before:
            one = _one(before[source.buffer], draft)
            if one is not None:
                gone.add(id(before[source.buffer]))
        found.append(draft if one is None else one)
    return [d for d in found if id(d) not in gone]


def _read_once(drafts: Sequence[DraftStep], asked: set[Buffer]) -> dict[Buffer, DraftStep]:
    """Products and steps that take rows, by where they write, if that is read by one step alone."""
    written = Counter(d.out.buffer for d in drafts)
    read: Counter[Buffer] = Counter()
    for draft in drafts:
        read.update(draft.read())
    found = {}
    for draft in drafts:
        buffer, product = draft.out.buffer, draft.way is Way.PLAIN and draft.op == Op.MUL
        if (product or draft.way is Way.TAKE) and buffer.role == "room" and buffer not in asked:
            if written[buffer] == read[buffer] == 1:
                found[buffer] = draft
    return found


def _one(before: DraftStep, draft: DraftStep) -> DraftStep | None:
    """A step that does what both do, of which the second alone reads the first; None: none does."""
    if before.way is Way.TAKE:
        if draft.way is not Way.ADD_AT:
            return None
        moved = replace(before, way=Way.MOVE, out=draft.out, cells=draft.index)
        moved.other, moved.other_times = draft.source, draft.source_times
        return moved
    a, b = before.reads
    ones = [v for v in (a, b) if v is not None and v.one]
    of = replace(draft, reads=[a, b], width=before.width, op=0)
    if draft.way is Way.PLAIN and draft.op == Op.REDUCE and draft.inner == 1 and not ones:
        return replace(of, way=Way.DOT, width=draft.many, many=draft.width)
    if draft.way is Way.SUM_OVER and len(ones) == 1:
        rows = b if ones[0] is a else a
        return replace(of, way=Way.SUM_TIMES, reads=[rows, ones[0]])
    return None


def needed(
    drafts: Sequence[DraftStep], roots: Sequence[Buffer], always: Sequence[DraftStep]
) -> list[DraftStep]:
    """Steps without which these buffers would not be what they are."""
    wanted, found = set(roots), []
    for draft in reversed(drafts):
        if draft.out.buffer in wanted or any(draft is each for each in always):
            found.append(draft)
            wanted.update(draft.read())
    return found[::-1]


def parts_added(drafts: Sequence[DraftStep]) -> dict[Buffer, NamedParts]:
    """By buffer that is zero but where something is added to parts of its rows by number, which."""
    writing: dict[Buffer, list[DraftStep]] = {}
    for draft in drafts:
        writing.setdefault(draft.out.buffer, []).append(draft)
    found = {}
    for buffer, steps in writing.items():
        zero, adding = steps[0], steps[-1]
        if len(steps) != 2 or zero.way is not Way.PLAIN or zero.op != Op.ZERO:
            continue
        numbers, kind, parts = adding.index, adding.source, adding.source_times
        if adding.way is Way.MOVE:
            numbers, kind, parts = adding.cells, adding.other, adding.other_times
        elif adding.way is not Way.ADD_AT:
            continue
        dense = zero.out.dense and adding.out.dense and kind == buffer.kind
        if dense and numbers is not None and _may_be_parts(adding.width, parts):
            found[buffer] = NamedParts(numbers, parts, adding.kind, adding.times)
    return found


def of_named(drafts: Sequence[DraftStep], asked: set[Buffer]) -> list[DraftStep]:
    """The same steps, with products for the parts of rows alone that others read, or that are not
    zero."""
    reading: dict[Buffer, list[DraftStep]] = {}
    for draft in drafts:
        for buffer in set(draft.read()):
            reading.setdefault(buffer, []).append(draft)
    written, added = Counter(d.out.buffer for d in drafts), parts_added(drafts)
    found = []
    for draft in drafts:
        source, weight, *bias = draft.reads if _is_whole_product(draft) else (None, None)
        if source is not None and weight is not None:
            out, named = draft.out.buffer, added.get(source.buffer)
            if weight.buffer.role == "weight" and out not in asked and written[out] == 1:
                draft = _of_read(draft, reading.get(out, ()))
            elif weight.buffer.role == "turned" and named and source.dense and not any(bias):
                draft = _in_parts(draft, Way.TIMES_NAMED_BACK, named)
        found.append(draft)
    return found


def _may_be_parts(width: int, parts: int) -> bool:
    return parts > 1 and width % _LEAST_PART == 0


def _is_whole_product(draft: DraftStep) -> bool:
    plain = draft.way is Way.PLAIN and draft.op == Op.PRODUCT and draft.times == 1
    return plain and not draft.inner and not draft.number


def _of_read(draft: DraftStep, readers: Sequence[DraftStep]) -> DraftStep:
    """A product, of the parts that its only reader takes by number."""
    if len(readers) != 1 or readers[0].way not in (Way.TAKE, Way.MOVE):
        return draft
    reader, out = readers[0], draft.out
    (taken,), parts = reader.reads, reader.source_times
    if taken is None or reader.index is None or reader.source != draft.kind or not out.dense:
        return draft
    lies = taken.at == 0 and taken.row == reader.width and taken.row * parts == draft.width
    if not lies or not _may_be_parts(reader.width, parts):
        return draft
    named = NamedParts(reader.index, parts, reader.kind, reader.times)
    return _in_parts(draft, Way.TIMES_NAMED, named)


def _in_parts(draft: DraftStep, way: Way, named: NamedParts) -> DraftStep:
    source, weight, *bias = draft.reads
    assert weight is not None
    packed = replace(weight, buffer=replace(weight.buffer, parts=named.parts))
    made = replace(draft, way=way, op=0, reads=[source, packed, *bias], index=named.numbers)
    if way is Way.TIMES_NAMED:
        made.width //= named.parts
    else:
        made.many //= named.parts
    made.inner, made.source, made.source_times = named.parts, named.kind, named.times
    return made
