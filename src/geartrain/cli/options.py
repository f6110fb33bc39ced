"""What commands have in common: how they end, words that several have, or that are one of a few."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, final

import typer
from typer.core import TyperGroup


@final
class Commands(TyperGroup):
    """Every command ends as ``geartrain.cli.exits`` says, whatever comes of it."""

    def invoke(self, ctx: Any) -> Any:
        from geartrain.cli.exits import ending

        with ending():
            return super().invoke(ctx)


class ComparedName(StrEnum):
    """Where parts run, on this host and by the clock."""

    THREADS = "threads"
    PROCESSES = "processes"
    AUTO = "auto"


class RuntimeName(StrEnum):
    """Where parts run."""

    PROCESSES = "processes"
    HOSTS = "hosts"
    RAY = "ray"
    THREADS = "threads"
    SIMULATED = "simulated"
    AUTO = "auto"


class OnWorkerDeathName(StrEnum):
    """What becomes of a run in which a worker process dies."""

    RAISE = "raise"
    RESTORE = "restore"
    GO_ON = "go_on"


class PrecisionName(StrEnum):
    """Of rows and products."""

    FULL = "full"
    BF16 = "bf16"


class SplitName(StrEnum):
    """Which part of the data; dev and valid are two words for the validation."""

    DEV = "dev"
    VALID = "valid"
    TEST = "test"
    TRAIN = "train"


class Format(StrEnum):
    """How to draw a graph."""

    TEXT = "text"
    MERMAID = "mermaid"
    DOT = "dot"


FLAG = ""
"""Takes no value, so help says none."""
DataOption = Annotated[
    Path | None, typer.Option("--data", help="Data folder; default $GEARTRAIN_DATA.")
]
JsonFlag = Annotated[
    bool,
    typer.Option(
        "--json", metavar=FLAG, help="One JSON object as the last line of standard output."
    ),
]
EvaluateOption = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Share of an epoch between evaluations, such as 0.25; default: its end.",
        show_default=False,
    ),
]
TopologyOption = Annotated[
    str | None,
    typer.Option(help="Who talks to whom: ring, full, ...; default ring.", show_default=False),
]
MixerOption = Annotated[
    str | None,
    typer.Option(help="How copies exchange: gradients, all-reduce, ...", show_default=False),
]
SpeedsOption = Annotated[
    str | None,
    typer.Option(metavar="SPEED,...", help="Speeds of simulated workers, repeated in turn."),
]
LinkOption = Annotated[
    str | None,
    typer.Option(
        metavar="LATENCY,BANDWIDTH[,BUFFER]", help="Simulated links, such as 50us,1.25GB."
    ),
]
DEVICE = "cpu|cuda|cuda:N"
RunArgument = Annotated[Path, typer.Argument(help="A run's folder.", show_default=False)]
RecipeArgument = Annotated[str, typer.Argument(help="See 'geartrain recipes'.", show_default=False)]
EpochsOption = Annotated[int | None, typer.Option(min=1, help="Default: the recipe's.")]
SeedOption = Annotated[int | None, typer.Option(min=0, help="Default 0.")]
OutOption = Annotated[
    Path | None, typer.Option(help="The run's folder; default runs/RECIPE-SEED-DATE-TIME.")
]


def active_or_auto(text: str | None) -> int | str | None:
    """A number, or ``auto``."""
    if text is None or text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r}: give 1 or more, or auto", param_hint="--max-active")
    return int(text)
