"""A session does one thing at a time, and says who is at it."""

from __future__ import annotations

import threading

import pytest

import geartrain as gt
from tests.rigs.products import in_pairs

CALLS = ("fit", "evaluate", "predict", "save", "load")


class Held:
    """Rows that wait, in the middle of a pass, until somebody lets them go on."""

    def __init__(self, rows):
        self._rows = rows
        self.begun, self.go = threading.Event(), threading.Event()

    def __iter__(self):
        yield from self._rows[:2]
        self.begun.set()
        assert self.go.wait(60)
        yield from self._rows[2:]


def call(session, name, rows, folder):
    if name == "fit":
        session.fit(rows, epochs=9)
    elif name in ("evaluate", "predict"):
        getattr(session, name)(rows)
    else:
        getattr(session, name)(folder / "latest.safetensors")


@pytest.mark.parametrize("runtime", [gt.Simulated(), gt.Threads(2)], ids=lambda r: r.name)
def test_another_thread_hears_who_is_busy_and_the_fit_loses_nothing(
    runtime, make_line, make_rows, tmp_path
):
    rows = make_rows(40)
    data = Held(rows)
    session = gt.Session(make_line().graph, runtime=runtime, max_active=2)
    session.fit(rows, epochs=1, folder=tmp_path)
    found = []
    fitting = threading.Thread(
        target=lambda: found.append(session.fit(data, epochs=2)), name="the trainer"
    )
    fitting.start()
    try:
        assert data.begun.wait(60)
        for name in CALLS:
            with pytest.raises(gt.BusyError, match=rf"{name}\(\).*fit\(\).*'the trainer'"):
                call(session, name, rows, tmp_path)
        assert session.statistics()["versions"]  # may be looked at
    finally:
        data.go.set()
        fitting.join(60)
    assert [f.instances for f in found] == [40]
    assert session.evaluate(rows).instances == 40


@pytest.mark.parametrize("first", ["evaluate", "predict"])
def test_passes_without_training_are_no_exception(first, make_line, make_rows, tmp_path):
    data = Held(make_rows(10))
    session = gt.Session(make_line().graph, runtime=gt.Threads(1), max_active=2)
    other = threading.Thread(target=lambda: getattr(session, first)(data), name="the reader")
    other.start()
    try:
        assert data.begun.wait(60)
        with pytest.raises(gt.BusyError, match=rf"fit\(\): .*{first}\(\) .*'the reader'"):
            session.fit(make_rows(10), epochs=1)
    finally:
        data.go.set()
        other.join(60)
    assert session.fit(make_rows(10), epochs=1).instances == 10


@in_pairs(
    name=CALLS,
    method=["on_fired", "on_updated", "on_progress"],
    runtime={each.name: each for each in (gt.Simulated(), gt.Threads(2))},
)
def test_an_instrument_that_calls_the_session_in_a_pass_ends_the_run_with_that_error(
    runtime, method, name, make_line, make_rows, tmp_path
):
    class Meddling(gt.AbstractInstrument):
        wants_firings = True

    rows = make_rows(20)
    instrument = Meddling()
    setattr(instrument, method, lambda event: call(session, name, rows, tmp_path))  # type: ignore[has-type]
    session = gt.Session(
        make_line().graph,
        rules=gt.Rules(update_every=5),
        runtime=runtime,
        instruments=[instrument],
    )
    with pytest.raises(gt.BusyError, match=rf"{name}\(\).*fit\(\)") as caught:
        session.fit(rows, epochs=1)
    assert any("Meddling" in note for note in caught.value.__notes__)
    session.instruments.clear()
    assert session.fit(rows, epochs=1).instances == 20


@pytest.mark.parametrize("method", ["on_run_started", "on_epoch_ended", "on_run_ended"])
def test_between_passes_an_instrument_may_evaluate_predict_and_save_but_not_train_or_load(
    method, make_line, make_rows, tmp_path
):
    rows, dev = make_rows(20), make_rows(7, seed=1)
    seen = []

    class Looking(gt.AbstractInstrument):
        pass

    def look(event):
        seen.append((session.evaluate(dev).instances, len(session.predict(dev))))
        session.save(tmp_path / "seen")
        for name in ("fit", "load"):
            with pytest.raises(gt.BusyError, match=rf"{name}\(\): .*in the middle of fit\(\)"):
                call(session, name, rows, tmp_path)

    instrument = Looking()
    setattr(instrument, method, look)

    def weights(*instruments):
        nonlocal session
        line = make_line()
        session = gt.Session(line.graph, runtime=gt.Simulated(), instruments=instruments)
        session.fit(rows, epochs=2, valid=dev)
        return [line.first.weight.detach().clone(), line.second.weight.detach().clone()]

    session = None
    watched = weights(instrument)
    assert set(seen) == {(7, 7)} and len(seen) == (2 if method == "on_epoch_ended" else 1)
    for one, other in zip(watched, weights(), strict=True):
        assert one.equal(other)


def test_data_that_call_the_session_are_told(make_line, make_rows):
    rows = make_rows(9)

    def convert(instance):
        if session.state.checked:
            session.predict(rows)
        return instance

    session = gt.Session(
        make_line().graph, runtime=gt.Threads(1), reading=gt.Reading(convert=convert)
    )
    with pytest.raises(gt.BusyError, match=r"predict\(\).*fit\(\)"):
        session.fit(rows, epochs=1)
