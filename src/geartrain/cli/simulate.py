"""``geartrain simulate``: more workers than there are cores, on a virtual clock.

measure a few instances in one thread ─► seconds by node ─► train, simulated, with those costs
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from geartrain.cli.copies import parse_link
from geartrain.cli.exits import preparing
from geartrain.cli.settings import RunSettings, new_settings
from geartrain.cli.train import Watching, train
from geartrain.observe.stopwatch import Stopwatch
from geartrain.recipes import Recipe, find_recipe
from geartrain.runtime.threads import Threads
from geartrain.train.options import Compute
from geartrain.train.session import Session

_MEASURED: Final = 100  # instances that are timed, after as many that warm caches up


def simulate(
    name: str,
    given: Mapping[str, Any],
    option_texts: Sequence[str],
    data: Path | None,
    out: Path | None,
    watching: Watching,
) -> None:
    """Measure, and train; exits as ``train`` does.

    Args:
        name: Of the recipe.
        given: Settings by field name, None for those that were not given.
        option_texts: ``NAME=VALUE`` each.
        data: The data folder.
        out: The run's folder.
        watching: What else to write.
    """
    with preparing():
        recipe = find_recipe(name)
        asked = {**given, "runtime": "simulated", "options": recipe.parse_options(option_texts)}
        settings = new_settings(recipe, asked)
        parse_link(settings.link)
        costs = measured(recipe, settings, data)
    print(f"measured {len(costs)} kinds of firings in one thread", file=sys.stderr)
    asked.pop("options")
    train(name, {**asked, "costs": costs}, option_texts, data, out, False, watching)


def measured(
    recipe: Recipe, settings: RunSettings, data: Path | None
) -> dict[str, tuple[float, float]]:
    """Seconds a firing and a row, by node, from training two copies in one thread.

    Args:
        recipe: The task; it is built for this alone.
        settings: Of the run.
        data: The data folder.
    """
    task = recipe.build(settings.setting(data, {}))
    instances = list(task.load("train")[:_MEASURED])
    stopwatch, threads = Stopwatch(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        session = Session(
            task.graph,
            rules=task.rules,
            runtime=Threads(1, kernel_threads=1),
            max_active=settings.max_active,
            compute=Compute(precision=settings.precision),
            seed=settings.seed,
            instruments=[stopwatch],
            **task.settings(1, settings.neighbours(copies=2)),
        )
        session.fit(instances, epochs=2)
    finally:
        torch.set_num_threads(threads)
    return dict(stopwatch.costs().nodes)
