"""Instances a second in training: geartrain against its peers, in one run, in turns.

    PYTHONPATH=src python -m benchmarks.peers.main sentiment --data ../shared/data \\
        --json FILE.json --chart FILE.png
    PYTHONPATH=src python -m benchmarks.peers.main --markdown FILE.json

Every system trains the same network on the same data with the same number of threads: forward,
backward, collation and optimiser steps included, reading excluded. In every round each system has a
process of its own: a pass to warm up, then passes that count. Every other round goes backwards.
Ratios are taken within rounds, of families at their best. What takes long trains on a share.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.figures import Document, draw, machine, markdown
from benchmarks.peers.protocol import Request
from benchmarks.peers.systems import FOREIGN, MODULES, SIZES, Kind, System, systems_of

ROOT: Final = Path(__file__).parents[2]
CHECKED: Final = 5
"""Trees whose loss all systems must agree on."""

Pythons = Mapping[Kind, Path]
"""Interpreters of those that have one of their own."""
TOLD: Final[Mapping[str, str | None]] = {
    "--data": "../shared/data",
    **{f"--{kind}-python": f"{kind.upper()}/bin/python" for kind in FOREIGN},
    "--json": None,
    "--chart": None,
}
"""Paths in the command that is written down: what stands for them; None: they are left out."""


def main() -> None:
    given = _arguments()
    if given.markdown is not None:
        document = json.loads(given.markdown.read_text())
    else:
        document = _measure(given)
    print("\n".join(markdown(document)))
    if given.chart is not None:
        draw(given.chart, document)


def _measure(given: argparse.Namespace) -> Document:
    sizes = SIZES[given.task]
    pythons: Pythons = {k: p for k in FOREIGN if (p := getattr(given, f"{k}_python")) is not None}
    systems = systems_of(
        given.task,
        threads=given.threads,
        sessions=given.session,
        foreign=list(pythons),
        one_thread_too=given.one_thread_too,
    )
    if given.only:
        systems = [s for s in systems if any(text in s.name for text in given.only)]
    options = dict(given.option)
    common: Request = {
        "task": given.task,
        "data": None if given.data is None else str(given.data),
        "threads": given.threads,
        "repeats": given.repeats,
        "seed": given.seed,
        "update_every": given.update_every,
    }
    texts = Trees(given.data, sizes.of(1.0, given.size)) if pythons else None
    if texts is not None:
        _agree(common, texts, pythons, {s.kind for s in systems})

    def requested(system: System) -> Request:
        told = {**sizes.of(system.share, given.size), **options}
        request = {**common, "system": system.to_json(), "options": told}
        request["threads"] = system.settings.get("threads", given.threads)
        if system.kind in FOREIGN and texts is not None:
            request |= texts.first(int(told["trees"]))
        return request

    document = _new_document(given, systems)
    save = partial(_save, given.json, document)
    run_rounds(systems, given.rounds, lambda s: run(s, requested(s), pythons), document, save)
    return document


def _new_document(given: argparse.Namespace, systems: Sequence[System]) -> Document:
    sizes = SIZES[given.task]
    return {
        "benchmark": "peers",
        "command": command_of(sys.argv[1:]),
        "task": given.task,
        "settings": {
            "threads": given.threads,
            "repeats": given.repeats,
            "seed": given.seed,
            sizes.option: given.size or sizes.size,
            **dict(given.option),
            **({"update_every": given.update_every} if given.update_every else {}),
            "unit": sizes.unit,
        },
        "machine": machine(),
        "systems": [
            {"family": s.family, "detail": s.detail, "kind": s.kind, "share": s.share, "runs": []}
            for s in systems
        ],
    }


def command_of(arguments: Sequence[str]) -> str:
    """What to type for the same figures; this machine's paths are not in it."""
    words, rest = ["python", "-m", "benchmarks.peers.main"], iter(arguments)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name not in TOLD:
            words.append(word)
            continue
        if not equals:
            next(rest)
        if (value := TOLD[name]) is not None:
            words += [name, value]
    return "PYTHONPATH=src " + shlex.join(words)


def in_turn(count: int, rounds: int) -> Iterator[tuple[int, int]]:
    """Pairs (round, place): every other round goes backwards."""
    for number in range(1, rounds + 1):
        places = range(count) if number % 2 else reversed(range(count))
        for place in places:
            yield number, place


def run_rounds(
    systems: Sequence[System],
    rounds: int,
    measure: Callable[[System], Mapping[str, Any]],
    document: Document,
    save: Callable[[], None],
) -> None:
    """Run every system in every round; what has failed once is not tried again.

    Args:
        systems: In the order of the document's.
        rounds: How many.
        measure: Gives the reply of a system's process, or its ``error``.
        document: Gets the runs.
        save: Called after every run.
    """
    for number, place in in_turn(len(systems), rounds):
        system, entry = systems[place], document["systems"][place]
        if any("error" in run for run in entry["runs"]):
            continue
        reply = dict(measure(system))
        if versions := reply.pop("versions", None):
            entry["versions"] = versions
        entry["runs"].append({"round": number, **reply})
        print(f"round {number}, {system.name}: {_told(reply)}", file=sys.stderr)
        save()


