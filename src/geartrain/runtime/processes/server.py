"""The process that forks workers: it has imported torch, runs no thread, and waits for deaths.

    parent ── "fork", a socket ──► server ── fork ──► worker        0.04 s; an import of torch: 4 s
    parent ◄─ "pid died, status" ─ server ◄─ SIGCHLD ─┘

When the parent is gone, the server ends the workers and itself; when the server is gone, the kernel
ends the workers. So nothing is left, whoever is killed. A fork of the parent itself would be of a
process with threads (OpenMP's at least), which may not be done.
"""

from __future__ import annotations

import fcntl
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, final

from geartrain.errors import GeartrainError, WorkerDiedError
from geartrain.runtime.processes.control import Control
from geartrain.runtime.processes.forking import be_a_worker, ended, get_ready

_MAIN: Final = f"""
import os, shutil, signal, socket, sys
fd, folder, parent = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
def look(*_):  # an import of torch is long
    if os.getppid() != parent:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)
signal.signal(signal.SIGALRM, look)
signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
from {__name__} import Control, serve
serve(Control(socket.socket(fileno=fd)), folder, parent)
"""
_PREFIX: Final = "geartrain-sockets-"
_FRESH_S: Final = 60.0
_PATIENCE_S: Final = 60.0  # for an import of torch on a machine that is busy


@final
class ForkServer:
    """The parent's side; a process has one, made when it first wants workers.

    Attributes:
        folder: For sockets; removed by whichever of the two lives longer.
        deaths: Workers that have ended, and how: a signal is below 0.
        pid: Its process.

    Raises:
        GeartrainError: It cannot be started.
    """

    _of_this_process: ClassVar[ForkServer | None] = None

    @classmethod
    def of_this_process(cls) -> ForkServer:
        """The server, made anew if there is none or it has died."""
        server = cls._of_this_process
        if server is None or server._owner != os.getpid() or not server.lives:
            if server is not None:
                server.close()
            server = cls._of_this_process = cls()
        return server

    def __init__(self) -> None:
        self._owner = os.getpid()
        self.deaths: dict[int, int] = {}
        self._generation = 0
        self.folder = folder = new_folder()
        held = hold(folder)
        here, there = socket.socketpair()
        with there:
            self._process = start(there.fileno(), str(folder))
        self.pid = self._process.pid
        self.control = Control(here)
        self._ready = False
        self._inside = threading.Lock()  # passes may run in several threads
        self._end = weakref.finalize(
            self, _close, self._owner, self.control, self._process, folder, held
        )

    @property
    def lives(self) -> bool:
        """Whether it can fork."""
        return self._end.alive and self._process.poll() is None

    def generation(self) -> int:
        """A number that no pass has had, for its sockets."""
        self._generation += 1
        return self._generation

    def fork(self, worker: int) -> tuple[int, Control]:
        """A new worker: its process and the channel to it.

        Raises:
            WorkerDiedError: The server is gone.
            GeartrainError: The system has no room for a process more.
        """
        here, there = socket.socketpair()
        with self._inside, there:
            try:
                self._wait()
            except BaseException:
                here.close()
                raise
            try:
                self.control.send(b"%d" % worker, [there.fileno()])
                while "forked" not in (told := self.control.hear()):
                    self._note(told)
            except (OSError, EOFError) as error:
                here.close()
                self.kill()
                raise WorkerDiedError(
                    f"the process that forks workers (process {self.pid}) has died; call again, "
                    "and another one is made"
                ) from error
        if told["forked"] < 0:
            here.close()
            raise GeartrainError(f"no worker process more can be made: {told['why']}")
        self.deaths.pop(told["forked"], None)  # of one that had the number before
        return told["forked"], Control(here)

    def _wait(self) -> None:
        """Until it has imported all that workers need; it began when it was made."""
        if self._ready:
            return
        self.control.socket.settimeout(_PATIENCE_S)
        try:
            self.control.hear()
        except (OSError, EOFError) as error:
            self.kill()
            raise GeartrainError(
                "the process that forks workers did not start (see what it printed); use threads: "
                "runtime=gt.Threads(...), --runtime threads"
            ) from error
        self._ready = True

    def listen(self, timeout_s: float = 0.0) -> None:
        """Take note of deaths that have been told; waits for one, at most so long.

        Raises:
            OSError, EOFError: The server is gone.
        """
        with self._inside:
            poller = select.poll()
            poller.register(self.control.socket, select.POLLIN)
            while poller.poll(timeout_s * 1e3):
                self._note(self.control.hear())
                timeout_s = 0.0

    def kill(self) -> None:
        """End the server at once, if it is not gone, and by that the workers."""
        self._process.kill()
        self._end()

    def close(self) -> None:
        """End the workers and the server; it is done at the end of the program if nobody asks."""
        self._end()

    def _note(self, told: Mapping[str, Any]) -> None:
        self.deaths[told["died"]] = told["status"]


