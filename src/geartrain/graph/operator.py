"""What every operator is: a verb as it was written, which checks itself and makes its node.

    specs   what leaves, when this comes in: columns, shapes, bundles; or a GraphError
    make    a fresh node or step, as often as one likes

Beside it: what can be known of a stream before it runs, and who may read which column.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.errors import GraphError
from geartrain.frames.frame import Schema, View
from geartrain.nodes.control import AbstractStep
from geartrain.nodes.node import AbstractNode, Place
from geartrain.nodes.weights import AbstractWeights

Keep: TypeAlias = Literal["auto", "inputs", "activations", "graph"]
Made: TypeAlias = AbstractNode | AbstractStep | None
Port: TypeAlias = tuple[int, int]
"""Operator number, port number."""
ROWS = 3
"""Rows of the batch that a dry run imagines."""

_HANDLE = "@"  # no name that a function could ask for begins so


def handle_of(memory: str) -> str:
    """The state column in which rows have their handle of a memory."""
    return f"{_HANDLE}{memory}"


def handles(columns: Collection[str]) -> frozenset[str]:
    """Those of the columns that hold handles."""
    return frozenset(c for c in columns if c.startswith(_HANDLE))


def without_handles(columns: Collection[str]) -> frozenset[str]:
    """The columns that a user knows."""
    return frozenset(c for c in columns if not c.startswith(_HANDLE))


class PartLike(Protocol):
    """What the graph must know of a part (the class itself lives one floor up)."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def name(self) -> str | None: ...
    @property
    def keep(self) -> Keep: ...
    @property
    def full_precision(self) -> bool: ...
    @property
    def gear(self) -> Any: ...


@final
@dataclass(frozen=True, slots=True)
class Spec:
    """What is known of a stream before it runs.

    Args:
        columns: State columns that are defined.
        payload: Meta tensors of ``ROWS`` rows, or None where the shape is unknown.
        bundled: Whether messages own several rows.
    """

    columns: frozenset[str]
    payload: tuple[Tensor, ...] | None
    bundled: bool


class AbstractOperator(ABC):
    """One verb, as it was written.

    Args:
        name: Unique in the graph.
        sources: For each input port, the output ports that lead to it.
    """

    kind: ClassVar[str]
    ways = 1

    def __init__(
        self, name: str, sources: Sequence[Sequence[tuple[AbstractOperator, int]]]
    ) -> None:
        self.name = name
        self.id = 0
        self.sources = [list(s) for s in sources]

    def port_name(self, port: int) -> str:
        """How drawings call an output port."""
        return str(port) if self.ways > 1 else ""

    def detail(self) -> str:
        """What the printed graph says besides kind and name."""
        return ""

    def remedy(self) -> str:
        """What to do where a stream of it is read by nobody."""
        return "end it with .loss(...), .output() or .stop()"

    @abstractmethod
    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        """What leaves, by output port, when this comes in, by input port.

        Raises:
            GraphError: What comes in does not fit.
        """

    @abstractmethod
    def make(self, place: Place, weights: AbstractWeights | None) -> Made:
        """A fresh node or step; None for what is only wiring."""


@final
class Input(AbstractOperator):
    """Where rows enter.

    Args:
        name: The name that instances use.
        shape: Shape of one payload row, or None: learned from the first instance.
        dtype: Its dtype.
        bundle: Whether each instance brings one message of many rows.
        fields: Constants for user columns that rows start with.
        alone: Whether instances are admitted one at a time: their bundles may differ in shape.
    """

    kind = "input"

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...] | None,
        dtype: torch.dtype | None,
        bundle: bool,
        fields: Mapping[str, int],
        alone: bool = False,
    ) -> None:
        super().__init__(name, [])
        self.shape, self.dtype, self.bundle, self.fields = shape, dtype, bundle, dict(fields)
        self.alone = alone
        self._rows: Tensor | None = None

    def detail(self) -> str:
        return "one bundle an instance" if self.bundle else ""

    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        if self.shape is not None and self.dtype is not None and self._rows is None:
            self._rows = torch.empty((ROWS, *self.shape), dtype=self.dtype, device="meta")
        payload = None if self._rows is None else (self._rows,)
        return [Spec(frozenset({"instance", "vertex", *self.fields}), payload, self.bundle)]

    def make(self, place: Place, weights: AbstractWeights | None) -> Made:
        return None


def readable(node: str, name: str, columns: frozenset[str], schema: Schema) -> None:
    """Whether rows with these state columns can read a name.

    Raises:
        GraphError: They cannot; says what they can read.
    """
    here = without_handles(columns) | {"size", "payload", "lengths"} | schema.value
    if "vertex" in columns:
        here |= schema.vertex
    if "edge" in columns:
        here |= schema.edge
    if name in here:
        return
    known = name in schema.state or name in schema.vertex or name in schema.edge
    why = "is not defined on the rows that come here" if known else "is unknown"
    edges = (
        ". Rows are at an edge behind flatmap('edge'); a module that gets a bundle with "
        f"inside=True has inside.edges['{name}']"
    )
    nowhere = (
        ". These rows are at no vertex, as their group's key has none: move(vertex=...) puts them "
        "at one, and group(by={'vertex': 0}, how='bundle', ...) a bundle with a row for each "
        "vertex, of which each reads its own entry"
    )
    hint = edges if name in schema.edge else nowhere if name in schema.vertex else ""
    raise GraphError(
        f"'{node}': column '{name}' {why}; rows can read {sorted(here)}. Columns of instances are "
        "declared in Graph(vertex=..., edge=..., value=...), columns of rows by input(..., step=0) "
        f"or move(step=...){hint}"
    )


def imagine(node: str, function: Callable[[View], Any], spec: Spec, schema: Schema) -> None:
    """Call a predicate with an imagined batch, to see which columns it asks for."""
    try:
        function(_Imagined(node, spec, schema))  # type: ignore[arg-type]
    except GraphError:
        raise
    except Exception:  # noqa: BLE001 - it needs real values; only the columns are of interest here
        return


class _Imagined:
    """Answers every column that rows can read with zeros."""

    def __init__(self, node: str, spec: Spec, schema: Schema) -> None:
        self._asked = (node, spec, schema)

    def __len__(self) -> int:
        return ROWS

    def __getattr__(self, name: str) -> object:
        node, spec, schema = self._asked
        readable(node, name, spec.columns, schema)
        if name == "payload":
            return tuple(map(zeros, spec.payload or ()))
        return np.zeros(ROWS, np.int64)


def zeros(x: Tensor) -> Tensor:
    """Zeros on the host, of the shape and dtype of a tensor without data."""
    return torch.zeros(x.shape, dtype=x.dtype, device="cpu")


def describe(payload: Sequence[Tensor]) -> str:
    """``float32 (n, 128), int64 (n,)``."""
    parts = []
    for p in payload:
        inner = "".join(f", {d}" for d in p.shape[1:]) or ","
        parts.append(f"{str(p.dtype).removeprefix('torch.')} (n{inner})")
    return ", ".join(parts)
