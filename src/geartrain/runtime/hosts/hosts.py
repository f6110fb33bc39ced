"""Workers on hosts that you name, each started there by a command of yours."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, final

from geartrain.bounds import require_number, require_whole
from geartrain.kinds import require_each, require_kind, require_truth
from geartrain.runtime.hosts.keepers import BACK_S, Keepers
from geartrain.runtime.hosts.pool import RemotePool
from geartrain.runtime.hosts.program import Host
from geartrain.runtime.processes.supervised import AbstractSupervised, OnWorkerDeath

_HERE = "127.0.0.1"


@final
class Hosts(AbstractSupervised):
    """One process per worker, on hosts that are named; parts, rows and gradients go by tcp.

    On each host a program is started when the first pass begins, by the host's command, and lives
    until ``close`` or the end of this program; it imports torch once and forks the workers. Graph
    and weights go there at the beginning of a pass, what a worker does not need left out, and the
    parts come back at its end: until then the modules here are as they were. Everything in the
    graph must be what cloudpickle can carry, and what it names be importable on the hosts.

    All connections between hosts are encrypted, and each process talks to the owners of known keys
    alone; public keys go by the pipes of the commands.

    Args:
        hosts: Where workers may be, in the order in which they are taken; those beyond ``workers``
            are spare, for when a host cannot be reached. A number: so many on this host.
        workers: How many; None: as many as the hosts may have.
        kernel_threads: Threads inside torch kernels, per worker; None: torch's number of this
            process, shared out among the workers.
        patience_s: As for ``Processes``.
        address: Of this host, as workers reach it; None: loopback, for workers on this host.
        socket_files: Where all workers are on this host, rows and gradients go by socket files in
            a folder of this user's alone, and are not encrypted, as nobody else gets there; False:
            by tcp, as between hosts.
        plain: Tcp without keys: whoever reaches the ports reads the data, and runs programs of his
            own in your workers. For measurements alone.
        on_worker_death, most_deaths: As for ``Processes``: also of a worker that does not answer
            for four seconds, as it is stopped, or its host or link is gone.
        wait_s: Where a call goes on after deaths: so long it waits for a host with room for a
            worker, if none is spare; then it ends with a ``GeartrainError``.

    Raises:
        ValueError: No hosts, more workers than they may have, other hosts than this one without
            an address of this one, or a time that is none.
    """

    name = "hosts"

    def __init__(
        self,
        hosts: Sequence[Host] | int = 2,
        workers: int | None = None,
        kernel_threads: int | None = None,
        patience_s: float = 60.0,
        *,
        address: str | None = None,
        socket_files: bool = True,
        plain: bool = False,
        on_worker_death: OnWorkerDeath = "raise",
        most_deaths: int = 10,
        wait_s: float = BACK_S,
    ) -> None:
        require_number(f"Hosts(wait_s={wait_s!r})", wait_s, "seconds, 0 or more; 0: none", least=0)
        if workers is not None:
            require_whole(f"Hosts(workers={workers!r})", workers, 1, "1 or more, or None")
        require_kind("Hosts", str | None, "this host's address, or None", address=address)
        if isinstance(hosts, str) or not isinstance(hosts, Sequence):
            what = f"Hosts({hosts!r:.80})"
            require_whole(what, hosts, 1, "1 or more workers on this host, or name hosts")
            hosts = [Host(address or _HERE, workers=hosts)]
        wanted = "their number, or each one: [Host('10.0.0.2', command=('ssh', '10.0.0.2')), ...]"
        require_each("Hosts", Host, wanted, hosts=hosts)
        require_truth("Hosts", socket_files=socket_files, plain=plain)
        room = sum(host.workers for host in hosts)
        count = room if workers is None else workers
        if not hosts or count > room:
            raise ValueError(
                f"Hosts: {count} workers, and room for {room} on {len(hosts)} hosts; name hosts, "
                "each with Host(workers=...), or give their number for workers on this host"
            )
        super().__init__(count, kernel_threads, patience_s, on_worker_death, most_deaths)
        if address is None and any(not host.address.startswith("127.") for host in hosts):
            raise ValueError(
                f"Hosts(address=None): workers on {hosts[0].address} have to reach this process: "
                "give address=, that of this host as they see it"
            )
        self.address, self.plain, self.socket_files = address or _HERE, plain, socket_files
        self.hosts, self.wait_s = tuple(hosts), wait_s
        self._keepers = self._new_keepers()
        self._had_workers = False

    def _new_keepers(self) -> Keepers:
        ready = self.on_worker_death != "raise"
        return Keepers(self.hosts, self.workers, ready=ready, wait_s=self.wait_s)

    def _make_pool(self) -> RemotePool:
        path = [os.path.abspath(entry) for entry in sys.path]
        pool = RemotePool(
            *(self._keepers, self.workers, self.address, path, "Hosts"),
            plain=self.plain,
            again=self._had_workers,
            meets=self.socket_files,
        )
        self._had_workers = True
        return pool

    def close(self) -> None:
        """End the workers, and the programs on the hosts; a later pass starts them anew."""
        super().close()
        self._keepers.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_keepers": self._new_keepers()}
