"""Whatever is asked for, and whatever lies in a folder: an exit status, a line, no traceback."""

from __future__ import annotations

import copy
import gzip
import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.main import get_command
from typer.testing import CliRunner

from geartrain.cli.main import app
from geartrain.data.cifar10 import FILE as CIFAR
from geartrain.data.qm9 import FILE as QM9
from geartrain.data.text import FILE as TEXT

NASTY = [
    *("", " ", "-1", "0", "x", "nan", "inf", "-inf", "1e400", "-1e400", "0x10", "1_0", "٣"),
    *("2147483648", "99999999999", "9" * 30, "9" * 5000, "-" + "9" * 30, "1e-320", "1" * 400),
    *("a=b", "=", "a=", "blocks=999999999999", "hidden=99999999", "hidden=nan", "hidden=-1"),
    *("hidden=1e9", "train_size=99999999999", "whole=7", "average_every=-1", "learning_rate=nan"),
    *("acc>=", ">=1", "accuracy>=--", "accuracy>=1e999", "loss<=nan", "accuracy=>1"),
    *("1,", ",", "1,0", "1,nan", "1,-1", "0us,0", "1us,1e999GB", "-1us,1GB", "1e300s,1", "ours"),
    *("ours:replicas=99999999999", "mixed:99999999999", "ours-sync:0", "ours:hidden=9999999", ":"),
    *("/dev/null", "/dev/null/x", "/proc/nowhere", "a" * 300, "é", "\udcff", "\x07", "cuda:999"),
]
COMMANDS: Any = get_command(app).commands  # type: ignore[attr-defined]


def ends(*words: str | Path) -> tuple[int, str]:
    """Status and all that was said; it is as it should be."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    told = result.stdout + result.stderr
    shown = " ".join(str(word)[:80] for word in words)
    assert result.exception is None or isinstance(result.exception, SystemExit), shown
    assert result.exit_code in (0, 1, 2), f"{shown}: {result.exit_code} {told}"
    assert "Traceback" not in told, f"{shown}: {told}"
    assert result.exit_code == 0 or told.strip(), shown
    return result.exit_code, told


def options_of(command: str) -> list[str]:
    """Names of the options that take a value."""
    found = COMMANDS[command].params
    return [p.opts[0] for p in found if p.opts[0].startswith("--") and not p.is_flag]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GEARTRAIN_DATA", raising=False)
    monkeypatch.delenv("GEARTRAIN_TRACEBACK", raising=False)


def sized(command: str) -> list[str]:
    """A run of a blink, or none at all."""
    words = [command]
    if command in ("train", "simulate", "compare"):
        words += ["listreduce", "--epochs", "1"]
        for option in ("train_size=12", "valid_size=3", "hidden=2"):
            words += ["--option", option]
    if command == "demo":
        words += ["--epochs", "1"]
        for option in ("train_size=8", "valid_size=2", "batch=4", "width=2", "blocks=4"):
            words += ["--option", option]
    if command == "train":
        words += ["--runtime", "simulated"]
    if command == "simulate":
        words += ["--replicas", "1", "--instances", "4"]
    if command == "compare":
        words += ["--against", "nothing like that"]
    if command in ("evaluate", "report"):
        words += ["nowhere"]
    if command == "graph":
        words += ["listreduce"]
    return words


EVERY = [(command, option) for command in COMMANDS for option in options_of(command)]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_option_gives_a_traceback_whatever_its_value(command: str) -> None:
    draw = random.Random(command)
    for option in options_of(command):
        ends(*sized(command), option, draw.choice(NASTY))
    for value in draw.sample(NASTY, 4):
        ends(command, value)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("command", "option"), EVERY)
def test_no_option_gives_a_traceback_whatever_its_value_of_all(command: str, option: str) -> None:
    for value in NASTY:
        ends(*sized(command), option, value)


given_words = st.lists(
    st.tuples(st.sampled_from(EVERY), st.sampled_from(NASTY) | st.text(max_size=20)), max_size=3
)


TOGETHER = given(command=st.sampled_from(sorted(COMMANDS)), words=given_words)
once = partial(settings, suppress_health_check=[HealthCheck.function_scoped_fixture])


@once(max_examples=6)
@TOGETHER
def test_no_options_together_give_a_traceback(
    command: str, words: list[tuple[tuple[str, str], str]]
) -> None:
    end_together(command, words)


@pytest.mark.slow
@once(max_examples=300)
@TOGETHER
def test_no_options_of_many_together_give_a_traceback(
    command: str, words: list[tuple[tuple[str, str], str]]
) -> None:
    end_together(command, words)


def end_together(command: str, words: list[tuple[tuple[str, str], str]]) -> None:
    some = [word for (_, option), value in words for word in (option, value)]
    ends(*sized(command), *(word.replace("\0", "") for word in some))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--workers", "2147483648"),
            "--workers 2147483648: give 1,024 at most, as each has",
        ),
        (
            ("--replicas", "99999999999"),
            "replicas 99999999999: give 1,024 at most, as each is",
        ),
        (("--replicas", "99999999999", "--topology", "ring"), "give 1,024 at most"),
        (("--max-active", "99999999999"), "give 1,048,576 at most, as each instance in flight"),
        (("--epochs", "99999999999"), "give 1,000,000,000 at most"),
        (("--seed", str(2**64)), "give 9,223,372,036,854,775,807 at most"),
        (("--option", "hidden=999999999999"), "hidden=1e+12: give 4,096 at most, as its weights"),
        (("--until", "accuracy>=1e999"), "write METRIC>=VALUE"),
        (("--speeds", "1,nan", "--topology", "ring"), "speeds 1,nan: write SPEED"),
    ],
)
def test_a_number_that_is_too_large_is_refused_with_the_reason(
    words: tuple[str, ...], said: str
) -> None:
    status, told = ends("train", "listreduce", *words)
    assert (status, said in told) == (2, True), told


def test_blocks_beyond_number_are_refused(small_data: Path) -> None:
    words = ("train", "cifar", "--data", small_data, "--option", "blocks=999999999999")
    status, told = ends(*words)
    assert (status, "give 1,000 at most, as each is a layer of its own" in told) == (2, True)


# Run folders.


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unfinished run with everything that a run can have."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = [*sized("train"), "--out", str(folder), "--trace", "--checkpoint-every", "5"]
    assert CliRunner().invoke(app, words).exit_code == 0
    (folder / "result.json").rename(folder.parent / "result.json")
    (folder / "files").mkdir()
    (folder / "files" / "vocabulary.json").write_text("{}")
    return folder


@pytest.fixture
def spoiled(run: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoiled."""
    return Path(shutil.copytree(run, tmp_path / "run"))


