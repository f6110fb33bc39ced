"""What ``fit`` refuses of its arguments."""

from __future__ import annotations

from pathlib import Path

from geartrain.bounds import EPOCHS, MOST_EPOCHS, require_at_most
from geartrain.data.points import require_evaluate_every
from geartrain.train.results import Target
from geartrain.train.source import Data


def require_fit_arguments(
    epochs: int,
    until: Target | None,
    valid: Data | None,
    folder: Path | str | None,
    every: int | None,
    keep_last: int,
    evaluate_every: float | None,
) -> None:
    """Refuse what does not go together.

    Raises:
        ValueError: Says what, and what to give.
    """
    if epochs < 0:
        raise ValueError(f"epochs={epochs}: give 0 or more")
    require_at_most(f"epochs={epochs}", epochs, MOST_EPOCHS, EPOCHS)
    if until is not None and valid is None:
        raise ValueError(f"until={until} wants validation data: fit(..., valid=...)")
    if every is not None and every < 1:
        raise ValueError(f"checkpoint_every={every}: give 1 or more instances, or None")
    if folder is None and (every is not None or keep_last):
        raise ValueError("checkpoint_every and keep_last want a folder: fit(..., folder=...)")
    require_evaluate_every(evaluate_every)
    if evaluate_every is not None and valid is None:
        raise ValueError(
            f"evaluate_every={evaluate_every:g} wants validation data: fit(..., valid=...)"
        )
