"""What can go wrong, and what is left of the run when it has."""

from __future__ import annotations

import errno
import math
import re
import signal
import threading
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain.engine.instrument import EpochEnded, Progress, RunEnded, Updated
from geartrain.engine.mailbox import RandomOrder
from geartrain.train import tensor_file
from geartrain.train.checkpoint import read_checkpoint, write_checkpoint
from tests.rigs.programs import Program
from tests.rigs.sessions import session_of

SGD = partial(torch.optim.SGD, lr=0.1)
OPTIMIZERS = {
    "adam": (partial(torch.optim.Adam, lr=0.01), False),
    "adagrad": (partial(torch.optim.Adagrad, lr=0.1), True),
    "momentum": (partial(torch.optim.SGD, lr=0.05, momentum=0.9), False),
}
RUNTIMES = [gt.Simulated(2, seed=5, jitter=0.5), gt.Threads(2)]


def forest_session(forest, optimizer="adagrad", **options):
    rules = gt.Rules(
        optimizer=OPTIMIZERS[optimizer][0],
        update_every=37,
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.9),
    )
    given = {
        "runtime": gt.Simulated(2, seed=4, jitter=0.4),
        "max_active": 12,
        "policy": RandomOrder,
    }
    return session_of(forest.graph, rules=rules, **{**given, **options})


def same_snapshot(one, other):
    tensors, document = one.state.snapshot()
    others, theirs = other.state.snapshot()
    assert tensors.keys() == others.keys()
    different = [k for k in tensors if not torch.equal(tensors[k], others[k])]
    assert not different
    assert document == theirs


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(n, marks=[pytest.mark.slow] * (n == "momentum")) for n in OPTIMIZERS],
)
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_last_bit(
    optimizer, make_forest, make_trees, tmp_path
):
    sparse = OPTIMIZERS[optimizer][1]
    trees, dev = make_trees(60), make_trees(8, seed=7)

    def convert(tree):  # draws, so that the random state must be right
        words = tree.inputs["word"].clone()
        words[torch.rand(len(words)) < 0.2] = 0
        return gt.Instance({"word": words}, tree.vertex, key=tree.key)

    class Copy(gt.AbstractInstrument):
        """Keeps the checkpoint of the middle of epoch 2."""

        def on_updated(self, event):
            if whole.state.position.epoch == 2 and 40 <= whole.state.position.taken < 60:
                (tmp_path / "middle").write_bytes(whole_folder.read_bytes())

    whole_folder = tmp_path / "whole" / "latest.safetensors"
    torch.manual_seed(3)
    whole = forest_session(
        make_forest(sparse=sparse), optimizer, convert=convert, instruments=[Copy()]
    )
    options = {"valid": dev, "checkpoint_every": 20}
    torch.manual_seed(3)
    history = whole.fit(trees, epochs=2, folder=tmp_path / "whole", **options).history
    position = read_checkpoint(tmp_path / "middle").document["position"]
    assert position["epoch"] == 2 and position["taken"] == 40
    waiting = [k for k in read_checkpoint(tmp_path / "middle").tensors if "/gradient/" in k]
    assert waiting  # gradient sums are a part of it
    resumed = forest_session(make_forest(seed=8, sparse=sparse), optimizer, convert=convert)
    torch.manual_seed(99)
    resumed.load(tmp_path / "middle")
    fit = resumed.fit(trees, epochs=2, folder=tmp_path / "resumed", **options)
    assert fit.history == history
    same_snapshot(whole, resumed)


