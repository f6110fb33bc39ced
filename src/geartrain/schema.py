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
import math
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


def read(kind: type[T], value: Any, place: str, *, more: bool = False, nulls: bool = False) -> T:
    """A JSON value as a dataclass.

    Args:
        kind: The dataclass. Whole numbers without a ``Range`` are within ``MOST`` of 0.
        value: What ``json.loads`` gave.
        place: What it is called in messages.
        more: Whether objects may have fields that are not known here, which are passed over.
        nulls: Whether a number that is no whole one may be null, which becomes NaN; all others are
            finite then.

    Raises:
        Mismatch: A field is missing, unknown, of another type, or out of its range.
    """
    found: T = _Reader(more, nulls).object(kind, value, place)
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


@final
@dataclass(frozen=True, slots=True)
class _Reader:
    more: bool
    nulls: bool

    def read(self, kind: Any, value: Any, place: str) -> Any:
        origin, inner = typing.get_origin(kind), typing.get_args(kind)
        if kind is Any:
            return value
        if origin is Annotated:
            marks = [mark for mark in inner[1:] if isinstance(mark, Range)]
            if inner[0] is int and type(value) is int:
                return _within(value, marks, place)
            return _within(self.read(inner[0], value, place), marks, place)
        if origin is Literal:
            if isinstance(value, str) and value in inner:
                return value
            raise _mismatch(value, place, "one of " + ", ".join(map(repr, inner)))
        if origin in (typing.Union, types.UnionType):
            return self._either(inner, value, place)
        if origin in (list, Sequence):
            return self._items(inner[0], value, place)
        if origin is tuple:
            return self._tuple(inner, value, place)
        if origin in (dict, Mapping):
            if not isinstance(value, dict):
                raise _mismatch(value, place, "an object")
            return {k: self.read(inner[1], each, f"{place}.{k}") for k, each in value.items()}
        if dataclasses.is_dataclass(kind):
            return self.object(kind, value, place)
        return self._plain(kind, value, place)

    def object(self, kind: Any, value: Any, place: str) -> Any:
        if not isinstance(value, dict):
            raise _mismatch(value, place, "an object")
        wanted = _fields(kind)
        missing = [n for n, (_, optional) in wanted.items() if n not in value and not optional]
        foreign = [] if self.more else sorted(value.keys() - wanted.keys())
        if missing or foreign:
            lacks = f" has no {_names(missing)}" if missing else ""
            joined = " and" if missing and foreign else ""
            besides = f" has {_names(foreign)} besides" if foreign else ""
            raise Mismatch(f"{place}{lacks}{joined}{besides}")
        given = {
            name: self.read(hint, value[name], f"{place}.{name}")
            for name, (hint, _) in wanted.items()
            if name in value
        }
        return kind(**given)

    def _plain(self, kind: Any, value: Any, place: str) -> Any:
        if kind is float and value is None and self.nulls:
            return math.nan
        if kind is float and type(value) in (int, float):
            try:
                found = float(value)
            except OverflowError:
                found = math.inf
            if (self.nulls or type(value) is int) and not math.isfinite(found):
                raise _mismatch(value, place, "a number that a float can hold")
            return found
        if kind is int and type(value) is int:
            return _within(value, (Range(-MOST),), place)
        if kind is types.NoneType and value is None:
            return None
        if kind in (bool, str) and type(value) is kind:
            return value
        raise _mismatch(value, place, _words(kind))

    def _either(self, kinds: Sequence[Any], value: Any, place: str) -> Any:
        if value is None and types.NoneType in kinds:
            return None
        some = [kind for kind in kinds if kind is not types.NoneType]
        if len(some) == 1:
            return self.read(some[0], value, place)
        for kind in some:
            if type(value) is kind:  # rather than to make a float of a whole number
                return self.read(kind, value, place)
        for kind in some:
            try:
                return self.read(kind, value, place)
            except Mismatch:
                continue
        raise _mismatch(value, place, " or ".join(_words(kind) for kind in some))

    def _items(self, kind: Any, value: Any, place: str) -> list[Any]:
        if not isinstance(value, list):
            raise _mismatch(value, place, "a list")
        return [self.read(kind, each, f"{place}[{i}]") for i, each in enumerate(value)]

    def _tuple(self, kinds: Sequence[Any], value: Any, place: str) -> tuple[Any, ...]:
        if len(kinds) == 2 and kinds[1] is Ellipsis:
            return tuple(self._items(kinds[0], value, place))
        if not isinstance(value, list) or len(value) != len(kinds):
            raise _mismatch(value, place, f"a list of {len(kinds)}")
        both = enumerate(zip(kinds, value, strict=True))
        return tuple(self.read(kind, each, f"{place}[{i}]") for i, (kind, each) in both)


_WORDS: Final[Mapping[Any, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
}


def _within(value: Any, marks: Sequence[Range], place: str) -> Any:
    for mark in marks:
        if not mark.least <= value <= mark.most:
            kind = "a whole number" if isinstance(value, int) else "a number"
            raise _mismatch(value, place, f"{kind} from {mark.least:.16g} to {mark.most:.16g}")
    return value


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


def _names(some: Sequence[str]) -> str:
    return ", ".join(repr(name)[:40] for name in some[:5]) + (", ..." if len(some) > 5 else "")


def _words(kind: Any) -> str:
    if typing.get_origin(kind) is Annotated:
        return _words(typing.get_args(kind)[0])
    return _WORDS.get(kind, "nothing" if kind is types.NoneType else "something else")


def _mismatch(value: Any, place: str, expected: str) -> Mismatch:
    shown = "null" if value is None else reprlib.repr(value)
    return Mismatch(f"{place} is {shown}, expected {expected}")
