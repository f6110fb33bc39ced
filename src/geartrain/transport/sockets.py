"""ZeroMQ's sockets: where they are, who may write to them, and how they are set.

in a folder   ipc, a file for each process and generation; the folder is open to one user alone
by tcp        with keys, or plainly where that is said
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

import zmq

from geartrain.errors import TransportError
from geartrain.transport.keys import Keys

_KERNEL_BYTES: Final = 1 << 20
"""Room in the kernel for a socket file, which grants less; by itself it has room for one batch of
128 KiB, and both sides wait for one another: 3,000 a second, not 10,000. Tcp measures its own."""
IPC: Final = "ipc://"
_TCP: Final = "tcp://"
_MOST_NAME: Final = 107  # bytes of a socket file's path, of Linux
_RETRY_MS: Final = 10  # until the other side has bound
_MOST_RETRY_MS: Final = 500
_MOST_ANSWER_BYTES: Final = 1 << 16  # of what comes to a socket that sends: handshakes
_CONNECT_MS: Final = 2000  # a door that was shut may be open by then
_HANDSHAKE_MS: Final = 10_000
_BEAT_MS: Final = 2000
_MOST_SILENT_MS: Final = 20_000
"""A connection by tcp that carries nothing for as long, not even what ZeroMQ's own threads say, has
ended: it is made anew, and what it lost shows. A link that was cut for 10 s goes on."""


def socket_file(folder: Path, number: int, generation: int) -> str:
    """The address of a process by a file.

    Raises:
        ValueError: Its path is longer than the system allows.
    """
    path = f"{folder}/{number}.{generation}"
    if len(os.fsencode(path)) > _MOST_NAME:
        raise ValueError(
            f"Transport: the socket file {path} has a path of {len(os.fsencode(path))} bytes, "
            f"and {_MOST_NAME} are the most; give a folder nearer to the root, such as one "
            "of tempfile.mkdtemp()"
        )
    return f"{IPC}{path}"


def prepare_pull(pull: zmq.Socket[bytes], address: str, most_bytes: int) -> None:
    """Set what a process is written to by, before it is bound.

    Args:
        pull: The socket.
        address: Where it will be bound.
        most_bytes: Of one message; who sends more is cut off.
    """
    pull.set_hwm(0)
    pull.setsockopt(zmq.LINGER, 0)
    pull.setsockopt(zmq.MAXMSGSIZE, most_bytes)
    if address.startswith(IPC):
        pull.setsockopt(zmq.RCVBUF, _KERNEL_BYTES)
    else:
        _beat(pull)


def prepare_push(push: zmq.Socket[bytes], address: str, *, beats: bool) -> None:
    """Set what another process is written to by, before it is connected.

    Args:
        push: The socket.
        address: Of the other process.
        beats: Whether ZeroMQ's own threads look, by tcp, if the other side is there.
    """
    push.set_hwm(0)
    push.setsockopt(zmq.LINGER, 0)
    push.setsockopt(zmq.RECONNECT_IVL, _RETRY_MS)
    push.setsockopt(zmq.RECONNECT_IVL_MAX, _MOST_RETRY_MS)
    push.setsockopt(zmq.MAXMSGSIZE, _MOST_ANSWER_BYTES)
    if address.startswith(IPC):
        push.setsockopt(zmq.SNDBUF, _KERNEL_BYTES)
        return
    push.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
    push.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    if beats:
        _beat(push)


def _beat(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, _BEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _MOST_SILENT_MS)


def require_closed_to_others(at: Path | str, keys: Keys | None, plain: bool) -> None:
    """Refuse to listen where anybody could write, unless that is asked for."""
    if isinstance(at, str) and at.startswith(_TCP):
        if (keys is None) != plain:
            raise ValueError(
                f"Transport({at!r}): tcp wants keys: give keys=Keys.make(), and connect the public "
                "keys of the others; or plain=True, and then whoever reaches the port can read the "
                "data and change or end the run"
            )
        return
    if keys is not None or plain:
        raise ValueError(f"Transport({str(at)!r}): keys and plain are for tcp, not for a folder")
    folder = at if isinstance(at, Path) else Path(at.removeprefix(IPC)).parent
    if isinstance(at, str) and not at.startswith(IPC):
        raise ValueError(f"Transport({at!r}): give a folder, or an address of tcp:// or ipc://")
    try:
        found = folder.stat()
    except OSError:
        return  # binding says what is wrong with it
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise TransportError(
            f"{folder} is of user {found.st_uid} and mode {stat.S_IMODE(found.st_mode):04o}, and "
            f"others could write to its sockets; it has to be of user {os.getuid()} and mode 0700: "
            f"chmod 700 {folder}, or take one of tempfile.mkdtemp()"
        )
