"""Workers that Ray places, starts and watches; batches, weights and graphs never pass through it.

    Ray      a placement group, an actor a worker; addresses and public keys; that one has ended
    tcp      all the rest, as on named hosts, encrypted between the owners of known keys

An actor that has died is not restarted by Ray, which would run its constructor and nothing else:
the runtime makes all of them anew, in the one way there is for workers that are processes. That an
actor is stopped Ray does not notice; asking does (``transport.pulse``).
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, final

from geartrain.bounds import MOST_WORKERS, WORKERS, require_at_most, require_number, require_whole
from geartrain.engine.engine import Engine
from geartrain.errors import GeartrainError
from geartrain.kinds import require_each, require_entries, require_kind, require_truth
from geartrain.runtime.base import log
from geartrain.runtime.hosts.launcher import START_S, AbstractLauncher
from geartrain.runtime.hosts.pool import RemotePool
from geartrain.runtime.hosts.worker import Greeting, Hello, RemoteWorker
from geartrain.runtime.processes.supervised import AbstractSupervised, OnWorkerDeath

Strategy: TypeAlias = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
Resources: TypeAlias = Mapping[str, float]

_STRATEGIES: Final = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_NAMESPACE: Final = "geartrain"
_MODE: Final = "RAY_AUTH_MODE"


@final
class WorkerActor:
    """What runs in an actor: one worker."""

    def __init__(self, greeting: str) -> None:
        told = Greeting.of_json({**json.loads(greeting), "bind": _ray().util.get_node_ip_address()})
        self._worker, self._number = RemoteWorker(told), told.worker

    def hello(self) -> tuple[str, str]:
        """What the worker says of itself, and the node that it is on."""
        node = _ray().get_runtime_context().get_node_id()
        return json.dumps(self._worker.hello.to_json()), node

    def live(self) -> None:
        self._worker.live()

    def __repr__(self) -> str:  # what Ray's dashboard and its logs show
        return f"geartrain worker {self._number}"


def _ray() -> Any:
    """Ray, if it is installed.

    Raises:
        GeartrainError: It is not.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise GeartrainError(
            f"runtime=gt.Ray(...): the package 'ray' cannot be imported ({error}). Install it: "
            'pip install "geartrain[ray]"; or name hosts yourself, runtime=gt.Hosts([...])'
        ) from error


def _kill(pid: int) -> None:
    """As a task on the host of a worker: one that is stopped does not hear what Ray tells it."""
    with suppress(OSError):  # it has ended
        if WorkerActor.__name__.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


@final
class RayLauncher(AbstractLauncher):
    """Starts workers as actors of a placement group.

    Args:
        bundles: Resources of each worker.
        strategy: Of the group.
        wait_s: For resources.
    """

    def __init__(self, bundles: Sequence[Resources], strategy: Strategy, wait_s: float) -> None:
        self._ray = _ray()
        self.bundles, self._strategy, self._wait_s = bundles, strategy, wait_s
        self._group: Any = None
        self._actors: list[Any] = []
        self._lives: list[Any] = []
        self._processes: list[tuple[int, str]] = []  # with their nodes
        self._ended: dict[int, str] = {}

    def binds(self) -> Sequence[str]:
        return ["" for _ in self.bundles]  # each knows its own

    def start(self, greetings: Sequence[Greeting]) -> Sequence[Hello]:
        ray, run = self._ray, uuid.uuid4().hex[:8]
        self.forget()
        self._reserve(run)
        scheduling = importlib.import_module("ray.util.scheduling_strategies")
        actor = ray.remote(WorkerActor)
        for greeting, bundle in zip(greetings, self.bundles, strict=True):
            options = actor.options(
                name=f"geartrain worker {greeting.worker} of {run}",
                max_restarts=0,
                max_task_retries=0,
                **_as_options(bundle),
                scheduling_strategy=scheduling.PlacementGroupSchedulingStrategy(
                    self._group, greeting.worker, placement_group_capture_child_tasks=False
                ),
            )
            self._actors.append(options.remote(json.dumps(greeting.to_json())))
        try:
            said = ray.get([each.hello.remote() for each in self._actors], timeout=START_S)
        except ray.exceptions.RayError as error:
            raise GeartrainError(
                f"workers could not begin on Ray: {_first_line(error)}; geartrain has to be "
                "installed on all of its nodes, in the version and for the Python of this one"
            ) from error
        hellos = [Hello(**json.loads(hello)) for hello, _ in said]
        self._processes = [(hello.pid, node) for hello, (_, node) in zip(hellos, said, strict=True)]
        self._lives = [each.live.remote() for each in self._actors]
        return hellos

    def _reserve(self, run: str) -> None:
        """Have Ray keep resources for all workers.

        Raises:
            GeartrainError: It has not as much.
        """
        ray = self._ray
        make = importlib.import_module("ray.util.placement_group").placement_group
        bundles = [dict(bundle) for bundle in self.bundles]
        self._group = make(bundles, strategy=self._strategy, name=f"geartrain {run}")
        if self._group.wait(self._wait_s):
            return
        free, whole = ray.available_resources(), ray.cluster_resources()
        nodes = sum(node["Alive"] for node in ray.nodes())
        self.forget()
        asked = "; ".join(f"worker {w}: {_told(x)}" for w, x in enumerate(self.bundles))
        raise GeartrainError(
            f"Ray has had no room for {len(self.bundles)} workers ({self._strategy}) in "
            f"{self._wait_s:.0f} s. Asked: {asked}. Free: {_told(free)}, of {_told(whole)} on "
            f"{nodes} nodes. Ask for less (resources=, workers), add nodes, end what uses them, "
            "or wait longer (wait_s=)"
        )

    def deaths(self, wait_s: float = 0.0) -> Mapping[int, str]:
        left = [live for w, live in enumerate(self._lives) if w not in self._ended]
        if left:
            done, _ = self._ray.wait(
                left, num_returns=len(left) if not wait_s else 1, timeout=wait_s
            )
            for live in done:
                self._ended[self._lives.index(live)] = self._how(live)
        return dict(self._ended)

    def _how(self, live: Any) -> str:
        try:
            self._ray.get(live)
        except self._ray.exceptions.RayError as error:
            return f"has ended ({_first_line(error)})"
        return "has ended"

    def kill(self, worker: int) -> None:
        ray = self._ray
        ray.kill(self._actors[worker], no_restart=True)
        pid, node = self._processes[worker]
        scheduling = importlib.import_module("ray.util.scheduling_strategies")
        there = scheduling.NodeAffinitySchedulingStrategy(node, soft=False)
        ray.remote(_kill).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(pid)

    def forget(self) -> None:
        if not self._ray.is_initialized():  # its end was theirs
            self._group, self._actors = None, []
        for each in self._actors:
            self._ray.kill(each, no_restart=True)
        self._actors, self._lives, self._processes, self._ended = [], [], [], {}
        if self._group is not None:
            importlib.import_module("ray.util.placement_group").remove_placement_group(self._group)
            self._group = None


