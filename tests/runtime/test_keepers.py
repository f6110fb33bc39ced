"""Programs on hosts that are spare or were lost, by scripts that say what such programs say."""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from geartrain.errors import GeartrainError
from geartrain.runtime.hosts import keepers
from geartrain.runtime.hosts import program as programs
from geartrain.runtime.hosts.keeper import PROTOCOL
from geartrain.runtime.hosts.keepers import Keepers
from geartrain.runtime.hosts.program import Host
from geartrain.runtime.hosts.worker import Greeting

VERSION = ".".join(map(str, sys.version_info[:2]))
READY = json.dumps({"ready": 1, "protocol": PROTOCOL, "python": VERSION, "host": "h"})
TOLD = """
case "$line" in
*ping*) n=$((n+1)); echo '{"pong": '$n'}' ;;
*fork*) w=$(echo "$line" | sed 's/.*"worker": \\([0-9]*\\).*/\\1/')
    echo '{"forked": 7'$w', "worker": '$w'}'
    echo '{"hello": {"worker": '$w', "pid": 7'$w', "address": "a", "public": null, "where": "h"}}'
    ;;
esac
"""


def program(before: str = "", during: str = TOLD) -> tuple[str, ...]:
    """A program that is ready after something, and does something for each line."""
    script = f'{before}\necho "$0"; n=0; while read line; do {during}\ndone'
    return ("sh", "-c", script, READY)


def host(k: int, command: Sequence[str], workers: int = 1) -> Host:
    return Host(f"127.0.0.{k}", command=command, workers=workers)


SILENT = program(during="true")


@contextmanager
def launched(
    hosts: Sequence[Host], workers: int, *, ready: bool = True, wait_s: float = 60.0
) -> Iterator[Keepers]:
    launcher = Keepers(hosts, workers, ready=ready, wait_s=wait_s)
    try:
        yield launcher
    finally:
        launcher.close()


def started(launcher: Keepers) -> list[str]:
    """Workers on all hosts; the addresses of these."""
    binds = [*launcher.binds()]
    launcher.start(greetings(range(len(binds)), binds))
    return binds


def greetings(workers: Sequence[int], binds: Sequence[str]) -> list[Greeting]:
    return [Greeting(w, 9, at, "p", None) for w, at in zip(workers, binds, strict=True)]


def until(holds, launcher: Keepers, bound_s: float = 20.0) -> None:
    """Tend hosts until a condition holds."""
    end = time.monotonic() + bound_s
    while not holds():
        assert time.monotonic() < end, "it did not become true"
        launcher.tend()
        time.sleep(0.01)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(programs, "_PING_S", 0.05)
    monkeypatch.setattr(programs, "_PONG_S", 0.4)
    monkeypatch.setattr(keepers, "_TRY_S", 0.05)


def test_only_the_worker_whose_host_is_gone_moves_to_a_spare_one_that_is_ready(quick, caplog):
    after_fork = TOLD.replace("*ping*)", "*never*)")  # it forks, and answers nobody any more
    dying = host(2, program(during=after_fork))
    with launched([host(1, program()), dying, host(3, program())], 2) as launcher:
        assert started(launcher) == ["127.0.0.1", "127.0.0.2"]
        until(lambda: 2 in launcher._keepers and launcher._keepers[2].ready, launcher)
        launcher.suspect(1)
        began = time.monotonic()
        assert launcher.places_again([1]) == ["127.0.0.3"]
        assert time.monotonic() - began < 5.0
        launcher.begin_again(greetings([1], ["127.0.0.3"]))
        [hello] = launcher.hellos_again([1])
        assert hello.worker == 1 and not launcher.deaths()
        assert "host 127.0.0.2 does not answer" in caplog.text
        assert "worker 1 is made anew on host 127.0.0.3" in caplog.text


