"""How many instances a network wants in flight: what decides, and that a run finds and keeps it."""

from __future__ import annotations

import logging

import pytest
import torch

import geartrain as gt
from geartrain.train.in_flight import Seen
from tests.rigs.sessions import session_of


@pytest.mark.parametrize(
    ("seen", "number", "why"),
    [
        (Seen(active=4, rows=8, updates=0, bytes=0), 50, "100 rows a firing"),
        (Seen(active=4, rows=1000, updates=0, bytes=0), 1, "100 rows a firing"),
        (Seen(active=4, rows=8, updates=0.1, bytes=0), 30, "a staleness of 1 updates"),
        (Seen(active=4, rows=8, updates=0.1, bytes=2**18), 16, "4 MiB of rows"),
        (Seen(active=4, rows=0.01, updates=0, bytes=0), 400, "at most 400"),
    ],
)
def test_the_nearest_bound_decides(seen, number, why):
    found = gt.InFlight(rows=100, max_staleness=1.0, max_bytes=2**22, most=400).find(seen)
    assert found == (number, why)


def graph() -> gt.Graph:
    """Rows that go three times round a loop: a firing has one of each instance."""
    torch.manual_seed(0)
    made = gt.Graph(value=("label",))
    loop = made.loop(name="loop", run="steps")
    loop.join(made.input("x", step=0))
    turned = loop.through(torch.nn.Linear(4, 4), name="turn").move(step=lambda m: m.step + 1)
    done, more = turned.where(lambda m: m.step >= 3)
    loop.join(more)
    done.through(torch.nn.Linear(4, 2), name="readout").loss(gt.cross_entropy, target="label")
    return made


def data(n: int = 600) -> list[gt.Instance]:
    draw = torch.Generator().manual_seed(1)
    return [
        gt.Instance({"x": torch.randn(1, 4, generator=draw)}, value={"label": i % 2}, key=i)
        for i in range(n)
    ]


def session(max_active, **told):
    rules = gt.Rules(
        optimizer=lambda ps: torch.optim.SGD(ps, 0.01), update_every=gt.Instances(told.pop("n", 8))
    )
    runtime = gt.Simulated()
    return session_of(graph(), rules=rules, max_active=max_active, runtime=runtime, **told)


class Rows(gt.AbstractInstrument):
    """Rows of the firings of parts on their way forward, epoch by epoch."""

    wants_firings = True

    def __init__(self) -> None:
        self.rows: list[list[int]] = [[]]

    def on_fired(self, event) -> None:
        if event.part is not None and event.direction == "forward":
            self.rows[-1].append(event.rows)

    def on_epoch_ended(self, event) -> None:
        self.rows.append([])


def test_a_run_finds_the_number_by_rows_a_firing_says_it_and_goes_on_with_it(caplog):
    watch, wanted = Rows(), gt.InFlight(rows=32, max_staleness=100.0)
    auto = session(wanted, ramp=gt.Ramp(over=0), instruments=[watch])
    assert auto.settings.max_active == 64
    with caplog.at_level(logging.INFO, "geartrain.train"):
        auto.fit(data(), epochs=2)
    found = auto.settings.max_active
    said = [r.message for r in caplog.records if "max_active='auto'" in r.message]
    assert said[-1] == f"max_active='auto': {found} instances in flight, for 32 rows a firing"
    last = watch.rows[1]
    assert 20 <= sum(last) / len(last) <= 44
    kept = session(found, ramp=gt.Ramp(over=0), instruments=[other := Rows()])
    kept.fit(data(), epochs=2)
    assert other.rows[1] == last  # the second epoch is that of a session with this number


def test_staleness_bounds_it_by_the_updates_that_instances_make():
    auto = session(gt.InFlight(rows=256, max_staleness=0.5), n=16)
    auto.fit(data(), epochs=2)
    assert 30 <= auto.settings.max_active <= 34  # two updates' worth of 16
    staleness = auto.state.position.history[-1].staleness
    assert max(part.mean for part in staleness.values()) <= 0.6


def test_workers_that_have_as_many_in_flight_each_share_the_bound_on_staleness() -> None:
    wanted = gt.InFlight(rows=256, max_staleness=0.5)
    rules = gt.Rules(optimizer=lambda ps: torch.optim.SGD(ps, 0.01), update_every=gt.Instances(16))
    auto = session_of(
        graph(),
        rules=rules,
        max_active=wanted,
        runtime=gt.Simulated(2),
        sharing=gt.SharedWeights(in_flight="each"),
    )
    auto.fit(data(), epochs=2)
    assert 15 <= auto.settings.max_active <= 17  # of each, where one alone has two updates' worth


def test_with_auto_the_found_number_is_in_the_checkpoint_and_a_resumed_run_is_the_same(tmp_path):
    whole, first = session("auto"), session("auto")
    whole.fit(data(), epochs=3)
    first.fit(data(), epochs=1)
    first.save(tmp_path / "one.safetensors")
    again = session("auto")
    again.load(tmp_path / "one.safetensors")
    assert again.settings.max_active == first.settings.max_active == 24
    again.fit(data(), epochs=3)
    for name, part in whole.parts.items():
        for a, b in zip(
            part.module.parameters(), again.parts[name].module.parameters(), strict=True
        ):
            assert torch.equal(a, b), name


def test_auto_wants_no_minibatches_and_words_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match=r"max_active='auto', drain=True: .* a number"):
        session("auto", drain=True)
    with pytest.raises(ValueError, match=r"max_active='many': give a number, 'auto', or gt.InFl"):
        session("many")
    with pytest.raises(ValueError, match=r"InFlight\(rows=0\): give 1 or more"):
        gt.InFlight(rows=0)
