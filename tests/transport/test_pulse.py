"""Whether others are there: who ends, who is stopped, who was never reached."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from geartrain.transport import pulse as pulses
from geartrain.transport.keys import Keys
from geartrain.transport.link import Transport
from geartrain.transport.pulse import DEAD_S, Pulse
from geartrain.transport.record import Record
from tests.rigs.left import wait_until

PEER = """
import sys, time
from geartrain.transport.link import Transport
here = Transport(1, 2, "tcp://127.0.0.1:*", plain=True)
print(here.address, flush=True)
while True:
    here.poll(0.1)
"""


def plain(me: int, pulse: Pulse | None = None) -> Transport:
    return Transport(me, 2, "tcp://127.0.0.1:*", plain=True, pulse=pulse)


def poll(transport: Transport) -> bool:
    transport.poll(0.01)
    return True


@pytest.mark.parametrize("asks", [True, False])
def test_who_leaves_is_lost_and_who_is_there_is_not(asks):
    with plain(0, Pulse(asks=asks)) as here:
        with plain(1) as there:
            here.connect({1: there.address})
            wait_until(lambda: poll(there) and here.reached(1), "they are connected")
            here.send(1, Record(16))
            wait_until(lambda: bool(there.poll(0.01)), "it has come")
            assert here.lost() == () and here.unreached() == {}
        wait_until(lambda: here.lost() == (1,), "it is noticed")
    assert here.lost() == ()  # closed: nobody watches


def test_whoever_knocks_before_he_is_known_is_not_lost_by_that():
    mine, theirs = Keys.make(), Keys.make()
    address = "tcp://127.0.0.1:*"
    with (
        Transport(0, 2, address, keys=mine, pulse=Pulse(asks=True)) as here,
        Transport(1, 2, address, keys=theirs) as there,
    ):
        here.connect({1: there.address}, {1: theirs.public})
        for _ in range(30):
            there.poll(0.01)
        assert not here.reached(1) and here.lost() == ()
        there.connect({0: here.address}, {0: mine.public})
        wait_until(lambda: poll(there) and poll(here) and here.reached(1), "they are connected")
        assert here.lost() == ()


def test_keys_that_are_admitted_ahead_are_let_in_before_they_are_connected():
    mine, theirs = Keys.make(), Keys.make()
    address = "tcp://127.0.0.1:*"
    with (
        Transport(0, 2, address, keys=mine, pulse=Pulse(asks=True)) as here,
        Transport(1, 2, address, keys=theirs) as there,
    ):
        there.admit({0: mine.public})
        here.connect({1: there.address}, {1: theirs.public})
        here.send(1, Record(16))
        wait_until(lambda: bool(there.poll(0.01)), "it has come")
        assert there.monitor().refused == 0


def test_an_address_where_nobody_is_counts_as_unreached_after_a_while(monkeypatch):
    with plain(0, Pulse(asks=True)) as here:
        here.connect({1: "tcp://127.0.0.1:1"})
        assert here.unreached() == {} and here.lost() == ()
        monkeypatch.setattr(pulses, "_REACHED_S", -1.0)
        assert here.unreached() == {1: "tcp://127.0.0.1:1"}


@pytest.mark.slow
@pytest.mark.parametrize("asks", [True, False])
def test_one_that_is_stopped_does_not_answer_those_who_ask(asks):
    """Its kernel goes on acknowledging what is sent: who does not ask hears nothing."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with (
        subprocess.Popen([sys.executable, "-c", PEER], stdout=subprocess.PIPE, env=env) as peer,
        plain(0, Pulse(asks=asks)) as here,
    ):
        try:
            here.connect({1: peer.stdout.readline().decode().strip()})
            wait_until(lambda: here.reached(1), "they are connected")
            began = time.monotonic()
            wait_until(lambda: time.monotonic() - began > 1.5 * DEAD_S, "a while has passed")
            assert here.lost() == (), "it answers"
            peer.send_signal(signal.SIGSTOP)
            began = time.monotonic()
            wait_until(
                lambda: bool(here.lost()) or time.monotonic() - began > 1.5 * DEAD_S, "noticed"
            )
            assert here.lost() == ((1,) if asks else ())
        finally:
            peer.kill()


def test_whoever_leaves_can_wait_until_all_that_he_has_sent_is_there():
    with plain(0, Pulse(asks=False)) as here, plain(1, Pulse(asks=False)) as there:
        here.connect({1: there.address})
        there.connect({0: here.address})
        wait_until(lambda: poll(there) and here.reached(1), "they are connected")
        assert here.await_heard(1, 0.0)  # nothing has been sent
        here.send(1, Record(16))
        assert not here.await_heard(1, 0.05)
        wait_until(lambda: bool(there.poll(0.01)), "it has come")
        there.confirm(0)
        assert here.await_heard(1, 20.0)
        here.send(1, Record(16))
        there.close()
        began = time.monotonic()
        assert not here.await_heard(1, 20.0)
        assert time.monotonic() - began < 10.0  # nobody is there any more
