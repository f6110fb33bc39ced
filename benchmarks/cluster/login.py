"""Programs on a host over a connection, as ssh starts them, so that cut links are felt there too.

    python -m benchmarks.cluster.login serve ADDRESS             on the host, while it is up
    python -m benchmarks.cluster.login on ADDRESS -- COMMAND     runs a command there

Stdin and stdout of the command are the connection; its stderr is the server's. A host that is not
there is given up after a few seconds, and a connection that is silent after fifteen, as ssh does
with ``ConnectTimeout=3`` and ``ServerAliveInterval=5``. A host that dies says nothing, so whoever
waits for it hears of that no sooner than by ssh. Nothing is encrypted, and nobody is asked who he
is: for hosts on this machine alone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Final

PORT: Final = 7022
CONNECT_S: Final = 3.0
SILENT_S: Final = 15.0
_MOST: Final = 1 << 16


def command(address: str) -> tuple[str, ...]:
    """What makes of a command one that runs on a host with such an address."""
    return (sys.executable, "-m", "benchmarks.cluster.login", "on", address, "--")


def serve(address: str) -> None:
    """Start what is asked for, until this process is killed; says a line when it listens."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they end
    with socket.create_server((address, PORT), backlog=64) as door:
        print("listens", flush=True)
        while True:
            try:
                called, _ = door.accept()
            except OSError:  # whoever called has gone
                continue
            with called:
                try:
                    _start(called)
                except (OSError, ValueError):
                    continue


def _start(called: socket.socket) -> None:
    called.settimeout(CONNECT_S)
    size = struct.unpack("=I", _exactly(called, 4))[0]
    told = json.loads(_exactly(called, size))
    called.settimeout(None)
    _watch(called)
    subprocess.Popen(
        told["command"],
        stdin=called,
        stdout=called,
        env=os.environ | told["env"],
        cwd=told["cwd"],
        start_new_session=True,
    )


def _exactly(called: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        some = called.recv(size - len(found))
        if not some:
            raise OSError("the connection has ended")
        found += some
    return found


def _watch(one: socket.socket) -> None:
    """Have the kernel end a connection whose other end is silent."""
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 5),
        (socket.TCP_KEEPINTVL, 5),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, round(SILENT_S * 1e3)),
    ):
        one.setsockopt(socket.IPPROTO_TCP, option, value)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def run(address: str, words: Sequence[str]) -> int:
    """Run a command on a host, with stdin and stdout of this process; 255 as ssh says it."""
    try:
        one = socket.create_connection((address, PORT), CONNECT_S)
    except OSError as error:
        print(f"login: {address}: {error}", file=sys.stderr)
        return 255
    with one:
        one.settimeout(None)
        _watch(one)
        env = {
            key: os.environ[key] for key in ("PYTHONPATH", "OMP_NUM_THREADS") if key in os.environ
        }
        asked = json.dumps({"command": [*words], "env": env, "cwd": os.getcwd()}).encode()
        try:
            one.sendall(struct.pack("=I", len(asked)) + asked)
            threading.Thread(target=_forward, args=(one,), daemon=True).start()
            while some := one.recv(_MOST):
                _write(some)
        except OSError as error:
            print(f"login: {address}: {error}", file=sys.stderr)
            return 255
    return 0


def _forward(one: socket.socket) -> None:
    """What comes by stdin; its end is told."""
    try:
        while some := os.read(0, _MOST):
            one.sendall(some)
        one.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the other direction says so


def _write(some: bytes) -> None:
    while some:
        some = some[os.write(1, some) :]


def main(words: Sequence[str]) -> int:
    """The command."""
    if words[0] == "serve":
        serve(words[1])
        return 0
    return run(words[1], words[3:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
