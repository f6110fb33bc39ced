"""What modules remember besides tensors, ``get_extra_state()``, in checkpoints and workers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.runtime.base import AbstractRuntime
from geartrain.train.checkpoint import read_checkpoint, write_checkpoint
from tests.rigs.passes import processes

RULES = gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.1), update_every=4)


class Diary(nn.Module):
    """A map that writes down what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(2, 2)
        self.told: dict[str, Any] = {"rows": 0, "sizes": (), "sum": torch.zeros(2), "é": None}

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled() and not x.is_meta:
            told = self.told
            self.told = told | {
                "rows": told["rows"] + len(x),
                "sizes": (*told["sizes"], len(x)),
                "sum": told["sum"] + x.detach().sum(0),
            }
        return self.map(x)

    def get_extra_state(self) -> Any:
        return self.told

    def set_extra_state(self, state: Any) -> None:
        self.told = state


def session(runtime: AbstractRuntime | None = None) -> tuple[gt.Session, Diary]:
    torch.manual_seed(0)
    diary = Diary()
    graph = gt.Graph(value=("label",))
    rows = graph.input("x", bundle=True).through(diary, name="diary", keep="graph", alone=True)
    rows.ungroup().loss(gt.cross_entropy, target="label")
    return gt.Session(graph, rules=RULES, runtime=runtime, max_active=1), diary


def data(n: int = 9) -> list[gt.Instance]:
    torch.manual_seed(1)
    return [gt.Instance({"x": torch.randn(1 + k % 3, 2)}, value={"label": k % 2}) for k in range(n)]


def assert_same(a: Any, b: Any) -> None:
    assert a.keys() == b.keys() and torch.equal(a["sum"], b["sum"])
    assert [a[k] for k in ("rows", "sizes", "é")] == [b[k] for k in ("rows", "sizes", "é")]


def test_a_checkpoint_holds_it_and_a_resumed_run_goes_on_with_it(tmp_path) -> None:
    whole, all_of_it = session()
    whole.fit(data(), epochs=2)
    assert all_of_it.told["rows"] == 2 * sum(len(each.inputs["x"]) for each in data())
    begun, half = session()
    begun.fit(data(), epochs=1)
    begun.save(tmp_path / "half.safetensors")
    resumed, other = session()
    resumed.load(tmp_path / "half.safetensors")
    assert_same(other.told, half.told)
    assert other.told["sum"] is not half.told["sum"]
    resumed.fit(data(), epochs=2)
    assert_same(other.told, all_of_it.told)
    light, third = session()
    light.load(tmp_path / "half.safetensors", weights_only=True)
    assert_same(third.told, half.told)


def test_it_comes_back_from_worker_processes() -> None:
    found = []
    for runtime in (gt.Threads(1), processes(2)):
        trained, diary = session(runtime)
        trained.fit(data(), epochs=2, valid=data(3))
        found.append(diary.told)
    assert_same(*found)


def test_copies_of_a_part_each_keep_their_own() -> None:
    trained, _ = session(gt.Threads(2))
    copied = gt.Session(
        trained.graph, rules=RULES, runtime=gt.Threads(2), sharing=gt.PartCopies(2), max_active=2
    )
    copied.fit(data(), epochs=1)


def test_what_json_cannot_say_is_refused_by_name_where_it_is_written(tmp_path) -> None:
    written, diary = session()
    diary.told = {"rows": 0, "sizes": (), "sum": torch.zeros(2), "é": object()}
    with pytest.raises(gt.CheckpointError, match=r"diary/weights/_extra_state.*numbers, text"):
        written.save(tmp_path / "it.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda entry: entry | {"extra": {}}, r"lacks \['_extra_state'\]"),
        (lambda entry: entry | {"extra": [3]}, "'extra' is"),
        (lambda entry: entry | {"extra": {"_extra_state": {"tensor": "it"}}}, "_extra_state"),
        (lambda entry: entry | {"extra": {"map.weight": 3}}, "lacks|is a int"),
    ],
)
@pytest.mark.parametrize("light", [False, True])
def test_a_damaged_one_is_refused_and_nothing_is_loaded(spoil, words, light, tmp_path) -> None:
    written, diary = session()
    written.fit(data(), epochs=1)
    written.save(tmp_path / "it.safetensors")
    was = read_checkpoint(tmp_path / "it.safetensors")
    document = dict(was.document)
    document["parts"] = {"diary": spoil(document["parts"]["diary"])}
    write_checkpoint(tmp_path / "bad.safetensors", was.tensors, document)
    other, untouched = session()
    with pytest.raises(gt.CheckpointError, match=words):
        other.load(tmp_path / "bad.safetensors", weights_only=light)
    assert untouched.told["rows"] == 0 and diary.told["rows"] > 0
