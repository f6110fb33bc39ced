"""What one would train with instead: plain PyTorch programs for the tasks of the recipes.

Peers for comparison only: none of them uses the engine, a graph or a session of geartrain, and
nothing of geartrain but what reads and cuts the data. Training with geartrain has one way, through
``geartrain.Session``; what stands here is never a part of it.

A recipe's baselines are in a file of their own, in the strongest form that we could write; update
sizes and rates are those of the sweeps in ``benchmarks/tuning``. ``PEERS`` has them by the recipe's
name. Those with ``needs`` want a package of the extra ``peers``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

from geartrain_baselines import babi, charlm, cifar, listreduce, mnist, qm9, sentiment
from geartrain_baselines.baseline import Baseline, Epoch, Terms


@final
@dataclass(frozen=True, slots=True)
class Peers:
    """What to compare a recipe with.

    Args:
        baselines: Plain PyTorch programs.
        drained: Instances between two drains when the recipe's own graph is run synchronously; of
            use where the recipe counts updates in rows.
    """

    baselines: tuple[Baseline, ...]
    drained: int


PEERS: Final[Mapping[str, Peers]] = {
    "babi": Peers(babi.BASELINES, drained=10),
    "charlm": Peers(charlm.BASELINES, drained=1),
    "cifar": Peers(cifar.BASELINES, drained=1),
    "listreduce": Peers(listreduce.BASELINES, drained=100),
    "mnist": Peers(mnist.BASELINES, drained=1),
    "qm9": Peers(qm9.BASELINES, drained=20),
    "sentiment": Peers(sentiment.BASELINES, drained=25),
}

__all__ = ["PEERS", "Baseline", "Epoch", "Peers", "Terms"]
