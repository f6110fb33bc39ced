"""What ``geartrain compare`` compares, from the words behind ``--against``.

ours                        as the settings say, always there
ours:replicas=2:hidden=64   ours with other settings or options
ours:runtime=processes      ours on worker processes
greedy, greedy:parts=8      ours by another method: the same as ours:method=greedy:parts=8
ours-sync:50                our graph, drained after every 50 instances
fused, fused:32             a baseline, in minibatches of 32
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from geartrain.cli.settings import RunSettings, require_settings
from geartrain.frames.precision import require_precision
from geartrain.recipes import Choice, Recipe
from geartrain.recipes.recipe import meant
from geartrain_baselines import PEERS, Baseline
from geartrain_baselines.standings import System
from geartrain_baselines.trial import OURS, SYNCHRONOUS

CHANGES: Final = ("max_active", "update_every", "replicas")  # of ours, besides options
RUNTIMES: Final = ("threads", "processes", "auto")  # on this host, by the clock
METHOD: Final = "method"  # the option whose words stand for ours with it

_DRAINED: Final = 25  # instances, where neither the recipe nor its peers say


def systems_of(
    recipe: Recipe, settings: RunSettings, against: str | None, epochs: int | None
) -> list[System]:
    """Ours, and what it is compared with.

    Args:
        recipe: The task.
        settings: Of ours.
        against: ``NAME`` or ``NAME:BATCH``; ours with other settings or options, as
            ``ours:replicas=2:hidden=64``; ours by another method of the recipe, as ``greedy`` or
            ``greedy:max_active=8``; with commas between them. None takes ours-sync and all
            baselines that are neither slow nor in need of a package that is not there.
        epochs: Of every system; None: what suits each.

    Raises:
        ValueError: There is no such system or setting, or its batch is no positive number.
    """
    peers = PEERS.get(recipe.name)
    baselines = {} if peers is None else {b.name: b for b in peers.baselines}
    if recipe.unit == "instances":
        drained = settings.update_every
    else:
        drained = _DRAINED if peers is None else peers.drained
    found = [System(OURS, OURS, _what(recipe, settings), None, settings.epochs)]
    methods = _methods(recipe)
    for text in _default(baselines) if against is None else against.split(","):
        name, colon, batch_text = text.strip().partition(":")
        if name == OURS or name in methods:
            settings_text = f"{METHOD}={name}" if name in methods else ""
            settings_text += ":" * bool(settings_text and colon) + batch_text
            changes = _changes(recipe, settings, text, settings_text) if settings_text else {}
            changed = replace(settings, **changes)
            require_settings(recipe, changed)
            what = _what(recipe, changed)
            system = System(text.strip(), OURS, what, None, settings.epochs, changes)
        elif name == SYNCHRONOUS:
            batch = _batch(text, batch_text) if colon else drained
            what = f"our graph, drained after every {batch} instances{_where(settings)}"
            system = System(text.strip(), name, what, batch, settings.epochs)
        else:
            baseline = _find(recipe, baselines, name, methods)
            batch = _batch(text, batch_text) if colon else baseline.batch
            of_baseline = epochs or baseline.epochs or recipe.epochs
            system = System(text.strip(), name, baseline.what, batch, of_baseline)
        if system.key not in [s.key for s in found]:
            found.append(system)
    return found


def _methods(recipe: Recipe) -> tuple[str, ...]:
    return next((o.words for o in recipe.options if o.name == METHOD and isinstance(o, Choice)), ())


def _what(recipe: Recipe, settings: RunSettings) -> str:
    copies = f", {settings.replicas} copies of {recipe.bottleneck}" if settings.replicas > 1 else ""
    rows = "" if settings.precision == "full" else f", rows in {settings.precision}"
    method = f"{settings.options[METHOD]}: " if _methods(recipe) else ""
    return (
        f"{method}{settings.max_active} in flight, an update every {settings.update_every} "
        f"{recipe.unit}{copies}{rows}{_where(settings)}"
    )


def _where(settings: RunSettings) -> str:
    runtime = "" if settings.runtime == "threads" else f", by runtime {settings.runtime}"
    return runtime + ("" if settings.device in (None, "cpu") else f", on {settings.device}")


def _changes(recipe: Recipe, settings: RunSettings, text: str, given: str) -> dict[str, Any]:
    """Settings of ours from ``replicas=2:max_active=16:hidden=64``."""
    changes: dict[str, Any] = {}
    options = dict(settings.options)
    for each in given.split(":"):
        name, _, value = each.partition("=")
        if name == "precision":
            changes[name] = require_precision(value, f"--against {text.strip()}: precision=")
        elif (name == "device" and value in ("cpu", "cuda")) or (
            name == "runtime" and value in RUNTIMES
        ):
            changes[name] = value
        elif name in options:
            options[name] = recipe.option(name).parse(value)
        elif name in CHANGES and value.isdecimal() and int(value) >= 1:
            changes[name] = int(value)
        else:
            known = (*CHANGES, "precision", "device", "runtime", *options)
            raise ValueError(
                f"--against {text.strip()}: write {OURS}:NAME=VALUE with a value of 1 or more and "
                f"one of {', '.join(CHANGES)}, or precision=bf16, or device=cuda, or runtime= one "
                f"of {', '.join(RUNTIMES)}, or one of the recipe's options {', '.join(options)}"
                + meant(name, known)
            )
    if options == settings.options:
        return changes
    if settings.max_active == recipe.in_flight(settings.options):  # as the recipe has it: follow
        changes.setdefault("max_active", recipe.in_flight(options))
    own = recipe.update_size(options)
    if settings.update_every == recipe.update_size(settings.options) != own:
        changes.setdefault("update_every", own)
    return {**changes, "options": options}


def _default(baselines: Mapping[str, Baseline]) -> list[str]:
    names = [SYNCHRONOUS]
    for baseline in baselines.values():
        if baseline.slow:
            continue
        if _missing(baseline):
            print(f"left out: {_how_to_install(baseline)}", file=sys.stderr)
        else:
            names.append(baseline.name)
    return names


def _find(
    recipe: Recipe, baselines: Mapping[str, Baseline], name: str, methods: Sequence[str]
) -> Baseline:
    if name not in baselines:
        known = [SYNCHRONOUS, *baselines, *methods]
        raise ValueError(
            f"no system '{name}': '{recipe.name}' can be compared with {', '.join(known)}"
            + meant(name, known)
        )
    if _missing(baselines[name]):
        raise ValueError(_how_to_install(baselines[name]))
    return baselines[name]


def _missing(baseline: Baseline) -> bool:
    return baseline.needs is not None and importlib.util.find_spec(baseline.needs) is None


def _how_to_install(baseline: Baseline) -> str:
    return (
        f"system '{baseline.name}' needs {baseline.needs}, which is not installed: "
        "pip install 'geartrain[peers]'"
    )


def _batch(text: str, number: str) -> int:
    if not number.isdecimal() or int(number) < 1:
        raise ValueError(f"--against {text.strip()}: write NAME:BATCH with a batch of 1 or more")
    return int(number)
