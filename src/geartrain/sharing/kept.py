"""What exchanges keep for copies, in a checkpoint: written, looked at, and put back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, final

from torch import Tensor

from geartrain.schema import Count, Range
from geartrain.sharing.endpoint import Endpoint
from geartrain.sharing.member import Member


@final
@dataclass(frozen=True, slots=True)
class MemberEntry:
    """What an exchange keeps for a copy of a part, as JSON has it; ``tensors`` says how many."""

    rounds: Count
    numbers: Mapping[str, Annotated[int | float, Range(-1)]]
    tensors: Mapping[str, Count]


@final
@dataclass(frozen=True, slots=True)
class ReplicasEntry:
    """Copies of a model, as JSON has them; ``parts`` are read elsewhere."""

    copies: Count
    exchange: str
    positions: Sequence[Count]
    trained: Sequence[Count]
    members: Mapping[str, MemberEntry]
    parts: Mapping[str, Any]


KeptOne: TypeAlias = tuple[int, dict[str, float], dict[str, list[Tensor]]]
"""Rounds, numbers and tensors of a member."""


def members_to_tensors(
    endpoints: Iterable[Endpoint],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What exchanges keep for members: tensors by name, their own, and JSON by part."""
    tensors: dict[str, Tensor] = {}
    entries: dict[str, Any] = {}
    for endpoint in endpoints:
        me = endpoint.member
        for key, values in me.tensors.items():
            for i, value in enumerate(values):
                tensors[f"{me.part.name}/exchange/{key}/{i}"] = value
        entries[me.part.name] = {
            "rounds": me.rounds,
            "numbers": dict(me.numbers),
            "tensors": {key: len(values) for key, values in me.tensors.items()},
        }
    return tensors, entries


def check_members(
    endpoints: Sequence[Endpoint],
    entries: Mapping[str, MemberEntry],
    tensors: Mapping[str, Tensor],
) -> None:
    """Look at what the copies of one part would be given; nothing is changed.

    Raises:
        ValueError: It cannot be theirs.
    """
    _require_kept(endpoints, [entries[e.member.part.name] for e in endpoints])
    members = [e.member for e in endpoints]
    before: list[KeptOne] = [(m.rounds, m.numbers, m.tensors) for m in members]
    kept = kept_of(endpoints, entries, tensors)
    try:
        put_members(endpoints, kept)
        endpoints[0].exchange.check(members)
    finally:
        put_members(endpoints, before)


def kept_of(
    endpoints: Sequence[Endpoint],
    entries: Mapping[str, MemberEntry],
    tensors: Mapping[str, Tensor],
) -> list[KeptOne]:
    """Copies of what is kept for the copies of one part."""
    found: list[KeptOne] = []
    for endpoint in endpoints:
        me = endpoint.member
        entry = entries[me.part.name]
        kept = {key: _kept(me, key, tensors) for key in entry.tensors}
        found.append((entry.rounds, me.numbers | dict(entry.numbers), kept))
    return found


def put_members(endpoints: Sequence[Endpoint], found: Sequence[KeptOne]) -> None:
    """Give members what ``kept_of`` has copied."""
    for endpoint, (rounds, numbers, kept) in zip(endpoints, found, strict=True):
        me = endpoint.member
        me.rounds, me.numbers, me.tensors = rounds, numbers, kept


def _require_kept(endpoints: Sequence[Endpoint], found: Sequence[MemberEntry]) -> None:
    """Copies keep what theirs keep; what one of them keeps for all, another may have kept.

    Raises:
        ValueError: Something else is kept.
    """
    was, now = (
        sorted(sorted(keys) for keys in many)
        for many in ([e.tensors for e in found], [e.keeps for e in endpoints])
    )
    if was != now:
        raise ValueError(f"its copies keep {was}, those of the session {now}")
    for endpoint, entry in zip(endpoints, found, strict=True):
        place, n = endpoint.member.part.name, len(endpoint.member.parameters)
        for key, count in entry.tensors.items():
            if count != n:
                raise ValueError(f"'{place}' keeps {count} tensors of {key}, expected {n}")
        if missing := sorted(endpoint.counts - entry.numbers.keys()):
            raise ValueError(f"'{place}' has no number {', '.join(missing)}")


def _kept(me: Member, key: str, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    kept: list[Tensor] = []
    for i, parameter in enumerate(me.parameters):
        name = f"{me.part.name}/exchange/{key}/{i}"
        found = tensors.get(name)
        if found is None or (found.shape, found.dtype) != (parameter.shape, parameter.dtype):
            what = "missing" if found is None else f"{found.dtype} {tuple(found.shape)}"
            raise ValueError(
                f"'{name}' is {what}, expected {parameter.dtype} {tuple(parameter.shape)}"
            )
        kept.append(found.to(parameter.device, copy=True))
    return kept