def test_a_resumed_epoch_of_a_shuffling_loader_loses_and_repeats_nothing(
    make_line, make_rows, tmp_path
):
    rows = make_rows(60)
    seen = []

    def noted(instance):
        seen.append(instance.key)
        return instance

    def session(line):
        return gt.Session(
            line.graph, runtime=gt.Simulated(), reading=gt.Reading(convert=noted), max_active=4
        )

    def loader():
        return DataLoader(rows, batch_size=8, shuffle=True, collate_fn=list)

    torch.manual_seed(0)
    whole = session(make_line())
    whole.fit(loader(), epochs=1, folder=tmp_path / "a", checkpoint_every=25, keep_last=9)
    order = list(seen)
    seen.clear()
    torch.manual_seed(1234)
    resumed = session(make_line(seed=3))
    resumed.load(tmp_path / "a" / "checkpoint-00000025.safetensors")
    resumed.fit(loader(), epochs=1, folder=tmp_path / "b", checkpoint_every=25)
    same_snapshot(whole, resumed)
    assert seen[-35:] == order[-35:] and sorted(order[-60:]) == list(range(60))


KILLED = """
    import os, random, signal, sys
    import numpy
    import torch
    import geartrain as gt
    from functools import partial
    from torch import nn

    folder, kill_at = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(int(sys.argv[3]))
    graph = gt.Graph(vertex=("label",))
    hidden = graph.input("x").through(nn.Linear(3, 8), name="a").through(torch.tanh)
    hidden.through(nn.Linear(8, 2), name="b").loss(gt.cross_entropy, target="label")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 2, 3, generator=generator)
    data = [gt.Instance({"x": r}, {"label": (r.sum(1) > 0).long().numpy()}) for r in x]

    class Killer(gt.AbstractInstrument):
        seen = 0

        def on_updated(self, event):
            self.seen += 1
            if self.seen == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    session = gt.Session(
        graph,
        rules=gt.Rules(optimizer=partial(torch.optim.Adam, lr=0.02), update_every=7),
        runtime=gt.Simulated(2, seed=1, jitter=0.3),
        instruments=[Killer()],
    )
    latest = os.path.join(folder, "latest.safetensors")
    if os.path.exists(latest):
        session.load(latest)
    session.fit(data, epochs=2, folder=folder, checkpoint_every=30)
    print(session.statistics()["trained"])
"""


def test_a_run_that_is_killed_in_an_epoch_ends_with_the_weights_of_one_that_is_not(
    nursery, tmp_path
):
    def run(name, folder, kill_at, seed):
        folder.mkdir(exist_ok=True)
        program = Program(nursery, tmp_path / name, KILLED, folder, kill_at, seed)
        try:
            return *program.end(), program.lines
        finally:
            program.close()

    status, *_ = run("first", tmp_path / "killed", 75, 0)
    assert status == -signal.SIGKILL
    position = read_checkpoint(tmp_path / "killed" / "latest.safetensors").document["position"]
    assert 0 < position["taken"] < 200
    status, errors, said = run("again", tmp_path / "killed", 0, 55)
    assert (status, said) == (0, ["400"]), errors
    status, errors, said = run("all of it", tmp_path / "whole", 0, 0)
    assert (status, said) == (0, ["400"]), errors
    one, other = (
        read_checkpoint(tmp_path / name / "latest.safetensors") for name in ("killed", "whole")
    )
    assert one.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(one.tensors[k], other.tensors[k]) for k in one.tensors)
    assert one.document == other.document


