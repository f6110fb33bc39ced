"""What a loader does with a record that it refuses: stop, or skip it and count.

    record ─► parse ─► DataError ─► Refusals.refuse ─┬─ "raise": the error goes to the caller
                                                     └─ "skip":  logged, counted, next record

A skipped record leaves nothing behind: loaders refuse before anything of it is kept.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal, final

from geartrain.errors import DataError

Policy = Literal["raise", "skip"]
POLICIES: tuple[Policy, ...] = ("raise", "skip")
MOST_LOGGED = 10  # a file that is broken throughout must not flood the log

_log = logging.getLogger("geartrain.data")


@final
class Refusals:
    """Carry out a policy for the records of one source, and count what was skipped.

    Args:
        policy: ``"raise"`` or ``"skip"``.
        path: The file that the records come from, named in the log; None for arrays.

    Raises:
        ValueError: Another policy.
    """

    __slots__ = ("_policy", "count", "path")

    def __init__(self, policy: Policy, path: Path | str | None = None) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy is {policy!r}; it must be one of {', '.join(POLICIES)}")
        self._policy, self.path = policy, path
        self.count = 0

    def refuse(self, error: DataError) -> None:
        """Raise the error, or log it (the first ten of a source) and count it."""
        if self._policy == "raise":
            raise error
        self.count += 1
        if self.count <= MOST_LOGGED:
            _log.warning("skipped: %s", error)

    def close(self, kept: int) -> int:
        """Log the totals if anything was skipped, and return how many records were.

        Raises:
            DataError: Everything was skipped, so there is nothing to train on.
        """
        if self.count:
            _log.warning("%s: %d records kept, %d skipped", self.path, kept, self.count)
            if not kept:
                raise DataError(
                    f"all {self.count} records were refused and skipped, so nothing is left; "
                    'expected at least one good record. Read it with policy="raise" to see the '
                    "first fault",
                    path=self.path,
                )
        return self.count
