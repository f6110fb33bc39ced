"""What a training run was asked for, as the command line gives it and ``config.json`` keeps it.

command line (None: not given) ─┬─ new run: the recipe's defaults fill in
                                └─ resumed: the run's config does; what differs is refused
"""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, final

import numpy as np
import torch

from geartrain.bounds import (
    ACTIVE,
    COPIES,
    COUNT,
    EPOCHS,
    MOST_ACTIVE,
    MOST_COPIES,
    MOST_COUNT,
    MOST_EPOCHS,
    MOST_SEED,
    MOST_WORKERS,
    SEED,
    WORKERS,
    require_at_most,
)
from geartrain.cli.copies import parse_link, parse_speeds, require_mixer
from geartrain.data.points import require_evaluate_every
from geartrain.device import cores, require_device
from geartrain.errors import DataError
from geartrain.frames.precision import Precision, require_precision
from geartrain.recipes import Recipe, Setting, Value, find_recipe
from geartrain.runtime.base import AbstractRuntime
from geartrain.runtime.costs import Costs
from geartrain.runtime.hosts.hosts import Hosts
from geartrain.runtime.hosts.on_ray import Ray
from geartrain.runtime.hosts.program import Host
from geartrain.runtime.processes.processes import Processes
from geartrain.runtime.processes.supervised import OnWorkerDeath
from geartrain.runtime.simulated import Simulated
from geartrain.runtime.threads import Threads
from geartrain.schema import Mismatch, NotNegative, Range, read
from geartrain.sharing.neighbours import Neighbours
from geartrain.sharing.topology import topology_of
from geartrain.train.auto import Auto
from geartrain.train.results import Target

