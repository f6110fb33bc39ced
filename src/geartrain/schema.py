"""JSON that anybody may have written, as dataclasses: every field, of its type, in its range.

    text ─► parsed ─► read(Position, value, "position") ─► Position(...)
                         └► Mismatch: position.taken is -3, expected a whole number from 0 to ...

What may stand in a file is said once, by the annotations of a dataclass: ``bool``, ``int``,
``float``, ``str``, ``None``, ``X | Y``, ``Literal``, ``list[X]``, ``tuple[X, Y]``,
``tuple[X, ...]``, ``Sequence[X]``, ``dict[str, X]``, ``Mapping[str, X]``, dataclasses, ``Any``, and
``Annotated[X, Range(...)]`` for numbers. Nothing is converted but whole numbers to ``float``.
"""

from __future__ import annotations

import dataclasses
import json
import reprlib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Final, Literal, TypeVar, final

__all__ = ["MOST", "Count", "Finite", "Mismatch", "NotNegative", "Range", "parsed", "read"]

MOST: Final = 2**53
"""No count of ours gets beyond it, and every whole number up to it is a float too."""

MOST_DEEP: Final = 64
"""Levels of nesting; ours have about ten."""

T = TypeVar("T")


class Mismatch(ValueError):
    """A value is not what stands there in a file of ours; names the place and both."""


@final
@dataclass(frozen=True, slots=True)
class Range:
    """Which numbers may stand in a field; NaN is in no range.

    Args:
        least, most: Both included.
    """

    least: float
    most: float = MOST


Count = Annotated[int, Range(0)]
Finite = Annotated[float, Range(-1e300, 1e300)]
NotNegative = Annotated[float, Range(0.0, 1e300)]


def parsed(text: str | bytes, what: str) -> Any:
    """The value of a JSON text.

    Args:
        text: UTF-8, if it is bytes.
        what: What it is of, to begin the message with.

    Raises:
        Mismatch: It is no JSON, or nested deeper than ``MOST_DEEP``.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise Mismatch(_too_deep(what)) from None
    except json.JSONDecodeError as error:
        place = f"column {error.colno} of line {error.lineno}"
        raise Mismatch(f"{what} is no JSON at {place}: {error.msg}") from None
    except ValueError as error:  # no UTF-8, or a number of thousands of digits
        raise Mismatch(f"{what} is no JSON ({error})") from None
    _require_flat(value, what)
    return value


def read(kind: type[T], value: Any, place: str, *, known: Sequence[str] = ()) -> T:
    """A JSON value as a dataclass.

    Args:
        kind: The dataclass.
        value: What ``json.loads`` gave.
        place: What it is called in messages.
        known: Further keys that its object may have, which are passed over.

    Raises:
        Mismatch: A field is missing, unknown, of another type, or out of its range.
    """
    found: T = _object(kind, value, place, known)
    return found


def _require_flat(value: Any, what: str) -> None:
    level: list[Any] = [value]
    for _ in range(MOST_DEEP):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise Mismatch(_too_deep(what))


def _too_deep(what: str) -> str:
    return f"{what} is nested too deeply: more than {MOST_DEEP} levels"


def _read(kind: Any, value: Any, place: str) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        return _within(_read(inner[0], value, place), inner[1:], place)
    if origin is Literal:
        if isinstance(value, str) and value in inner:
            return value
        raise _mismatch(value, place, "one of " + ", ".join(map(repr, inner)))
    if origin in (typing.Union, types.UnionType):
        return _either(inner, value, place)
    if origin in (list, Sequence):
        return _items(inner[0], value, place)
    if origin is tuple:
        return _tuple(inner, value, place)
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            raise _mismatch(value, place, "an object")
        return {key: _read(inner[1], each, f"{place}.{key}") for key, each in value.items()}
    if dataclasses.is_dataclass(kind):
        return _object(kind, value, place, ())
    return _plain(kind, value, place)


def _plain(kind: Any, value: Any, place: str) -> Any:
    if kind is float and type(value) in (int, float):
        try:
            return float(value)
        except OverflowError:
            raise _mismatch(value, place, "a number that a float can hold") from None
    if kind in (None, types.NoneType) and value is None:
        return None
    if kind in _WORDS and type(value) is kind:
        return value
    raise _mismatch(value, place, _words(kind))


_WORDS: Final[Mapping[Any, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
}


def _within(value: Any, marks: Sequence[Any], place: str) -> Any:
    for mark in marks:
        if isinstance(mark, Range) and not mark.least <= value <= mark.most:
            kind = "a whole number" if isinstance(value, int) else "a number"
            raise _mismatch(value, place, f"{kind} from {mark.least:.16g} to {mark.most:.16g}")
    return value


def _either(kinds: Sequence[Any], value: Any, place: str) -> Any:
    if value is None and types.NoneType in kinds:
        return None
    some = [kind for kind in kinds if kind is not types.NoneType]
    if len(some) == 1:
        return _read(some[0], value, place)
    for kind in some:
        if type(value) is kind:  # rather than to make a float of a whole number
            return value
    for kind in some:
        try:
            return _read(kind, value, place)
        except Mismatch:
            continue
    raise _mismatch(value, place, " or ".join(_words(kind) for kind in some))


def _items(kind: Any, value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise _mismatch(value, place, "a list")
    return [_read(kind, each, f"{place}[{i}]") for i, each in enumerate(value)]


def _tuple(kinds: Sequence[Any], value: Any, place: str) -> tuple[Any, ...]:
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(_items(kinds[0], value, place))
    if not isinstance(value, list) or len(value) != len(kinds):
        raise _mismatch(value, place, f"a list of {len(kinds)}")
    both = enumerate(zip(kinds, value, strict=True))
    return tuple(_read(kind, each, f"{place}[{i}]") for i, (kind, each) in both)


@cache
def _fields(kind: Any) -> Mapping[str, tuple[Any, bool]]:
    """Name to annotation and whether it may be left out."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        f.name: (
            hints[f.name],
            f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING,
        )
        for f in dataclasses.fields(kind)
    }


def _object(kind: Any, value: Any, place: str, known: Sequence[str]) -> Any:
    if not isinstance(value, dict):
        raise _mismatch(value, place, "an object")
    wanted = _fields(kind)
    missing = [name for name, (_, optional) in wanted.items() if name not in value and not optional]
    foreign = sorted(value.keys() - wanted.keys() - set(known))
    if missing or foreign:
        lacks = f" has no {_names(missing)}" if missing else ""
        joined = " and" if missing and foreign else ""
        more = f" has {_names(foreign)} besides" if foreign else ""
        raise Mismatch(f"{place}{lacks}{joined}{more}")
    given = {
        name: _read(hint, value[name], f"{place}.{name}")
        for name, (hint, _) in wanted.items()
        if name in value
    }
    return kind(**given)


def _names(some: Sequence[str]) -> str:
    return ", ".join(repr(name)[:40] for name in some[:5]) + (", ..." if len(some) > 5 else "")


def _words(kind: Any) -> str:
    if typing.get_origin(kind) is Annotated:
        return _words(typing.get_args(kind)[0])
    return _WORDS.get(kind, "nothing" if kind is types.NoneType else "something else")


def _mismatch(value: Any, place: str, expected: str) -> Mismatch:
    shown = "null" if value is None else reprlib.repr(value)
    return Mismatch(f"{place} is {shown}, expected {expected}")