def look_at(folder: Path) -> None:
    """All that may be done with a run."""
    ends("report", folder)
    ends("evaluate", folder)
    ends("train", "listreduce", "--resume", "--out", folder, "--json")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    os.truncate(path, 40 << 30)


def half(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def noise(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(max(200, path.stat().st_size)))


def flips(path: Path) -> None:
    content, draw = bytearray(path.read_bytes()), random.Random(1)
    for _ in range(8):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


SPOILT: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "a pipe": pipe,
    "a folder": folder,
    "a loop of links": loop,
    "a device": device,
    "forty gigabytes of nothing": sparse,
    "cut": half,
    "noise": noise,
    "flipped": flips,
    "nested": lambda path: path.write_text('{"a":' * 100_000),
    "nested and closed": lambda path: path.write_text("[" * 900 + "]" * 900),
    "null": lambda path: path.write_text("null"),
    "an object": lambda path: path.write_text("{}"),
    "a number": lambda path: path.write_text("9" * 5000),
    "not a number": lambda path: path.write_text('{"settings": NaN, "event": 1e999, "ph": null}'),
    "no UTF-8": lambda path: path.write_bytes(b'{"event": "\xff\xfe"}\n'),
}
FILES = ("config.json", "metrics.jsonl", "trace.json", "graph.mmd", "run.log")
FILES += ("latest.safetensors", "best.safetensors", "files/vocabulary.json")


@pytest.mark.parametrize(
    ("name", "how"),
    [(("config.json", "metrics.jsonl")[k % 2], how) for k, how in enumerate(SPOILT)],
)
def test_no_file_of_a_run_gives_a_traceback(name: str, how: str, spoiled: Path) -> None:
    SPOILT[how](spoiled / name)
    look_at(spoiled)


@pytest.mark.slow
@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize("name", FILES)
def test_no_file_of_a_run_gives_a_traceback_of_all(name: str, how: str, spoiled: Path) -> None:
    SPOILT[how](spoiled / name)
    look_at(spoiled)


