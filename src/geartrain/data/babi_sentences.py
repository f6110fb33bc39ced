"""The sentences of bAbI tasks 4, 15, 16, 18 and 19: what each states or asks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import final

from geartrain.errors import DataError

_Sentences = tuple[tuple[re.Pattern[str], str | None], ...]


@final
@dataclass(frozen=True, slots=True)
class _Grammar:
    """Sentences, each with the relation or kind that it states; None if the sentence names it."""

    facts: _Sentences
    questions: _Sentences


_OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
_SINGULAR = {"mice": "mouse", "wolves": "wolf", "sheep": "sheep"}

_DIRECTION = "(?P<relation>north|south|east|west)"
_INVERSE = "(?P<inverse>north|south|east|west)"
_A, _B, _AS, _BS = (f"(?P<{name}>[A-Za-z]+)" for name in ("a", "b", "as", "bs"))
_THING, _OTHER = "(?P<a>[A-Za-z ]+?)", "(?P<b>[A-Za-z ]+)"
_WHERE = re.compile(rf"The {_A} is {_DIRECTION} of the {_B}\.")
_KIND_OF = re.compile(rf"{_A} is an? {_B}\.")

_GRAMMARS = {
    4: _Grammar(
        ((_WHERE, None),),
        (
            (re.compile(rf"What is {_DIRECTION} of the {_A}\?"), None),
            (re.compile(rf"What is the {_A} {_INVERSE} of\?"), None),
        ),
    ),
    15: _Grammar(
        ((re.compile(rf"{_AS} are afraid of {_BS}\."), "fears"), (_KIND_OF, "is")),
        ((re.compile(rf"What is {_A} afraid of\?"), "fears"),),
    ),
    16: _Grammar(
        ((_KIND_OF, "is"), (re.compile(rf"{_A} is {_B}\."), "has_color")),
        ((re.compile(rf"What color is {_A}\?"), "has_color"),),
    ),
    18: _Grammar(
        (
            (re.compile(rf"The {_THING} fits inside the {_OTHER}\."), "fits_inside"),
            (re.compile(rf"The {_THING} is bigger than the {_OTHER}\."), "bigger_than"),
        ),
        (
            (re.compile(rf"Does the {_THING} fit in the {_OTHER}\?"), "fits_inside"),
            (re.compile(rf"Is the {_THING} bigger than the {_OTHER}\?"), "bigger_than"),
        ),
    ),
    19: _Grammar(
        ((_WHERE, None),),
        ((re.compile(rf"How do you go from the {_A} to the {_B}\?"), "path"),),
    ),
}


def stated(sentence: str, task: int, line: int) -> tuple[str, str, str]:
    """Subject, relation and object of a fact.

    Args:
        sentence: Ends with its full stop.
        task: Its number.
        line: Of the file, for errors.

    Raises:
        DataError: It is no fact of the task.
    """
    for pattern, relation in _GRAMMARS[task].facts:
        if match := pattern.fullmatch(sentence):
            subject, object_ = _names(match)
            return subject, relation or match["relation"], object_
    raise _strange(sentence, "fact", _GRAMMARS[task].facts, task, line)


def asked(sentence: str, task: int, line: int) -> tuple[str, tuple[str, ...]]:
    """The kind of a question, and whom it asks about.

    Args:
        sentence: Ends with its question mark.
        task, line: As above.

    Raises:
        DataError: It is no question of the task.
    """
    for pattern, kind in _GRAMMARS[task].questions:
        if match := pattern.fullmatch(sentence):
            groups = match.groupdict()
            return kind or groups.get("relation") or _OPPOSITE[groups["inverse"]], _names(match)
    raise _strange(sentence, "question", _GRAMMARS[task].questions, task, line)


def _names(match: re.Match[str]) -> tuple[str, ...]:
    groups = match.groupdict()
    names = [groups[name].lower() for name in ("a", "b") if name in groups]
    plural = [groups[name].lower() for name in ("as", "bs") if name in groups]
    return (*names, *(_SINGULAR.get(name, name.removesuffix("s")) for name in plural))


def _strange(sentence: str, what: str, sentences: _Sentences, task: int, line: int) -> DataError:
    known = " or ".join(repr(_readable(pattern)) for pattern, _ in sentences)
    return DataError(
        f"{sentence[:80]!r} is no {what} of task {task}; expected {known}. See whether the "
        "file is of that task, and in English",
        line=line,
    )


def _readable(pattern: re.Pattern[str]) -> str:
    text = pattern.pattern
    for complex_, simple in ((_DIRECTION, "north"), (_INVERSE, "north")):
        text = text.replace(complex_, simple)
    text = text.replace("an?", "a")
    return re.sub(r"\(\?P<(.)s?>[^)]*\)", lambda m: m[1].upper(), text).replace("\\", "")
