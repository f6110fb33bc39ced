"""Workers that Ray places, starts and watches: what it is asked, what it tells, what is left."""

from __future__ import annotations

import importlib
import json
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.errors import GeartrainError, WorkerDiedError
from geartrain.runtime.base import AbstractRuntime
from geartrain.runtime.hosts import on_ray as ours
from geartrain.runtime.hosts.on_ray import Ray
from tests.rigs.killing import Killer
from tests.rigs.left import living, wait_until
from tests.rigs.on_ray import RAY, on_ray
from tests.rigs.pairs import graph_of_pairs, pairs

ADAM = gt.Rules(optimizer=partial(torch.optim.Adam, lr=1e-2), update_every=4)
LOST_S = 15.0
EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"


def weights_of(session: gt.Session) -> list[Tensor]:
    return [p.detach().clone() for part in session.parts.values() for p in part.parameters]


def one_at_a_time(runtime: AbstractRuntime, **more: object) -> gt.Session:
    """A session whose order is the same on every runtime."""
    return gt.Session(graph_of_pairs(), rules=ADAM, runtime=runtime, max_active=1, **more)  # type: ignore[arg-type]


def same(a: gt.Session, b: gt.Session) -> bool:
    return all(x.equal(y) for x, y in zip(weights_of(a), weights_of(b), strict=True))


