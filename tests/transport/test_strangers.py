"""By tcp, a transport hears those whose keys it was told, as themselves, and nobody else."""

from __future__ import annotations

import copy
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import zmq

from geartrain.errors import TransportError
from geartrain.transport import door
from geartrain.transport.keys import Keys
from geartrain.transport.link import Transport
from geartrain.transport.record import Record, encode

LONG_S = 10.0
ANY = "tcp://127.0.0.1:*"


class Group:
    """Transports by tcp, with keys; nobody is connected yet."""

    def __init__(self, stack: ExitStack, n: int, generation: int = 0) -> None:
        self.keys = [Keys.make() for _ in range(n)]
        self.members = [
            stack.enter_context(Transport(k, n, ANY, generation, keys=keys))
            for k, keys in enumerate(self.keys)
        ]
        self.addresses = {k: each.address for k, each in enumerate(self.members)}
        self.public = {k: keys.public for k, keys in enumerate(self.keys)}

    def connect(self, *who: int) -> None:
        """Have these, or all, know all."""
        for k in who or range(len(self.members)):
            self.members[k].connect(self.addresses, self.public)

    def until(self, holds: Callable[[], object]) -> list[tuple[int, int, Record]]:
        """Poll all until it holds: receiver, sender and record of what has come."""
        found: list[tuple[int, int, Record]] = []
        end = time.monotonic() + LONG_S
        while not holds():
            assert time.monotonic() < end, f"does not come to hold; {found} came"
            for k, each in enumerate(self.members):
                found += ((k, sender, record) for sender, record in each.poll(0.002))
        return found

    def take(self, n: int) -> list[tuple[int, int, Record]]:
        """The next n records."""
        found: list[tuple[int, int, Record]] = []
        end = time.monotonic() + LONG_S
        while len(found) < n:
            assert time.monotonic() < end, f"{len(found)} of {n} came"
            for k, each in enumerate(self.members):
                found += ((k, sender, record) for sender, record in each.poll(0.002))
        return found


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