def _told(reply: Mapping[str, Any]) -> str:
    if "error" in reply:
        return f"failed, {reply['error']}"
    return f"{reply['instances'] / min(reply['seconds']):,.0f} a second"


def run(system: System, request: Request, pythons: Pythons, limit_s: float = 900.0) -> Any:
    """One process, one request: its reply, or its ``error``: the last thing that it said."""
    threads = str(request["threads"])
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    environment = {**os.environ, **dict.fromkeys(names, threads), **system.environment}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [str(pythons.get(system.kind, sys.executable)), "-m", MODULES[system.kind]]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(request) + "\n",
            capture_output=True,
            text=True,
            env=environment,
            cwd=ROOT,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {limit_s:.0f} s"}
    except OSError as error:
        return {"error": f"{command[0]}: {error.strerror}"}
    if done.returncode or not done.stdout:
        said = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
        return {"error": said[-1]}
    return json.loads(done.stdout.splitlines()[-1])


class Trees:
    """Training trees as lists, for interpreters that cannot read them themselves.

    Args:
        data: The data folder, or None.
        options: The recipe's; as many trees as they say.
    """

    def __init__(self, data: Path | None, options: Mapping[str, int | float]) -> None:
        from geartrain.data.sst import load_sst

        sst = load_sst(data, ("train",))
        names = ("word", "leaf", "parent", "slot", "label")
        self._words = len(sst.vocabulary)
        self._trees = [
            {name: getattr(tree, name).tolist() for name in names}
            for tree in sst.train[: int(options["trees"])]
        ]

    def first(self, n: int) -> Request:
        """What a request says of the first so many."""
        return {"words": self._words, "trees": self._trees[:n]}


def _agree(common: Request, trees: Trees, pythons: Pythons, kinds: set[Kind]) -> None:
    """Refuse to measure systems that compute something else.

    Raises:
        SystemExit: A system's loss at the agreed weights is not that of ``geartrain_baselines``.
    """
    request = {**common, **trees.first(CHECKED), "check": CHECKED, "options": {"hidden": 128}}
    ours = System(family="PyTorch", detail="checked", kind="baseline")
    wanted = run(ours, {**request, "system": ours.to_json()}, {})
    for kind in pythons.keys() & kinds:
        theirs = System(family=kind, detail="checked", kind=kind)
        found = run(theirs, {**request, "system": theirs.to_json()}, pythons)
        losses = wanted.get("loss"), found.get("loss")
        if "error" in found:
            print(f"{kind} does not run: {found['error']}", file=sys.stderr)
        elif None in losses or not math.isclose(*losses, rel_tol=1e-4):
            raise SystemExit(
                f"the loss of {CHECKED} trees at equal weights is {found} in {kind} and {wanted} "
                "in geartrain_baselines: the two do not compute the same"
            )


def _save(path: Path | None, document: Document) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")


def session_of(text: str) -> dict[str, Any]:
    """``precision=bf16,max_rows=512`` as arguments of ``Session``; values are JSON or words."""
    told = {}
    for pair in text.split(","):
        name, equals, value = pair.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"{pair!r}: write NAME=VALUE, such as precision=bf16")
        told[name.strip()] = value_of(value.strip())
    return told


def value_of(text: str) -> Any:
    """JSON, or where it is none the word itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def option_of(text: str) -> tuple[str, int | float]:
    """``hidden=64``: a number for the recipe's option."""
    name, _, value = text.partition("=")
    number = value_of(value)
    if not isinstance(number, (int, float)):
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=NUMBER, such as hidden=64")
    return name, number


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # ``command_of`` goes by whole names
    )
    parser.add_argument("task", nargs="?", choices=sorted(SIZES))
    parser.add_argument("--data", type=Path, help="folder that holds sst/, babi/, qm9/")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=1, help="passes in a process that count")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--one-thread-too", action="store_true", help="peers also on one thread")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, help="instances to draw on, instead of the task's own")
    parser.add_argument("--option", action="append", default=[], type=option_of,
                        metavar="NAME=NUMBER", help="of the recipe, for all systems")  # fmt: skip
    parser.add_argument("--update-every", type=int, help="of ours, instead of the recipe's")
    parser.add_argument("--session", action="append", default=[], type=session_of,
                        metavar="NAME=VALUE,...", help="ours also with this argument of Session, "
                        "such as precision=bf16")  # fmt: skip
    parser.add_argument("--only", action="append", default=[], metavar="TEXT",
                        help="only systems whose name holds this, or "
                        "another one given so")  # fmt: skip
    for kind in FOREIGN:
        parser.add_argument(f"--{kind}-python", type=Path, help=f"an interpreter that has {kind}")
    parser.add_argument("--json", type=Path, help="write what was measured")
    parser.add_argument("--chart", type=Path, help="draw it (needs matplotlib)")
    parser.add_argument("--markdown", type=Path, metavar="JSON", help="measure nothing: tables")
    given = parser.parse_args()
    if given.task is None and given.markdown is None:
        parser.error("name a task, or a JSON file with --markdown")
    if given.task != "sentiment" and any(getattr(given, f"{k}_python") for k in FOREIGN):
        parser.error("DGL and DyNet are there for sentiment alone")
    return given


if __name__ == "__main__":
    main()