def test_a_full_disk_does_not_end_the_run_and_leaves_the_previous_checkpoint(
    make_line, make_rows, tmp_path, monkeypatch, recorder, caplog
):
    line, rows = make_line(), make_rows(60)
    session = gt.Session(line.graph, runtime=gt.Threads(2), instruments=[recorder])
    session.fit(rows, epochs=1, folder=tmp_path)
    before = (tmp_path / "latest.safetensors").read_bytes()
    write = tensor_file.write

    def full(file, header, tensors):
        file.write(b"half a checkpoint")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tensor_file, "write", full)
    fit = session.fit(rows, epochs=3, folder=tmp_path)
    assert fit.instances == 120 and fit.unsaved == 2
    (said,) = [r.getMessage() for r in caplog.records if "goes on without" in r.getMessage()]
    assert "latest.safetensors" in said and "previous" in said and "No space" in said
    with pytest.raises(gt.NoRoomError, match="No space"):
        session.save(tmp_path / "latest.safetensors")
    assert (tmp_path / "latest.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["latest.safetensors"]
    ended = recorder.events[-1]
    assert ended.outcome == "done" and ended.unsaved == 2
    assert len(session.predict(rows)) == 60
    monkeypatch.setattr(tensor_file, "write", write)
    fit = session.fit(rows, epochs=4, folder=tmp_path)
    assert [e.epoch for e in fit.history] == [1, 2, 3, 4]
    assert fit.instances == 60 and fit.unsaved == 0
    fresh = gt.Session(make_line(seed=5).graph, runtime=gt.Threads(2))
    fresh.load(tmp_path / "latest.safetensors")
    for ours, theirs in zip(session.predict(rows), fresh.predict(rows), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_checkpoint_of_another_graph_is_refused_by_name_and_changes_nothing(
    make_line, make_forest, make_rows, tmp_path
):
    forest = forest_session(make_forest())
    forest.save(tmp_path / "forest")
    line = gt.Session(make_line().graph, runtime=gt.Simulated())
    with pytest.raises(
        gt.CheckpointError,
        match=r"\['branch', 'embed', 'readout'\], the graph has \['first', 'second'\]",
    ):
        line.load(tmp_path / "forest")


def test_a_checkpoint_that_does_not_fit_changes_nothing(make_line, make_rows, tmp_path):
    line = make_line()
    session = gt.Session(line.graph, rules=gt.Rules(optimizer=SGD), runtime=gt.Simulated())
    session.fit(make_rows(30), epochs=1)
    adam = gt.Session(
        make_line(seed=1).graph,
        rules=gt.Rules(optimizer=lambda p: torch.optim.Adam(list(p))),
        runtime=gt.Simulated(),
    )
    adam.fit(make_rows(30), epochs=1)
    adam.save(tmp_path / "adam")
    other_seed = gt.Session(make_line(seed=2).graph, rules=gt.Rules(optimizer=SGD), seed=7)
    other_seed.save(tmp_path / "seed")
    other_type = gt.Session(make_line(seed=2).graph, rules=gt.Rules(optimizer=SGD))
    other_type.parts["first"].module.double()
    other_type.save(tmp_path / "double")
    before = {k: v.clone() for k, v in session.state.snapshot()[0].items()}
    for name, message in (
        ("adam", r"part 'first': optimizer SGD.*'Adam'"),
        ("seed", "made with seed 7, the session has 0"),
        ("double", r"'first'.*float64.*weights_only=True"),
    ):
        with pytest.raises(gt.CheckpointError, match=message):
            session.load(tmp_path / name)
        after = session.state.snapshot()[0]
        assert after.keys() == before.keys()
        assert all(torch.equal(after[k], before[k]) for k in after)
        assert session.statistics()["trained"] == 30
    for name in ("adam", "seed", "double"):
        session.load(tmp_path / name, weights_only=True)
    assert session.statistics()["trained"] == 30
    torch.testing.assert_close(
        line.first.weight, other_type.parts["first"].module.weight, check_dtype=False
    )


def test_weights_alone_leave_optimizers_position_and_random_state(make_line, make_rows, tmp_path):
    trained = gt.Session(make_line(seed=1).graph, runtime=gt.Simulated())
    trained.fit(make_rows(30), epochs=2)
    trained.save(tmp_path / "trained")
    line = make_line()
    session = gt.Session(line.graph, runtime=gt.Simulated(), seed=3)
    session.fit(make_rows(20), epochs=1)
    _, before = session.state.snapshot()
    session.load(tmp_path / "trained", weights_only=True)
    assert torch.equal(line.first.weight, trained.parts["first"].module.weight)
    assert session.state.snapshot()[1] == before


@pytest.mark.parametrize("runtime", RUNTIMES, ids=lambda r: r.name)
def test_ctrl_c_finishes_what_is_in_flight_and_fit_goes_on_with_the_next_instance(
    runtime, make_line, make_rows, tmp_path, recorder
):
    rows, admitted = make_rows(600), Counter()
    main = threading.main_thread().ident
    threads, before = threading.active_count(), signal.getsignal(signal.SIGINT)

    def noted(instance):
        if session.state.checked:
            admitted[instance.key] += 1
        return instance

    def interrupt(event):
        if isinstance(event, Updated) and event.part == "first" and event.version == 3:
            signal.pthread_kill(main, signal.SIGINT)

    recorder.react = interrupt
    session = gt.Session(
        make_line().graph,
        rules=gt.Rules(optimizer=SGD, update_every=20),
        runtime=runtime,
        reading=gt.Reading(convert=noted),
        instruments=[recorder],
        schedule=gt.Schedule(max_rows=16),
    )
    with pytest.raises(KeyboardInterrupt, match="everything that was in flight has finished"):
        session.fit(rows, epochs=1, folder=tmp_path)
    assert threading.active_count() == threads
    assert signal.getsignal(signal.SIGINT) is before  # what ignores it where a shell has said so
    ended = recorder.events[-1]
    assert isinstance(ended, RunEnded) and ended.outcome == "interrupted"
    done = sum(admitted.values())
    assert 0 < done < 600 and ended.instances == done
    document = read_checkpoint(tmp_path / "latest.safetensors").document
    assert document["position"]["taken"] == document["position"]["trained"] == done
    assert document["position"]["epoch_seconds"] > 0
    assert session.state.engine is not None
    session.state.engine.check_empty()
    fit = session.fit(rows, epochs=1, folder=tmp_path)
    assert fit.instances == 600 - done
    assert set(admitted) == set(range(600)) and set(admitted.values()) == {1}
    assert fit.history[0].instances == 600
    assert sum(fit.history[0].staleness["first"].histogram) == sum(len(i.inputs["x"]) for i in rows)


def test_a_second_ctrl_c_abandons_what_is_in_flight(make_line, make_rows, recorder):
    def interrupt_twice(event):
        if isinstance(event, Updated) and event.version == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    recorder.react = interrupt_twice
    line, rows = make_line(), make_rows(200)
    session = gt.Session(
        line.graph,
        rules=gt.Rules(optimizer=SGD, update_every=20, max_staleness=2),
        runtime=gt.Simulated(2),
        instruments=[recorder],
    )
    with pytest.raises(KeyboardInterrupt, match="abandoned"):
        session.fit(rows, epochs=1)
    recorder.react = lambda event: None
    assert session.fit(rows, epochs=1).instances == 200
    assert session.state.engine is not None
    session.state.engine.check_empty()


class Fragile(nn.Linear):
    """Raises on its 1,000th row, until it is mended."""

    def __init__(self):
        super().__init__(3, 3)
        self.rows = 0
        self.mended = False

    def forward(self, x):
        if x.device.type != "meta" and not torch.is_grad_enabled():
            self.rows += len(x)
            if self.rows >= 1000 and not self.mended:
                raise RuntimeError("the 1,000th row")
        return super().forward(x)


@pytest.mark.parametrize("runtime", RUNTIMES, ids=lambda r: r.name)
def test_a_module_that_raises_on_its_1000th_row_is_named_and_the_session_goes_on(
    runtime, make_rows, recorder
):
    torch.manual_seed(0)
    fragile = Fragile()
    graph = gt.Graph(vertex=("label",))
    stream = graph.input("x").through(gt.Part(fragile, name="weak"), name="fragile", keep="inputs")
    stream.through(nn.Linear(3, 2), name="last").loss(gt.cross_entropy, target="label")
    session = gt.Session(
        graph,
        rules=gt.Rules(optimizer=SGD, update_every=50, max_staleness=4),
        runtime=runtime,
        instruments=[recorder],
    )
    rows, threads = make_rows(800, rows=2), threading.active_count()
    with pytest.raises(gt.WorkerError) as raised:
        session.fit(rows, epochs=1)
    message = str(raised.value)
    assert "RuntimeError in node 'fragile' of part 'weak', forward" in message
    assert re.search(r"rows, payload float32 \(\d+, 3\), instance \d+ \(\d+\)", message)
    assert "the 1,000th row" in message and isinstance(raised.value.__cause__, RuntimeError)
    assert recorder.events[-1].outcome == "failed"
    assert recorder.events[-1].message.startswith("WorkerError: RuntimeError in node 'fragile'")
    assert threading.active_count() == threads
    assert session.statistics()["store_bytes"] == 0
    fragile.mended = True
    counted = recorder.events[-1].instances  # of segments that had ended with everything at rest
    fit = session.fit(rows, epochs=1)
    assert fit.instances == 800 - counted and fit.history[0].updates["weak"] >= 8
    assert session.state.engine is not None
    session.state.engine.check_empty()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_payload_that_is_not_finite_is_refused_before_it_enters(value, make_line, make_rows):
    rows = make_rows(5)
    x = torch.zeros(2, 3)
    x[1, 2] = value
    rows[3] = gt.Instance({"x": x}, {"label": [0, 1]}, key="dev.txt:17")
    line = make_line()
    before = line.first.weight.detach().clone()
    session = gt.Session(
        line.graph, runtime=gt.Threads(1), max_active=10, reading=gt.Reading(shuffle=False)
    )
    with pytest.raises(gt.DataError, match=r"dev\.txt:17: input 'x' holds NaN or infinity"):
        session.fit(rows, epochs=1)
    assert torch.equal(line.first.weight, before)
    session = gt.Session(line.graph, runtime=gt.Threads(2), reading=gt.Reading(on_bad="skip"))
    fit = session.fit(rows, epochs=2)
    assert (fit.skipped, fit.instances) == (2, 8)


def test_labels_out_of_range_name_the_instance(make_line, make_rows):
    rows = make_rows(5)
    rows[2] = gt.Instance(rows[2].inputs, {"label": rows[2].vertex["label"] + 2}, key="line 3")
    with pytest.raises(
        gt.DataError, match=r"instance line 3: 'loss': target 'label' is [23]; expected 0\.\.1"
    ):
        gt.Session(make_line().graph, reading=gt.Reading(shuffle=False)).fit(rows, epochs=1)


def test_a_loss_that_becomes_nan_names_the_instance(make_rows):
    def criterion(prediction, target):
        return torch.where(target == 7, math.nan, 1.0) * prediction[:, 0]

    graph = gt.Graph(vertex=("label",))
    graph.input("x").through(nn.Linear(3, 1), name="linear").loss(criterion, target="label")
    rows = [
        gt.Instance(i.inputs, {"label": np.zeros(2, int)}, key=i.key) for i in make_rows(9, 0, 2)
    ]
    rows[4] = gt.Instance(rows[4].inputs, {"label": np.array([0, 7])}, key="the fifth")
    session = gt.Session(graph, runtime=gt.Simulated(), reading=gt.Reading(shuffle=False))
    with pytest.raises(gt.NonFiniteError, match=r"'loss': loss is nan at a row of .*\(the fifth\)"):
        session.fit(rows, epochs=1)


def test_a_gradient_that_is_not_finite_names_the_part_in_a_session(make_rows):
    class Steep(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

        def forward(self, x):
            return torch.sqrt((x * self.weight).abs())

    graph = gt.Graph()
    graph.input("x").through(Steep(), name="steep").loss(lambda y: y.sum(1))
    session = gt.Session(graph, rules=gt.Rules(optimizer=SGD, update_every=1))
    with pytest.raises(gt.NonFiniteError, match=r"part 'steep': the gradient of \['weight'\]"):
        session.fit([gt.Instance({"x": torch.ones(1, 3)}, key=1)], epochs=1)
    assert torch.equal(graph.modules()[0].weight, torch.zeros(3))


@pytest.mark.parametrize("runtime", RUNTIMES, ids=lambda r: r.name)
def test_a_run_that_is_stuck_tells_who_waits_for_what(runtime, make_forest, make_trees, recorder):
    forest, trees = make_forest(), make_trees(8)
    session = forest_session(forest, runtime=runtime, instruments=[recorder])
    lonely = gt.Instance(
        {"word": torch.tensor([1])},
        {"parent": np.array([1, -1]), "slot": np.array([0, 0]), "label": np.array([0, 0])},
        key="an only child",
    )
    with pytest.raises(gt.StuckError) as raised:
        session.fit([*trees, lonely], epochs=1)
    message = str(raised.value)
    assert "1 instances are unfinished" in message and "an only child" in message
    assert "'group'" in message
    assert recorder.events[-1].outcome == "failed"
    assert session.fit(trees, epochs=1).instances == 8


class Raising(gt.AbstractInstrument):
    """Raises in one of its methods."""

    wants_firings = True

    def __init__(self, method):
        self._method = method
        self.ended = None

    def __getattribute__(self, name):
        if name.startswith("on_") and name == object.__getattribute__(self, "_method"):
            return self._fail
        return object.__getattribute__(self, name)

    def _fail(self, event):
        raise OSError(f"no room for {type(event).__name__}")

    def on_run_ended(self, event):
        self.ended = event


@pytest.mark.parametrize("runtime", RUNTIMES, ids=lambda r: r.name)
@pytest.mark.parametrize(
    "method", ["on_run_started", "on_fired", "on_updated", "on_progress", "on_epoch_ended"]
)
def test_an_instrument_that_raises_ends_the_run_with_its_error(
    runtime, method, make_line, make_rows, recorder
):
    raising, threads = Raising(method), threading.active_count()
    session = gt.Session(make_line().graph, runtime=runtime, instruments=[raising, recorder])
    with pytest.raises(OSError, match="no room for") as raised:
        session.fit(make_rows(50), epochs=1)
    assert f"instrument Raising in {method}" in "".join(raised.value.__notes__)
    assert threading.active_count() == threads
    assert raising.ended.outcome == recorder.events[-1].outcome == "failed"
    assert "no room" in recorder.events[-1].message
    session.instruments.clear()
    assert session.fit(make_rows(50), epochs=2).history[-1].epoch == 2


def test_an_instrument_that_raises_at_the_end_hides_neither_the_others_nor_the_failure(
    make_line, make_rows, recorder
):
    raising = Raising("on_run_ended")
    session = gt.Session(make_line().graph, instruments=[raising, recorder])
    with pytest.raises(OSError, match="no room for RunEnded"):
        session.fit(make_rows(5), epochs=1)
    assert recorder.events[-1].outcome == "done"
    with pytest.raises(gt.DataError, match="no instance") as raised:
        session.fit([], epochs=2)
    assert "also: OSError: no room for RunEnded" in raised.value.__notes__
    assert recorder.events[-1].outcome == "failed"


def test_a_failed_validation_keeps_the_training_before_it(make_line, make_rows, recorder):
    bad = [gt.Instance({"x": torch.full((1, 3), math.nan)}, {"label": [0]}, key="bad")]
    session = gt.Session(make_line().graph, runtime=gt.Simulated(), instruments=[recorder])
    with pytest.raises(gt.DataError, match="bad"):
        session.fit(make_rows(40), epochs=1, valid=bad)
    assert not recorder.of(EpochEnded) and session.statistics()["trained"] == 40
    fit = session.fit(make_rows(40), epochs=1, valid=make_rows(5))
    assert fit.instances == 0 and len(fit.history) == 1 and fit.history[0].instances == 40
    assert sum(fit.history[0].staleness["first"].histogram) > 40


def test_a_bound_on_staleness_holds_in_a_session(make_forest, make_trees):
    worst = {}
    for bound in (None, 1, 0):
        forest = make_forest()
        rules = gt.Rules(optimizer=SGD, update_every=5, max_staleness=bound)
        session = gt.Session(
            forest.graph,
            rules=rules,
            runtime=gt.Simulated(3, jitter=0.5),
            max_active=32,
            schedule=gt.Schedule(max_rows=4, ramp=gt.Ramp(over=0)),
        )
        fit = session.fit(make_trees(40), epochs=1)
        worst[bound] = max(s.max for s in fit.staleness.values())
        assert fit.instances == 40
    assert worst[None] > 3 and worst[1] <= 1 and worst[0] == 0


def test_progress_of_a_resumed_epoch_counts_on(make_line, make_rows, tmp_path, recorder):
    rows = make_rows(60)
    session = gt.Session(make_line().graph, runtime=gt.Simulated())
    session.fit(rows, epochs=1, folder=tmp_path, checkpoint_every=25, keep_last=9)
    resumed = gt.Session(make_line().graph, runtime=gt.Simulated(), instruments=[recorder])
    resumed.load(tmp_path / "checkpoint-00000050.safetensors")
    fit = resumed.fit(rows, epochs=1)
    last = recorder.of(Progress)[-1]
    assert (last.finished, last.total, fit.instances) == (60, 60, 10)
    assert last.loss == pytest.approx(session.state.position.history[0].loss, rel=0.2)


@pytest.mark.parametrize("runtime", RUNTIMES, ids=lambda r: r.name)
def test_a_failure_after_ctrl_c_is_not_hidden_by_it(runtime, make_line, make_rows, recorder):
    main = threading.main_thread().ident
    never = threading.Event()

    def interrupt_then_fail(event):
        if isinstance(event, Updated) and event.version == 2:
            signal.pthread_kill(main, signal.SIGINT)
            while not signal.getsignal(signal.SIGINT).__self__.asked:
                never.wait(0.01)  # until the main thread has heard of it
            raise OSError("no room")

    recorder.react = interrupt_then_fail
    session = gt.Session(
        make_line().graph,
        rules=gt.Rules(optimizer=SGD, update_every=20),
        runtime=runtime,
        instruments=[recorder],
    )
    with pytest.raises(OSError, match="no room"):
        session.fit(make_rows(200), epochs=1)
    assert recorder.events[-1].outcome == "failed"


def test_ctrl_c_in_a_validation_keeps_the_epoch_and_validates_later(
    make_line, make_rows, tmp_path, recorder
):
    def interrupt(event):
        if isinstance(event, Progress) and event.mode == "evaluate":
            signal.raise_signal(signal.SIGINT)

    recorder.react = interrupt
    session = gt.Session(make_line().graph, runtime=gt.Simulated(), instruments=[recorder])
    rows, dev = make_rows(40), make_rows(200, seed=1)
    with pytest.raises(KeyboardInterrupt):
        session.fit(rows, epochs=2, valid=dev, folder=tmp_path)
    assert recorder.events[-1].outcome == "interrupted"
    resumed = gt.Session(make_line(seed=4).graph, runtime=gt.Simulated())
    resumed.load(tmp_path / "latest.safetensors")
    fit = resumed.fit(rows, epochs=2, valid=dev)
    assert fit.instances == 40 and [e.instances for e in fit.history] == [40, 40]
    assert all("accuracy" in e.valid for e in fit.history)


def test_a_file_that_no_session_wrote_is_refused(make_line, tmp_path):
    session = gt.Session(make_line().graph)
    write_checkpoint(tmp_path / "other", {"w": torch.zeros(2)}, {"parts": {}})
    with pytest.raises(gt.CheckpointError, match=r"has no \['position', 'random', 'seed'\]"):
        session.load(tmp_path / "other")
    tensors, document = session.state.snapshot()
    document["position"] = {"epoch": 1}
    write_checkpoint(tmp_path / "damaged", tensors, document)
    with pytest.raises(gt.CheckpointError, match=r"position in the data is damaged .*'taken'"):
        session.load(tmp_path / "damaged")
    session.load(tmp_path / "damaged", weights_only=True)