@pytest.mark.parametrize("name", ["run.log", "latest.safetensors", "trace.json", "result.json"])
def test_a_pipe_in_a_run_is_not_waited_for(name: str, spoiled: Path) -> None:
    (spoiled / name).unlink(missing_ok=True)
    os.mkfifo(spoiled / name)
    look_at(spoiled)


def test_a_result_of_something_else_is_refused(run: Path, spoiled: Path) -> None:
    good = json.loads((run.parent / "result.json").read_text())
    resume = ("train", "listreduce", "--resume", "--out", spoiled, "--json")
    (spoiled / "result.json").write_text(json.dumps(good))
    assert ends(*resume)[0] == 0
    for value in (
        {},
        {**good, "valid": 3},
        {**good, "extra": float("nan")},
        {**good, "reached": 1},
    ):
        (spoiled / "result.json").write_text(json.dumps(value))
        assert ends(*resume)[0] == 2


WRONG: list[Any] = [None, True, -1, 0, 0.5, 10**12, 10**400, float("nan"), "x", [], {}, [[]]]


def forgeries(value: Any) -> Iterator[Any]:
    """The value with one entry gone, or of another type, for all of them."""
    for key in value:
        yield {k: v for k, v in value.items() if k != key}
        for wrong in WRONG:
            yield {**value, key: wrong}
        if isinstance(value[key], dict) and value[key]:
            for inner in forgeries(value[key]):
                yield {**value, key: inner}


@pytest.mark.parametrize("part", range(4))
def test_no_type_in_a_config_gives_a_traceback(part: int, spoiled: Path) -> None:
    path = spoiled / "config.json"
    config = json.loads(path.read_text())
    every = list(forgeries(config))
    assert len(every) > 300
    (spoiled / "latest.safetensors").unlink()
    (spoiled / "best.safetensors").unlink()  # so that nothing is trained or evaluated
    for forged in random.Random(0).sample(every, len(every))[part::4][:6]:
        path.write_text(json.dumps(forged))
        ends("evaluate", spoiled)
        ends("train", "listreduce", "--resume", "--out", spoiled)


@pytest.mark.slow
def test_no_type_in_a_config_gives_a_traceback_of_all(spoiled: Path) -> None:
    path = spoiled / "config.json"
    config = json.loads(path.read_text())
    for forged in forgeries(config):
        path.write_text(json.dumps(forged))
        look_at(spoiled)


SOME = pytest.mark.parametrize("many", [6, pytest.param(60, marks=pytest.mark.slow)])


@SOME
def test_no_event_gives_a_traceback(many: int, spoiled: Path) -> None:
    path = spoiled / "metrics.jsonl"
    lines = path.read_text().splitlines()
    draw, kinds = random.Random(0), {}
    for number, line in enumerate(lines):
        kinds.setdefault(json.loads(line)["event"], number)
    for number in kinds.values():
        every = list(forgeries(json.loads(lines[number])))
        for forged in draw.sample(every, min(many, len(every))):
            spoilt = copy.copy(lines)
            spoilt[number] = json.dumps(forged)
            path.write_text("\n".join(spoilt) + "\n")
            ends("report", spoiled)


@SOME
def test_no_event_of_a_trace_gives_a_traceback(many: int, spoiled: Path) -> None:
    path = spoiled / "trace.json"
    lines = path.read_text().splitlines()
    draw, found = random.Random(0), {}
    for number, line in enumerate(lines):
        text = line.removeprefix("[").removesuffix(",")
        if text not in ("", "]"):
            event = json.loads(text)
            found.setdefault(event["ph"], (number, event))
    for number, event in found.values():
        every = list(forgeries(event))
        for forged in draw.sample(every, min(many, len(every))):
            spoilt = copy.copy(lines)
            spoilt[number] = ("[" if not number else "") + json.dumps(forged) + ","
            path.write_text("\n".join(spoilt) + "\n")
            ends("report", spoiled)


# Data.


def stories() -> bytes:
    return b"".join(
        b"1 Wolves are afraid of mice.\n2 %s is a wolf.\n3 What is %s afraid of?\tmouse\t1 2\n"
        % (name.title(), name)
        for name in (b"gertrude", b"jessica", b"winona", b"emily", b"anna", b"paul")
    )


