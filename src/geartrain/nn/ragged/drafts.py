"""Of steps that were written one by one: which are needed, and which are one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from geartrain.native.fused import Op
from geartrain.native.ragged import Way
from geartrain.nn.ragged.values import Buffer, DraftStep


def together(drafts: Sequence[DraftStep], asked: set[Buffer]) -> list[DraftStep]:
    """The same steps, with products that are just added up made and added in one,
    and rows that are just taken and added moved."""
    written, read = Counter(d.out.buffer for d in drafts), Counter()  # type: ignore[var-annotated]
    for draft in drafts:
        read.update(draft.read())
    factors: dict[Buffer, DraftStep] = {}
    found: list[DraftStep] = []
    for draft in drafts:
        buffer = draft.out.buffer
        factor = draft.way is Way.PLAIN and draft.op == Op.MUL
        if (factor or draft.way is Way.TAKE) and buffer.role == "room":
            if buffer not in asked and written[buffer] == read[buffer] == 1:
                factors[buffer] = draft
        (source, *_) = draft.reads or [None]
        product = factors.get(source.buffer) if source is not None else None
        if product is not None and source is not None and source.dense:
            if product.way is Way.TAKE:
                if draft.way is Way.ADD_AT:
                    found = [d for d in found if d is not product]
                    moved = replace(product, way=Way.MOVE, out=draft.out, cells=draft.index)
                    moved.many, moved.inner = draft.source, draft.source_times
                    found.append(moved)
                else:
                    found.append(draft)
                continue
            a, b = product.reads
            ones = [v for v in (a, b) if v is not None and v.one]
            of = replace(draft, reads=[a, b], width=product.width, op=0)
            whole = draft.op == Op.REDUCE and draft.inner == 1 and draft.many == product.width
            if draft.way is Way.PLAIN and whole and not ones:
                found = [d for d in found if d is not product]
                found.append(replace(of, way=Way.DOT, many=0))
                continue
            if draft.way is Way.SUM_OVER and len(ones) == 1:
                found = [d for d in found if d is not product]
                rows = b if ones[0] is a else a
                found.append(replace(of, way=Way.SUM_TIMES, reads=[rows, ones[0]]))
                continue
        found.append(draft)
    return found


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