@pytest.fixture
def many_open_files():
    """Numbers of open files go on beyond those that ``select`` takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip(f"a process may have {hard} open files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    mine = [os.open(os.devnull, os.O_RDONLY)]
    while mine[-1] < 1024:
        mine.append(os.dup(mine[0]))
    yield
    for fd in mine:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_program_with_many_open_files_has_workers_on_hosts(quick, many_open_files):
    """Its data may be as many files."""
    with launched([host(1, program()), host(2, program())], 2) as launcher:
        assert started(launcher) == ["127.0.0.1", "127.0.0.2"]
        assert not launcher.deaths(0.05)


def test_a_worker_that_died_alone_is_made_anew_where_it_was(quick):
    with launched([host(1, program()), host(2, program()), host(3, program())], 2) as launcher:
        started(launcher)
        until(lambda: 2 in launcher._keepers and launcher._keepers[2].ready, launcher)
        assert launcher.places_again([0]) == ["127.0.0.1"]


def test_a_worker_that_another_one_does_not_reach_goes_to_a_spare_host_once(quick):
    with launched([host(1, program()), host(2, program()), host(3, program())], 2) as launcher:
        started(launcher)
        until(lambda: 2 in launcher._keepers and launcher._keepers[2].ready, launcher)
        launcher.avoid(0)
        assert launcher.places_again([0]) == ["127.0.0.3"]
        assert launcher.places_again([0]) == ["127.0.0.3"], "where it is now, it was reached"
        launcher.avoid(0)
        assert launcher.places_again([0]) == ["127.0.0.1"], "its first host is spare now"


def test_without_a_spare_host_a_worker_waits_for_its_own_to_come_back(quick, caplog, tmp_path):
    """What came first ends; later ones fail until a file says that the host is up again."""
    up, first = tmp_path / "up", tmp_path / "first"
    comes = f"if [ -e {first} ]; then [ -e {up} ] || exit 255; fi; touch {first}"
    again = host(1, program(comes, TOLD.replace("*ping*)", f"*ping*) [ -e {up} ] || continue;")))
    with launched([again], 1) as launcher, caplog.at_level(logging.INFO, "geartrain"):
        started(launcher)
        launcher.suspect(0)
        tried = launcher._tried_s[0]
        keeper = launcher._keepers[0]

        real = launcher._hear_spare
        heard: list[int] = []

        def later(wait_s: float) -> None:
            heard.append(1)
            if launcher._tried_s[0] > tried and "exited with status 255" in caplog.text:
                up.touch()
            real(wait_s)

        launcher._hear_spare = later  # type: ignore[method-assign]
        assert launcher.places_again([0]) == ["127.0.0.1"]
        assert launcher._keepers[0] is not keeper and keeper.closed and heard


def test_a_spare_host_that_falls_silent_is_not_chosen(quick):
    with launched([host(1, program()), host(2, SILENT), host(3, program())], 1) as launcher:
        started(launcher)
        until(lambda: 2 in launcher._keepers and launcher._keepers[2].ready, launcher)
        launcher.avoid(0)
        assert launcher.places_again([0]) == ["127.0.0.3"]


def test_a_place_that_is_at_hand_is_told_without_waiting_for_an_answer(quick):
    after_fork = TOLD.replace("*ping*)", "*never*)")  # it forks, and answers nobody any more
    dying, well = host(2, program(during=after_fork)), host(1, program())
    with launched([well, dying, host(3, program())], 2) as launcher:
        started(launcher)
        assert launcher.at_hand([0]) == ["127.0.0.1"], "its host was not in doubt"
        began = time.monotonic()
        launcher.suspect(0)
        launcher.suspect(1)
        assert launcher.at_hand([0]) is None, "the spare one is left alone until it has answered"
        assert launcher.at_hand([1, 0]) is None
        assert time.monotonic() - began < 0.4
        until(lambda: launcher.at_hand([0]), launcher)
        assert launcher._homes[0].host is well, "it answers"
        until(lambda: launcher.at_hand([1]), launcher)
        assert launcher._homes[1].host.address == "127.0.0.3"


def test_a_newcomer_is_there_or_on_its_way_or_will_not_come(quick):
    with launched([host(1, program()), host(2, SILENT)], 1) as launcher:
        started(launcher)
        assert launcher.at_hand([0]) == ["127.0.0.1"]
        launcher.begin_again(greetings([0], ["127.0.0.1"]))
        until(lambda: launcher.begun(0), launcher)
        assert [hello.worker for hello in launcher.hellos_again([0])] == [0]
        keeper = launcher._homes[0]
        tell, keeper.tell = keeper.tell, lambda **what: None  # type: ignore[method-assign]
        launcher.begin_again(greetings([0], ["127.0.0.1"]))
        assert launcher.begun(0) is False and not keeper.suspect
        keeper.ping()  # which nobody hears
        until(lambda: launcher.begun(0) is None, launcher)
        assert keeper.suspect, "its host is in doubt now"
        keeper.tell = tell  # type: ignore[method-assign]
        launcher._keepers[0]._process.kill()
        until(lambda: launcher.begun(0) is None, launcher)


def test_where_nobody_goes_on_after_deaths_spare_hosts_are_left_alone():
    with launched([host(1, program()), host(2, program())], 1, ready=False) as launcher:
        started(launcher)
        launcher.tend()
        assert [*launcher._keepers] == [0]
        launcher.suspect(0)
        assert launcher.places_again([0]) == ["127.0.0.1"]
        launcher._keepers[0]._process.kill()
        launcher.suspect(0)
        assert launcher.places_again([0]) is None


def test_hosts_that_had_workers_are_waited_for_when_all_are_started_again(quick, tmp_path: Path):
    up = tmp_path / "up"
    up.touch()
    with launched([host(1, program(f"[ -e {up} ] || exit 255"))], 1) as launcher:
        started(launcher)
        launcher.close()
        up.unlink()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launcher, "_wait_s", 0.3)
            with pytest.raises(
                GeartrainError,
                match=r"none: 127\.0\.0\.1 could not be reached for 0\.3 s \(wait_s=\)",
            ):
                launcher.binds()
        launcher._lacking_s = None
        strike = launcher._strike

        def once(k: int, error: GeartrainError) -> None:
            strike(k, error)
            up.touch()

        launcher._strike = once  # type: ignore[method-assign]
        assert launcher.binds() == ["127.0.0.1"]


def test_a_host_that_stays_away_is_waited_for_once_for_as_long_as_is_said(quick, tmp_path: Path):
    """First for one worker anew, then for all: together no longer, and again when it was back."""
    up = tmp_path / "up"
    up.touch()
    hosts = [host(1, program()), host(2, program(f"[ -e {up} ] || exit 255"))]
    with launched(hosts, 2, wait_s=1.0) as launcher:
        started(launcher)
        up.unlink()
        launcher._keepers[1]._process.kill()
        launcher.suspect(1)
        began = time.monotonic()
        assert launcher.places_again([1]) is None
        waited = time.monotonic() - began
        assert 1.0 <= waited < 5.0
        began = time.monotonic()
        with pytest.raises(GeartrainError, match="could not be reached for 1 s"):
            launcher.binds()
        assert time.monotonic() - began < 0.9, "it has been waited for"
        up.touch()
        assert launcher.binds() == ["127.0.0.1", "127.0.0.2"]
        assert launcher._lacking_s is None


def test_a_worker_that_says_nothing_is_told_with_its_host_and_how_long(quick, monkeypatch):
    monkeypatch.setattr(keepers, "_FORK_S", 0.2)
    with launched([host(1, program())], 1) as launcher:
        started(launcher)
        assert launcher.places_again([0]) == ["127.0.0.1"]
        silent = launcher._homes[0]
        silent.tell = lambda **what: None  # type: ignore[method-assign]
        launcher.begin_again(greetings([0], ["127.0.0.1"]))
        with pytest.raises(GeartrainError, match=r"worker 0 has not .* 127\.0\.0\.1 in 0\.2 s"):
            launcher.hellos_again([0])
        assert silent.suspect