def digits(n: int, *shape: int) -> bytes:
    head = struct.pack(f">4B{1 + len(shape)}I", 0, 0, 8, 1 + len(shape), n, *shape)
    return gzip.compress(head + bytes(k % 10 for k in range(n * int(np.prod(shape, dtype=int)))))


def good_data(folder: Path) -> Path:
    """A little of every kind."""
    files = {
        "sst/train.txt": b"(3 (2 It) (4 (2 's) (3 good)))\n(1 (2 so) (0 bad))\n",
        "sst/dev.txt": b"(1 (2 so) (0 bad))\n",
        "babi/en/qa15_basic-deduction_train.txt": stories(),
        "mnist/train-images-idx3-ubyte.gz": digits(6, 28, 28),
        "mnist/train-labels-idx1-ubyte.gz": digits(6),
        "mnist/t10k-images-idx3-ubyte.gz": digits(3, 28, 28),
        "mnist/t10k-labels-idx1-ubyte.gz": digits(3),
        TEXT: b"the cat sat on the mat; the rat ate the hat.\n" * 12,
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    for name in (QM9, CIFAR):
        (folder / name).parent.mkdir()
    n = np.array([3] * 12)
    np.savez_compressed(
        folder / QM9, id=np.arange(12), n_atoms=n, Z=np.tile([8, 1, 1], 12), mu=np.ones(12),
        R=np.tile([[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]], (12, 1)).astype(np.float32),
    )  # fmt: skip
    arrays: dict[str, Any] = {"classes": np.array([f"class {k}" for k in range(10)])}
    for name in ("train", "test"):
        arrays |= {f"x_{name}": np.zeros((10, 32, 32, 3), np.uint8), f"y_{name}": np.arange(10)}
    np.savez_compressed(folder / CIFAR, **arrays)
    return folder


RECIPES = {
    "sentiment": ("sst/train.txt", ("hidden=2",)),
    "babi": ("babi/en/qa15_basic-deduction_train.txt", ("hidden=4",)),
    "mnist": ("mnist/train-images-idx3-ubyte.gz", ("hidden=4", "batch=3")),
    "qm9": (QM9, ("hidden=5", "steps=1")),
    "cifar": (CIFAR, ("width=2", "blocks=1", "batch=5")),
    "charlm": (TEXT, ("dim=4", "heads=1", "blocks=2", "length=8", "batch=4", "train_size=8")),
}


def trained(recipe: str, data: Path, out: Path) -> tuple[int, str]:
    _, options = RECIPES[recipe]
    words: list[str | Path] = ["train", recipe, "--data", data, "--epochs", "1", "--out", out]
    return ends(*words, *(word for option in options for word in ("--option", option)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_data_file_gives_a_traceback(recipe: str, tmp_path: Path) -> None:
    """Each recipe meets a third of them, and each of them two recipes."""
    spoil_data(recipe, [*SPOILT][[*RECIPES].index(recipe) % 3 :: 3], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_data_file_gives_a_traceback_of_all(recipe: str, tmp_path: Path) -> None:
    spoil_data(recipe, [*SPOILT], tmp_path)


def spoil_data(recipe: str, ways: list[str], tmp_path: Path) -> None:
    file, _ = RECIPES[recipe]
    data = good_data(tmp_path / "data")
    good = (data / file).read_bytes()
    for number, how in enumerate(ways):
        path, spoil = data / file, SPOILT[how]
        spoil(path)
        if file == TEXT and how == "nested":  # words like others: there need not be as many
            os.truncate(path, 2000)
        status, told = trained(recipe, data, tmp_path / f"run{number}")
        assert status == 2 or how == "flipped" or file == TEXT, f"{how}: {told}"
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        path.write_bytes(good)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_little_good_data_trains(recipe: str, tmp_path: Path) -> None:
    status, told = trained(recipe, good_data(tmp_path / "data"), tmp_path / "run")
    assert status == 0, told


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_flipped_bits_of_data_give_a_traceback(recipe: str, tmp_path: Path) -> None:
    file, _ = RECIPES[recipe]
    data = good_data(tmp_path / "data")
    good, draw = (data / file).read_bytes(), random.Random(recipe)
    for number in range(40):
        content = bytearray(good)
        for _ in range(draw.choice((1, 2, 8))):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        if draw.random() < 0.3:
            content = content[: draw.randrange(len(content))]
        (data / file).write_bytes(content)
        trained(recipe, data, tmp_path / f"run{number}")
