"""Who ran which node, when, for how many rows: a timeline that Perfetto and Chrome open.

    worker 0  ▏embed fwd▕▏  branch fwd  ▕▏ branch bwd ▕↑▏...     complete events, a thread a worker
    worker 1      ▏readout fwd▕▏readout bwd▕      ▏...           ↑ an instant where a part stepped
    in flight ▂▄▆███▇                                            counters

The file is the array form of the Chrome trace event format: an event a line, times in
microseconds. The array need not be closed, so a killed run leaves a trace that opens.

Source: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeAlias, final

from geartrain.engine.instrument import (
    AbstractInstrument,
    Chosen,
    EpochEnded,
    Fired,
    Progress,
    Restored,
    RunEnded,
    RunStarted,
    Updated,
)
from geartrain.errors import DataError
from geartrain.files import open_regular
from geartrain.observe.sidefile import SideFile
from geartrain.schema import Mismatch, parsed

_log = logging.getLogger(__name__)
_BATCH: Final = 4096  # events that wait at most before they are written
_LONGEST: Final = 1 << 20  # characters of a line that is read; ours have some hundreds
_PROCESS: Final = 1  # its id; 0 means the idle process to some viewers
TRACE_FULL: Final = "trace full"  # the name of the last event of a trace that reached its limit
_Recorded: TypeAlias = Fired | Updated | Progress | Chosen | Restored | EpochEnded


@final
class PerfettoTrace(AbstractInstrument):
    """Record firings, updates, instances in flight and instances/s from one run.

    Open the file at ui.perfetto.dev or chrome://tracing. Recording a firing appends to a list; the
    text is made in batches (every 4,096 events and with each ``Progress``). An event takes about
    180 bytes on disk. A file that is there is replaced when a run starts. Where it can no longer be
    written, that is said once, and the run goes on without it.

    Args:
        path: The file, by custom ``trace.json``; its folder is made if need be.
        limit: Events to record at most. Beyond it nothing more is recorded, which is said once in
            the log and in the file.

    Raises:
        ValueError: ``limit`` is not positive.
    """

    wants_firings = True

    def __init__(self, path: Path | str, limit: int = 2_000_000) -> None:
        if limit < 1:
            raise ValueError(f"limit is {limit}; expected a number of events, 1 or more")
        self._path = Path(path)
        self._limit = limit
        self._left = 0  # events that may still be recorded; none outside of a run
        self._pending: list[_Recorded] = []
        self._named: set[int] = set()  # workers
        self._file: SideFile | None = None

    def on_run_started(self, event: RunStarted) -> None:
        """Open the file; name the process and the workers."""
        self.close()
        self._file = SideFile(self._path, "w")
        self._left, self._named = self._limit, set()
        clock = " (virtual time)" if event.runtime == "simulated" else ""
        title = f"geartrain: {event.runtime}{clock}"
        lines = [_metadata("process_name", 0, {"name": title})]
        for worker in range(event.workers):
            lines.extend(self._names(worker))
        self._file.write("[" + ",\n".join(lines))
        self._file.flush()

    def on_fired(self, event: Fired) -> None:
        """Record a firing."""
        # The event is immutable: keeping it is cheaper than taking it apart here.
        self._record(event)

    def on_updated(self, event: Updated) -> None:
        """Record a step of a part."""
        self._record(event)

    def on_progress(self, event: Progress) -> None:
        """Record the counters and write what waits."""
        self._record(event)
        self._write()

    def on_chosen(self, event: Chosen) -> None:
        """Mark where the work was shared out anew, and by what."""
        self._record(event)

    def on_restored(self, event: Restored) -> None:
        """Mark a death of a worker, on its track, and write what waits."""
        if event.mode == "train":  # what is repeated else has no place on the clock
            self._record(event)
            self._write()

    def on_epoch_ended(self, event: EpochEnded) -> None:
        """Mark the end of the epoch and write what waits."""
        self._record(event)
        self._write()

    def on_run_ended(self, event: RunEnded) -> None:
        """Close the array and the file."""
        self.close()

    def close(self) -> None:
        """Close the array and the file; again is harmless."""
        self._write()
        if self._file is not None:
            self._file.write("\n]\n")
            self._file.close()
        self._file, self._left = None, 0

    def _record(self, event: _Recorded) -> None:
        if self._left:
            self._left -= 1
            self._pending.append(event)
            if not self._left:
                self._end_at_limit(event)
            elif len(self._pending) >= _BATCH:
                self._write()

    def _end_at_limit(self, event: _Recorded) -> None:
        self._write()
        assert self._file is not None
        time_s = event.end_s if isinstance(event, Fired) else event.time_s
        words = f"{self._limit:,} events are recorded, the limit; later ones are left out"
        self._file.write(",\n" + _instant(TRACE_FULL, 0, time_s, "g", json.dumps({"note": words})))
        self._file.flush()
        _log.warning("%s: %s (PerfettoTrace(limit=...))", self._path, words)

    def _write(self) -> None:
        if self._file is None or not self._pending:
            return
        lines: list[str] = []
        for event in self._pending:
            if isinstance(event, (Fired, Updated)) and event.worker not in self._named:
                lines.extend(self._names(event.worker))
            lines.extend(_lines(event))
        self._pending.clear()
        self._file.write(",\n" + ",\n".join(lines))
        self._file.flush()

    def _names(self, worker: int) -> list[str]:
        self._named.add(worker)
        return [
            _metadata("thread_name", _thread(worker), {"name": f"worker {worker}"}),
            _metadata("thread_sort_index", _thread(worker), {"sort_index": worker}),
        ]


def read_trace(path: Path | str) -> Iterator[dict[str, Any]]:
    """Read the events that ``PerfettoTrace`` wrote, one after the other.

    A last line that was cut off is left out.

    Raises:
        DataError: Any other line is not an event.
        OSError: The file cannot be read, or is no regular file.
    """
    torn: tuple[int, str] | None = None
    with open_regular(path) as binary, io.TextIOWrapper(binary, "utf-8", "replace") as file:
        for at, line in enumerate(iter(lambda: file.readline(_LONGEST), ""), start=1):
            if torn is not None:
                raise DataError(
                    f"got {torn[1][:60]!r}; expected an event a line, as PerfettoTrace writes it",
                    path=path,
                    line=torn[0],
                )
            text = line.strip().removeprefix("[").removesuffix(",")
            if not text or text == "]":
                continue
            event = _parsed(text)
            if event is None:
                torn = (at, text)
            else:
                yield event


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        event = parsed(text, "the event")
    except Mismatch:  # the caller knows whether that is an error here
        return None
    return event if isinstance(event, dict) else None


def _lines(event: _Recorded) -> list[str]:
    match event:
        case Fired():
            return [_complete(event)]
        case Updated():
            args = f'{{"part":{_quoted(event.part)},"version":{event.version},"rows":{event.rows}}}'
            name = f"update {event.part}"
            return [_instant(name, _thread(event.worker), event.time_s, "t", args)]
        case Progress():
            return [
                _counter("in flight", "instances", event.active, event.time_s),
                _counter("instances/s", "instances/s", event.instances_per_second, event.time_s),
            ]
        case Chosen():
            args = json.dumps({"why": event.why})
            return [_instant("chosen", 0, event.time_s, "g", args)]
        case Restored():
            args = json.dumps(
                {"how": event.message, "repeated": event.repeated, "from": event.source}
            )
            thread = 0 if event.worker is None else _thread(event.worker)
            return [_instant(f"death {event.deaths}", thread, event.time_s, "g", args)]
        case EpochEnded():
            return [_instant(f"epoch {event.epoch} ended", 0, event.time_s, "g", "{}")]


def _complete(event: Fired) -> str:
    ts = event.start_s * 1e6
    dur = max(0.0, event.end_s * 1e6 - ts)
    return (
        f'{{"ph":"X","pid":{_PROCESS},"tid":{_thread(event.worker)},"ts":{ts:.3f},"dur":{dur:.3f},'
        f'"name":{_quoted(f"{event.node} {event.direction}")},"cat":"{event.direction}",'
        f'"args":{{"node":{_quoted(event.node)},"part":{_quoted(event.part)},'
        f'"direction":"{event.direction}","rows":{event.rows}}}}}'
    )


def _instant(name: str, thread: int, time_s: float, scope: str, args: str) -> str:
    return (
        f'{{"ph":"i","pid":{_PROCESS},"tid":{thread},"ts":{time_s * 1e6:.3f},"s":"{scope}",'
        f'"name":{_quoted(name)},"args":{args}}}'
    )


def _counter(name: str, series: str, value: float, time_s: float) -> str:
    # A comparison with NaN is false: what JSON cannot say becomes zero.
    value = value if 0 < value < float("inf") else 0
    return (
        f'{{"ph":"C","pid":{_PROCESS},"tid":0,"ts":{time_s * 1e6:.3f},"name":"{name}",'
        f'"args":{{"{series}":{value:.6g}}}}}'
    )


def _metadata(name: str, thread: int, args: dict[str, object]) -> str:
    event = {"ph": "M", "pid": _PROCESS, "tid": thread, "name": name, "args": args}
    return json.dumps(event, separators=(",", ":"))


def _thread(worker: int) -> int:
    return worker + 1  # 0 is for what belongs to no worker


@lru_cache(maxsize=4096)
def _quoted(text: str | None) -> str:
    return json.dumps(text)
