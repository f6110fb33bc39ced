"""geartrain simulate --hosts: what more hosts would do, from a recorded run."""

from __future__ import annotations

import pytest

from geartrain.cli.simulate import parse_hosts

FEW = ("--option", "train_size=60", "--option", "valid_size=6", "--option", "hidden=8")


def test_hosts_over_links_are_a_table_and_json(geartrain, tmp_path):
    run = tmp_path / "run"
    found = geartrain(
        "train", "listreduce", *FEW, "--runtime", "simulated", "--epochs", "2", "--out", run,
    )  # fmt: skip
    assert found.status == 0, found.err
    found = geartrain(
        "simulate", "listreduce", *FEW, "--recorded", run, "--hosts", "3", "--mixer", "weights",
        "--link", "1ms,1GB", "--link", "50ms,1MB", "--json",
    )  # fmt: skip
    assert found.status == 0, found.err
    told = {(x["link"], x["as"], x["hosts"]): x for x in found.json["forecasts"]}
    ways = ("parts", "copies, weights", "copies, all-reduce")
    links = ("1ms,1GB", "50ms,1MB")
    assert set(told) == {(link, way, n) for link in links for way in ways for n in (3,)}
    near, far = (told[link, "copies, all-reduce", 3] for link in links)
    assert near["instances_per_second"] > far["instances_per_second"] > 0
    assert near["bytes_per_instance"] == far["bytes_per_instance"] > 0
    assert near["instances"] > 3 * 64 and 0 < far["busy"] < near["busy"] <= 1.0
    assert "instances/s" in found.err and "copies, all-reduce" in found.err


def test_a_run_without_costs_and_numbers_that_are_none_are_refused(geartrain, tmp_path):
    for text in ("1_000", "٣", "", "4,x", "0", "4,99999"):
        with pytest.raises(ValueError, match="write N"):
            parse_hosts(text)
    (tmp_path / "metrics.jsonl").write_text("")
    found = geartrain("simulate", "listreduce", "--recorded", tmp_path, "--hosts", "2")
    assert found.status == 2 and "no epoch of training has ended" in found.err