def on_a_ray(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that wants one."""
    for mark in RAY:
        test = mark(test)
    return test


@pytest.mark.parametrize("way", ["there", "back"])
@on_a_ray
def test_a_run_begun_on_ray_resumes_elsewhere_and_the_reverse(tmp_path, way):
    whole = one_at_a_time(gt.Threads(1))
    whole.fit(pairs(30), epochs=2)
    first, second = (gt.Threads(1), on_ray(2)) if way == "there" else (on_ray(2), gt.Threads(1))
    begun = one_at_a_time(first)
    begun.fit(pairs(30), epochs=1, folder=tmp_path / "b", checkpoint_every=7, keep_last=20)
    resumed = one_at_a_time(second)
    resumed.load(sorted((tmp_path / "b").glob("*-*.safetensors"))[1])
    resumed.fit(pairs(30), epochs=2)
    assert same(whole, resumed)


@on_a_ray
def test_an_actor_that_is_killed_is_told_and_the_next_pass_makes_another():
    session = one_at_a_time(on_ray(2))
    session.fit(pairs(4), epochs=1)
    pids = on_ray(2).pids
    killer = Killer(on_ray(2), {3})
    session.instruments.append(killer)
    with pytest.raises(
        WorkerDiedError, match=r"worker 1 .* has ended .*its worker process has die"
    ):
        session.fit(pairs(300), epochs=2)
    assert time.monotonic() - killer.sent_s < 5.0
    wait_until(lambda: not living(pids), "all actors have ended")
    one_at_a_time(on_ray(2)).fit(pairs(4), epochs=1)


@on_a_ray
def test_an_actor_that_is_stopped_does_not_answer_and_its_process_is_ended():
    """Ray tells one that is stopped to end, and takes it for dead; the process would stay."""
    session = one_at_a_time(on_ray(2))
    session.fit(pairs(4), epochs=1)
    pids = on_ray(2).pids
    killer = Killer(on_ray(2), {3}, signal.SIGSTOP)
    session.instruments.append(killer)
    with pytest.raises(WorkerDiedError, match=r"worker 1 .* does not answer"):
        session.fit(pairs(300), epochs=2)
    assert time.monotonic() - killer.sent_s < LOST_S
    wait_until(lambda: not living(pids), "all actors have ended")


@on_a_ray
def test_a_fit_goes_on_after_a_death_and_ends_as_if_there_had_been_none(monkeypatch):
    monkeypatch.setattr(on_ray(2), "most_deaths", 4)
    undisturbed, disturbed = one_at_a_time(gt.Threads(1)), one_at_a_time(on_ray(2))
    disturbed.instruments.append(Killer(on_ray(2), {6}))  # early, as events are told late
    undisturbed.fit(pairs(60), epochs=2)
    fit = disturbed.fit(pairs(60), epochs=2)
    assert fit.deaths == 1 and fit.repeated > 0
    assert same(undisturbed, disturbed)


@on_a_ray
def test_actors_have_names_for_the_dashboard_and_go_with_the_pool():
    one_at_a_time(on_ray(2)).fit(pairs(4), epochs=1)
    on_ray(2)._drop(busy=False)
    wait_until(lambda: not named(), "the actors of before are gone")
    one_at_a_time(on_ray(2)).fit(pairs(4), epochs=1)
    assert [name.split(" of ")[0] for name in named()] == [
        "geartrain worker 0",
        "geartrain worker 1",
    ]
    on_ray(2)._drop(busy=False)
    wait_until(lambda: not named(), "they are gone again")


def named() -> list[str]:
    found = importlib.import_module("ray.util").list_named_actors(all_namespaces=True)
    return sorted(each["name"] for each in found)


@on_a_ray
def test_what_cannot_be_placed_is_told_with_what_there_is():
    one_at_a_time(on_ray(2)).fit(pairs(4), epochs=1)
    greedy = Ray(2, resources={"CPU": 1, "diamond": 1}, wait_s=1.0)
    with pytest.raises(GeartrainError, match=r"no room for 2 workers .*diamond 1.* Free: .*CPU"):
        one_at_a_time(greedy).fit(pairs(4), epochs=1)
    table = importlib.import_module("ray.util").placement_group_table().values()
    assert "PENDING" not in {group["state"] for group in table}


@on_a_ray
def test_resources_follow_parts_to_their_workers():
    runtime = Ray(2, resources={"CPU": 0.1}, parts={"a": {"CPU": 0.2}}, wait_s=30.0)
    graph = gt.Graph()
    x = graph.input("x").through(nn.Linear(2, 2), name="a").through(nn.Linear(2, 2), name="b")
    x.loss(lambda y: y.square().sum(1))
    placed = gt.Schedule(placement={"a": 1, "b": 0})
    points = [gt.Instance({"x": torch.ones(1, 2)}) for _ in range(3)]
    gt.Session(graph, rules=ADAM, runtime=runtime, schedule=placed).fit(points, epochs=1)
    assert runtime._bundles == [{"CPU": 0.1}, {"CPU": pytest.approx(0.3)}]
    runtime.close()


@on_a_ray
def test_the_file_for_a_cloud_is_one_of_rays():
    yaml, jsonschema = (importlib.import_module(name) for name in ("yaml", "jsonschema"))
    autoscaler = Path(importlib.import_module("ray.autoscaler").__file__).parent
    schema = json.loads((autoscaler / "ray-schema.json").read_text())
    config = yaml.safe_load((EXAMPLES / "aws.yaml").read_text())
    jsonschema.validate(config, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(config | {"no_such_key": 1}, schema)
    assert config["head_node_type"] in config["available_node_types"]
    assert config["max_workers"] == config["available_node_types"]["worker"]["max_workers"]
    for starts in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert "RAY_AUTH_MODE=token" in config[starts][-1]


def test_without_ray_it_is_said_how_to_install_it(monkeypatch):
    def missing(name: str) -> None:
        raise ImportError(f"No module named '{name}'")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(GeartrainError, match=r'pip install "geartrain\[ray\]"'):
        one_at_a_time(Ray(1)).fit(pairs(4), epochs=1)


class _NoCluster:
    """Of the module ``ray``, what is asked before there is a cluster."""

    @staticmethod
    def is_initialized() -> bool:
        return False

    @staticmethod
    def init(**given: object) -> None:
        raise ConnectionError(f"Could not find any running Ray instance at {given['address']}.")


def test_a_cluster_that_asks_nobody_who_he_is_is_not_joined(monkeypatch):
    monkeypatch.setattr(ours, "_ray", lambda: _NoCluster)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(GeartrainError, match="RAY_AUTH_MODE=token on all nodes"):
        one_at_a_time(Ray(1, "10.0.0.1:6379")).fit(pairs(4), epochs=1)


def test_a_cluster_that_cannot_be_reached_is_named(monkeypatch):
    monkeypatch.setattr(ours, "_ray", lambda: _NoCluster)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(GeartrainError, match=r"10\.0\.0\.1:6379'\): no cluster can be reached"):
        one_at_a_time(Ray(1, "10.0.0.1:6379")).fit(pairs(4), epochs=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ray(2, strategy="HUG"), r"strategy='HUG'.*STRICT_SPREAD"),
        (lambda: Ray(2, resources=[{"CPU": 1}]), "there are 1 of them"),
        (lambda: Ray(1, resources={"CPU": -1}), "give numbers, 0 or more"),
        (lambda: Ray(1, resources={"CPU": 0}), "give some of one resource"),
        (lambda: Ray(0), r"Ray\(workers=0\)"),
    ],
)
def test_arguments_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_part_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"Ray\(parts=\['nose'\]\)"):
        one_at_a_time(Ray(1, parts={"nose": {"GPU": 1}})).fit(pairs(4), epochs=1)