class Outside:
    """Where strangers have their sockets."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(self.context.destroy, linger=0)

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        """One that is closed in the end."""
        found = self.context.socket(kind)
        self._stack.callback(found.close, linger=0)
        return found

    def writes(self, address: str, keys: Keys | None, server: bytes) -> zmq.Socket[bytes]:
        """A socket that writes to an address, with these keys."""
        push = self.socket(zmq.PUSH)
        push.setsockopt(zmq.RECONNECT_IVL, 10)
        if keys is not None:
            keys.protect(push, server)
        push.connect(address)
        return push


@pytest.fixture
def outside(stack: ExitStack) -> Outside:
    return Outside(stack)


def message(sender: int, n: int, number: int = 0, kind: int = 16) -> list[bytes]:
    """What process ``sender`` would write to process 0, as its so many-th message."""
    stamp = np.zeros((n, n), np.int64)
    stamp[sender, 0] = number
    return encode(Record(kind, (7,)), stamp, sender, 0)


def test_records_go_both_ways_between_those_who_know_their_keys(stack: ExitStack) -> None:
    group = Group(stack, 3)
    group.connect()
    for k, each in enumerate(group.members):
        for to in range(3):
            each.send(to, Record(16, (k, to), arrays=(np.full(40_000, k),)))
    found = group.take(9)
    assert sorted((sender, to) for to, sender, _ in found) == [
        (k, to) for k in range(3) for to in range(3)
    ]
    for to, sender, record in found:
        assert record.ints == (sender, to) and (record.arrays[0] == sender).all()
    assert [each.monitor().refused for each in group.members] == [0, 0, 0]


def test_what_is_sent_to_one_who_does_not_know_the_sender_yet_waits_for_that(
    stack: ExitStack,
) -> None:
    group = Group(stack, 2)
    a, b = group.members
    group.connect(0)
    a.send(1, Record(16, (1,)))
    assert b._ends.door is not None
    group.until(lambda: b._ends.door._asking)
    group.connect(1)
    assert [record.ints for _, _, record in group.take(1)] == [(1,)]


@pytest.mark.parametrize("who", ["without keys", "with a key that nobody knows"])
def test_a_stranger_is_never_heard(
    stack: ExitStack,
    outside: Outside,
    monkeypatch: pytest.MonkeyPatch,
    who: str,
) -> None:
    monkeypatch.setattr(door, "_HANDSHAKE_MS", 100)
    group = Group(stack, 2)
    a, b = group.members
    keys = None if who == "without keys" else Keys.make()
    push = outside.writes(a.address, keys, group.public[0])
    push.send_multipart(message(1, 2))
    push.send_multipart([b"garbage"])
    assert group.until(lambda: a.monitor().refused) == []
    group.connect()
    b.send(0, Record(16, (1,)))
    assert [record.ints for _, _, record in group.take(1)] == [(1,)]
    assert a.monitor().received_messages == (0, 1)


def test_a_door_that_nobody_answers_for_lets_nobody_in(stack: ExitStack, outside: Outside) -> None:
    group = Group(stack, 2)
    a = group.members[0]
    assert a._ends.door is not None
    a.connect({1: group.addresses[1]}, {1: group.public[1]})
    a._ends.door._zap.unbind("inproc://zeromq.zap.01")
    push = outside.writes(a.address, group.keys[1], group.public[0])
    push.send_multipart(message(1, 2))
    assert group.until(lambda: a.monitor().refused) == []


def test_a_peer_that_says_it_is_another_one_is_refused(stack: ExitStack, outside: Outside) -> None:
    group = Group(stack, 3)
    a = group.members[0]
    group.connect(0)
    push = outside.writes(a.address, group.keys[1], group.public[0])
    push.send_multipart(message(2, 3))
    with pytest.raises(TransportError, match="from process 2 came by the key of process 1"):
        group.until(lambda: False)


def test_a_process_that_is_not_who_it_was_said_to_be_is_told_nothing(
    stack: ExitStack, outside: Outside
) -> None:
    group = Group(stack, 2)
    impostor = outside.socket(zmq.PULL)
    other = Keys.make()
    impostor.setsockopt(zmq.CURVE_SERVER, 1)
    impostor.setsockopt(zmq.CURVE_SECRETKEY, other.secret)
    port = impostor.bind_to_random_port("tcp://127.0.0.1")
    events = impostor.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    stack.callback(events.close, linger=0)
    group.members[0].connect({1: f"tcp://127.0.0.1:{port}"}, {1: group.public[1]})
    group.members[0].send(1, Record(16))
    assert events.poll(1000 * LONG_S), "it came, and gave up"
    assert not impostor.poll(0)


def test_the_door_is_shut_once_all_are_inside_and_open_when_one_has_gone(stack: ExitStack) -> None:
    group = Group(stack, 3)
    door_of_a = group.members[0]._ends.door
    assert door_of_a is not None
    group.connect()
    group.until(lambda: not door_of_a._open)
    c = group.members[2]
    assert c._ends._pushes[0] is not None
    c._ends._pushes[0].close(linger=0)
    c._ends._pushes[0] = None
    group.until(lambda: door_of_a._open)
    c.connect({0: group.addresses[0]}, {0: group.public[0]})
    group.until(lambda: not door_of_a._open)
    for k in (1, 2):
        group.members[k].send(0, Record(16, (k,)))
    assert sorted(sender for _, sender, _ in group.take(2)) == [1, 2]


def test_a_flood_of_connections_costs_a_bounded_number_of_descriptors(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "_MOST_STRANGERS", 8)
    monkeypatch.setattr(door, "_HANDSHAKE_MS", 100)
    group = Group(stack, 2)
    a, b = group.members
    assert a._ends.door is not None
    group.connect(0)
    address = ("127.0.0.1", int(a.address.rpartition(":")[2]))
    most = 0
    for _ in range(40):
        stranger = stack.enter_context(socket.socket())
        stranger.setblocking(False)
        stranger.connect_ex(address)
        a.poll(0.001)
        most = max(most, len(a._ends.door._live))
    assert 8 <= most < 8 + 4, "some came before it was shut"
    group.until(lambda: a.monitor().refused >= 20)
    group.connect(1)
    b.send(0, Record(16))
    assert len(group.take(1)) == 1


def test_refusals_are_logged_at_a_bounded_rate_with_how_many_were_left_out(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = Group(stack, 1)
    (a,) = group.members
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert a._ends.door is not None
    with caplog.at_level(logging.WARNING, "geartrain.transport"):
        for _ in range(500):
            a._ends.door._refuse("an unknown key, from 10.0.0.7")
        now[0] += 11.0
        a._ends.door._refuse("what is no handshake")
    monkeypatch.undo()
    assert len(caplog.messages) == 2
    assert "an unknown key, from 10.0.0.7 (0 before it" in caplog.messages[0]
    assert "what is no handshake (499 before it were left out here, 501 in" in caplog.messages[1]
    assert group.keys[0].secret.decode() not in caplog.text


def test_a_secret_key_is_not_shown_pickled_or_copied() -> None:
    keys = Keys.make()
    assert len(keys.public) == len(keys.secret) == 40
    for shown in (repr(keys), str(keys), f"{keys}"):
        assert keys.public.decode() in shown and keys.secret.decode() not in shown
    for carry in (cloudpickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"send keys\.public"):
            carry(keys)
    with pytest.raises(ValueError, match="does not belong") as refused:
        Keys(Keys.make().public, keys.secret)
    assert keys.secret.decode() not in str(refused.value)
    for wrong in ("x" * 40, b"x" * 39, b"~" * 40, b"#" * 40):
        with pytest.raises(ValueError, match="40 bytes in Z85"):
            Keys(wrong, keys.secret)


def test_tcp_without_keys_is_refused_unless_it_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"keys=Keys.make\(\).* or plain=True"):
        Transport(0, 2, ANY)
    with pytest.raises(ValueError, match="plain=True"):
        Transport(0, 2, ANY, keys=Keys.make(), plain=True)


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    folder.chmod(0o710)
    for at in (folder, f"ipc://{folder}/0"):
        with pytest.raises(TransportError, match=r"mode 0710.* chmod 700"):
            Transport(0, 2, at)
    folder.chmod(0o700)
    with Transport(0, 2, folder), Transport(0, 2, f"ipc://{folder}/a"):
        pass
    for wrong in ({"keys": Keys.make()}, {"plain": True}):
        with pytest.raises(ValueError, match="are for tcp"):
            Transport(0, 2, folder, **wrong)
    with pytest.raises(ValueError, match="give a folder, or an address"):
        Transport(0, 2, "inproc://x")


def test_peers_without_a_key_or_with_anothers_are_refused(stack: ExitStack) -> None:
    group = Group(stack, 3)
    a = group.members[0]
    with pytest.raises(ValueError, match=r"no public key of the processes \[1, 2\]"):
        a.connect(group.addresses)
    with pytest.raises(ValueError, match="process 2 has the key of process 1"):
        a.connect(group.addresses, {1: group.public[1], 2: group.public[1]})
    plain = stack.enter_context(Transport(1, 2, ANY, plain=True))
    with pytest.raises(ValueError, match="give Transport keys of its own"):
        plain.connect({0: a.address}, {0: group.public[0]})


def test_who_gathers_waits_for_all_and_keeps_what_came_meanwhile(stack: ExitStack) -> None:
    group = Group(stack, 3)
    a, b, _ = group.members
    group.connect(0, 1)
    b.send(0, Record(16, (1,)))
    with pytest.raises(TransportError, match=r"processes \[2\] have not connected to process 0"):
        a.gather(0.1)
    group.connect(2)
    a.gather(LONG_S)
    assert [record.ints for _, record in a.poll(LONG_S)] == [(1,)]
    with Transport(0, 2, ANY, plain=True) as plain:
        plain.gather(LONG_S)


def test_who_waits_hears_at_once_that_the_last_peer_has_come_in(stack: ExitStack) -> None:
    """No message comes with him; whoever gathers would sleep on."""
    group = Group(stack, 2)
    a, b = group.members
    a.admit(group.public)
    b.connect({0: a.address}, {0: group.public[0]})
    assert a._ends.door is not None
    began = time.monotonic()
    while a._ends.door.missing():
        assert a.poll(3 * LONG_S) == []
    assert time.monotonic() - began < LONG_S


def test_a_question_that_came_while_another_was_answered_is_not_left_lying(
    stack: ExitStack,
) -> None:
    """Whoever sends an answer by a socket, or looks at it, takes the signal of all that came."""
    group = Group(stack, 3)
    a, b, c = group.members
    asked = a._ends.door
    assert asked is not None
    b.connect({0: a.address}, {0: group.public[0]})
    group.until(lambda: asked._asking)
    c.connect({0: a.address}, {0: group.public[0]})
    assert asked._zap.poll(LONG_S * 1e3), "its question is there"
    asked.admit(1, group.public[1])
    asked.admit(2, group.public[2])
    assert asked.missing() == []


def test_whoever_is_gone_is_not_waited_for_and_his_key_opens_no_door_any_more():
    with ExitStack() as stack:
        group = Group(stack, 3)
        one, other, gone = group.members
        one.admit(group.public)
        other.connect({0: one.address}, {0: group.public[0]})
        one.forget(2)
        other.send(0, Record(16))
        one.gather(LONG_S)
        assert [(k, record.kind) for k, record in one.poll(LONG_S)] == [(1, 16)]
        assert one._ends.door is not None and not one._ends.door._open
        gone.close()