RUNTIMES = ("processes", "hosts", "ray", "threads", "simulated", "auto")
_APART = ("processes", "hosts", "ray")
"""Whose workers are processes: the same training, wherever they are."""
_WHERE = {"hosts": ("hosts",), "address": ("hosts", "ray"), "resources": ("ray",)}
"""Settings that say where workers are, and the runtimes that they go with."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """All that decides how a run goes; equal settings and ``simulated`` give equal weights.

    Args:
        recipe: Name.
        runtime: ``processes``, ``hosts``, ``ray``, ``threads``, ``simulated`` or ``auto``.
        workers: How many; for ``auto`` at most.
        max_active: Most instances in flight, or ``auto``: as the network wants.
        update_every: In the recipe's unit.
        epochs: Planned.
        seed: Of weights, order and generated data.
        until: A target as text, or None.
        checkpoint_every: Instances between checkpoints within an epoch, or None.
        evaluate_every: Share of an epoch between evaluations, or None.
        replicas: Copies of the recipe's bottleneck; with ``topology`` or ``mixer`` of the whole
            model.
        topology, mixer: Who talks to whom, and how; None and None: no copies of the model.
        speeds, link: Speeds, latency and bandwidth as text, for ``simulated``.
        costs: Seconds a firing and a row by node, measured, for ``simulated``.
        on_worker_death: For ``processes``, ``hosts`` and ``ray``: ``raise``, ``restore`` or
            ``go_on``, or None, as ``raise``. It changes nothing of the training; a run may be
            resumed with another, and so it is with where workers are: with these runtimes, and what
            follows.
        hosts: Addresses and commands as text, for ``hosts``; None: this host.
        address: Of this host, for ``hosts``; of a cluster, for ``ray``.
        resources: Of each worker as text, for ``ray``.
        precision: ``full`` or ``bf16``.
        device: Of all parts, or None: the CPU. It changes nothing but speed and rounding, so a run
            may be resumed on another.
        options: The recipe's, complete.
    """

    recipe: str
    runtime: str
    workers: int
    max_active: int | Literal["auto"]
    update_every: int
    epochs: int
    seed: Annotated[int, Range(0, MOST_SEED)]
    until: str | None
    checkpoint_every: int | None
    evaluate_every: float | None
    replicas: int
    precision: Precision
    device: str | None
    options: Mapping[str, Value]
    topology: str | None = None
    mixer: str | None = None
    speeds: str | None = None
    link: str | None = None
    costs: Mapping[str, tuple[NotNegative, NotNegative]] | None = None
    on_worker_death: OnWorkerDeath | None = None
    hosts: str | None = None
    address: str | None = None
    resources: str | None = None

    def make_runtime(self) -> AbstractRuntime | Auto:
        """The runtime of this name and size."""
        if self.runtime == "auto":
            return Auto(workers=self.workers)
        if self.runtime == "simulated":
            # One kernel thread: sums are then added in the same order on every machine.
            torch.set_num_threads(1)
            link = parse_link(self.link)
            # Without a buffer each two workers have a link of their own.
            costs = link.on(Costs(shared=link.buffer_bytes is not None))
            if self.costs is not None:
                nodes = {name: (float(a), float(b)) for name, (a, b) in self.costs.items()}
                costs = replace(costs, nodes=nodes, backward=0.0)
            speeds = parse_speeds(self.speeds, self.workers)
            return Simulated(self.workers, seed=self.seed, costs=costs, speeds=speeds)
        then = self.on_worker_death or "raise"
        if self.runtime == "processes":
            return Processes(self.workers, on_worker_death=then)
        if self.runtime == "hosts":
            hosts = self.workers if self.hosts is None else parse_hosts(self.hosts)
            return Hosts(hosts, self.workers, address=self.address, on_worker_death=then)
        if self.runtime == "ray":
            return Ray(
                self.workers,
                self.address,
                resources=parse_resources(self.resources),
                on_worker_death=then,
            )
        return Threads(self.workers)

    @property
    def copies_model(self) -> bool:
        """Whether ``replicas`` are copies of the whole model."""
        return self.topology is not None or self.mixer is not None

    def neighbours(self, copies: int | None = None) -> Neighbours | None:
        """Copies of the model, if there are any; or so many in a ring.

        Raises:
            ValueError: No such mixer.
        """
        if not self.copies_model:
            return None
        return Neighbours(
            copies=copies or self.replicas,
            topology="ring" if copies else self.topology or "ring",
            exchange=require_mixer(self.mixer or "gradients"),
        )

    def target(self) -> Target | None:
        """The target, if there is one."""
        return None if self.until is None else Target.parse(self.until)

    def setting(self, data: Path | None, files: Mapping[str, str]) -> Setting:
        """For ``Recipe.build``."""
        return Setting(
            seed=self.seed,
            epochs=self.epochs,
            update_every=self.update_every,
            data=data,
            options=self.options,
            files=files,
            replicas=1 if self.copies_model else self.replicas,
        )


def new_settings(recipe: Recipe, given: Mapping[str, Any]) -> RunSettings:
    """What was given, and the recipe's defaults for the rest.

    Args:
        recipe: The task.
        given: Field name to value; None where nothing was given.

    Raises:
        ValueError: A value that cannot be.
    """
    options = recipe.complete(given["options"] or {})
    copies_model = given.get("topology") is not None or given.get("mixer") is not None
    workers = cores() if given["runtime"] == "auto" else min(2, cores())
    if recipe.workers is not None and given["runtime"] not in ("simulated", "auto"):
        workers = min(recipe.workers, workers)
    if not copies_model or given["runtime"] == "simulated":
        workers = max(workers, given["replicas"] or 1)
    defaults: dict[str, Any] = {
        "runtime": _runtime(recipe, given, workers),
        "workers": workers,
        "max_active": 1 if copies_model and recipe.whole_minibatches else recipe.in_flight(options),
        "update_every": recipe.update_size(options),
        "epochs": recipe.epochs,
        "seed": 0,
        "until": None,
        "checkpoint_every": None,
        "evaluate_every": None,
        "replicas": 1,
        "precision": "full",
        "topology": None,
        "mixer": None,
        "device": None,
        "speeds": None,
        "link": None,
        "costs": None,
        "on_worker_death": None,
        **dict.fromkeys(_WHERE),
    }
    chosen = {
        name: default if given.get(name) is None else given[name]
        for name, default in defaults.items()
    }
    settings = RunSettings(recipe=recipe.name, options=options, **chosen)
    require_settings(recipe, settings)
    return settings


def _runtime(recipe: Recipe, given: Mapping[str, Any], workers: int) -> str:
    """The recipe's, for several workers, where nothing asked for has to be in one process."""
    copies_model = given.get("topology") is not None or given.get("mixer") is not None
    elsewhere = given.get("device") is not None or not sys.platform.startswith("linux")
    many = (given.get("workers") or workers) > 1
    return recipe.runtime if many and not (copies_model or elsewhere) else "threads"


