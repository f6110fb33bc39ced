"""``geartrain evaluate``: the checkpoint of a run on a split of the data."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from geartrain.cli.exits import preparing, running
from geartrain.cli.logs import logging_to
from geartrain.cli.settings import on_device, settings_from_json
from geartrain.cli.train import finite
from geartrain.observe.figures import measure
from geartrain.recipes import find_recipe
from geartrain.train.options import Compute
from geartrain.train.run import RunFolder
from geartrain.train.session import Session


def evaluate(
    run: Path, data: Path | None, split: str, as_json: bool, device: str | None = None
) -> None:
    """Evaluate the best checkpoint, or the latest where no validation chose a best.

    Args:
        run: The run's folder.
        data: The data folder; None takes that of the training.
        split: ``dev`` or ``valid``, ``test``, ``train``.
        as_json: Print one JSON object.
        device: Where the model is to live; None takes that of the training.
    """
    with preparing():
        folder = RunFolder(run)
        config = folder.read_config()
        settings = on_device(settings_from_json(config), device)
        recipe = find_recipe(settings.recipe)
        kept = config.get("data")
        where = data or (Path(kept) if isinstance(kept, str) else None)
        checkpoint = folder.best if folder.best.exists() else folder.latest
        if not checkpoint.exists():
            raise ValueError(f"{run}: the run has no checkpoint yet; train it further")
        task = recipe.build(settings.setting(where, folder.read_files()))
        instances = task.load(split)
        session = Session(
            task.graph,
            rules=task.rules,
            runtime=settings.make_runtime(),
            max_active=settings.max_active,
            compute=Compute(precision=settings.precision, device=settings.device),
            seed=settings.seed,
            **task.settings(settings.workers),
        )
        session.load(checkpoint, weights_only=True)
    with logging_to(folder.log), running(folder.log):
        found = session.evaluate(instances)
    result = {
        "recipe": recipe.name,
        "run": str(run),
        "split": split,
        "instances": found.instances,
        "metrics": finite(found.metrics),
        "seconds": found.seconds,
    }
    if as_json:
        print(json.dumps(result, allow_nan=False))
        return
    print(f"{checkpoint}: {found.instances} instances of {split}", file=sys.stderr)
    for name, value in found.metrics.items():
        print(f"{name:<12}{measure(name, value)}")
