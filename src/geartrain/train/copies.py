"""Copies of a model in a session: their shards, checkpoints, consensus and counts.

epoch ─► feeder of shards ─► engine ─► consensus into the user's modules ─► Exchanged
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from torch import Tensor

from geartrain.engine.instrument import CopyExchanged, Exchanged
from geartrain.errors import CheckpointError
from geartrain.frames.instance import Instance
from geartrain.parts.snapshot import FoundPart, check_parts, parts_to_tensors
from geartrain.runtime.base import AbstractFeeder, Feeder, OnBadInstance
from geartrain.runtime.shards import PullFeeder, ShardFeeder
from geartrain.sharing.letters import Ledger
from geartrain.sharing.sharing import AbstractSharingState, Kept
from geartrain.sharing.totals import Totals
from geartrain.train.results import staleness_of
from geartrain.train.source import Source


@final
class Feed:
    """The instances of one epoch, segment by segment.

    Args:
        source: The data.
        sharing: Who has copies of the parts.
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
        sharing: AbstractSharingState,
        epoch: int,
        taken: int,
        on_bad: OnBadInstance,
    ) -> None:
        self._source, self._sharing, self._epoch, self._on_bad = source, sharing, epoch, on_bad
        self._instances: Iterator[Instance] = iter(())
        if not taken:
            sharing.epoch_begins()
        if sharing.shards == "static":
            source.require_shards(sharing.copies)
            source.require_start(taken)
            source.begin(epoch)
        else:
            self._instances = source.epoch(epoch, taken)

    def segment(self, taken: int, limit: int | None) -> AbstractFeeder:
        """A feeder for so many more instances, or for all that are left.

        Args:
            taken: Instances of the epoch before.
            limit: How many; None: all.
        """
        sharing = self._sharing
        if sharing.shards is None:
            return Feeder(self._instances, self._on_bad, limit)
        if sharing.shards == "pull":
            length = self._source.length
            left = None if length is None else length - taken
            return PullFeeder(self._instances, sharing.positions, self._on_bad, limit, left)
        n, total = sharing.copies, len(self._source)
        left = total - taken
        return ShardFeeder(
            lambda k, start: self._source.shard(self._epoch, k, n, start),
            [len(range(k, total, n)) for k in range(n)],
            sharing.positions,
            left if limit is None else min(limit, left),
            ends=limit is None or limit >= left,
            beyond=0 if limit is None else max(0, left - limit),
            on_bad=self._on_bad,
            together=sharing.going_together,
        )


def sharing_to_tensors(
    sharing: AbstractSharingState,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All that a resumed run needs besides the consensus; tensors are their own.

    Returns:
        Tensors by name, and an entry ``replicas`` for the document; nothing where the consensus is
        all there is.
    """
    if sharing.consensus is sharing:
        return {}, {}
    tensors, parts = parts_to_tensors(sharing.parts)
    kept, document = sharing.to_tensors()
    return tensors | kept, {"replicas": document | {"parts": parts}}


def check_sharing(
    sharing: AbstractSharingState,
    tensors: Mapping[str, Tensor],
    document: Mapping[str, Any],
    path: str,
) -> tuple[Kept, dict[str, FoundPart]]:
    """What would be put back besides the consensus; nothing is changed.

    Raises:
        CheckpointError: The file has copies of the model and the session none, or the reverse, or
            they are others.
    """
    given = document.get("replicas")
    if sharing.consensus is sharing:
        if given is not None:
            raise CheckpointError(
                f"{path}: was made with copies of the model, and the session has none; make the "
                "session as it was, or load with weights_only=True"
            )
        return Kept(), {}
    if given is None:
        raise CheckpointError(
            f"{path}: was made without copies of the model; load with weights_only=True to begin "
            "with its weights"
        )
    try:
        kept = sharing.check(tensors, given)
    except ValueError as error:
        raise CheckpointError(
            f"{path}: its copies do not fit ({error}); make the session as it was, or load with "
            "weights_only=True"
        ) from error
    return kept, check_parts(sharing.parts, tensors, kept.parts, path, kept.numbers)


@final
class ExchangeCounts:
    """Makes the events of what copies have exchanged: differences between two looks.

    Args:
        sharing: Who has copies of the parts.
    """

    def __init__(self, sharing: AbstractSharingState) -> None:
        self._sharing, self._before = sharing, sharing.totals()

    def event(self, epoch: float, time_s: float, seconds: float) -> Exchanged | None:
        """Since the last call; None where copies do not talk.

        Args:
            epoch, time_s: For the event.
            seconds: How long that was.
        """
        before, now = self._before, self._sharing.totals()
        if before is None or now is None:
            return None
        self._before = now
        return Exchanged(
            epoch=epoch,
            time_s=time_s,
            exchange=now.exchange,
            distance=now.distance,
            copies=tuple(
                _copy_event(now, before, k, seconds, present)
                for k, present in enumerate(now.present)
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