def resumed_settings(
    recipe: Recipe, given: Mapping[str, Any], config: Mapping[str, Any]
) -> RunSettings:
    """The settings of the run, after a look at whether what was given agrees.

    Raises:
        ValueError: An option differs; names all that do. Or the device is not here.
        DataError: The config is not one of ours.
    """
    settings = on_device(settings_from_json(config), given["device"])
    settings = _moved(settings, given)
    _require_deaths(settings)
    _require_where(settings)
    was = asdict(settings)
    differing = [] if recipe.name == settings.recipe else [f"RECIPE {settings.recipe}"]
    for name, value in given.items():
        old = was[name]
        if name == "options":
            changed = {k: v for k, v in (value or {}).items() if old.get(k) != v}
            differing += [f"--option {k}={old.get(k)}" for k in changed]
        elif value is not None and value != old:
            option = name.replace("_", "-")
            differing.append(f"no --{option}" if old is None else f"--{option} {old}")
    if differing:
        raise ValueError(
            f"--resume continues the run as it was begun, with {', '.join(differing)}; leave out "
            "the options that differ, or start another run with another --out"
        )
    return settings


def _moved(settings: RunSettings, given: Mapping[str, Any]) -> RunSettings:
    """The settings of a run whose workers, if they are processes, are to be elsewhere now."""
    names = ["on_worker_death"]
    changed: dict[str, Any] = {}
    runtime = given.get("runtime") or settings.runtime
    if {runtime, settings.runtime} <= {*_APART}:
        names += ["runtime", *_WHERE]
        changed = {k: None for k, those in _WHERE.items() if runtime not in those}
    changed |= {k: given[k] for k in names if given.get(k) is not None}
    return replace(settings, **changed)


def on_device(settings: RunSettings, device: str | None) -> RunSettings:
    """The settings of a run, on another device if one is given.

    Raises:
        ValueError: There is no such device here.
    """
    found = settings if device is None else replace(settings, device=device)
    if found.device is not None:
        whose = "--device" if device is not None else "the run's --device"
        require_device(found.device, whose)
    return found


def settings_from_json(config: Mapping[str, Any]) -> RunSettings:
    """What ``config_of`` made.

    Raises:
        DataError: A key is missing, or a value of another type.
        ValueError: There is no such recipe, or it cannot be trained so.
    """
    stored = config.get("settings")
    if isinstance(stored, Mapping):
        stored = {"precision": "full", "device": None, **stored}  # from before there was a choice
    try:
        settings = read(RunSettings, stored, "settings")
    except Mismatch as error:
        raise DataError(
            f"the run's config.json is not one of ours: {error}; restore it, or read it with the "
            f"version of geartrain that made it ({config.get('versions')!r:.200})"
        ) from error
    # The device is looked at when it is known which: a run may go on, on another.
    require_settings(find_recipe(settings.recipe), replace(settings, device=None))
    return settings


