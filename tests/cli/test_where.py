"""Where workers of a run are: options for hosts and Ray, and a run that is resumed elsewhere."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from geartrain.cli.settings import (
    RunSettings,
    new_settings,
    parse_hosts,
    parse_resources,
    resumed_settings,
)
from geartrain.recipes import find_recipe
from geartrain.runtime.hosts.hosts import Hosts
from geartrain.runtime.hosts.on_ray import Ray
from tests.cli.test_train import SMALL_LISTS

LISTS = find_recipe("listreduce")
NOTHING = dict.fromkeys(
    "runtime workers max_active update_every epochs seed until checkpoint_every evaluate_every "
    "replicas topology mixer speeds link precision device on_worker_death hosts address resources "
    "options".split()
)


def begun(**given: object) -> RunSettings:
    return new_settings(LISTS, {**NOTHING, **given})


def as_kept(settings: RunSettings) -> dict[str, object]:
    return {"settings": asdict(settings)}


def test_hosts_are_an_address_and_a_command_each():
    one, two = parse_hosts("10.0.0.2 ssh -T 'user name@b'; 10.0.0.3")
    assert (one.address, one.command) == ("10.0.0.2", ["ssh", "-T", "user name@b"])
    assert (two.address, two.command) == ("10.0.0.3", [])


def test_resources_are_names_and_numbers():
    assert parse_resources("CPU=2, GPU=0.5") == {"CPU": 2.0, "GPU": 0.5}
    assert parse_resources(None) is None
    with pytest.raises(ValueError, match="'GPU' is not NAME=N"):
        parse_resources("CPU=1,GPU")


def test_settings_make_the_runtime_that_was_named():
    made = begun(runtime="hosts", workers=3).make_runtime()
    assert isinstance(made, Hosts) and made.workers == 3 and made.address == "127.0.0.1"
    far = begun(runtime="hosts", workers=1, hosts="10.0.0.2 ssh b", address="10.0.0.1")
    made = far.make_runtime()
    assert isinstance(made, Hosts)
    assert made.address == "10.0.0.1" and made.hosts[0].command == ["ssh", "b"]
    made = begun(runtime="ray", workers=2, resources="CPU=2", address="auto").make_runtime()
    assert isinstance(made, Ray)
    assert (made.address, made.resources) == ("auto", [{"CPU": 2.0}, {"CPU": 2.0}])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--host", "10.0.0.2"), "--host goes with --runtime hosts"),
        (("--address", "10.0.0.2"), "--address goes with --runtime hosts or ray"),
        (("--runtime", "hosts", "--resources", "CPU=1"), "--resources goes with --runtime ray"),
        (("--runtime", "hosts", "--workers", "2", "--host", "h"), "--host: 1 for 2 workers"),
        (("--runtime", "ray", "--resources", "CPU"), "'CPU' is not NAME=N"),
    ],
)
def test_what_does_not_go_together_is_refused(geartrain, words, why):
    lists = [word for word in SMALL_LISTS if word not in ("--runtime", "simulated")]
    done = geartrain("train", *lists, *words)
    assert done.status == 2 and why in done.err


def test_a_run_of_worker_processes_is_resumed_wherever_these_are_now():
    was = begun(runtime="hosts", workers=2, hosts="10.0.0.2 ssh b; 10.0.0.3", address="10.0.0.1")
    there = resumed_settings(LISTS, NOTHING, as_kept(was))
    assert there == was
    other = {**NOTHING, "hosts": "10.0.0.7; 10.0.0.8", "on_worker_death": "restore"}
    moved = resumed_settings(LISTS, other, as_kept(was))
    assert (moved.hosts, moved.address) == ("10.0.0.7; 10.0.0.8", "10.0.0.1")
    assert moved.on_worker_death == "restore"
    here = resumed_settings(LISTS, {**NOTHING, "runtime": "processes"}, as_kept(was))
    assert (here.runtime, here.hosts, here.address) == ("processes", None, None)
    with pytest.raises(ValueError, match="--runtime hosts"):
        resumed_settings(LISTS, {**NOTHING, "runtime": "threads"}, as_kept(was))
    with pytest.raises(ValueError, match="--workers 2"):
        resumed_settings(LISTS, {**NOTHING, "workers": 3}, as_kept(was))


@pytest.mark.slow
def test_a_recipe_trains_on_hosts(geartrain, tmp_path: Path):
    lists = [word if word != "simulated" else "hosts" for word in SMALL_LISTS]
    words = (*lists, "--option", "whole=0", "--workers", 2, "--out", tmp_path / "run", "--json")
    done = geartrain("train", *words)
    assert done.status == 0, done.err
    assert (done.json["runtime"], done.json["workers"]) == ("hosts", 2)