def _as_options(bundle: Resources) -> dict[str, Any]:
    """Resources as an actor is asked for."""
    own = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    found: dict[str, Any] = {"num_cpus": 0}
    found |= {own[name]: n for name, n in bundle.items() if name in own}
    found["resources"] = {name: n for name, n in bundle.items() if name not in own}
    return found


def _told(resources: Resources) -> str:
    """Resources for people; without those that Ray counts for itself."""
    return ", ".join(
        f"{name} {n / 2**30:.1f} GiB" if name.endswith("memory") else f"{name} {n:g}"
        for name, n in sorted(resources.items())
        if not name.startswith(("node:", "bundle_group", "object_store")) and "_group_" not in name
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if line.startswith("The actor is dead")), "")
    return (told or (lines[0] if lines else type(error).__name__))[:300]


@final
class Ray(AbstractSupervised):
    """One process per worker, each an actor of Ray, on a cluster or on this host.

    What differs from ``Hosts`` is who starts and places the workers; rows, gradients, weights and
    graphs go by the same encrypted connections between them.

    Args:
        workers: How many.
        address: Of a cluster, as ``ray.init`` takes it: ``"auto"``, ``"10.0.0.1:6379"``; None:
            the one that this program is connected with, or else a Ray on this host that is started
            now and ended by ``close``.
        resources: Of each worker, as Ray names them (``CPU``, ``GPU``, ``memory`` in bytes, your
            own); or a list with those of each.
        parts: What the worker of a part is to have besides, by the part's name.
        strategy: ``PACK``: on as few nodes as can be; ``SPREAD``: on as many; ``STRICT_PACK`` and
            ``STRICT_SPREAD``: so, or not at all.
        wait_s: How long to wait for resources.
        kernel_threads: Threads inside torch kernels, per worker; None: as many as it has CPUs.
        patience_s, socket_files, plain, on_worker_death, most_deaths: As for ``Hosts``.
        token: Whether a cluster at an address must ask for a token (``RAY_AUTH_MODE=token``):
            who reaches one that does not runs programs of his own there.

    Raises:
        ValueError: A value is none of these.
    """

    name = "ray"

    def __init__(
        self,
        workers: int = 2,
        address: str | None = None,
        *,
        resources: Resources | Sequence[Resources] | None = None,
        parts: Mapping[str, Resources] | None = None,
        strategy: Strategy = "PACK",
        wait_s: float = 60.0,
        kernel_threads: int | None = None,
        patience_s: float = 60.0,
        socket_files: bool = True,
        plain: bool = False,
        token: bool = True,
        on_worker_death: OnWorkerDeath = "raise",
        most_deaths: int = 10,
    ) -> None:
        if strategy not in _STRATEGIES:
            raise ValueError(f"Ray(strategy={strategy!r}): give one of {', '.join(_STRATEGIES)}")
        require_whole(f"Ray(workers={workers!r})", workers, 1)
        require_at_most(f"Ray(workers={workers})", workers, MOST_WORKERS, WORKERS)
        require_number(f"Ray(wait_s={wait_s!r})", wait_s, "seconds, 0 or more", least=0)
        require_truth("Ray", socket_files=socket_files, plain=plain, token=token)
        require_kind("Ray", str | None, "a cluster's address, or None", address=address)
        given = {"CPU": 1.0} if resources is None else resources
        wanted = "names with numbers, for all workers or a list with one for each: {'CPU': 2}"
        if not isinstance(given, Mapping):
            require_each("Ray", Mapping, wanted, resources=resources)
        if parts is not None:
            wanted = "part names, each with what it wants: {'cell': {'GPU': 1}}"
            require_entries("Ray", str, Mapping, wanted, parts=parts)
        each = [given] * workers if isinstance(given, Mapping) else list(given)
        if len(each) != workers:
            raise ValueError(
                f"Ray(workers={workers}, resources=[...]): there are {len(each)} of them; give "
                "one mapping for all workers, or one for each"
            )
        for bundle in [*each, *(parts or {}).values()]:
            require_entries("Ray", str, object, "names with numbers: {'CPU': 2}", resources=bundle)
            for n in bundle.values():
                require_number(f"Ray(resources={dict(bundle)})", n, "numbers, 0 or more", least=0)
        if not all(any(bundle.values()) for bundle in each):
            raise ValueError(
                f"Ray(resources={resources}): give some of one resource to each worker, such as "
                "CPU 0.1; Ray keeps no place for those that want nothing"
            )
        if kernel_threads is None:
            kernel_threads = max(1, int(min((x.get("CPU", 1.0) for x in each), default=1.0)))
        super().__init__(workers, kernel_threads, patience_s, on_worker_death, most_deaths)
        self.address, self.plain, self.token = address, plain, token
        self.socket_files = socket_files
        self.strategy, self.wait_s = strategy, wait_s
        self.resources, self.parts = [dict(x) for x in each], dict(parts or {})
        self._started = False  # whether the Ray on this host is ours
        self._bundles: list[dict[str, float]] = []

    def _prepare(self, engine: Engine) -> None:
        if unknown := sorted(self.parts.keys() - engine.parts.keys()):
            raise ValueError(
                f"Ray(parts={unknown}): the graph has no such parts; it has "
                f"{', '.join(sorted(engine.parts))}"
            )
        bundles = [dict(each) for each in self.resources]
        for bundle, worker in zip(bundles, engine.workers, strict=True):
            for part in self.parts.keys() & worker.parts.keys():
                for name, n in self.parts[part].items():
                    bundle[name] = bundle.get(name, 0.0) + n
        if bundles != self._bundles:  # parts live elsewhere than in the pass before
            self._drop(busy=False)
            self._bundles = bundles

    def _make_pool(self) -> RemotePool:
        ray = _ray()
        self._connect(ray)
        launcher = RayLauncher(self._bundles, self.strategy, self.wait_s)
        path = [os.path.abspath(entry) for entry in sys.path]
        here = ray.util.get_node_ip_address()
        return RemotePool(
            *(launcher, self.workers, here, path, "Ray"),
            plain=self.plain,
            meets=self.socket_files,
        )

    def _connect(self, ray: Any) -> None:
        """Have this program be connected with a cluster.

        Raises:
            GeartrainError: There is none, or it asks nobody who he is.
        """
        if ray.is_initialized():
            return
        if self.address is None:
            log.info("Ray is started on this host")
            ray.init(
                num_cpus=max(os.cpu_count() or 1, self._cpus()),
                namespace=_NAMESPACE,
                log_to_driver=True,
                logging_level="warning",
            )
            self._started = True
            return
        if self.token and os.environ.get(_MODE, "").lower() != "token":
            raise GeartrainError(
                f"Ray(address={self.address!r}): this program has {_MODE}="
                f"{os.environ.get(_MODE, '')!r}, so the cluster would take programs from whoever "
                "reaches it. Start it with RAY_AUTH_MODE=token on all nodes and here (ray "
                "get-auth-token --generate makes one), or give token=False where nobody else can "
                "reach it"
            )
        try:
            ray.init(address=self.address, namespace=_NAMESPACE, logging_level="warning")
        except (ConnectionError, ValueError, RuntimeError, TimeoutError, OSError) as error:
            raise GeartrainError(
                f"Ray(address={self.address!r}): no cluster can be reached there "
                f"({_first_line(error)}); 'ray status' on its head says whether it lives, and "
                "this host has to reach its port; without an address Ray is started here"
            ) from error

    def _cpus(self) -> int:
        return int(sum(bundle.get("CPU", 0.0) for bundle in self._bundles) + 0.999)

    def close(self) -> None:
        """End the workers, and the Ray on this host if it was started for them."""
        super().close()
        if self._started:
            self._started = False
            _ray().shutdown()