def config_of(settings: RunSettings, data: Path | None, version: str) -> dict[str, Any]:
    """What goes into ``config.json``."""
    return {
        "settings": asdict(settings),
        "data": None if data is None else str(data.resolve()),
        "versions": {
            "geartrain": version,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }


def require_settings(recipe: Recipe, settings: RunSettings) -> None:
    """Refuse what cannot be trained.

    Raises:
        ValueError: A number out of range, an unknown option, runtime, precision or metric, a device
            that is not here, or more copies than workers or than the recipe can have.
    """
    _require_numbers(settings)
    recipe.require_options(settings.options)
    if settings.runtime not in RUNTIMES:
        raise ValueError(f"--runtime {settings.runtime}: expected one of {', '.join(RUNTIMES)}")
    if settings.until is not None:
        target = settings.target()
        known = (*recipe.metrics, "loss")
        if target is not None and target.metric not in known:
            raise ValueError(
                f"--until {settings.until}: recipe '{recipe.name}' reports {', '.join(known)}"
            )
    require_precision(settings.precision, "--precision ")
    if settings.device is not None:
        require_device(settings.device, "--device")
    if settings.copies_model:
        _require_copies(settings)
    else:
        recipe.require_replicas(settings.replicas)
    if settings.runtime != "simulated" and (settings.speeds or settings.link):
        raise ValueError(
            "--speeds and --link imagine machines: they go with --runtime simulated, or with "
            "geartrain simulate"
        )
    _require_deaths(settings)
    _require_where(settings)
    if not settings.copies_model and settings.replicas > settings.workers:
        raise ValueError(
            f"replicas={settings.replicas} with workers={settings.workers}: every copy has a "
            f"worker of its own; give --workers {settings.replicas} or more"
        )
    require_evaluate_every(settings.evaluate_every)


def _require_deaths(settings: RunSettings) -> None:
    if settings.on_worker_death is not None and settings.runtime not in _APART:
        raise ValueError(
            f"--on-worker-death {settings.on_worker_death}: workers of --runtime "
            f"{settings.runtime} live and die with the program; give --runtime processes (or "
            "hosts, ray), or leave it out"
        )


def _require_where(settings: RunSettings) -> None:
    for name, runtimes in _WHERE.items():
        if getattr(settings, name) is not None and settings.runtime not in runtimes:
            option = "host" if name == "hosts" else name
            raise ValueError(
                f"--{option} goes with --runtime {' or '.join(runtimes)}, and the runtime is "
                f"{settings.runtime}"
            )
    if settings.hosts is not None and len(parse_hosts(settings.hosts)) < settings.workers:
        raise ValueError(
            f"--host: {len(parse_hosts(settings.hosts))} for {settings.workers} workers; repeat it "
            "for each worker"
        )
    parse_resources(settings.resources)


def parse_hosts(text: str) -> list[Host]:
    """``ADDRESS [COMMAND ...]; ...`` as hosts of one worker each.

    Raises:
        ValueError: It is not so.
    """
    found = []
    for each in text.split(";"):
        address, *command = shlex.split(each) or [""]
        found.append(Host(address, command=command))
    return found


def parse_resources(text: str | None) -> dict[str, float] | None:
    """``NAME=N,...`` as numbers by name.

    Raises:
        ValueError: It is not so.
    """
    if text is None:
        return None
    found = {}
    for each in text.split(","):
        name, _, number = each.partition("=")
        try:
            found[name.strip()] = float(number)
        except ValueError as error:
            raise ValueError(f"--resources {text}: {each!r} is not NAME=N, as CPU=1") from error
    return found


def _require_numbers(settings: RunSettings) -> None:
    for name, least, most, why in (
        ("replicas", 1, MOST_COPIES, COPIES),  # first, as there are as many workers
        ("workers", 1, MOST_WORKERS, WORKERS),
        ("max_active", 1, MOST_ACTIVE, ACTIVE),
        ("update_every", 1, MOST_COUNT, COUNT),
        ("epochs", 1, MOST_EPOCHS, EPOCHS),
        ("seed", 0, MOST_SEED, SEED),
        ("checkpoint_every", 1, MOST_COUNT, COUNT),
    ):
        value, said = getattr(settings, name), f"--{name.replace('_', '-')}"
        if value == "auto":
            continue
        if value is not None and value < least:
            raise ValueError(f"{said} {value}: give {least} or more")
        if value is not None:
            require_at_most(f"{said} {value}", value, most, why)


def told(name: str, value: Value) -> str:
    """An option as one would give it."""
    return f"{name}={value}" if isinstance(value, str) else f"{name}={value:g}"


def _require_copies(settings: RunSettings) -> None:
    setting = settings.neighbours()
    assert setting is not None
    if settings.replicas > 1 and setting.made_exchange().needs_neighbours:
        topology_of(setting.topology).neighbours(settings.replicas)
    parse_link(settings.link)
    parse_speeds(settings.speeds, settings.workers)
