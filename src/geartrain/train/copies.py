"""Copies of a model in a session: their shards, checkpoints, consensus and counts.

epoch ─► feeder of shards ─► engine ─► consensus into the user's modules ─► Exchanged
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from geartrain.engine.instrument import CopyExchanged, Exchanged
from geartrain.errors import CheckpointError
from geartrain.frames.instance import Instance
from geartrain.runtime.base import AbstractFeeder, Feeder, OnBadInstance
from geartrain.runtime.shards import PullFeeder, ShardFeeder
from geartrain.sharing.exchange import Ledger
from geartrain.sharing.replicas import Replicas, ReplicasEntry, Totals
from geartrain.train.results import staleness_of
from geartrain.train.snapshot import FoundPart, check_parts, parts_to_tensors
from geartrain.train.source import Source


@final
class Feed:
    """The instances of one epoch, stretch by stretch.

    Args:
        source: The data.
        replicas: The copies, or None.
        epoch: Its number.
        taken: Instances that were taken of it before.
        on_bad: As for ``Feeder``.

    Raises:
        ValueError: The data cannot be cut into shards.
        DataError: They end before ``taken``.
    """

    def __init__(
        self,
        source: Source,
        replicas: Replicas | None,
        epoch: int,
        taken: int,
        on_bad: OnBadInstance,
    ) -> None:
        self._source, self._replicas, self._epoch, self._on_bad = source, replicas, epoch, on_bad
        self._static = replicas is not None and replicas.setting.shards == "static"
        self._instances: Iterator[Instance] = iter(())
        if replicas is not None and not taken:
            replicas.positions[:] = [0] * replicas.copies
        if self._static:
            assert replicas is not None
            source.require_shards(replicas.copies)
            source.require_start(taken)
            source.begin(epoch)
        else:
            self._instances = source.epoch(epoch, taken)

    def stretch(self, taken: int, limit: int | None) -> AbstractFeeder:
        """A feeder for so many more instances, or for all that are left.

        Args:
            taken: Instances of the epoch before.
            limit: How many; None: all.
        """
        replicas = self._replicas
        if replicas is None:
            return Feeder(self._instances, self._on_bad, limit)
        if not self._static:
            return PullFeeder(self._instances, replicas.positions, self._on_bad, limit)
        n, total = replicas.copies, len(self._source)
        left = total - taken
        return ShardFeeder(
            lambda k, start: self._source.shard(self._epoch, k, n, start),
            [len(range(k, total, n)) for k in range(n)],
            replicas.positions,
            left if limit is None else min(limit, left),
            ends=limit is None or limit >= left,
            beyond=0 if limit is None else max(0, left - limit),
            on_bad=self._on_bad,
        )


def replicas_to_tensors(replicas: Replicas) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All that a resumed run needs of the copies; tensors are their own."""
    tensors, parts = parts_to_tensors(replicas.parts)
    kept, document = replicas.to_tensors()
    return tensors | kept, document | {"parts": parts}


@final
@dataclass(frozen=True, slots=True)
class FoundReplicas:
    """What ``check_replicas`` has found in order."""

    entry: ReplicasEntry
    parts: Mapping[str, FoundPart]


def check_replicas(
    replicas: Replicas, tensors: Mapping[str, Tensor], document: Mapping[str, Any], path: str
) -> FoundReplicas:
    """The copies that would be put back; nothing is changed.

    Raises:
        CheckpointError: There are no copies in the file, or others.
    """
    if document.get("replicas") is None:
        raise CheckpointError(
            f"{path}: was made without copies of the model; load with weights_only=True to begin "
            "with its weights"
        )
    try:
        entry = replicas.check(tensors, document["replicas"])
    except ValueError as error:
        raise CheckpointError(
            f"{path}: its copies do not fit ({error}); make the session as it was, or load with "
            "weights_only=True"
        ) from error
    numbers = {
        desks[k].member.part.name: n
        for desks in replicas.desks.values()
        for k, n in enumerate(entry.trained)
    }
    return FoundReplicas(entry, check_parts(replicas.parts, tensors, entry.parts, path, numbers))


@final
class Tally:
    """Makes the events of what copies have exchanged: differences between two looks.

    Args:
        replicas: The copies.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas, self._before = replicas, replicas.totals()

    def event(self, epoch: float, time_s: float, seconds: float) -> Exchanged:
        """Since the last call.

        Args:
            epoch, time_s: For the event.
            seconds: How long that was.
        """
        now, before = self._replicas.totals(), self._before
        self._before = now
        return Exchanged(
            epoch=epoch,
            time_s=time_s,
            exchange=self._replicas.exchange_name,
            distance=self._replicas.distance(),
            copies=tuple(
                _copy_event(now, before, k, seconds, present)
                for k, present in enumerate(self._replicas.present())
            ),
        )


def _copy_event(
    now: Totals, before: Totals, k: int, seconds: float, present: bool
) -> CopyExchanged:
    new, old = now.ledgers[k], before.ledgers[k]

    def since(name: str) -> int:
        return int(getattr(new, name) - getattr(old, name))

    instances, rounds = now.finished[k] - before.finished[k], now.rounds[k] - before.rounds[k]
    return CopyExchanged(
        instances=instances,
        rounds=rounds,
        instances_per_second=instances / seconds if seconds > 0 else 0.0,
        sent=since("sent"),
        applied=since("applied"),
        merged=since("merged"),
        dropped=since("dropped"),
        lost=since("lost"),
        bytes=since("bytes"),
        bytes_per_round=since("bytes") / rounds if rounds else 0.0,
        staleness=staleness_of(_ages(new, old)),
        present=present,
        meetings=since("meetings"),
        meetings_per_round=since("meetings") / since("rounds") if since("rounds") else 0.0,
        declined=since("declined"),
    )


def _ages(new: Ledger, old: Ledger) -> Sequence[int]:
    """Letters by versions passed under way."""
    top = max(new.staleness, default=-1)
    return [new.staleness.get(a, 0) - old.staleness.get(a, 0) for a in range(top + 1)]