def start(fd: int, folder: str) -> subprocess.Popen[bytes]:
    """The server's process; with a session of its own, so that a terminal's signals pass it by."""
    return subprocess.Popen(
        [sys.executable, "-c", _MAIN, str(fd), folder, str(os.getpid())],
        pass_fds=[fd],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )


def new_folder() -> Path:
    """A folder for sockets, open to this user alone; those that nobody uses are removed."""
    sweep()
    return Path(tempfile.mkdtemp(prefix=_PREFIX))


def hold(folder: Path | str) -> int:
    """Say that a folder is in use, for as long as this file is open here or in a fork."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def sweep() -> None:
    """Remove folders that nobody uses: all were killed together, so that nobody was left to."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # somebody else's, or in use, or gone meanwhile
            if time.time() - folder.stat().st_mtime < _FRESH_S:
                continue  # it may have been made just now, and is held in a moment
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(fd)


def _close(
    owner: int, control: Control, process: subprocess.Popen[bytes], folder: Path, held: int
) -> None:
    if os.getpid() != owner:
        return  # of the process that has forked this one
    control.end()
    try:
        process.wait(_PATIENCE_S / 10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)
    os.close(held)


def serve(control: Control, folder: str, parent: int) -> None:
    """The server's life, until the parent ends it, or ends itself in whatever way."""
    workers: set[int] = set()
    try:
        hold(folder)
        _serve(control, parent, workers)
    except (EOFError, ConnectionError):
        pass  # the parent has closed the channel, or is gone
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def _serve(control: Control, parent: int, workers: set[int]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent decides
    heard, rings = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(rings)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    get_ready()
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    # Whoever the parent has forked may have its end of the channel, and outlive it.
    try:
        life = [os.pidfd_open(parent)]
    except OSError:
        life = []  # a kernel or a container without; then the channel alone tells
    if os.getppid() != parent:
        return
    control.tell(ready=os.getpid())
    with selectors.EpollSelector() as selector:
        ours = [selector.fileno(), heard, rings, *life]
        for fd in (control.socket.fileno(), heard, *life):
            selector.register(fd, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd in life:
                    return
                if key.fd == heard:
                    os.read(heard, 4096)
                    for pid, status in ended(workers):
                        control.tell(died=pid, status=status)
                    continue
                content, fds = control.receive()
                _fork(int(content), fds[0], workers, control, ours)


def _fork(worker: int, fd: int, workers: set[int], control: Control, ours: Sequence[int]) -> None:
    server = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        control.tell(forked=-1, why=str(error))
    else:
        if pid == 0:
            control.close()
            signal.set_wakeup_fd(-1)
            for each in ours:
                os.close(each)
            be_a_worker(server, partial(_live, worker, fd))
        workers.add(pid)
        control.tell(forked=pid)
    os.close(fd)


def _live(worker: int, fd: int) -> None:
    from geartrain.runtime.processes.child import live
    from geartrain.runtime.processes.forked import ForkedChannel

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and decides
    live(worker, ForkedChannel(Control(socket.socket(fileno=fd))))
