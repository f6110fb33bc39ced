"""Firings of a run, watched from outside: what benchmarks share that look into them.

with around_firings(watch): run()     every firing inside a ``watch()``
with Operations(see): ...             see(operator, arguments, named, result), in this thread
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias, final

from torch.utils._python_dispatch import TorchDispatchMode

import geartrain as gt
from benchmarks.peers.systems import SIZES
from geartrain.engine.firing import Firing
from geartrain.engine.worker import WorkerState
from geartrain.recipes import find_recipe
from geartrain.recipes.recipe import Setting

See: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
"""Gets an operator, its arguments, those with names, and its result."""


class Operations(TorchDispatchMode):
    """Shows torch's operations in one thread while it is entered."""

    def __init__(self, see: See) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._see(func, args, kwargs, result)
        return result


def name_of(operator: Any) -> str:
    """``addmm`` of ``aten.addmm.out``."""
    return str(operator.overloadpacket.__name__)


@contextmanager
def around_firings(
    watch: Callable[[], AbstractContextManager[Any]] = nullcontext,
    after: Callable[[Firing], None] = lambda firing: None,
) -> Iterator[None]:
    """While this lasts, every firing is inside a ``watch()``, and ``after`` gets it."""
    fire = WorkerState.fire

    def watched(worker: WorkerState) -> Firing:
        with watch():
            firing = fire(worker)
        after(firing)
        return firing

    WorkerState.fire = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        WorkerState.fire = fire  # type: ignore[method-assign]


@final
class Training:
    """A recipe in a session; called, it trains a pass and returns its seconds.

    Args:
        task: Of ``SIZES``.
        data: The data folder, or None.
        share: Of the peers' instances a pass.
        size: Instances to take the share of; None: the peers'.
        in_flight: At most.
        workers: Each has one kernel thread.
        epochs: How often it is going to be called.
    """

    def __init__(
        self,
        task: str,
        data: Path | None,
        *,
        share: float = 1.0,
        size: int | None = None,
        in_flight: int = 256,
        workers: int = 1,
        epochs: int = 9,
    ) -> None:
        recipe = find_recipe(task)
        setting = Setting(
            seed=0,
            epochs=epochs,
            update_every=recipe.update_size(SIZES[task].of(share, size)),
            data=data,
            options=SIZES[task].of(share, size),
        )
        made = recipe.build(setting)
        self.instances = made.load("train")
        self._epoch = count(1)
        self._session = gt.Session(
            made.graph,
            rules=made.rules,
            runtime=gt.Threads(workers, kernel_threads=1),
            max_active=in_flight,
            schedule=gt.Schedule(ramp=gt.Ramp(over=0)),
        )

    def __call__(self) -> float:
        return self._session.fit(self.instances, epochs=next(self._epoch)).train_seconds
