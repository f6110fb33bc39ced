"""What is measured in each task: geartrain in several settings, and peers of several kinds.

A *family* is one way to do it; its members differ in the size of an update alone, and a family at
its best is its fastest member.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias, final

Kind: TypeAlias = Literal["ours", "baseline", "steps", "dgl", "dynet"]

MODULES: Final[Mapping[Kind, str]] = {
    "ours": "benchmarks.peers.child",
    "baseline": "benchmarks.peers.child",
    "steps": "benchmarks.peers.child",
    "dgl": "benchmarks.peers.dgl_trees",
    "dynet": "benchmarks.peers.dynet_trees",
}
FOREIGN: Final[Sequence[Kind]] = ("dgl", "dynet")
"""They may need interpreters of their own, and get their trees with the request."""

OURS: Final = "geartrain"
"""Families of ours begin so."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Something that trains.

    Args:
        family: The way it does it.
        detail: Which member of the family.
        kind: What runs it.
        settings: For what runs it.
        share: Of the task's instances that it trains on in a pass; less where it is slow.
        environment: Variables that its process gets beside the others'.
    """

    family: str
    detail: str
    kind: Kind
    settings: Mapping[str, Any] = field(default_factory=dict)
    share: float = 1.0
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.family}, {self.detail}"

    def to_json(self) -> dict[str, Any]:
        """For a request."""
        return {"kind": self.kind, **self.settings}


@final
@dataclass(frozen=True, slots=True)
class TaskSizes:
    """How much data a pass of a task has.

    Args:
        option: The recipe's option that says so.
        size: Its value in a full pass.
        unit: What is counted.
        options: What else the recipe is told.
        only: The values that the option may have; none: any.
    """

    option: str
    size: int
    unit: str
    options: Mapping[str, int | float] = field(default_factory=dict)
    only: tuple[int, ...] = ()

    def of(self, share: float, size: int | None = None) -> dict[str, int | float]:
        """The recipe's options for a share of a pass.

        Args:
            share: Between 0 and 1.
            size: Of the full pass; None: as it is.
        """
        whole = self.size if size is None else size
        wanted = max(1, round(whole * share))
        if self.only:
            wanted = max((n for n in self.only if n <= wanted), default=min(self.only))
        return {**self.options, self.option: wanted}


SIZES: Final[Mapping[str, TaskSizes]] = {
    "sentiment": TaskSizes("trees", 4000, "trees", {"hidden": 128}),
    "listreduce": TaskSizes("train_size", 20_000, "lists", {"hidden": 128, "valid_size": 100}),
    "babi": TaskSizes("thousands", 10, "graphs", {"task": 15}, only=(1, 10)),
    "qm9": TaskSizes("limit", 5000, "molecules"),
}


def systems_of(
    task: str,
    *,
    threads: int = 2,
    sessions: Sequence[Mapping[str, Any]] = (),
    foreign: Sequence[Kind] = (),
    one_thread_too: bool = False,
) -> list[System]:
    """All systems of a task.

    Args:
        task: Of ``SIZES``.
        threads: That each of them has.
        sessions: Arguments of ``Session``; ours also runs once with each of them.
        foreign: Those of ``FOREIGN`` that there is an interpreter for.
        one_thread_too: Whether peers also run on one thread, where small products are faster.
    """
    peers = [s for s in PEERS[task] if s.kind not in FOREIGN or s.kind in foreign]
    if one_thread_too and threads > 1:
        peers += [_on_one_thread(s) for s in peers if s.kind != "dynet"]
    return [*_ours(threads, sessions), *peers]


def _on_one_thread(system: System) -> System:
    settings = {**system.settings, "threads": 1}
    return replace(system, detail=f"{system.detail}, one thread", settings=settings)


def _ours(threads: int, sessions: Sequence[Mapping[str, Any]]) -> Iterator[System]:
    shapes: list[tuple[str, int, dict[str, Any]]] = [("1 worker", 1, {})]
    if threads > 1:
        shapes.append((f"{threads} workers", threads, {}))
        shared = {"sharing": "SharedWeights"}
        shapes.append((f"{threads} workers, shared weights", threads, shared))
    for more in ({}, *sessions):
        told = "".join(f", {name}={value}" for name, value in more.items())
        for in_flight in (256, 64):
            for detail, workers, session in shapes:
                yield System(
                    family=f"{OURS}, {in_flight} in flight{told}",
                    detail=detail,
                    kind="ours",
                    settings={
                        "workers": workers,
                        "in_flight": in_flight,
                        "session": {**session, **more},
                    },
                )


def _sizes(
    family: str, kind: Kind, method: str, batches: Sequence[int], unit: str, share: float = 1.0
) -> list[System]:
    return [
        System(
            family=family,
            detail=f"{batch} {unit} an update",
            kind=kind,
            settings={"method": method, "batch": batch},
            share=share,
        )
        for batch in batches
    ]


def _dgl(batches: Sequence[int]) -> list[System]:
    """DGL brings an OpenMP of its own beside torch's: threads of one that spin hinder the other."""
    family, passive = "DGL, levels", {"OMP_WAIT_POLICY": "passive"}
    return [
        *_sizes(family, "dgl", "levels", [100], "trees"),
        *(
            replace(s, detail=f"{s.detail}, OpenMP told to wait passively", environment=passive)
            for s in _sizes(family, "dgl", "levels", batches, "trees")
        ),
    ]


PEERS: Final[Mapping[str, Sequence[System]]] = {
    "sentiment": [
        *_sizes("PyTorch, node by node", "baseline", "node", [25], "trees", 0.05),
        *_sizes("PyTorch, levels by hand", "baseline", "level", [25, 50, 100, 200, 400], "trees"),
        *_sizes("PyTorch, levels and backward by hand", "baseline", "fused",
                [25, 50, 100, 200, 400], "trees"),
        *_dgl([25, 100, 400]),
        *_sizes("DyNet, automatic batching", "dynet", "autobatch", [25, 100], "trees", 0.5),
    ],
    "listreduce": [
        *_sizes("PyTorch, list by list", "baseline", "single", [100], "lists", 0.02),
        *_sizes("PyTorch, packed nn.RNN", "baseline", "packed", [100, 200, 400, 800], "lists"),
        *_sizes("PyTorch, packed, cell as a loop", "steps", "steps", [100, 200, 400, 800], "lists"),
        *_sizes("PyTorch, nn.RNN, one length", "baseline", "bucketed", [100, 400], "lists"),
        *_sizes("PyTorch, packed, folded loop", "baseline", "mixed", [100, 200, 400, 800], "lists"),
    ],
    "babi": [
        *_sizes("PyTorch, graph by graph", "baseline", "single", [10], "graphs", 0.1),
        *_sizes("PyTorch, block-diagonal", "baseline", "block", [10, 20, 50, 100], "graphs"),
        *_sizes("PyTorch Geometric, our collation", "baseline", "pyg", [20, 50, 100], "graphs"),
        *_sizes("PyTorch Geometric", "baseline", "pyg-batch", [20, 50, 100], "graphs"),
    ],
    "qm9": [
        *_sizes("PyTorch, molecule by molecule", "baseline", "single", [20], "molecules", 0.1),
        *_sizes("PyTorch, block-diagonal", "baseline", "block", [4, 20, 50, 100, 200], "molecules"),
        *_sizes("PyTorch Geometric, our collation", "baseline", "pyg", [4, 20, 50, 100],
                "molecules"),
        *_sizes("PyTorch Geometric", "baseline", "pyg-batch", [4, 20, 50, 100], "molecules"),
    ],
}  # fmt: skip
