"""Memory that processes share lasts as long as the tensors in it, and no longer."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys

import cloudpickle
import pytest
import torch
from torch import nn

from geartrain.runtime.processes.locks import RegionLock
from geartrain.runtime.processes.memory import Apart, SharedRegion, SharedTensors, dumps, loads
from tests.rigs.left import open_files


def test_a_region_is_closed_when_its_last_tensor_is_gone():
    gc.collect()
    before = open_files()
    shared = SharedTensors()
    one, two = nn.Linear(3, 4), nn.Linear(4, 5)
    shared.move([*one.parameters()])
    shared.move([*two.parameters()])
    assert len(shared.regions) == 2
    kept = two.weight
    del one, two
    gc.collect()
    shared.drop_unused()
    assert list(shared.regions) == [1] and shared.place(kept) == (1, 0)
    del kept
    shared.drop_unused()
    assert shared.regions == {} and open_files() == before


def test_models_that_come_and_go_leave_one_region():
    shared = SharedTensors()
    for _ in range(5):
        model = nn.Linear(3, 4)
        shared.move(list(model.parameters()))
        shared.move(list(model.parameters()))
        assert len(shared.regions) == 1


def test_memory_of_one_that_is_gone_is_not_taken_for_that_of_another():
    shared = SharedTensors()
    model = nn.Linear(3, 4)
    shared.move(list(model.parameters()))
    (region,) = shared.regions.values()
    assert model.weight in region
    del model
    gc.collect()
    assert not region.in_use
    other = torch.zeros(1)
    region.start = other.data_ptr()  # as when the system gives the addresses out again
    assert other not in region


def test_a_write_to_one_tensor_is_no_write_to_its_neighbour():
    """Autograd counts writes: a step of one part must not spoil the graphs that another keeps."""
    shared = SharedTensors()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    shared.move(list(model.parameters()))
    here = loads(dumps(model, shared), shared_with_another(shared))
    x = torch.ones(2, 3, requires_grad=True)
    y = here[1](here[0](x))
    before = [p._version for p in here.parameters()]
    with torch.no_grad():
        here[0].bias.add_(1.0)
    assert [p._version for p in here.parameters()] == [before[0], before[1] + 1, *before[2:]]
    y.sum().backward()
    assert x.grad is not None
    assert model[0].bias.equal(here[0].bias)


def test_a_tensor_is_written_once_however_often_it_is_held():
    shared = SharedTensors()
    model = nn.Linear(3, 4)
    shared.move(list(model.parameters()))
    once, often = dumps([model.weight], shared), dumps([[model.weight] for _ in range(100)], shared)
    assert len(often) < len(once) + 100 * 8
    assert len({id(x) for (x,) in loads(often, shared_with_another(shared))}) == 1


def test_references_are_read_only_with_the_memory_that_they_are_to():
    shared = SharedTensors()
    model = nn.Linear(3, 4)
    shared.move(list(model.parameters()))
    with pytest.raises(RuntimeError, match="loads"):
        cloudpickle.loads(dumps(model, shared))


def shared_with_another(shared: SharedTensors):
    """The regions as another process has them."""
    return {k: SharedRegion(os.dup(r.fd), r.size) for k, r in shared.regions.items()}


def test_what_goes_apart_is_written_once_and_each_gets_its_own():
    torch.manual_seed(0)
    one, two = nn.Linear(3, 4), nn.Linear(4, 5)
    turned = one.weight.detach().T  # of the same memory
    apart = Apart([*one.parameters(), *two.parameters(), torch.zeros(0)])
    common = dumps([one, two, turned, one.weight], SharedTensors(), apart)
    here, there, same, first = loads(common, {}, apart.content([*one.parameters(), one.bias]))
    assert here.weight.equal(one.weight) and here.bias.equal(one.bias) and first is here.weight
    with torch.no_grad():
        here.weight[1, 2] = 7.0  # it may be written to, and is no memory of ours
    assert same[2, 1] == 7.0 and one.weight[1, 2] != 7.0
    assert here.weight.data_ptr() % 64 == 0 and isinstance(here.weight, nn.Parameter)
    assert there.weight.shape == two.weight.shape and not there.weight.any()
    assert there.weight.untyped_storage().nbytes() == 4
    other = loads(common, {}, apart.content(two.parameters()))
    assert other[1].weight.equal(two.weight) and not other[0].weight.any()
    nobody = loads(common, {})
    assert not any(p.any() for p in (*nobody[0].parameters(), *nobody[1].parameters()))


def test_a_lock_of_a_region_keeps_other_processes_out_and_is_free_when_its_holder_is_killed():
    region = SharedRegion.make(64)
    one, two = RegionLock(region, 0), RegionLock(region, 1)
    held = (
        "import fcntl, sys; fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX, 1, 1);"
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", held, str(region.fd)],
        pass_fds=[region.fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        assert not two.acquire(blocking=False)
        with one:  # another lock of the same region
            pass
        os.kill(other.pid, signal.SIGKILL)
        two.acquire()  # as soon as the kernel has ended it
        two.release()
    assert one.acquire(blocking=False)
    one.release()
