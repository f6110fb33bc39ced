"""What worker processes are handed: tensors that they write to, and all the rest as bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields

from torch import Tensor

from geartrain.engine.engine import Engine
from geartrain.parts.trained import AbstractPart
from geartrain.runtime.processes.child import Pass
from geartrain.runtime.processes.members import AbstractPool
from geartrain.runtime.processes.memory import Apart


def tensors_written(engine: Engine) -> list[Tensor]:
    """What workers write to and the user's modules hold: weights, buffers, optimisers' state."""
    modules = [*engine.made_of.graph.modules(), *(p.module for p in engine.parts.values())]
    found: list[Tensor] = []
    for module in modules:
        found += [*module.parameters(), *module.buffers()]
    for part in engine.parts.values():
        states = () if part.optimizer is None else part.optimizer.state.values()
        for state in states:
            found += [x for x in state.values() if isinstance(x, Tensor)]
    found += engine.sharing.in_common()
    unique = {id(x): x for x in found}
    for x in unique.values():
        if not x.is_cpu:
            raise ValueError(
                f"runtime=Processes(...): a weight of shape {tuple(x.shape)} lies on {x.device}; "
                "worker processes share memory of the host: use runtime=gt.Threads(...) for devices"
            )
    return list(unique.values())


def of_parts(engine: Engine, names: Iterable[str]) -> Iterator[Tensor]:
    """Weights of parts, and what their optimisers keep."""
    for name in names:
        part = engine.parts[name]
        yield from part.module.parameters()
        optimizer = getattr(part, "optimizer", None)
        for state in () if optimizer is None else optimizer.state.values():
            yield from (x for x in state.values() if isinstance(x, Tensor))


def pickled(
    given: Pass,
    pool: AbstractPool,
    parts: Mapping[str, AbstractPart],
    apart: Apart | None = None,
) -> bytes:
    """A pass as workers get it.

    Raises:
        ValueError: Something in it cannot be pickled; names it, if that can be told.
    """
    try:
        return pool.dumps(given, apart)
    except Exception as error:
        raise ValueError(
            f"the graph cannot be handed to worker processes: {type(error).__name__}: {error}"
            f"{_culprit(given, pool, parts)}. What a module, function or rule of it holds has to "
            "be what cloudpickle can carry: make locks, open files, generators and the like where "
            "they are used, or use runtime=gt.Threads(...)"
        ) from error


def _culprit(given: Pass, pool: AbstractPool, parts: Mapping[str, AbstractPart]) -> str:
    """Where it is that cannot be pickled, if that can be told."""
    for name, part in parts.items():
        for path, module in part.module.named_modules():
            for attribute, value in vars(module).items():
                if attribute != "_modules" and not _can_be_pickled(value, pool):
                    at = f", its module '{path}'" if path else ""
                    return (
                        f"; it is in part '{name}'{at}: {type(module).__name__}.{attribute}, a "
                        f"{type(value).__name__}"
                    )
    for operator in given.made_of.graph.operators:
        for attribute, value in vars(operator).items():
            if callable(value) and not _can_be_pickled(value, pool):
                return f"; it is in '{operator.name}': its {attribute}"
    return _rule(pool, parts)


def _rule(pool: AbstractPool, parts: Mapping[str, AbstractPart]) -> str:
    """Which rule of which part cannot be pickled, if it is one."""
    for name, part in parts.items():
        for rule in fields(part.rules):
            if not _can_be_pickled(getattr(part.rules, rule.name), pool):
                return f"; it is in the rules of part '{name}': its {rule.name}"
    return ""


def _can_be_pickled(thing: object, pool: AbstractPool) -> bool:
    try:
        pool.dumps(thing)
    except Exception:  # noqa: BLE001 - of whatever type; it is looked for after it was raised
        return False
    return True
