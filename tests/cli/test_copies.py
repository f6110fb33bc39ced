"""Copies of the model on the command line: train and simulate."""

from __future__ import annotations

import json
import re

import pytest

from geartrain.cli.copies import parse_link, parse_speeds

FEW = ("--epochs", "1", "--option", "train_size=96", "--option", "valid_size=8",
       "--option", "hidden=8")  # fmt: skip


@pytest.mark.parametrize(
    ("text", "latency", "bandwidth", "room"),
    [("50us,1.25GB", 50e-6, 1.25e9, None), ("0.001,1e6", 1e-3, 1e6, None),
     ("2ms,3MB/s", 2e-3, 3e6, None), ("10ms,12.5MB,256kB", 1e-2, 12.5e6, 256e3),
     ("10ms,12.5MB/s,1e6", 1e-2, 12.5e6, 1e6), (None, 0.0, None, None)],
)  # fmt: skip
def test_links_are_read(text, latency, bandwidth, room):
    assert parse_link(text) == (pytest.approx(latency), bandwidth, room)


@pytest.mark.parametrize(
    "text",
    ["50us", "fast,1GB", "1us,0GB", "1us,1e", "-1us,1GB", "1-2us,1GB", "1us,1GB,", "1us,1GB,0B",
     "1us,1GB,2kB,3kB"],
)  # fmt: skip
def test_links_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="LATENCY,BANDWIDTH"):
        parse_link(text)


def test_speeds_are_repeated_in_turn():
    assert parse_speeds("1,0.25", 5) == (1.0, 0.25, 1.0, 0.25, 1.0)
    assert parse_speeds(None, 2) == (1.0, 1.0)


@pytest.mark.parametrize("text", ["", "1,x", "0", "1,-2"])
def test_speeds_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="SPEED"):
        parse_speeds(text, 2)


def test_train_with_a_topology_copies_the_whole_model(geartrain, tmp_path):
    found = geartrain(
        "train", "listreduce", *FEW, "--runtime", "simulated", "--replicas", "3", "--topology",
        "ring", "--speeds", "1,0.5", "--link", "1ms,1MB", "--out", tmp_path / "run", "--json",
    )  # fmt: skip
    assert found.status == 0, found.err
    told = found.json
    assert (told["replicas"], told["topology"], told["mixer"]) == (3, "ring", None)
    assert sum(told["copies"]["instances"]) == told["instances"] == 96
    assert told["copies"]["letters"]["sent"] > 0
    assert told["copies"]["letters"]["declined"] == told["copies"]["meetings"] == 0
    assert geartrain("report", tmp_path / "run").status == 0
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "3 copies of the model, NearestNeighbours" in page
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    exchanged = [json.loads(x) for x in lines if '"Exchanged"' in x]
    assert [len(e["copies"]) for e in exchanged] == [3]
    found = geartrain("evaluate", tmp_path / "run", "--json")
    assert found.status == 0, found.err


def test_how_often_copies_have_met_is_in_the_summary_the_json_the_log_and_the_page(
    geartrain, tmp_path
):
    found = geartrain(
        "train", "listreduce", *FEW, "--runtime", "simulated", "--replicas", "3", "--topology",
        "ring", "--mixer", "weights", "--out", tmp_path / "run", "--json",
    )  # fmt: skip
    assert found.status == 0, found.err
    told = found.json["copies"]
    assert told["meetings"] == told["letters"]["sent"] > 0
    assert told["letters"]["declined"] == 0
    words = f"3 by PairAverage, 0 of {told['letters']['sent']} letters declined, .* "
    assert re.search(words + f"{told['meetings_per_gradient']:.2f} meetings a gradient", found.err)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    exchanged = [json.loads(x) for x in lines if '"Exchanged"' in x]
    assert sum(c["meetings"] for e in exchanged for c in e["copies"]) == told["meetings"]
    assert geartrain("report", tmp_path / "run").status == 0
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "declined" in page and "meetings/gradient" in page


def test_a_mixer_that_drives_copies_apart_is_named_on_the_screen_and_in_the_log(
    geartrain, tmp_path
):
    given = ("--runtime", "simulated", "--replicas", "5", "--topology", "ring")
    found = geartrain("train", "listreduce", *FEW, *given, "--out", tmp_path / "run")
    assert found.status == 0, found.err
    told = "5 copies, NearestNeighbours, topology='ring': the least eigenvalue of I + A"
    assert found.err.count(told) == 1
    log = (tmp_path / "run" / "run.log").read_text(encoding="utf-8")
    assert log.count(told) == 1 and "--mixer weights" in log
    found = geartrain(
        "train", "listreduce", *FEW, *given, "--mixer", "weights", "--out", tmp_path / "other"
    )
    assert found.status == 0 and "eigenvalue" not in found.err


def test_simulate_measures_and_trains(geartrain, tmp_path):
    found = geartrain(
        "simulate", "listreduce", *FEW, "--option", "whole=0", "--replicas", "5",
        "--mixer", "all-reduce", "--out", tmp_path / "run", "--json",
    )  # fmt: skip
    assert found.status == 0, found.err
    told = found.json
    assert (told["runtime"], told["workers"], told["mixer"]) == ("simulated", 5, "all-reduce")
    assert told["copies"]["distance"] == 0.0
    kept = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))
    assert any(name.endswith("backward") for name in kept["settings"]["costs"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--mixer", "gradent"), "did you mean 'gradients'"),
        (("--topology", "moebius"), "moebius"),
        (("--mixer", "gradients", "--link", "1us,1GB"), "--runtime simulated"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_trained(geartrain, words, told):
    found = geartrain("train", "listreduce", *FEW, "--replicas", "3", *words)
    assert found.status == 2
    assert told in found.err
