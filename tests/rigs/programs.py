"""Programs that get real signals: each a process of its own, forked from one that has imported all.

Nursery()           a process that imports torch and geartrain once, and forks
  Program(...)      a program: its lines as they come, signals to it, its status; all with a bound
  Forked(...)       python -m MODULE, as subprocess.Popen would show it
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

BOUND_S = 60.0
"""So long anything may take, on a busy machine, before a test fails."""

_NURSERY = """
import ctypes, json, os, signal, sys, traceback

def end_with_parent():  # as it cannot end what it has begun once it is killed
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)

end_with_parent()
import torch
import geartrain as gt
import geartrain.cli.train

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
graph = gt.Graph()  # a first run imports and loads what later ones need
graph.input("x").through(torch.nn.Linear(1, 1)).loss(lambda x: x[:, 0])
session = gt.Session(graph, runtime=gt.Simulated())
session.fit([gt.Instance({"x": torch.ones(1, 1)})], epochs=1)

for line in sys.stdin:
    asked = json.loads(line)
    if "wait" in asked:
        print(os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1]), flush=True)
        continue
    child = os.fork()
    if child:
        print(child, flush=True)
        continue
    end_with_parent()
    for number, path in ((1, asked["out"]), (2, asked["err"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv = ["program", *asked["words"]]
    status = 1
    try:
        exec(compile(asked["script"], "program", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    if asked["whole"]:
        sys.exit(status)
    sys.stdout.flush()
    os._exit(status)  # to take the interpreter down would cost more than all the rest
"""


class Nursery:
    """A process that forks programs."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _NURSERY],
            # A fork of a process that has threads of OpenMP waits for them for ever.
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def ask(self, **question: Any) -> int | None:
        """A number for an answer; None: there is none within the bound."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        return self.hear()

    def hear(self) -> int | None:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], BOUND_S)
        return int(self._process.stdout.readline()) if ready else None

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


class Program:
    """A program that runs, and the lines that it prints.

    Args:
        nursery: Forks it.
        folder: Where it runs; made for it.
        script: Its text.
        words: Its arguments.
        out, err: Files that get what it prints, and its errors; "out" for the errors: the same as
            what it prints. None: a pipe to here, and a file in the folder.
        environment: None: that of this process.
        whole: Whether it ends as Python does, with all that happens at exit.
    """

    def __init__(
        self,
        nursery: Nursery,
        folder: Path,
        script: str,
        *words: object,
        out: str | Path | None = None,
        err: str | Path | None = None,
        environment: Mapping[str, str] | None = None,
        whole: bool = False,
    ) -> None:
        folder.mkdir()
        pipe, self._err = folder / "out", folder / "err"
        os.mkfifo(pipe)
        if err is not None:
            self._err = Path(pipe if err == "out" else err)
        self._nursery = nursery
        self._out: int | None = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        self._rest = b""
        self._sent = 0.0
        self._status: int | None = None
        self.lines: list[str] = []
        pid = nursery.ask(
            script=textwrap.dedent(script),
            words=[str(word) for word in words],
            folder=str(folder),
            out=str(pipe if out is None else out),
            err=str(self._err),
            environment=dict(os.environ if environment is None else environment),
            whole=whole,
        )
        if out is not None:
            self.turn_away()
        assert pid is not None
        self.pid = pid

    def until(self, words: str) -> str:
        """Read on to a line with these words, and return it."""
        while (line := self.line()) is not None:
            if words in line:
                return line
        raise AssertionError(f"{words!r} was never said: {self.lines}; {self._err.read_text()}")

    def send(self, number: int, *, asleep: bool = False) -> None:
        """Send a signal.

        Args:
            number: Which.
            asleep: When the main thread waits: the interpreter would not wake up for one that comes
                in the moment before it goes to sleep, and a user would press the keys once more.
        """
        if asleep:
            self._await_sleep()
        self._sent = time.monotonic()
        os.kill(self.pid, number)

    def _await_sleep(self) -> None:
        until = time.monotonic() + BOUND_S
        stat = Path(f"/proc/{self.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "S":
            if time.monotonic() > until:
                raise AssertionError(f"process {self.pid} has not waited for {BOUND_S} s")
            os.sched_yield()

    @property
    def seconds(self) -> float:
        """Since the last signal."""
        return time.monotonic() - self._sent

    def turn_away(self) -> None:
        """Read no more, and have it know."""
        if self._out is not None:
            os.close(self._out)
            self._out = None

    def end(self) -> tuple[int | None, str]:
        """Exit status and errors, when it is over; what else it has printed is in ``lines``."""
        while self.line() is not None:
            pass
        if self._status is None:
            self._status = self._nursery.ask(wait=self.pid)
        return self._status, self.errors()

    def errors(self) -> str:
        """What it has written to its errors so far."""
        return self._err.read_text() if self._err.is_file() else ""

    def close(self) -> None:
        """End it, if it still runs."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            self._nursery.ask(wait=self.pid)
        self.turn_away()

    def line(self) -> str | None:
        """The next line; None at the end of the output."""
        if self._out is None:
            return None
        end = time.monotonic() + BOUND_S
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._out], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise AssertionError(f"nothing more was said in {BOUND_S} s: {self.lines}")
            read = os.read(self._out, 1 << 16)
            if not read:
                return None
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        self.lines.append(line.decode())
        return self.lines[-1]


_MODULE = """
import runpy, sys
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


class Forked:
    """What ``subprocess.Popen(command, stdout=PIPE, stderr=file, text=True, env=...)`` would give.

    Args:
        nursery: Forks it.
        folder: Where it runs; made for it.
        command: ``[python, "-m", module, *words]``.
    """

    def __init__(
        self,
        nursery: Nursery,
        folder: Path,
        command: Sequence[str],
        *,
        stdout: int,
        stderr: IO[str],
        text: bool,
        env: Mapping[str, str],
    ) -> None:
        assert (command[1], stdout, text) == ("-m", subprocess.PIPE, True)
        errors = f"/proc/{os.getpid()}/fd/{stderr.fileno()}"
        self._program = Program(nursery, folder, _MODULE, *command[2:], err=errors, environment=env)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self._program.close()

    @property
    def stdout(self) -> Iterator[str]:
        while (line := self._program.line()) is not None:
            yield f"{line}\n"

    def wait(self) -> int | None:
        return self._program.end()[0]

    def kill(self) -> None:
        self._program.send(signal.SIGKILL)
