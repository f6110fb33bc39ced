"""``geartrain train``: the JSON, the run folder, exit status, and going on after a stop."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import pytest
import torch

from geartrain.cli.settings import RunSettings
from geartrain.engine.instrument import AbstractInstrument, EpochEnded, Updated
from geartrain.observe.jsonlog import read_json_log
from geartrain.observe.progress import ProgressLine
from geartrain.runtime.processes.processes import Processes
from geartrain.train.checkpoint import read_checkpoint
from tests.rigs.programs import Nursery, Program

SMALL_LISTS = ("listreduce", "--option", "train_size=300", "--option", "valid_size=60")
SMALL_LISTS += ("--option", "hidden=8", "--runtime", "simulated", "--epochs", "2")
FIELDS = {
    "recipe", "runtime", "workers", "max_active", "update_every", "replicas", "seed", "epochs",
    "instances", "train_seconds", "instances_per_second", "valid", "history", "reached",
    "staleness", "updates", "peak_rss_mib", "precision", "device", "topology", "mixer",
}  # fmt: skip


def test_the_last_line_is_the_json_of_the_run_and_the_rest_goes_to_standard_error(
    geartrain, tmp_path: Path
) -> None:
    done = geartrain("train", *SMALL_LISTS, "--seed", 7, "--out", tmp_path / "run", "--json")
    assert done.status == 0
    assert len(done.out.strip().splitlines()) == 1
    result = done.json
    assert set(result) == FIELDS
    assert (result["recipe"], result["runtime"], result["seed"]) == ("listreduce", "simulated", 7)
    assert (result["max_active"], result["update_every"]) == (256, 100)
    assert (result["epochs"], result["instances"]) == (2, 600)
    assert set(result["valid"]) == {"loss", "accuracy"}
    assert [set(entry) for entry in result["history"]] == [{"epoch", "seconds", "valid"}] * 2
    assert result["history"][-1]["valid"] == result["valid"]
    assert result["history"][-1]["seconds"] == result["train_seconds"] > 0
    assert result["history"][0]["seconds"] < result["train_seconds"]
    assert result["reached"] is None
    assert set(result["staleness"]) == {"cell"}
    assert result["updates"] == {"cell": 2 * 3}  # 300 lists in updates of 100
    assert all(set(part) == {"mean", "max"} for part in result["staleness"].values())
    assert result["peak_rss_mib"] > 10
    assert "epoch 2/2" in done.err


def test_a_run_on_worker_processes_has_a_track_for_each_of_them(geartrain, tmp_path: Path) -> None:
    lists = [word if word != "simulated" else "processes" for word in SMALL_LISTS]
    told = ("--option", "whole=0", "--workers", 2, "--trace", "--out", tmp_path / "run", "--json")
    done = geartrain("train", *lists, *told)
    assert done.status == 0, done.err
    assert (done.json["runtime"], done.json["workers"]) == ("processes", 2)
    assert done.json["updates"] == {"cell": 6, "readout": 6}
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    fired = {event["tid"] for event in trace if event.get("ph") == "X"}
    assert len(fired) == 2, "a track for each worker"


@pytest.mark.slow
def test_a_run_whose_worker_is_killed_goes_on_and_counts_what_it_repeats(
    geartrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Processes] = []
    make, steps = RunSettings.make_runtime, []

    def strike(line: ProgressLine, event: Updated) -> None:
        steps.append(event)
        if len(steps) == 1:  # others may be of the end of an epoch, when no pass runs
            os.kill(made[0].pids[1], signal.SIGKILL)

    monkeypatch.setattr(RunSettings, "make_runtime", lambda it: made.append(make(it)) or made[0])
    monkeypatch.setattr(ProgressLine, "on_updated", strike, raising=False)
    lists = [word if word != "simulated" else "processes" for word in SMALL_LISTS]
    lists += ["--option", "whole=0", "--workers", "2", "--checkpoint-every", "70"]
    told = ("--on-worker-death", "restore", "--out", tmp_path / "run", "--json")
    done = geartrain("train", *lists, *told)
    assert done.status == 0, done.err
    assert set(done.json) == FIELDS | {"deaths", "repeated"}
    assert (done.json["deaths"], done.json["instances"]) == (1, 600)
    assert 0 <= done.json["repeated"] <= 300
    log = read_json_log(tmp_path / "run" / "metrics.jsonl")
    (restored,) = [event for event in log if event["event"] == "Restored"]
    assert restored["source"] == str(tmp_path / "run" / "latest.safetensors")
    assert restored["repeated"] == done.json["repeated"]
    assert "was killed by SIGKILL" in done.err and "died       1 worker process" in done.err
    made[0].close()


@pytest.mark.parametrize("how", ["raise", "restore"])
def test_deaths_of_workers_are_a_matter_of_worker_processes(geartrain, how: str) -> None:
    done = geartrain("train", *SMALL_LISTS, "--on-worker-death", how)
    assert done.status == 2
    assert f"--on-worker-death {how}" in done.err and "--runtime processes" in done.err


def test_the_run_folder_holds_settings_events_graph_checkpoints_and_trace(
    geartrain, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert geartrain("train", *SMALL_LISTS, "--out", folder, "--trace").status == 0
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "metrics.jsonl", "graph.mmd", "latest.safetensors"}
    assert names >= {"best.safetensors", "trace.json", "result.json"}
    config = json.loads((folder / "config.json").read_text())
    assert config["settings"]["options"]["hidden"] == 8
    assert {"geartrain", "torch", "python"} <= set(config["versions"])
    events = [
        json.loads(line)["event"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert events[0] == "RunStarted"
    assert events.count("EpochEnded") == 2
    assert events[-1] == "RunEnded"
    assert "flowchart" in (folder / "graph.mmd").read_text()
    report = geartrain("report", folder)
    assert (report.status, Path(report.out.strip()).name) == (0, "report.html")


def test_without_a_name_the_run_gets_one_of_recipe_seed_and_time(geartrain, tmp_path: Path) -> None:
    assert geartrain("train", *SMALL_LISTS, "--seed", 5).status == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("listreduce-5-20")


def test_a_reached_target_ends_training_and_a_missed_one_is_a_failure(
    geartrain, tmp_path: Path
) -> None:
    got = geartrain(
        "train", *SMALL_LISTS, "--until", "accuracy>=0.01", "--out", tmp_path / "a", "--json"
    )
    assert got.status == 0
    reached = got.json["reached"]
    assert set(reached) == {"metric", "value", "seconds", "epochs"}
    assert (reached["metric"], reached["epochs"]) == ("accuracy", 1)
    assert reached["seconds"] == got.json["train_seconds"]
    missed = geartrain(
        "train", *SMALL_LISTS, "--until", "accuracy>=0.999", "--out", tmp_path / "b", "--json"
    )
    assert missed.status == 1
    assert missed.json["reached"] is None
    assert "accuracy>=0.999 was missed" in missed.err


def test_sentiment_trains_on_threads_and_its_run_evaluates_on_any_split(
    geartrain, trees: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    done = geartrain(
        "train", "sentiment", "--data", trees, "--option", "hidden=8", "--epochs", 2, "--workers",
        2, "--update-every", 5, "--out", folder, "--json",
    )  # fmt: skip
    assert done.status == 0, done.err
    assert set(done.json["valid"]) == {"loss", "all", "root"}
    best = min(done.json["history"], key=lambda epoch: epoch["valid"]["loss"])
    dev = geartrain("evaluate", folder, "--split", "dev", "--json").json
    assert dev["metrics"] == pytest.approx(best["valid"])
    assert (dev["recipe"], dev["run"], dev["split"]) == ("sentiment", str(folder), "dev")
    assert (dev["instances"], dev["seconds"] > 0) == (2, True)

    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "sst").mkdir(parents=True)
    (elsewhere / "sst" / "test.txt").write_text("(3 (2 unheard-of) (4 good))\n" * 3)
    held_out = geartrain("evaluate", folder, "--data", elsewhere, "--split", "test", "--json")
    assert held_out.status == 0, held_out.err
    assert held_out.json["instances"] == 3
    shown = geartrain("evaluate", folder, "--data", elsewhere, "--split", "test")
    assert "root" in shown.out


def damage(folder: Path, name: str, text: str) -> None:
    (folder / "sst" / f"{name}.txt").write_text(text)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("train", "(3 (2 It) (3 good))\n(1 (2 so) (0 bad)\n", "train.txt:2: column 18"),
        ("train", "(3 (2 It) (7 good))\n", "train.txt:1: column 11: '(7'"),
        ("train", "\n\n", "train.txt: the file has no tree"),
        ("train", "", "sst/train.txt is empty"),
        ("dev", "(3 (2 It) (3 good) (3 is))\n", "dev.txt:1:"),
        ("dev", "", "sst/dev.txt is empty"),
    ],
)
def test_malformed_trees_are_wrong_use_told_by_file_and_line(
    geartrain, trees: Path, tmp_path: Path, name: str, text: str, said: str
) -> None:
    damage(trees, name, text)
    refused = geartrain("train", "sentiment", "--data", trees, "--out", tmp_path / "run")
    assert refused.status == 2
    assert said in refused.err
    assert "Traceback" not in refused.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train", "lstreduce"), "did you mean 'listreduce'"),
        (("train", "sentiment"), "GEARTRAIN_DATA"),
        (("train", "sentiment", "--data", "nowhere"), "does not exist"),
        (("train", "listreduce", "--until", "acuracy>=0.9"), "reports accuracy, loss"),
        (("train", "listreduce", "--until", "accuracy"), "METRIC>=VALUE"),
        (("train", "listreduce", "--option", "width=3"), "train_size"),
        (("train", "listreduce", "--workers", "0"), "--workers"),
        (("train", "listreduce", "--runtime", "cloud"), "simulated"),
        (("train", "listreduce", "--precision", "fp16"), "bf16"),
        (("train", "listreduce", "--device", "cuda:97"), "device='cuda:97' does not exist"),
        (("train", "listreduce", "--device", "gpu"), "none that torch knows"),
        (("train", "listreduce", "--device", "meta"), "of a kind that parts cannot live on"),
        (("compare", "listreduce", "--device", "cuda:97"), "device='cuda:97' does not exist"),
        (("train", "listreduce", "--resume"), "--out"),
        (("train", "listreduce", "--resume", "--out", "none"), "not the folder of a run"),
        (("train", "listreduce", "--sed", "1"), "--seed"),
        (("evaluate", "none"), "not the folder of a run"),
        (("report", "none"), "metrics.jsonl"),
        (("graph", "tree"), "no recipe 'tree'"),
    ],
)
def test_wrong_use_is_status_2_and_says_what_to_do(
    geartrain, words: Sequence[str], said: str
) -> None:
    refused = geartrain(*words)
    assert refused.status == 2
    assert said in refused.err
    assert "Traceback" not in refused.err


def test_what_the_run_raises_is_one_line_and_its_traceback_is_in_the_log(
    geartrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from geartrain.train.session import Session

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("the wheel came off\nand rolled away")

    monkeypatch.setattr(Session, "fit", broken)
    failed = geartrain("train", *SMALL_LISTS, "--out", tmp_path / "run")
    assert failed.status == 1
    assert "RuntimeError: the wheel came off (traceback in" in failed.err
    assert "Traceback" not in failed.err
    assert "Traceback" in (tmp_path / "run" / "run.log").read_text()


def test_a_checkpoint_that_does_not_fit_on_the_disk_ends_no_run_and_is_told_at_its_end(
    geartrain, tmp_path: Path
) -> None:
    resource = pytest.importorskip("resource", reason="needs limits on the size of files")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
    try:
        failed = geartrain("train", *SMALL_LISTS, "--option", "hidden=64", "--out", "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert failed.status == 1
    assert "safetensors: cannot be written (no file was left there)" in failed.err
    assert "has no checkpoint of its end" in failed.err
    assert "there is no checkpoint yet" in failed.err
    assert not (tmp_path / "run" / "result.json").exists(), "it is not finished"
    assert "make room" in failed.err
    assert "Traceback" not in failed.err
    assert not list((tmp_path / "run").glob("*.safetensors"))


class Spoiling(AbstractInstrument):
    """Has the disk turn read-only for some files of a run after its first epoch."""

    def __init__(self, folder: Path, *names: str) -> None:
        self._files = [folder / name for name in names]

    def on_epoch_ended(self, event: EpochEnded) -> None:
        if event.epoch == 1:
            log = logging.getLogger("geartrain.test")
            log.info("the log is opened by this")
            for fd in map(int, os.listdir("/proc/self/fd")):
                for path in self._files:
                    with suppress(OSError):  # of the listing itself, or not there
                        if os.path.samestat(os.fstat(fd), path.stat()):
                            read_only = os.open(path, os.O_RDONLY)
                            os.dup2(read_only, fd)
                            os.close(read_only)
            for k in range(3):
                log.info("message %d, which finds no place", k)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")
def test_logs_that_can_no_longer_be_written_are_told_once_and_the_run_ends_well(
    geartrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from geartrain.cli import train

    folder, names = tmp_path / "run", ("metrics.jsonl", "trace.json", "run.log")
    instruments = train._instruments
    monkeypatch.setattr(
        train, "_instruments", lambda *given: [*instruments(*given), Spoiling(folder, *names)]
    )
    done = geartrain("train", *SMALL_LISTS, "--out", folder, "--trace", "--json")
    assert (done.status, done.json["epochs"]) == (0, 2)
    for name in names:
        (said,) = [line for line in done.err.splitlines() if f"{folder / name}: cannot" in line]
        assert "Bad file descriptor" in said
    assert "Traceback" not in done.err and "Logging error" not in done.err
    assert (folder / "result.json").exists()


def test_a_finished_run_is_not_written_over_and_resuming_it_repeats_its_result(
    geartrain, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    first = geartrain("train", *SMALL_LISTS, "--out", folder, "--json")
    again = geartrain("train", *SMALL_LISTS, "--out", folder, "--json")
    assert again.status == 2
    assert "holds a finished run" in again.err
    resumed = geartrain("train", "listreduce", "--out", folder, "--resume", "--json")
    assert (resumed.status, resumed.json) == (0, first.json)


def test_options_that_differ_from_the_run_are_refused_by_name_when_resuming(
    geartrain, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    geartrain("train", *SMALL_LISTS, "--out", folder, "--max-active", 9)
    (folder / "result.json").unlink()
    refused = geartrain(
        "train", "listreduce", "--out", folder, "--resume", "--seed", 1, "--epochs", 2,
        "--max-active", 8, "--option", "hidden=9",
    )  # fmt: skip
    assert refused.status == 2
    assert "--seed 0" in refused.err
    assert "--max-active 9" in refused.err
    assert "--option hidden=8" in refused.err
    assert "--epochs" not in refused.err
    other = geartrain("train", "sentiment", "--out", folder, "--resume")
    assert (other.status, "RECIPE listreduce" in other.err) == (2, True)
    unfinished = geartrain("train", *SMALL_LISTS, "--out", folder)
    assert (unfinished.status, "--resume" in unfinished.err) == (2, True)


def test_a_run_that_stopped_between_its_last_checkpoint_and_its_result_only_reports(
    geartrain, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    words = ("train", *SMALL_LISTS, "--until", "accuracy>=0.01", "--out", folder, "--json")
    first = geartrain(*words)
    (folder / "result.json").unlink()
    resumed = geartrain(*words, "--resume")
    assert resumed.status == 0
    assert drop_memory(resumed.json) == drop_memory(first.json)


def drop_memory(result: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in result.items() if name != "peak_rss_mib"}


KILLED = """
import os, signal, sys
from geartrain.train import checkpoint
from geartrain.cli.main import app

