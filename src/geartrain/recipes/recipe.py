"""What a recipe is: a task by name, with every number that it takes to train it.

    Recipe ── build(Setting) ─► Task(graph, rules, ramp, splits, files) ─► Session

A ``Recipe`` is text and defaults, cheap to list. ``build`` makes the model; data are read when a
split is asked for. ``Task.files`` is what a task needs to be built again besides the checkpoint,
such as a vocabulary.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, final

import torch

from geartrain.bounds import COPIES, MOST_COPIES, MOST_SEED, SEED, require_at_most
from geartrain.engine.controller import AbstractRamp
from geartrain.engine.schedule import Schedule
from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph
from geartrain.parts.rules import Rules
from geartrain.pipeline.pipeline import Pipeline
from geartrain.sharing.mixer import Average
from geartrain.sharing.part_copies import PartCopies
from geartrain.sharing.shared_weights import SharedWeights
from geartrain.sharing.sharing import AbstractSharing

Number: TypeAlias = int | float
Value: TypeAlias = Number | str
"""Of an option."""
LoadSplit: TypeAlias = Callable[[], Sequence[Instance]]


_SQUARE: Final = "its weights are as many as its square"
_STACK: Final = "each is a layer of its own"
_SIZE: Final = "they are in memory all together"
_RATE: Final = "no number is as large"
_TIMES: Final = "each is computed one after the other"

LARGEST: Final[Mapping[str, tuple[Number, str]]] = {
    "hidden": (4096, _SQUARE),
    "dim": (4096, _SQUARE),
    "width": (512, _SQUARE),
    "blocks": (1000, _STACK),
    "parts": (1000, "each is a layer or more"),
    "heads": (4096, "each has entries of a vector"),
    "length": (8192, "attention takes the square of it"),
    "batch": (10_000, _SIZE),
    "steps": (1000, _TIMES),
    "train_size": (10_000_000, _SIZE),
    "valid_size": (10_000_000, _SIZE),
    "trees": (10_000_000, _SIZE),
    "limit": (10_000_000, _SIZE),
    "learning_rate": (1e300, _RATE),
    "weight_decay": (1e300, _RATE),
    "momentum": (1.0, "more would grow by itself"),
    "dropout": (1.0, "it is a share"),
    "whole": (1, "it is 0 or 1"),
    "enlarged": (1, "it is 0 or 1"),
}
"""Most that an option of this name may be, and why: models and data are made in memory."""


@final
@dataclass(frozen=True, slots=True)
class Option:
    """A number of a recipe that may be changed with ``--option NAME=VALUE``.

    Args:
        name: Lower case.
        default: An int takes whole numbers only.
        least: The smallest value.
        what: Half a sentence.
    """

    name: str
    default: Number
    least: Number
    what: str

    def parse(self, text: str) -> Number:
        """The value of its text.

        Raises:
            ValueError: No number of this kind, or out of its range.
        """
        try:
            value = type(self.default)(text)
        except ValueError:
            value = math.nan
        return self.require(value, text)

    def require(self, value: object, text: str | None = None) -> Number:
        """The value, if it may be one.

        Args:
            value: Of any type.
            text: As it was given.

        Raises:
            ValueError: No number of this kind, or out of its range.
        """
        kind = type(self.default)
        good = type(value) is kind or (kind is float and type(value) is int)
        if not good or not isinstance(value, int | float) or not self.least <= value < math.inf:
            words = "a whole number" if kind is int else "a number"
            given = repr(value) if text is None else text
            raise ValueError(
                f"option {self.name}={given[:40]}: expected {words}, {self.least:g} or more"
            )
        most, why = LARGEST.get(self.name, (10**9, "no recipe wants as many"))
        require_at_most(f"option {self.name}={value:g}", value, most, why)
        return value


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """A word of a recipe that may be changed with ``--option NAME=WORD``.

    Args:
        name: Lower case.
        default: One of the words.
        words: Those there are.
        what: Half a sentence.
    """

    name: str
    default: str
    words: tuple[str, ...]
    what: str

    def parse(self, text: str) -> str:
        """The word.

        Raises:
            ValueError: It is none of those there are.
        """
        return self.require(text)

    def require(self, value: object) -> str:
        """The value, if it is one of the words.

        Raises:
            ValueError: It is not.
        """
        if not isinstance(value, str) or value not in self.words:
            text = str(value)[:40]
            raise ValueError(
                f"option {self.name}={text}: expected one of {', '.join(self.words)}"
                + meant(text, self.words)
            )
        return value


AVERAGE_EVERY: Final = "average_every"  # the option of recipes that have a bottleneck


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a task is built from.

    Args:
        seed: Of the initial weights and of generated data; not negative.
        epochs: Planned; a schedule ends with the last.
        update_every: In the unit of the recipe.
        data: The data folder; None takes ``$GEARTRAIN_DATA``.
        options: Values of the recipe's options; those missing take their defaults.
        files: ``Task.files`` of the run that is built again; empty for a new one.
        replicas: Copies of the recipe's bottleneck.
    """

    seed: int
    epochs: int
    update_every: int
    data: Path | None = None
    options: Mapping[str, Value] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    replicas: int = 1

    def copies_of(self, part: str) -> AbstractSharing | None:
        """Copies of the bottleneck, for recipes that have one; None: there is one copy.

        They become their mean every so many instances, as the option ``average_every`` says; 0:
        when an epoch ends or is evaluated alone.

        Args:
            part: Its name.
        """
        if self.replicas == 1:
            return None
        every = int(self.options[AVERAGE_EVERY])
        return PartCopies({part: self.replicas}, Average(every or None))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model and its data.

    Args:
        graph: Holds the modules, freshly initialised.
        rules: How its parts learn.
        splits: Name to what reads it; the names always include ``train`` and ``validation``'s.
        validation: The split to validate on.
        ramp: How instances in flight grow.
        files: Name to text, kept in the run's folder for ``Setting.files``.
        pipeline: That the graph is of, if it is one; its parts are placed in their order.
        sharing: How workers share the weights, where parts are not just spread over them: by copies
            of the bottleneck, or, as one part has nearly all the work, by a graph for each.
    """

    graph: Graph
    rules: Rules
    splits: Mapping[str, LoadSplit]
    validation: str
    ramp: AbstractRamp
    files: Mapping[str, str] = field(default_factory=dict)
    pipeline: Pipeline | None = None
    sharing: AbstractSharing | None = None

    def settings(
        self, workers: int, sharing: AbstractSharing | None = None, *, chosen: bool = False
    ) -> dict[str, Any]:
        """What ``Session`` is told besides graph, rules, runtime and what a user chooses.

        Args:
            workers: Of the runtime.
            sharing: Instead of the task's own.
            chosen: How workers share weights, and where parts live, is left to be chosen by what
                they cost; copies that were asked for stay.
        """
        schedule = Schedule(ramp=self.ramp)
        if self.pipeline is not None:
            told = self.pipeline.settings(min(workers, len(self.pipeline.parts)))["schedule"]
            schedule = replace(told, ramp=self.ramp)
            if chosen or (sharing is not None and not sharing.spreads):
                schedule = replace(schedule, placement={})
        wanted = sharing or self.sharing
        if chosen and isinstance(wanted, SharedWeights):
            wanted = None
        return {"schedule": schedule} | ({} if wanted is None else {"sharing": wanted})

    def load(self, split: str) -> Sequence[Instance]:
        """The instances of a split; ``dev`` and ``valid`` are two words for the validation.

        Raises:
            ValueError: There is no such split.
            DataError: Its files are missing or refused.
        """
        name = self.validation if split in ("dev", "valid") else split
        if name not in self.splits:
            raise ValueError(f"split '{split}': there is {', '.join(self.splits)}")
        return self.splits[name]()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A task by name.

    Args:
        name: On the command line.
        summary: A line.
        paper: Where the task or the model comes from.
        metrics: Of validation, the most telling first; ``loss`` comes with every task.
        target: A value worth reaching, as ``Target.parse`` reads it.
        max_active: Default number of instances in flight, or a function of all options that gives
            it.
        update_every: Default, in ``unit``, or a function of all options that gives it.
        unit: What updates are counted in.
        epochs: Default number.
        needs: Files of the data folder; none for generated data.
        options: Numbers and words that may be changed.
        whole_minibatches: Whether an instance is a minibatch, so that a copy of the model has one
            in flight.
        bottleneck: The part that most of the work is in, which may have copies, met every so many
            instances as the option ``average_every`` says; None: the work is spread evenly.
        workers: Default number of workers; None: 2, where there are two cores. With one its kernels
            have all cores.
        runtime: Default of several workers.
        why: Why so many, and there, in a line with the figure.
        make: Builds the task from a complete setting, torch's generator already seeded.
        draw: Makes the graph alone, without data, to be looked at.
    """

    name: str
    summary: str
    paper: str
    metrics: tuple[str, ...]
    target: str
    max_active: int | Callable[[Mapping[str, Value]], int]
    update_every: int | Callable[[Mapping[str, Value]], int]
    unit: Literal["rows", "instances"]
    epochs: int
    make: Callable[[Setting], Task]
    draw: Callable[[], Graph]
    needs: tuple[str, ...] = ()
    options: tuple[Option | Choice, ...] = ()
    bottleneck: str | None = None
    whole_minibatches: bool = False
    workers: int | None = None
    runtime: Literal["threads", "processes"] = "threads"
    why: str = ""

    def build(self, setting: Setting) -> Task:
        """The task, with weights initialised from the seed.

        Raises:
            ValueError: The seed is negative, an option is unknown, or there are to be copies of a
                bottleneck that the recipe does not have.
            DataError: Data that the model is shaped by are missing or refused.
        """
        if setting.seed < 0:
            raise ValueError(f"seed {setting.seed}: expected 0 or more")
        require_at_most(f"seed {setting.seed}", setting.seed, MOST_SEED, SEED)
        self.require_replicas(setting.replicas)
        self.require_options(setting.options)
        torch.manual_seed(setting.seed)
        return self.make(
            Setting(
                seed=setting.seed,
                epochs=setting.epochs,
                update_every=setting.update_every,
                data=setting.data,
                options=self.complete(setting.options),
                files=setting.files,
                replicas=setting.replicas,
            )
        )

    def require_replicas(self, replicas: int) -> None:
        """Refuse copies that cannot be.

        Raises:
            ValueError: Fewer than 1, or more and the recipe has no bottleneck.
        """
        if replicas < 1:
            raise ValueError(f"replicas={replicas}: expected 1 or more")
        require_at_most(f"replicas={replicas}", replicas, MOST_COPIES, COPIES)
        if replicas > 1 and self.bottleneck is None:
            raise ValueError(
                f"replicas={replicas}: recipe '{self.name}' has no bottleneck to copy, as its work "
                "is spread evenly over its parts; leave replicas out, and give it more workers"
            )

    def require_options(self, options: Mapping[str, object]) -> None:
        """Refuse options that the recipe does not have, and values that they cannot have.

        Raises:
            ValueError: There is one.
        """
        for name, value in options.items():
            self.option(name).require(value)

    def complete(self, options: Mapping[str, Value]) -> dict[str, Value]:
        """These options, and the defaults of the others."""
        return {o.name: o.default for o in self.options} | dict(options)

    def in_flight(self, options: Mapping[str, Value]) -> int:
        """The default number of instances in flight under these options."""
        if isinstance(self.max_active, int):
            return self.max_active
        return self.max_active(self.complete(options))

    def update_size(self, options: Mapping[str, Value]) -> int:
        """How many ``unit`` make an update by default under these options."""
        if isinstance(self.update_every, int):
            return self.update_every
        return self.update_every(self.complete(options))

    def parse_options(self, texts: Sequence[str]) -> dict[str, Value]:
        """``["hidden=32"]`` as values by name.

        Raises:
            ValueError: Not of that form, an unknown name, or a value that does not fit.
        """
        values: dict[str, Value] = {}
        for text in texts:
            name, equals, value = text.partition("=")
            if not equals:
                raise ValueError(f"option {text!r}: write NAME=VALUE, such as hidden=64")
            values[name.strip()] = self.option(name.strip()).parse(value.strip())
        return values

    def option(self, name: str) -> Option | Choice:
        """The option of a name.

        Raises:
            ValueError: There is none.
        """
        for option in self.options:
            if option.name == name:
                return option
        known = [o.name for o in self.options]
        raise ValueError(
            f"option '{name}': recipe '{self.name}' has {', '.join(known) or 'none'}"
            + meant(name, known)
        )


def meant(word: str, known: Sequence[str]) -> str:
    """A question after an unknown word, or nothing."""
    close = difflib.get_close_matches(word.lower(), known, 1, 0.5)
    return f"; did you mean '{close[0]}'?" if close else ""
