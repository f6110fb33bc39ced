"""Training on a device: geartrain beside what an engineer writes for it.

    PYTHONPATH=src python -m benchmarks.devices.main --data ../shared/data [--device cuda] \\
        [--only trees,molecules,childsum,decoder] [--widths 128,512,2048] [--rounds 5] \\
        [--json FILE.json] [--markdown]
    PYTHONPATH=src python -m benchmarks.devices.main --read FILE.json --markdown

Systems take turns in one process; every other round goes backwards; ratios are within rounds. With
``--profile`` the first of ours is looked into instead: what the host does, and how much of the time
the device computes.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.devices.systems import Pass, Setup, systems_of
from benchmarks.peers.figures import Document, Spread, machine

TASKS: Final = ("trees", "molecules", "childsum", "decoder")
INSTANCES: Final = {"trees": 2048, "molecules": 2048, "decoder": 256}
"""Of a pass; of other tasks ``EXAMPLES``."""
EXAMPLES: Final = 512


def timed(system: Pass, device: str) -> tuple[float, float]:
    """Seconds of a pass, until the device is done, and its loss."""
    _wait(device)
    began = time.perf_counter()
    loss = system()
    _wait(device)
    return time.perf_counter() - began, loss


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def measure(task: str, width: int, given: argparse.Namespace) -> Document:
    """All systems of a task at a width; those that cannot run say why."""
    setup = Setup(task, width, given.device, given.data, _instances(task, given))
    document: Document = {"task": task, "width": width, "instances": setup.instances, "systems": []}
    alive: list[tuple[Document, Pass]] = []
    for name, make in systems_of(task).items():
        if given.systems and not any(name.startswith(each) for each in given.systems):
            continue
        told: Document = {"name": name, "seconds": [], "losses": []}
        document["systems"].append(told)
        try:
            system = make(setup)
            for _ in range(given.warm):
                timed(system, given.device)
        except (RuntimeError, ValueError, ImportError) as error:
            told["failed"] = str(error).splitlines()[0][:200]
            print(f"{task} {width} {name}:", file=sys.stderr)
            traceback.print_exc()
            continue
        alive.append((told, system))
    gc.collect()
    gc.freeze()
    for number in range(given.rounds):
        for told, system in alive if number % 2 == 0 else reversed(alive):
            seconds, loss = timed(system, given.device)
            told["seconds"].append(seconds)
            told["losses"].append(loss)
    return document


def _instances(task: str, given: argparse.Namespace) -> int:
    return int(given.instances or INSTANCES.get(task, EXAMPLES))


def profile(task: str, width: int, given: argparse.Namespace) -> None:
    """Look into one pass of the first system that is chosen."""
    setup = Setup(task, width, given.device, given.data, _instances(task, given))
    names = [n for n in systems_of(task) if not given.systems or n.startswith(tuple(given.systems))]
    system = systems_of(task)[names[0]](setup)
    for _ in range(given.warm):
        timed(system, given.device)
    print(f"== {task} {width} {names[0]}: {timed(system, given.device)[0]:.3f} s")
    looked = cProfile.Profile()
    looked.runcall(timed, system, given.device)
    stats = pstats.Stats(looked)
    stats.sort_stats("tottime").print_stats(given.profile)
    if given.device == "cpu":
        return
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        seconds, _ = timed(system, given.device)
    events = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(e.self_device_time_total for e in events) / 1e6
    print(f"device: {len(events):,} kernels and copies, {busy:.3f} s of {seconds:.3f} s (profiled)")
    print(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=14,
                                     max_name_column_width=60))  # fmt: skip


def pairs_of(systems: Sequence[Document]) -> Iterator[tuple[str, str]]:
    """Ours and the peers of as many updates."""
    names = [s["name"] for s in systems if s["seconds"]]
    for ours in (n for n in names if n.startswith("ours")):
        update = ours.rpartition("/")[2] if "/" in ours else ""
        for peer in (n for n in names if not n.startswith("ours")):
            if not update or peer.rpartition(" ")[2] == update:
                yield ours, peer


def markdown(document: Document) -> Iterator[str]:
    """A table for each task."""
    yield f"{document['device']}, torch {document['torch']}; {document['settings']}"
    for task in dict.fromkeys(found["task"] for found in document["found"]):
        found = [f for f in document["found"] if f["task"] == task]
        widths = [f["width"] for f in found]
        yield from ("", f"**{task}**, {found[0]['instances']:,} instances a pass", "")
        yield f"| times as fast as | {' | '.join(f'H = {w}' for w in widths)} |"
        yield "|---" * (len(widths) + 1) + "|"
        pairs = dict.fromkeys(pair for f in found for pair in pairs_of(f["systems"]))
        for ours, peer in pairs:
            yield f"| {ours} : {peer} | {' | '.join(_ratio(f, ours, peer) for f in found)} |"
        yield ""
        yield f"| instances/s | {' | '.join(f'H = {w}' for w in widths)} |"
        yield "|---" * (len(widths) + 1) + "|"
        for name in dict.fromkeys(s["name"] for f in found for s in f["systems"]):
            yield f"| {name} | {' | '.join(_rate(f, name) for f in found)} |"


def _system(found: Document, name: str) -> Document | None:
    return next((s for s in found["systems"] if s["name"] == name and s["seconds"]), None)


def _ratio(found: Document, ours: str, peer: str) -> str:
    one, other = _system(found, ours), _system(found, peer)
    if one is None or other is None:
        return ""
    spread = Spread.of([b / a for a, b in zip(one["seconds"], other["seconds"], strict=True)])
    assert spread is not None
    return f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"


def _rate(found: Document, name: str) -> str:
    system = _system(found, name)
    if system is None:
        return "failed"
    spread = Spread.of([found["instances"] / s for s in system["seconds"]])
    assert spread is not None
    return f"{spread.median:,.0f}"


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    def split(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="the data folder")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", type=split, default=list(TASKS), help="tasks, or own programs")
    parser.add_argument("--systems", type=split, help="those whose names begin so")
    parser.add_argument("--widths", type=split, default=["128", "512", "2048"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", type=int, default=3, help="passes that do not count")
    parser.add_argument("--instances", type=int, help="of a pass; default: the task's")
    parser.add_argument("--profile", type=int, default=0, help="lines of a profile, instead")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", type=Path, help="a file of --json, instead of a run")
    parser.add_argument("--markdown", action="store_true")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    """Run, or read what was run, and tell."""
    given = _arguments(words)
    torch.set_num_threads(1)
    if given.read is not None:
        print("\n".join(markdown(json.loads(given.read.read_text()))))
        return
    tasks = [(task, int(width)) for task in given.only for width in given.widths]
    if given.profile:
        for task, width in tasks:
            profile(task, width, given)
        return
    name = "CPU" if given.device == "cpu" else torch.cuda.get_device_name(given.device)
    settings: dict[str, Any] = {"rounds": given.rounds, "warm": given.warm}
    document: Document = {"benchmark": "devices", "machine": machine(), "device": name}
    document |= {"torch": torch.__version__, "settings": settings, "found": []}
    for task, width in tasks:
        document["found"].append(measure(task, width, given))
        if given.json is not None:
            given.json.write_text(json.dumps(document, indent=1) + "\n")
        if not given.markdown:
            alone = document | {"found": document["found"][-1:]}
            print("\n".join(markdown(alone)), flush=True)
    if given.markdown:
        print("\n".join(markdown(document)))


if __name__ == "__main__":
    main()
