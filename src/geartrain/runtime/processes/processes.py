"""Workers as processes: they compute at the same time, whatever the interpreter does.

They are forked on this host and have its memory in common with the parent: weights lie there, so
the modules of the user see every step. What a pass is to parent and worker: ``parent``, ``child``.
"""

from __future__ import annotations

import sys
from typing import final

from geartrain.runtime.processes.pool import Pool
from geartrain.runtime.processes.server import ForkServer
from geartrain.runtime.processes.supervised import AbstractSupervised, OnWorkerDeath


@final
class Processes(AbstractSupervised):
    """One process per worker.

    They are forked when the first pass begins, live until ``close`` or the end of the program, and
    are handed the graph and its modules at the beginning of each pass. Everything in the graph must
    be what cloudpickle can carry: no open files, locks or generators. What modules keep besides
    weights and buffers (a counter, a list) stays in the process that counts.

    Args:
        workers: How many.
        kernel_threads: Threads inside torch kernels, per worker; None shares out torch's
            own number (``torch.set_num_threads``, ``OMP_NUM_THREADS``).
        patience_s: How long a pass that failed waits for the firings of that moment to end; after
            it, and two seconds after a second interrupt, workers are killed.
        on_worker_death: What becomes of a call of the session in which a worker process dies, by
            whatever: ``raise`` ends it with a ``WorkerDiedError``. ``restore`` has it go on with
            new processes: ``fit`` from its last checkpoint (in its folder; without one from a copy
            in memory, made where a checkpoint would be: at the beginning and after every
            evaluation and epoch), and what was trained since is trained again; an evaluation
            begins anew. ``go_on``: as ``restore``, but copies of the model (``gt.Neighbours``)
            that live in other workers go on, and are not set back: what was in flight in the
            copies that are gone is fed to them, and when that is done, a new process takes the
            place of the old, with weights and optimiser of one of them. A death after Ctrl-C is
            raised.
        most_deaths: After so many in one call, one more is raised, with the story of all.

    Raises:
        ValueError: A value is none of these, or the system is not Linux.
    """

    name = "processes"

    def __init__(
        self,
        workers: int = 2,
        kernel_threads: int | None = None,
        patience_s: float = 60.0,
        *,
        on_worker_death: OnWorkerDeath = "raise",
        most_deaths: int = 10,
    ) -> None:
        super().__init__(workers, kernel_threads, patience_s, on_worker_death, most_deaths)
        if not sys.platform.startswith("linux"):
            raise ValueError(
                f"Processes on {sys.platform}: worker processes want Linux (files in memory, "
                "signals at a parent's death); use runtime=gt.Threads(...)"
            )
        ForkServer.of_this_process()  # it imports torch while we go on

    def _make_pool(self) -> Pool:
        return Pool(self.workers)
