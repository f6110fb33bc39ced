"""Whatever strangers say to a port, peers are heard and strangers are not."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import islice

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.cluster.hostile import (
    KINDS,
    Attack,
    Relay,
    endpoint,
    greeting,
    words,
)
from geartrain.errors import TransportError
from geartrain.transport import door, sockets
from geartrain.transport.record import Record
from tests.transport.test_strangers import Group


class Besieged(Group):
    """Processes 0 and 1, who talk, of 3: the door of 0 stays open for 2, who never comes.

    What 1 says to 0 for the first time is kept in ``said``, as it went over the line.
    """

    def __init__(self, stack: ExitStack) -> None:
        super().__init__(stack, 3)
        a, b, _ = self.members
        relay = Relay(a.address)
        stack.callback(relay.close)
        a.connect(self.addresses, self.public)
        b.connect({0: relay.address}, {0: self.public[0]})
        self.members = [a, b]
        self.sent = 0
        self.speak()
        self.said = bytes(relay.said[0])
        assert a._ends.door is not None
        self.door = a._ends.door

    def speak(self) -> None:
        """Process 0 hears what 1 says, and nothing else."""
        self.members[1].send(0, Record(16, (self.sent,)))
        assert [(sender, record.ints) for _, sender, record in self.take(1)] == [(1, (self.sent,))]
        self.sent += 1

    def suffer(self, said: bytes) -> None:
        """A stranger says it and hangs up; nothing of it is heard."""
        with socket.create_connection(endpoint(self.addresses[0])) as stranger:
            # Refused and hung up on in the middle of what he says.
            with suppress(OSError):
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
            refused = self.door.refused
            assert self.until(lambda: self.door.refused > refused) == []
        assert self.until(lambda: len(self.door._live) == 1) == []


@pytest.fixture(scope="module")
def besieged() -> Iterator[Besieged]:
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(door, "_HANDSHAKE_MS", 200)
        yield Besieged(stack)


hostile = st.one_of(
    st.binary(max_size=500),
    st.builds(lambda x: greeting(b"CURVE") + x, st.binary(max_size=500)),
    st.builds(
        lambda kind, seed, given: words(kind, [given], 3, random.Random(seed)),
        st.sampled_from(KINDS),
        st.integers(0, 1 << 30),
        st.just(b""),
    ),
)
changes = st.lists(st.tuples(st.integers(0, 4), st.floats(0, 1), st.floats(0, 1)), max_size=3)


def changed(said: bytes, how: list[tuple[int, float, float]]) -> bytes:
    """A recording with parts of it cut off, cut out, repeated, reversed, or with a bit changed."""
    found = bytearray(said)
    for kind, x, y in how:
        at, to = sorted((int(x * len(found)), int(y * len(found))))
        part = found[at:to]
        if kind == 0:
            del found[at:]
        elif kind == 1:
            del found[at:to]
        elif kind == 2:
            found[at:at] = part
        elif kind == 3:
            found[at:to] = part[::-1]
        elif part:
            found[at] ^= 16
    return bytes(found)


FEW = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MANY = settings(FEW, max_examples=1000)


@FEW
@given(said=hostile)
def test_bytes_of_strangers_are_refused_and_peers_are_heard(
    besieged: Besieged, said: bytes
) -> None:
    besieged.suffer(said)
    besieged.speak()


@FEW
@given(how=changes)
def test_what_a_peer_has_said_is_nothing_when_a_stranger_says_it_again(
    besieged: Besieged, how: list[tuple[int, float, float]]
) -> None:
    besieged.suffer(changed(besieged.said, how))
    besieged.speak()


@pytest.mark.slow
@MANY
@given(said=hostile, how=changes)
def test_strangers_are_refused_whatever_they_say(
    besieged: Besieged, said: bytes, how: list[tuple[int, float, float]]
) -> None:
    besieged.suffer(said)
    besieged.suffer(changed(besieged.said, how))
    besieged.speak()


def test_the_recording_is_of_a_whole_session(besieged: Besieged) -> None:
    assert besieged.said.startswith(b"\xff") and b"HELLO" in besieged.said
    assert b"INITIATE" in besieged.said and b"MESSAGE" in besieged.said


def test_a_frame_that_is_too_large_ends_the_connection_before_it_is_made(
    besieged: Besieged,
) -> None:
    besieged.suffer(greeting(b"CURVE") + b"\x06" + struct.pack(">Q", 1 << 62))
    besieged.speak()


def test_a_handshake_that_takes_too_long_is_ended(besieged: Besieged) -> None:
    with socket.create_connection(endpoint(besieged.addresses[0])) as stranger:
        refused = besieged.door.refused
        said = iter(greeting(b"CURVE")[:-1])  # all is right, and never done

        def drip() -> bool:
            if byte := bytes(islice(said, 1)):
                with suppress(OSError):
                    stranger.sendall(byte)
            return besieged.door.refused > refused

        assert besieged.until(drip) == []
    besieged.speak()


def test_what_somebody_changes_on_the_way_is_not_heard_and_its_loss_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sockets, "_BEAT_MS", 50)
    monkeypatch.setattr(sockets, "_MOST_SILENT_MS", 200)
    with ExitStack() as stack:
        group = Group(stack, 2)
        a, b = group.members
        relay = Relay(a.address)
        stack.callback(relay.close)
        a.connect(group.addresses, group.public)
        b.connect({0: relay.address}, {0: group.public[0]})
        b.send(0, Record(16, (0,)))
        group.take(1)
        relay.tampers = True
        b.send(0, Record(16, (1,)))
        assert group.until(lambda: a.monitor().refused) == []
        relay.tampers = False
        with pytest.raises(TransportError, match="from process 1 to process 0 were lost"):
            for _ in range(500):
                b.send(0, Record(16, (2,)))
                assert a.poll(0.01) == []


def test_attacks_of_all_kinds_are_survived() -> None:
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(door, "_HANDSHAKE_MS", 200)
        besieged = Besieged(stack)
        attack = Attack([(besieged.addresses[0], besieged.public[0])], 3, [besieged.said])
        strangers = threading.Thread(target=attack.run, args=(80, 4))
        strangers.start()
        while strangers.is_alive():
            besieged.speak()
        strangers.join()
        assert sum(attack.done.values()) == 80 and set(attack.done) == set(KINDS)
        besieged.until(lambda: len(besieged.door._live) == 1)
        besieged.speak()
        assert besieged.members[0].monitor().refused > 40
