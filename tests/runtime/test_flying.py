"""Bytes under way between processes are bounded by admission, and the run says when they limit."""

from __future__ import annotations

import logging

import torch
from torch import nn

import geartrain as gt
from geartrain.runtime.processes import parent
from geartrain.runtime.processes.flying import Flying, Unread


def test_nothing_is_admitted_while_too_much_is_under_way_and_something_is_in_flight(caplog):
    caplog.set_level(logging.INFO, "geartrain.runtime")
    flying = Flying(100)
    assert flying.has_room(99, 5)
    flying.told(0, 60)
    assert not flying.has_room(40, 5) and flying.limits
    assert not flying.has_room(40, 4)
    assert flying.has_room(40, 0)  # all that is in flight will be read: it would wait for ever
    flying.told(0, 0)
    assert flying.has_room(40, 4) and not flying.limits
    flying.told(1, 200)
    assert not flying.has_room(0, 1)
    assert flying.limited == 2
    (said,) = (r.message for r in caplog.records)  # once
    assert "memory is what limits" in said


def test_a_worker_tells_when_much_is_unread_and_when_it_has_been_read():
    unread = Unread(800)
    heard = [(n, unread.news(n)) for n in (99, 100, 150, 199, 200, 120, 99, 60, 49, 10, 130)]
    assert [(n, told) for n, told in heard if told is not None] == [
        (100, 100),
        (200, 200),
        (99, 0),
        (130, 130),
    ]


def test_a_pass_with_hardly_any_room_ends_with_all_instances_and_says_so(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "geartrain.runtime")
    monkeypatch.setattr(parent, "MOST_FLYING", 1)
    graph = gt.Graph(value=("label",))
    stream = graph.input("x").through(nn.Linear(2, 8), name="first")
    stream.through(nn.Linear(8, 2), name="second").loss(gt.cross_entropy, target="label")
    points = [gt.Instance({"x": torch.randn(1, 2)}, value={"label": k % 2}) for k in range(60)]
    runtime = gt.Processes(2, kernel_threads=1)
    placed = gt.Schedule(placement={"first": 0, "second": 1})
    fit = gt.Session(graph, runtime=runtime, max_active=8, schedule=placed).fit(points, epochs=2)
    runtime.close()
    assert fit.instances == 120
    assert any("memory is what limits" in r.message for r in caplog.records)
