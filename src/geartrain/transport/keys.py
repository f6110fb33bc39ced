"""The key pair of a process, by which others know it.

    keys = Keys.make() ─► keys.public   goes to whoever is to talk to this process, by any way
                          keys.secret   stays in this process

Pairs are of CurveCP, as ZeroMQ has them (CURVE, RFC 26): 32 bytes each, as 40 printable ones (Z85).
A new process makes a new pair; nothing is kept in a file.
"""

from __future__ import annotations

import struct
from typing import Final, NoReturn, final

import zmq
from zmq.utils import z85

_PRINTED: Final = 40  # bytes of a key in Z85


@final
class Keys:
    """A public key and the secret one that belongs to it.

    Args:
        public: 40 bytes.
        secret: 40 bytes. It is shown by no ``repr``, and the pair cannot be pickled or copied.

    Raises:
        ValueError: They are no pair; the message has no part of the secret.
    """

    __slots__ = ("public", "secret")

    public: bytes
    secret: bytes

    def __init__(self, public: bytes, secret: bytes) -> None:
        require_public("public", public)
        if not _is_key(secret) or zmq.curve_public(secret) != public:
            raise ValueError("Keys: the secret key does not belong to the public one; Keys.make()")
        self.public, self.secret = public, secret

    @classmethod
    def make(cls) -> Keys:
        """A new pair."""
        return cls(*zmq.curve_keypair())

    def protect(self, socket: zmq.Socket[bytes], server: bytes) -> None:
        """Have a socket that is yet to connect speak to the owner of one public key alone.

        Args:
            socket: Of a client.
            server: The public key of who has bound there.
        """
        require_public("server", server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, server)

    def __repr__(self) -> str:
        return f"Keys(public={self.public!r})"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "Keys are not pickled or copied: the secret key stays in the process that made it; "
            "send keys.public"
        )


def require_public(name: str, key: bytes) -> None:
    """Refuse what is no public key in Z85."""
    if not _is_key(key):
        told = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
        raise ValueError(
            f"Keys: {name} is {told}, expected {_PRINTED} bytes in Z85, as Keys.make().public is"
        )


def _is_key(key: object) -> bool:
    if not isinstance(key, bytes) or len(key) != _PRINTED:
        return False
    try:
        z85.decode(key)
    except (KeyError, struct.error):
        return False
    return True
