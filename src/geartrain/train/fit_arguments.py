"""What ``fit`` refuses of its arguments."""

from __future__ import annotations

from pathlib import Path

from geartrain.bounds import EPOCHS, MOST_EPOCHS, require_at_most, require_whole
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
        TypeError: A number is none, or not whole.
    """
    require_whole(f"epochs={epochs!r:.80}", epochs, 0)
    require_whole(f"keep_last={keep_last!r:.80}", keep_last, 0)
    require_at_most(f"epochs={epochs}", epochs, MOST_EPOCHS, EPOCHS)
    if until is not None and valid is None:
        raise ValueError(f"until={until} wants validation data: fit(..., valid=...)")
    if every is not None:
        what = f"checkpoint_every={every!r:.80}"
        require_whole(what, every, 1, "1 or more instances, or None")
    if folder is None and (every is not None or keep_last):
        raise ValueError("checkpoint_every and keep_last want a folder: fit(..., folder=...)")
    require_evaluate_every(evaluate_every)
    if evaluate_every is not None and valid is None:
        raise ValueError(
            f"evaluate_every={evaluate_every:g} wants validation data: fit(..., valid=...)"
        )
