"""A module that reads a memory is tried on one that is padded further.

    rows, memory (n, 4, d), mask ─► f ─► y
    rows, memory (n, 6, d), mask ─► f ─► y'      is y' what y is?

How far a memory is padded follows from what else is in the firing, so a module that does not use
the mask gives other results in other company. Where all that is held is of one length nothing is
padded, and such a module is right, so it is told, and not refused.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from geartrain.frames.message import Payload
from geartrain.graph.dry_run import how_far_apart
from geartrain.graph.sample_rows import Sample
from geartrain.nodes.chance import generators_kept
from geartrain.nodes.stand_in import StandIn, plain

log = logging.getLogger("geartrain.graph")

_MORE: Final = 2
"""So many places more."""


def tell_of_padding(
    name: str,
    detail: str,
    function: Callable[..., Any],
    samples: Sequence[Sample],
    held: range,
) -> None:
    """Say it, if what a module makes of a row changes with how far its memory is padded.

    Args:
        name, detail: The node and its function.
        function: It.
        samples: Arguments of it, tried in turn until it runs.
        held: Which of these are the memory and its mask.
    """
    for sample in samples:
        with warnings.catch_warnings(), generators_kept(None):
            warnings.simplefilter("ignore")
            off = _changes(function, sample, held)
        if off:
            log.warning(
                "'%s': %s makes something else of a row where its memory is padded further (by "
                "%.2g of its size), and a memory is padded to the longest of a firing; use the "
                "mask: scores.masked_fill(~mask, -1e9) before a softmax, values * mask[..., None] "
                "before a sum. Only where all that is held has one length does it not matter",
                name,
                detail,
                off,
            )
        if off is not None:
            return


def _changes(function: Callable[..., Any], sample: Sample, held: range) -> float | None:
    """By how much what it makes changes, 0 if by chance; None: it does not run on this."""
    rows, _ = sample.arguments(np.arange(sample.n))
    wide = tuple(_wider(x) if k in held else x for k, x in enumerate(rows))
    with suppress(Exception):  # code of anybody is run, in a way that it may not know
        stand_in = StandIn(plain(function), owns=True)
        y, again, other = (stand_in.play(xs, None) for xs in (rows, rows, wide))
        return 0.0 if _furthest(y, again) else _furthest(y, other)
    return None


def _wider(x: Tensor) -> Tensor:
    """A memory, or its mask, padded by some places more."""
    return torch.cat([x, x.new_zeros(x.shape[0], _MORE, *x.shape[2:])], 1)


def _furthest(y: Payload, other: Payload) -> float:
    """How far two results are from one another, at most."""
    return max((how_far_apart(a, b) for a, b in zip(y, other, strict=True)), default=0.0)
