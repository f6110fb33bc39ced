"""Sessions in odd surroundings, and rows of odd kinds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import geartrain as gt
from tests.rigs.passes import processes

RULES = gt.Rules(
    optimizer=partial(torch.optim.SGD, lr=0.1), update_every=gt.Flush(), average="instances"
)


def session(keep: Any = "auto") -> tuple[gt.Session, nn.Module]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Hardtanh(), nn.Linear(3, 2))
    graph = gt.Graph(value=("label",))
    graph.input("x").through(net, name="net", keep=keep).loss(gt.cross_entropy, target="label")
    return gt.Session(graph, rules=RULES), net


def data(like: Callable[[Tensor], Any] = lambda x: x) -> list[gt.Instance]:
    torch.manual_seed(1)
    rows = [torch.randn(1, 2) for _ in range(8)]
    return [gt.Instance({"x": like(x)}, value={"label": k % 2}, key=k) for k, x in enumerate(rows)]


def assert_trained_as_by_hand(net: nn.Module, steps: int, given: list[gt.Instance]) -> None:
    _, plain = session()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    x = torch.cat([each.inputs["x"] for each in given])  # type: ignore[misc]
    labels = torch.tensor([each.value["label"] for each in given])
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(plain(x), labels).backward()
        optimizer.step()
    for mine, wanted in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize("keep", ["auto", "inputs", "activations", "graph"])
@pytest.mark.parametrize("around", [torch.inference_mode, torch.no_grad])
def test_training_is_training_whatever_is_said_around_it(
    around: Callable[[], AbstractContextManager[None]], keep: str, caplog
) -> None:
    net: Any = None
    with around():
        if around is torch.no_grad:
            trained, net = session(keep)
            trained.fit(data(), epochs=2)
        else:
            with torch.inference_mode(False):
                graph = session(keep)[0].graph
            trained, net = gt.Session(graph, rules=RULES), graph.modules()[0]
            trained.fit(data(), epochs=1)
            trained.evaluate(data())
            trained.predict(data())
    if around is torch.inference_mode:
        trained.fit(data(), epochs=2)
    assert_trained_as_by_hand(net, 2, data())
    assert "never learns" not in caplog.text
    net(torch.ones(1, 2)).sum().backward()


def test_what_a_session_makes_under_inference_mode_can_be_trained() -> None:
    """Adagrad has its sums from the first."""
    graph = session()[0].graph
    before = [p.detach().clone() for p in graph.modules()[0].parameters()]
    with torch.inference_mode():
        rules = gt.Rules(optimizer=partial(torch.optim.Adagrad, lr=0.1), update_every=4)
        trained = gt.Session(graph, rules=rules)
    trained.fit(data(), epochs=1)
    now = list(graph.modules()[0].parameters())
    assert not any(torch.equal(a, b) for a, b in zip(before, now, strict=True))


def in_inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


@pytest.mark.parametrize(
    "like",
    [
        in_inference,
        nn.Parameter,
        lambda x: x * torch.ones(2, requires_grad=True),
        lambda x: torch.cat([x, x], 1)[:, ::2].contiguous()[:, [0, 0]].T.contiguous().T,
        lambda x: x[:, :1].expand(1, 2),
    ],
    ids=["inference", "parameter", "of a graph", "strided", "expanded"],
)
@pytest.mark.parametrize("keep", ["auto", "graph"])
def test_rows_are_data_whatever_they_were_made_from(like: Callable[..., Any], keep: str) -> None:
    trained, net = session(keep)
    given = data(like)
    trained.fit(given, epochs=1)
    with torch.no_grad():
        assert_rows = data(lambda x: like(x).detach().clone())
    assert_trained_as_by_hand(net, 1, assert_rows)
    assert all(each.inputs["x"].grad is None for each in given if each.inputs["x"].is_leaf)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("like", "kind"),
    [
        (lambda x: x.to_sparse(), "sparse_coo"),
        (lambda x: torch.nested.nested_tensor([x[0]]), "nested"),
        (lambda x: x.to("meta"), "meta"),
    ],
)
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_rows_that_are_no_plain_tensor_are_refused_by_name(
    like: Callable[..., Any], kind: str, first: int
) -> None:
    trained, _ = session()
    given = [*data()[:first], *data(like)[first:]]
    words = rf"instance \d: input 'x' is .*{kind}.*: give a dense tensor"
    with pytest.raises(gt.DataError, match=words):
        trained.fit(given, epochs=1)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_a_session_is_not_copied_but_saved_and_loaded(how: Callable[[Any], Any]) -> None:
    trained, _ = session()
    trained.fit(data(), epochs=1)
    with pytest.raises(TypeError, match=r"a Session is not copied .*save\(path\).*load"):
        how(trained)


def test_graphs_are_copied_with_their_modules_and_train_alike() -> None:
    graph = session()[0].graph
    other = copy.deepcopy(graph)
    gt.Session(other, rules=RULES).fit(data(), epochs=1)
    assert_trained_as_by_hand(other.modules()[0], 1, data())
    assert_trained_as_by_hand(graph.modules()[0], 0, data())


@pytest.mark.parametrize("large", [2**63, 2**64, np.uint64(2**63), np.array(2**63)])
@pytest.mark.parametrize("first", [0, 3])
def test_integers_beyond_63_bits_are_refused_and_not_wrapped(large: Any, first: int) -> None:
    trained, _ = session()
    given = data()
    given[first] = gt.Instance(given[first].inputs, value={"label": large}, key=first)
    with pytest.raises(gt.DataError, match=rf"instance {first}: value column 'label'.*2\*\*63"):
        trained.fit(given, epochs=1)
    column = gt.Graph(vertex=("v",), value=("label",))
    column.input("x").through(nn.Linear(2, 2)).loss(gt.cross_entropy, target="label")
    wrong = gt.Instance(given[first].inputs, {"v": [large]}, value={"label": 1}, key=7)
    with pytest.raises(gt.DataError, match=r"instance 7: vertex column 'v'.*2\*\*63"):
        gt.Session(column, rules=RULES).fit([wrong], epochs=1)


def test_a_folder_that_cannot_be_made_is_told_with_its_name(tmp_path) -> None:
    (tmp_path / "file").touch()
    trained, _ = session()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(gt.CheckpointError, match=r"folder '.*file.*cannot be made.*give one"):
            trained.fit(data(), epochs=1, folder=folder)
    with pytest.raises(gt.CheckpointError, match="is a folder: give the name of a file"):
        trained.save("")


class Mute(Exception):
    """A user's own that says nothing."""

    def __str__(self) -> str:
        raise RuntimeError("no voice")


class Muting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) == 1 and not x.is_meta:
            raise Mute
        return self.map(x)


@pytest.mark.parametrize("runtime", [partial(gt.Threads, 1), partial(processes, 2)])
def test_an_error_that_cannot_say_itself_is_told_with_its_node(runtime) -> None:
    graph = gt.Graph(value=("label",))
    mute = graph.input("x").through(Muting(), name="mute", keep="graph")
    mute.loss(gt.cross_entropy, target="label")
    talking = gt.Session(graph, rules=RULES, runtime=runtime(), max_active=1)
    with pytest.raises(gt.WorkerError, match=r"Mute in node 'mute'.*__str__ raised Runt") as told:
        talking.fit(data(), epochs=1)
    assert not isinstance(told.value, gt.WorkerDiedError)
