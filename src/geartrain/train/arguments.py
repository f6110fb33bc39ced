"""Of what kind the arguments of a session are: what is no such thing is told by its name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Final

from geartrain.engine.instrument import AbstractInstrument
from geartrain.engine.schedule import Schedule
from geartrain.graph.graph import Graph
from geartrain.parts.rules import Rules
from geartrain.runtime.base import AbstractRuntime
from geartrain.train.auto import Auto
from geartrain.train.options import Compute, Keep, Reading
from geartrain.train.results import Target

_KINDS: Final[Mapping[str, tuple[tuple[type, ...], str]]] = {
    "graph": ((Graph,), "a gt.Graph, such as the graph of a gt.Pipeline: pipe.graph"),
    "rules": ((Rules,), "gt.Rules(optimizer=partial(torch.optim.Adam, lr=1e-3), ...)"),
    "runtime": (
        (AbstractRuntime, Auto),
        "gt.Threads(1), gt.Processes(2), another runtime, 'auto' or gt.Auto(...)",
    ),
    "schedule": ((Schedule,), "gt.Schedule(ramp=..., placement=..., ...)"),
    "compute": ((Compute,), "gt.Compute(precision='bf16'), gt.Compute(device='cuda'), ..."),
    "reading": ((Reading,), "gt.Reading(convert=..., shuffle=..., ...)"),
    "until": ((Target,), "gt.Target('accuracy', 0.9)"),
    "keep": ((Keep,), "gt.Keep(every=5000) or gt.Keep(seconds=30)"),
    "folder": ((str, os.PathLike), "a path"),
    "path": ((str, os.PathLike), "a path"),
}


def require_kinds(**given: Any) -> None:
    """Arguments by name; None passes, and ``runtime="auto"``.

    Raises:
        TypeError: One is of another kind than it has to be.
    """
    for name, value in given.items():
        kinds, wanted = _KINDS[name]
        if value is None or isinstance(value, kinds) or (name == "runtime" and value == "auto"):
            continue
        raise TypeError(f"{name}={value!r:.80}: give {wanted}")


def require_given(**given: Any) -> None:
    """The same, and None does not pass.

    Raises:
        TypeError: One is of another kind, or None.
    """
    for name, value in given.items():
        if value is None:
            raise TypeError(f"{name}=None: give {_KINDS[name][1]}")
    require_kinds(**given)


def require_instruments(given: Any) -> list[AbstractInstrument]:
    """Instruments, as a list.

    Raises:
        TypeError: They are none.
    """
    found = list(given) if isinstance(given, Iterable) else [given]
    for each in found:
        if not isinstance(each, AbstractInstrument) or not isinstance(given, Iterable):
            raise TypeError(
                f"instruments={given!r:.80}: give a list of instruments, such as [ProgressLine()]; "
                "one of your own derives from gt.AbstractInstrument"
            )
    return found
