"""``geartrain simulate``: more workers than there are cores, on a virtual clock.

measure a few instances in one thread ─┐
the log of a run                      ─┴► seconds by node ─► train, simulated, with those costs
                                                          └► --hosts: an epoch each, and a table
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from rich.console import Console
from rich.table import Table

from geartrain.bounds import MOST_WORKERS
from geartrain.cli.copies import ImaginedLink, parse_link
from geartrain.cli.exits import preparing
from geartrain.cli.settings import RunSettings, new_settings
from geartrain.cli.train import Watching, make_session, train
from geartrain.engine.instrument import AbstractInstrument
from geartrain.observe.recorded import recorded_run
from geartrain.observe.stopwatch import Stopwatch
from geartrain.recipes import Recipe, find_recipe
from geartrain.runtime.costs import Costs
from geartrain.runtime.simulated import Simulated
from geartrain.runtime.threads import Threads
from geartrain.train.forecast import Forecast, forecast
from geartrain.train.options import Compute
from geartrain.train.session import Session

_MEASURED: Final = 100  # instances that are timed, after as many that warm caches up
_UPDATES: Final = 4  # of each host, so that what they exchange is among what they do


def simulate(
    name: str,
    given: Mapping[str, Any],
    option_texts: Sequence[str],
    data: Path | None,
    out: Path | None,
    watching: Watching,
    recording: Path | None = None,
) -> None:
    """Measure, and train; exits as ``train`` does.

    Args:
        name: Of the recipe.
        given: Settings by field name, None for those that were not given.
        option_texts: ``NAME=VALUE`` each.
        data: The data folder.
        out: The run's folder.
        watching: What else to write.
        recording: The folder of a run whose costs are taken; None: they are measured.
    """
    with preparing():
        recipe = find_recipe(name)
        asked = {**given, "runtime": "simulated", "options": recipe.parse_options(option_texts)}
        settings = new_settings(recipe, asked)
        parse_link(settings.link)
        costs = _costs(recipe, settings, data, recording)
    asked.pop("options")
    train(name, {**asked, "costs": costs}, option_texts, data, out, False, watching)


def _costs(
    recipe: Recipe, settings: RunSettings, data: Path | None, recording: Path | None
) -> dict[str, tuple[float, float]]:
    """Seconds a firing and a row, from the log of a run or a measurement; says from which."""
    if recording is None:
        costs = measured(recipe, settings, data)
        print(f"measured {len(costs)} kinds of firings in one thread", file=sys.stderr)
        return costs
    found = recorded_run(recording)
    print(
        f"{recording}: {len(found.nodes)} kinds of firings, {found.throughput:,.1f} instances/s "
        f"by {found.workers} worker(s)",
        file=sys.stderr,
    )
    return dict(found.nodes)


@final
@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be foreseen.

    Args:
        hosts: Numbers of hosts, as text.
        links: Each as ``LATENCY,BANDWIDTH[,BUFFER]``; none: links without latency and bounds.
        recording: The folder of a run whose costs are taken, or None.
        instances: Of an epoch, for each host; None: as some updates want.
    """

    hosts: str
    links: Sequence[str]
    recording: Path | None
    instances: int | None


def foresee(
    name: str,
    given: Mapping[str, Any],
    option_texts: Sequence[str],
    data: Path | None,
    asked: Asked,
    as_json: bool,
) -> None:
    """Say what hosts would do: the parts of one model apart, and copies of it.

    Args:
        name: Of the recipe.
        given: Settings by field name, None for those that were not given.
        option_texts: ``NAME=VALUE`` each.
        data: The data folder.
        asked: Hosts and links.
        as_json: Whether JSON is written, too.
    """
    with preparing():
        recipe = find_recipe(name)
        common = {**given, "runtime": "simulated", "options": recipe.parse_options(option_texts)}
        common |= {"workers": 1, "replicas": None, "topology": None, "link": None, "until": None}
        numbers = parse_hosts(asked.hosts)
        links = [(text, parse_link(text)) for text in asked.links] or [("none", ImaginedLink())]
        alone = new_settings(recipe, {**common, "mixer": None})
        nodes = _costs(recipe, alone, data, asked.recording)
        ways = _ways(given, recipe)
        plans = [
            (text, link, way, new_settings(recipe, {**common, **chosen, **_sized(hosts, way)}))
            for text, link in links
            for way, chosen in ways.items()
            for hosts in numbers
        ]
    found: list[dict[str, Any]] = []
    for text, link, way, settings in plans:
        # A host has one way out and one way in; a mean is made as runtimes of hosts do it.
        costs = link.on(Costs(nodes=nodes, backward=0.0, shared=True, collective="star"))
        with preparing():
            each = _foreseen(recipe, settings, data, asked.instances, costs)
        told = {"link": text, **link._asdict(), "as": way}
        found.append({**told, **each.to_json()})
        print(f"{text}, {way}, {each.hosts} hosts: done", file=sys.stderr)
    _show(found, to_stderr=as_json)
    if as_json:
        print(json.dumps({"recipe": name, "forecasts": found}))


def parse_hosts(text: str) -> list[int]:
    """Numbers of hosts from ``4,16,64``.

    Raises:
        ValueError: It is not of this form.
    """
    words = text.split(",")
    plain = all(re.fullmatch("[0-9]{1,9}", word) for word in words)  # int takes 1_000 and more
    found = [int(word) for word in words] if plain else []
    if not found or min(found) < 1 or max(found) > MOST_WORKERS:
        raise ValueError(
            f"--hosts {text:.80}: write N[,N...], each from 1 to {MOST_WORKERS}, such as 4,16,64"
        )
    return found


def _ways(given: Mapping[str, Any], recipe: Recipe) -> dict[str, dict[str, Any]]:
    """What is asked of the hosts, by name."""
    mixer = given["mixer"]
    topology = {"topology": given["topology"] or "ring"}
    return {
        "parts": {"mixer": None},
        f"copies, {mixer}": {"mixer": mixer, **topology},
        "copies, all-reduce": {"mixer": "all-reduce", **topology},
    }


def _sized(hosts: int, way: str) -> dict[str, Any]:
    return {"workers": hosts, "replicas": None if way == "parts" else hosts}


def _foreseen(
    recipe: Recipe, settings: RunSettings, data: Path | None, each: int | None, costs: Costs
) -> Forecast:
    """An epoch of so many instances for each host; data that are fewer come again."""
    task = recipe.build(settings.setting(data, {}))
    train = task.load("train")
    if each is None:
        active = settings.max_active if isinstance(settings.max_active, int) else 0
        each = _UPDATES * max(settings.update_every, active)
    some = [train[k % len(train)] for k in range(each * settings.workers)]

    def make(runtime: Simulated, instruments: Sequence[AbstractInstrument]) -> Session:
        return make_session(settings, task, instruments, runtime)

    # Two epochs: after the ramp. The program is on the first host.
    return forecast(make, some, settings.workers, costs, epochs=2, parent=0)


def _show(found: Sequence[Mapping[str, Any]], *, to_stderr: bool) -> None:
    table = Table(box=None)
    for head in ("link", "as"):
        table.add_column(head, no_wrap=True)
    for head in ("hosts", "instances/s", "busy", "staleness", "bytes each"):
        table.add_column(head, justify="right")
    for each in found:
        table.add_row(
            each["link"],
            each["as"],
            str(each["hosts"]),
            f"{each['instances_per_second']:,.1f}",
            f"{100 * each['busy']:.0f}%",
            f"{each['staleness']:.1f}",
            f"{each['bytes_per_instance']:,.0f}",
        )
    Console(stderr=to_stderr).print(table)


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
