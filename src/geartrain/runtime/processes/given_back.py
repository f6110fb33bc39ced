"""What a worker sends of its state as records, meanwhile and in the end; ``returned`` takes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from geartrain.codec import encode
from geartrain.engine.engine import Engine
from geartrain.nodes.loss import Objective
from geartrain.nodes.node import AbstractNode
from geartrain.parts.part import PartState
from geartrain.parts.snapshot import parts_to_tensors
from geartrain.runtime.processes.memory import COMMON, SharedRegion
from geartrain.runtime.processes.messages import named_to_record
from geartrain.transport.record import Record


def meanwhile(
    engine: Engine, nodes: Sequence[AbstractNode], worker: int, parts: Iterable[str]
) -> Record:
    """Sums of losses, and how old gradients were, since the beginning.

    Args:
        engine, nodes: As of ``what_lives_here``.
        worker: Its number.
        parts: Names of those that live there.
    """
    said = {
        "sums": {
            i: x.sums.peek() for i, x in engine.ends(nodes).items() if isinstance(x, Objective)
        },
        "staleness": {
            name: list(engine.parts[name].histogram())
            for name in parts
            if name in engine.parts and engine.sharing.keeps(worker, name)
        },
    }
    return named_to_record("pulse", said, {})


def what_lives_here(
    engine: Engine,
    nodes: Sequence[AbstractNode],
    parts: Mapping[str, PartState],
    regions: Mapping[int, SharedRegion],
) -> Iterator[Record]:
    """Outputs, parts and memories.

    Args:
        engine: The worker's.
        nodes: That live there.
        parts: That it gives back, by name.
        regions: Of memory that the parent has, too, by number.
    """

    def is_shared(x: Tensor) -> bool:
        return any(x in region for k, region in regions.items() if k != COMMON)

    yield from _outputs(engine, nodes)
    for name, part in parts.items():
        yield _part(name, part, is_shared, trains=engine.passing.train)
    for node in nodes:
        memory = node.memory()
        if memory is not None:
            tensors, document = memory
            said = {"node": node.name, "document": encode(document, node.name)}
            yield named_to_record("memory", said, tensors)


def _part(
    name: str, part: PartState, is_shared: Callable[[Tensor], bool], *, trains: bool
) -> Record:
    """What is in shared memory, or cannot have changed, goes by its name alone."""
    tensors, document = parts_to_tensors({name: part})
    weights = {f"{name}/weights/{key}" for key, _ in part.module.named_parameters()}
    buffers = dict(part.module.named_buffers(remove_duplicate=False))
    for key in buffers:
        tensors.pop(f"{name}/weights/{key}", None)
    sent = {
        k: x
        for k, x in tensors.items()
        if isinstance(x, Tensor)  # what a state_dict has besides stays here
        and not is_shared(x)
        and (trains or not (k in weights or k.startswith(f"{name}/optimizer/")))
    }
    said = {
        "part": name,
        "document": document[name],
        "shared": sorted(tensors.keys() - sent),
        "frozen": part.frozen,
    }
    for key, buffer in buffers.items():
        if not is_shared(buffer):
            sent[f"{name}/buffers/{key}"] = buffer
    return named_to_record("part", said, sent)


def _outputs(engine: Engine, nodes: Sequence[AbstractNode]) -> Iterator[Record]:
    for number, end in engine.ends(nodes).items():
        for serials, vertices, lengths, payload in end.collected or ():
            tensors = {
                "serials": torch.from_numpy(serials),
                "vertices": torch.from_numpy(vertices),
                **({} if lengths is None else {"lengths": torch.from_numpy(lengths)}),
                **{f"payload {j}": x for j, x in enumerate(payload)},
            }
            yield named_to_record("output", number, tensors)