write, left = checkpoint.write_checkpoint, [int(sys.argv.pop(1))]
signals = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT, "terminate": signal.SIGTERM}
chosen = signals[sys.argv.pop(1)]

def stop_later(*args, **kwargs):
    write(*args, **kwargs)
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), chosen)

checkpoint.write_checkpoint = stop_later
app(prog_name="geartrain")
"""


def stopped(
    nursery: Nursery, folder: Path, how: str, after: int, *words: object
) -> tuple[int | None, list[str], str]:
    """Status, output and errors of the command that gets a signal after so many checkpoints."""
    program = Program(nursery, folder, KILLED, after, how, *words)
    try:
        status, errors = program.end()
    finally:
        program.close()
    return status, program.lines, errors


WAITING = """
import sys
from geartrain.train.session import Session
from geartrain.cli.main import app

fit, told = Session.fit, sys.argv.pop(1)

def fit_later(*args, **kwargs):
    print("about to train", flush=True)
    with open(told) as told_to_go_on:
        told_to_go_on.read()
    return fit(*args, **kwargs)

Session.fit = fit_later
app(prog_name="geartrain")
"""


@pytest.fixture
def waiting(nursery: Nursery, tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """A command that is about to train, and does so when ``tmp_path/go`` is written to."""
    os.mkfifo(tmp_path / "go")
    running: list[Program] = []

    def start(*words: object) -> Program:
        running.append(Program(nursery, tmp_path / "waiting", WAITING, tmp_path / "go", *words))
        running[-1].until("about to train")
        return running[-1]

    yield start
    for each in running:
        each.close()


def test_two_runs_do_not_share_a_folder_and_the_first_one_s_result_stays(
    geartrain, waiting, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    words = ("train", *SMALL_LISTS, "--out", folder, "--json")
    first = waiting(*words)
    second = geartrain(*words, "--seed", 1)
    (tmp_path / "go").write_text("go on")
    status, err = first.end()
    assert second.status == 2
    assert f"{folder} is in use by process {first.pid} on " in second.err
    assert f", since {datetime.now().year}" in second.err
    assert (status, json.loads(first.lines[-1])["seed"]) == (0, 0), err
    assert json.loads((folder / "result.json").read_text())["seed"] == 0


def test_a_run_that_goes_on_elsewhere_is_not_resumed_and_a_killed_one_is_at_once(
    geartrain, waiting, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    geartrain("train", *SMALL_LISTS, "--out", folder)
    (folder / "result.json").unlink()
    again = ("train", "listreduce", "--out", folder, "--resume", "--json")
    (folder / "latest.safetensors").rename(tmp_path / "kept")
    first = waiting("train", *SMALL_LISTS, "--out", folder)
    (tmp_path / "kept").rename(folder / "latest.safetensors")
    refused = geartrain(*again)
    first.send(signal.SIGKILL)
    assert first.end()[0] == -signal.SIGKILL
    assert (refused.status, f"in use by process {first.pid}" in refused.err) == (2, True)
    resumed = geartrain(*again)
    assert (resumed.status, resumed.json["epochs"]) == (0, 2), resumed.err


def test_two_comparisons_do_not_share_a_folder(geartrain, tmp_path: Path) -> None:
    from geartrain.train.lock import held

    out = tmp_path / "out"
    out.mkdir()
    (out / "runs.jsonl").write_text("of the other one\n")
    with held(out / ".lock"):
        done = geartrain("compare", "listreduce", "--out", out)
    assert (done.status, "is in use by this very process" in done.err) == (2, True)
    assert (out / "runs.jsonl").read_text() == "of the other one\n"


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_kill_9_in_the_middle_of_an_epoch_and_resume_end_at_the_same_weights(
    geartrain, nursery: Nursery, tmp_path: Path, workers: int
) -> None:
    words = ("train", *SMALL_LISTS, "--checkpoint-every", "70", "--workers", workers, "--json")
    whole = geartrain(*words, "--out", tmp_path / "whole")
    status, *_ = stopped(
        nursery, tmp_path / "program", "kill", 7, *words, "--out", tmp_path / "killed"
    )
    assert status == -signal.SIGKILL
    assert not (tmp_path / "killed" / "result.json").exists()
    position = read_checkpoint(tmp_path / "killed" / "latest.safetensors").document["position"]
    assert 0 < position["taken"] < 300
    resumed = geartrain("train", "listreduce", "--out", tmp_path / "killed", "--resume", "--json")
    assert resumed.status == 0, resumed.err
    for result in ("valid", "history", "instances", "train_seconds"):
        assert resumed.json[result] == whole.json[result]
    a, b = (read_checkpoint(tmp_path / n / "latest.safetensors") for n in ("whole", "killed"))
    assert a.tensors.keys() == b.tensors.keys()
    assert all(a.tensors[name].equal(b.tensors[name]) for name in a.tensors)


@pytest.mark.parametrize(("how", "status"), [("interrupt", 130), ("terminate", 143)])
def test_a_signal_has_the_checkpoint_written_and_says_how_to_go_on(
    geartrain, nursery: Nursery, tmp_path: Path, how: str, status: int
) -> None:
    folder = tmp_path / "run"
    words = ("train", *SMALL_LISTS, "--checkpoint-every", "70")
    ended, said, errors = stopped(nursery, tmp_path / "program", how, 2, *words, "--out", folder)
    assert ended == status
    assert f"geartrain: {how.removesuffix('e')}ed; " in errors
    assert f"geartrain train listreduce --out {folder} --resume" in errors
    assert "Traceback" not in errors
    assert said == []
    resumed = geartrain("train", "listreduce", "--out", folder, "--resume", "--json")
    assert resumed.status == 0, resumed.err
    assert resumed.json["instances"] == 600


def test_evaluated_within_epochs_the_run_stops_at_a_fraction(geartrain, tmp_path: Path) -> None:
    words = ("train", *SMALL_LISTS, "--evaluate-every", 0.25, "--json")
    whole = geartrain(*words, "--out", tmp_path / "whole").json
    assert [e["epoch"] for e in whole["history"]] == [0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2]
    assert (whole["epochs"], whole["instances"]) == (2, 600)
    worst = max(e["valid"]["loss"] for e in whole["history"][:3])
    done = geartrain(*words, "--until", f"loss<={worst + 1e-9}", "--out", tmp_path / "stops")
    assert done.status == 0
    assert done.json["reached"]["epochs"] == done.json["epochs"] < 1
    assert done.json["instances"] == 300 * done.json["epochs"]
    assert geartrain("report", tmp_path / "stops").status == 0


def stopped_and_resumed(geartrain, words, folder: Path):
    """A training of lists that has ended after half an epoch, and then gone on to its end."""
    stopped = geartrain(*words, "--until", "loss<=99", "--out", folder)
    assert stopped.json["epochs"] == 0.5
    (folder / "result.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["settings"]["until"] = None
    (folder / "config.json").write_text(json.dumps(config))
    return geartrain("train", "listreduce", "--out", folder, "--resume", "--json")


def test_copies_of_the_bottleneck_train_resume_and_are_evaluated(geartrain, tmp_path: Path) -> None:
    words = ["train", *SMALL_LISTS, "--replicas", 2, "--option", "average_every=90"]
    words += ["--evaluate-every", 0.5, "--checkpoint-every", 50, "--json"]
    whole = geartrain(*words, "--out", tmp_path / "whole")
    assert whole.status == 0
    assert (whole.json["replicas"], whole.json["workers"]) == (2, 2)
    tensors = read_checkpoint(tmp_path / "whole" / "latest.safetensors").tensors
    assert any(name.startswith("cell#1/weights/") for name in tensors)
    folder = tmp_path / "stopped"
    resumed = stopped_and_resumed(geartrain, words, folder)
    assert resumed.status == 0
    same = "valid", "history", "instances", "replicas", "staleness", "updates"
    assert [resumed.json[name] for name in same] == [whole.json[name] for name in same]
    found = geartrain("evaluate", folder, "--json")
    assert found.json["metrics"]["loss"] == pytest.approx(
        min(e["valid"]["loss"] for e in whole.json["history"])
    )
    refused = geartrain("train", "listreduce", "--out", folder, "--resume", "--replicas", 1)
    assert (refused.status, "--replicas 2" in refused.err) == (2, True)


def test_a_run_in_bf16_says_so_and_resumes_in_it(geartrain, tmp_path: Path) -> None:
    words = ["train", *SMALL_LISTS, "--precision", "bf16", "--runtime", "simulated"]
    words += ["--epochs", 2, "--evaluate-every", 0.5, "--json"]
    whole = geartrain(*words, "--out", tmp_path / "whole")
    assert (whole.status, whole.json["precision"]) == (0, "bf16")
    folder = tmp_path / "stopped"
    resumed = stopped_and_resumed(geartrain, words, folder)
    assert (resumed.status, resumed.json["valid"]) == (0, whole.json["valid"])
    ends = [read_checkpoint(p / "latest.safetensors").tensors for p in (folder, tmp_path / "whole")]
    assert {t.dtype for t in ends[0].values() if t.is_floating_point()} == {torch.float32}
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[1])
    assert geartrain("evaluate", folder, "--json").status == 0
    refused = geartrain("train", "listreduce", "--out", folder, "--resume", "--precision", "full")
    assert (refused.status, "--precision bf16" in refused.err) == (2, True)


def test_a_run_may_go_on_and_be_evaluated_on_another_device(geartrain, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = geartrain("train", *SMALL_LISTS, "--until", "loss<=99", "--out", folder, "--json")
    assert (done.status, done.json["device"]) == (0, "cpu")
    (folder / "result.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["settings"] |= {"until": None, "device": "cuda:97"}  # a run of a machine with GPUs
    (folder / "config.json").write_text(json.dumps(config))
    again = ("train", "listreduce", "--out", folder, "--resume", "--json")
    for words in (again, ("evaluate", folder)):
        refused = geartrain(*words)
        assert (refused.status, "the run's --device: device='cuda:97'" in refused.err) == (2, True)
        assert "give 'cpu'" in refused.err or "give one of these" in refused.err
    resumed = geartrain(*again, "--device", "cpu")
    assert (resumed.status, resumed.json["epochs"], resumed.json["device"]) == (0, 2, "cpu")
    found = geartrain("evaluate", folder, "--device", "cpu", "--json")
    best = min(e["valid"]["loss"] for e in resumed.json["history"])
    assert found.json["metrics"]["loss"] == pytest.approx(best)
    refused = geartrain("evaluate", folder, "--device", "cuda:98")
    assert (refused.status, "--device: device='cuda:98'" in refused.err) == (2, True)


def test_the_number_in_flight_is_found_said_on_the_screen_and_kept(
    geartrain, tmp_path: Path
) -> None:
    words = (*SMALL_LISTS, "--max-active", "auto", "--out", tmp_path / "run", "--json")
    done = geartrain("train", *words)
    found = done.json["max_active"]
    assert f"max_active='auto': {found} instances in flight, for " in done.err
    more = ("train", "listreduce", "--out", tmp_path / "run", "--resume", "--json")
    assert geartrain(*more).json["max_active"] == found
    refused = geartrain("train", "listreduce", "--max-active", "0")
    assert (refused.status, "'0': give 1 or more, or auto" in refused.err) == (2, True)


def test_a_run_from_before_there_were_devices_is_of_the_cpu(geartrain, tmp_path: Path) -> None:
    geartrain("train", *SMALL_LISTS, "--out", tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    del config["settings"]["device"]
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    assert geartrain("evaluate", tmp_path / "run", "--json").status == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("mnist", "--replicas", 2), "recipe 'mnist' has no bottleneck to copy"),
        (("listreduce", "--replicas", 3, "--workers", 2), "give --workers 3 or more"),
        (("listreduce", "--evaluate-every", 0.0), "evaluate_every=0: give a share of an epoch"),
    ],
)
def test_copies_and_shares_that_cannot_be_are_wrong_use(geartrain, words, said: str) -> None:
    done = geartrain("train", *words)
    assert done.status == 2
    assert said in done.err
