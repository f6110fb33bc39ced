"""A whole run on hosts is attacked at all its ports, and trains on as if nobody had come."""

from __future__ import annotations

import os
import socket

import pytest

from benchmarks.cluster import besieged

FOUND = {
    "attacked": {"weights": "a", "rss_mib": [[9.0, 10.0]] * 3, "fds": [[9, 10]] * 3},
    "undisturbed": {"weights": "a"},
}


def test_what_does_not_hold_is_named() -> None:
    assert not [*besieged.failures(FOUND)]
    attacked = FOUND["attacked"]
    grown = attacked | {"weights": "b", "rss_mib": [[9.0, 9.0], [9.0, 99.0], [9.0, 9.0]]}
    grown |= {"fds": [[9, 9], [9, 9], [9, 99]]}
    told = [*besieged.failures(FOUND | {"attacked": grown})]
    assert told == [
        "the weights are others",
        "worker 0: memory grew, from 9.0 to 99.0 MiB",
        "worker 1: descriptors grew, from 9 to 99",
    ]


def test_ports_of_a_process_are_found_and_those_of_others_are_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port in besieged.listening(os.getpid())
        assert port not in besieged.listening(os.getppid())
    assert port not in besieged.listening(os.getpid())


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="listening on the line wants root")
def test_weights_of_a_run_that_is_attacked_are_those_of_one_that_is_not() -> None:
    found = besieged.siege(attacks=200, threads=16)
    assert not [*besieged.failures(found)]
    assert sum(found["attacks"].values()) == 200 and len(found["attacks"]) == 8
    assert found["ports"] >= 3
