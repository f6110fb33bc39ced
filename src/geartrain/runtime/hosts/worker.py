"""A worker on whatever host: it makes its keys, says who it is, and lives as every worker does."""

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, final

from geartrain.runtime.hosts.control import SILENT_S, RemoteChannel
from geartrain.runtime.hosts.near import Near
from geartrain.runtime.processes.child import live
from geartrain.transport.keys import Keys
from geartrain.transport.link import Transport
from geartrain.transport.pulse import Pulse


@final
@dataclass(frozen=True, slots=True)
class Greeting:
    """What a worker is told by who starts it; nothing of it is secret.

    Args:
        worker: Its number.
        workers: How many there are.
        bind: Address of its host, as others reach it.
        parent: Address of the parent.
        public: The parent's key; None: tcp is plain.
        path: Where the parent finds modules; what is there on this host is looked at, too.
        near: Where workers on the parent's host meet; None: nowhere.
        modules: That others had to import for their passes, so that nobody waits for it then.
    """

    worker: int
    workers: int
    bind: str
    parent: str
    public: str | None
    path: tuple[str, ...] = ()
    near: Near | None = None
    modules: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, told: Mapping[str, Any]) -> Greeting:
        near = None if told["near"] is None else Near(**told["near"])
        given = {name: tuple(told[name]) for name in ("path", "modules")}
        return cls(**{**told, **given, "near": near})


@final
@dataclass(frozen=True, slots=True)
class Hello:
    """What a worker says of itself by the same way; nothing of it is secret.

    Args:
        worker: Its number.
        address: Where it listens.
        public: Its key; None: tcp is plain.
        pid: Of its process.
        where: Its host, for people.
        near: Whether it is on the parent's host, and meets there who is as well.
    """

    worker: int
    address: str
    public: str | None
    pid: int
    where: str
    near: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@final
class RemoteWorker:
    """A worker that has made its keys and listens, and waits for its parent to call.

    Args:
        greeting: Where the parent is.

    Attributes:
        hello: What the parent is to be told, by the way that this worker was started.
    """

    def __init__(self, greeting: Greeting) -> None:
        sys.path += [entry for entry in greeting.path if entry not in sys.path]
        for name in greeting.modules:
            with suppress(Exception):  # if the pass wants it, it is told there
                importlib.import_module(name)
        self._greeting = greeting
        me, parent = greeting.worker, greeting.workers
        keys = None if greeting.public is None else Keys.make()
        self._theirs = {} if greeting.public is None else {parent: greeting.public.encode()}
        self._control = Transport(
            me,
            parent + 1,
            f"tcp://{greeting.bind}:*",
            keys=keys,
            plain=keys is None,
            pulse=Pulse(asks=True, dead_s=SILENT_S),
        )
        self._control.admit(self._theirs)
        self._channel = RemoteChannel(self._control, parent, greeting.bind, keys)
        public = None if keys is None else keys.public.decode()
        near = greeting.near is not None and greeting.near.is_here
        at, where = self._control.address, socket.gethostname()
        self.hello = Hello(me, at, public, os.getpid(), where, near)

    def live(self) -> None:
        """Work until the parent is gone."""
        with self._control:
            try:
                self._channel.greet(self._connect)
            except EOFError:
                return
            live(self._greeting.worker, self._channel)
        if self._greeting.near is not None:
            self._greeting.near.remove()

    def _connect(self) -> None:
        at = {self._greeting.workers: self._greeting.parent}
        self._control.connect(at, self._theirs or None)
