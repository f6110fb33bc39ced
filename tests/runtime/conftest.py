"""After the tests of a module no worker process is left, nor a socket file."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from tests.rigs.left import children, wait_until


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left_by_processes() -> Iterator[None]:
    yield
    if "geartrain.runtime.processes.processes" not in sys.modules:
        return
    from geartrain.runtime.hosts.hosts import Hosts
    from geartrain.runtime.processes.processes import Processes
    from geartrain.runtime.processes.server import ForkServer

    for each in gc.get_objects():
        if type(each) is Processes:
            each.close()
        elif type(each) is Hosts:  # programs on hosts have imported torch, and stay
            each._drop(busy=False)
            for keeper in each._keepers._keepers.values():
                pid = keeper._process.pid
                wait_until(lambda pid=pid: not children(pid), "all workers have ended")
    server = ForkServer._of_this_process
    if server is not None and server.lives:
        wait_until(lambda: not children(server.pid), "all workers have ended")
        assert list(server.folder.iterdir()) == []
