"""Rows, columns and targets of another dtype than a module takes: refused by name, never computed.

PyTorch raises where these meet; a kernel that would cast instead makes zeros of a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import geartrain as gt
from geartrain.frames.message import Forward, join_payload
from geartrain.nodes import products
from geartrain.nodes.kernel import kernel_of

N = 3
WHOLE = torch.arange(4 * N).view(N, 4)
DOUBLE = torch.linspace(-1, 1, 4 * N, dtype=torch.float64).view(N, 4)
SHARES = torch.linspace(0.1, 0.9, N)
TREE = {"vertex": {"parent": [2, 2, -1], "slot": [0, 1, 0]}}
GRAPH = {"edge": {"source": [0, 1, 2], "target": [1, 2, 0], "type": [0, 1, 0]}}


@dataclass
class Case:
    """A module, the rows that come, and the words of the refusal."""

    module: Callable[[], nn.Module]
    rows: Tensor
    words: str
    through: dict[str, Any] = field(default_factory=dict)
    instance: dict[str, Any] = field(default_factory=dict)
    bundle: bool = False


def of_bundles(
    module: Callable[[], nn.Module], rows: Tensor, words: str, pool: bool = False, **more: Any
) -> Case:
    through = {"inside": True, "pool": pool} | more.pop("through", {})
    return Case(module, rows, words, through, more, bundle=True)


FLOAT = "payload 0 comes as {0} (n, 4), expected float32"
INTEGER = "payload 0 comes as float32 (n,), expected int64"
COLUMNS = {"read": ("parent", "slot")}


def leaf_and_branch() -> nn.Module:
    return gt.nn.WholeTree(gt.nn.TreeLSTMLeaf(4, 5), gt.nn.TreeLSTMBranch(5))


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {
        "an embedding of floats": Case(lambda: nn.Embedding(4, 5), SHARES, INTEGER),
        "a leaf of float words": Case(
            lambda: gt.nn.TreeLSTMLeaf(4, 5, vocabulary=3), SHARES, INTEGER
        ),
        "a list of float tokens": of_bundles(
            lambda: gt.nn.WholeList(gt.nn.TokenRNN(4, 5)), SHARES, INTEGER, pool=True
        ),
        "slots that are floats": of_bundles(
            leaf_and_branch,
            DOUBLE.float(),
            "column 'slot' comes as float64 (n,), expected int64",
            through=COLUMNS,
            vertex={"parent": [2, 2, -1], "slot": [0.0, 1.0, 0.0]},
        ),
        "rows in bfloat16": Case(
            lambda: nn.Linear(4, 5), DOUBLE.bfloat16(), FLOAT.format("bfloat16")
        ),
    }
    for kind, rows in (("int64", WHOLE), ("float64", DOUBLE)):
        words = FLOAT.format(kind)
        found |= {
            f"a linear map of {kind}": Case(lambda: nn.Linear(4, 5), rows, words),
            f"a wide one of {kind}": Case(lambda: nn.Linear(4, 5000), rows, words),
            f"one that runs again, of {kind}": Case(
                lambda: nn.Linear(4, 5), rows, words, {"keep": "inputs"}
            ),
            f"one with a graph, of {kind}": Case(
                lambda: nn.Linear(4, 5), rows, words, {"keep": "graph"}
            ),
            f"a sequence of {kind}": Case(
                lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh()), rows, words
            ),
            f"a leaf of {kind}": Case(lambda: gt.nn.TreeLSTMLeaf(4, 5), rows, words),
            f"an rnn over lists of {kind}": of_bundles(
                lambda: gt.nn.WholeList(nn.RNNCell(4, 5)), rows, words, pool=True
            ),
            f"a gru over lists of {kind}": of_bundles(
                lambda: gt.nn.WholeList(nn.GRUCell(4, 5)), rows, words, pool=True
            ),
            f"a whole tree of {kind}": of_bundles(
                leaf_and_branch, rows, words, through=COLUMNS, **TREE
            ),
            f"a gated cell of {kind}": of_bundles(
                lambda: gt.nn.GatedGraphCell(4, 2), rows, words, **GRAPH
            ),
            f"a gated sum of {kind}": of_bundles(
                lambda: gt.nn.GatedSum(4), rows, words, pool=True, **GRAPH
            ),
            f"a choice among {kind}": of_bundles(
                lambda: gt.nn.VertexChoice(4),
                rows,
                words,
                pool=True,
                through={"read": "label"},
                **GRAPH,
            ),
        }
    return found


CASES = cases()


def session_of(case: Case) -> tuple[gt.Session, list[gt.Instance]]:
    edge = ("type",) if "edge" in case.instance else None
    vertex = tuple(case.instance.get("vertex", ()))
    graph = gt.Graph(vertex=vertex, edge=edge, value=("label",))
    x = graph.input("x", bundle=case.bundle)
    y = x.through(case.module(), name="node", **case.through)
    y.loss(lambda y, *rest: y.float().flatten(1).sum(1) if y.ndim > 1 else y)
    instance = gt.Instance({"x": case.rows}, value={"label": 1}, **case.instance)
    return gt.Session(graph, runtime=gt.Simulated(1)), [instance] * 3


@pytest.mark.parametrize("name", CASES)
def test_rows_and_columns_of_another_dtype_are_refused_before_anything_moves(name: str) -> None:
    case = CASES[name]
    for act in ("predict", "fit"):
        session, data = session_of(case)
        with pytest.raises(gt.GraphError) as caught:
            session.predict(data) if act == "predict" else session.fit(data, epochs=1)
        said = str(caught.value)
        assert said.startswith("'node': ") and case.words in said, said
        assert "bring it so" in said


def test_a_double_module_takes_double_rows() -> None:
    module, x = nn.Linear(4, 3).double(), DOUBLE
    graph = gt.Graph()
    graph.input("x").through(module).output()
    (found,) = gt.Session(graph).predict([gt.Instance({"x": x})])
    assert_close(found, module(x))


def test_a_tanh_makes_floats_of_integers_as_torch_does() -> None:
    graph = gt.Graph()
    graph.input("x").through(nn.Tanh()).output()
    (found,) = gt.Session(graph).predict([gt.Instance({"x": WHOLE})])
    assert_close(found, torch.tanh(WHOLE))


CROSS = "cross_entropy is given a wrong dtype: column 'label' comes as float64 (n,), expected int64"
TARGETS: dict[str, tuple[Any, Any, str]] = {
    "classes as floats": (gt.cross_entropy, 1.0, CROSS),
    "torch's": (F.cross_entropy, 1.0, CROSS),
    "a module": (nn.CrossEntropyLoss(reduction="none"), 1.0, "column 'label' comes as float64"),
    "of logarithms": (F.nll_loss, 1.0, "nll_loss is given a wrong dtype: column 'label'"),
    "whole numbers as shares": (
        lambda y, t: F.binary_cross_entropy_with_logits(y[:, 0], t, reduction="none"),
        1,
        "column 'label' comes as int64 (n,), expected float32",
    ),
    "numbers in double, as their gradient is asked for": (
        lambda y, t: F.huber_loss(y[:, 0], t, reduction="none"),
        1.0,
        "column 'label' comes as float64 (n,), expected float32",
    ),
    "shares in double": (
        lambda y, t: F.binary_cross_entropy(y[:, 0].sigmoid(), t, reduction="none"),
        1.0,
        "column 'label' comes as float64 (n,), expected float32",
    ),
}


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_targets_of_another_dtype_are_refused_before_anything_moves(
    name: str, computed: bool
) -> None:
    criterion, label, words = TARGETS[name]
    graph = gt.Graph(value=("label",))
    y = graph.input("x").through(nn.Linear(4, 3))
    y.loss(criterion, (lambda view: view.label) if computed else "label", name="judge")
    data = [gt.Instance({"x": DOUBLE.float()}, value={"label": label})] * 3
    with pytest.raises(gt.GraphError) as caught:
        gt.Session(graph).fit(data, epochs=1)
    said = str(caught.value)
    assert said.startswith("'judge': "), said
    assert (words.replace("'label'", "'target'") if computed else words) in said


class Twice(torch.autograd.Function):
    """Without a way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_a_criterion_without_a_gradient_is_not_said_to_want_another_dtype() -> None:
    graph = gt.Graph()
    graph.input("x").through(nn.Linear(4, 1)).loss(lambda y: Twice.apply(y)[:, 0], name="judge")
    with pytest.raises(gt.GeartrainError, match="backward") as caught:
        gt.Session(graph).fit([gt.Instance({"x": DOUBLE.float()})] * 3, epochs=1)
    assert "dtype" not in str(caught.value)


def test_whole_numbers_are_predictions_that_are_judged_alone() -> None:
    graph = gt.Graph()
    x = graph.input("x")
    x.through(nn.Linear(4, 1)).loss(lambda y: y[:, 0], label="own")
    x.through(lambda x: x.argmax(1)).loss(lambda k: k.float())
    fit = gt.Session(graph).fit([gt.Instance({"x": DOUBLE.float()})] * 3, epochs=1)
    assert fit.history[0].loss == float(DOUBLE.argmax(1).double().mean())


def test_whole_numbers_are_targets_of_a_squared_error() -> None:
    graph = gt.Graph(value=("aim",))
    graph.input("x").through(nn.Linear(4, 1)).loss(F.mse_loss, "aim")
    gt.Session(graph).fit([gt.Instance({"x": DOUBLE.float()}, value={"aim": 2})] * 3, epochs=1)


def test_predictions_are_made_without_targets_of_any_dtype() -> None:
    graph = gt.Graph(value=("label",))
    y = graph.input("x").through(nn.Linear(4, 1))
    y.loss(lambda y, t: F.binary_cross_entropy_with_logits(y[:, 0], t, reduction="none"), "label")
    session = gt.Session(graph)
    rows = {"x": DOUBLE.float()}
    assert session.predict([gt.Instance(rows)])[0].shape == (N, 1)
    session.fit([gt.Instance(rows, value={"label": np.float32(1)})] * 3, epochs=1)


def test_a_target_whose_dtype_shows_in_the_run_alone_is_refused_there() -> None:
    """The check knows no shape of rows that are stacked in numbers from the data."""
    graph = gt.Graph(vertex=("members",), value=("label",))
    stacked = graph.input("x").group("instance", size="members")
    stacked.through(lambda x: x.sum(1)).loss(gt.cross_entropy, "label", name="judge")
    data = gt.Instance(
        {"x": DOUBLE.float()}, vertex={"members": [N] * N}, value={"label": 1.0}, key="line 3"
    )
    with pytest.raises(gt.GraphError, match=r"'judge': .*column 'label' comes as float64"):
        gt.Session(graph).fit([data] * 4, epochs=1)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float16])
@pytest.mark.parametrize("shape", [(3, 4), (3, 2, 4)])
def test_products_never_meet_a_weight_that_was_cast(
    shape: tuple[int, ...], dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr("geartrain.native.library.current", lambda: None)
    kernel = kernel_of(nn.Linear(4, 5))
    assert kernel is not None
    with torch.no_grad():
        with pytest.raises(gt.GraphError, match=rf"rows of {dtype} meet a weight of torch.float32"):
            kernel.forward((torch.ones(shape, dtype=dtype),))
        if len(shape) == 2:
            with pytest.raises(gt.GraphError, match="meet a weight"):
                products.times(torch.ones(3, 5, dtype=dtype), torch.ones(5, 4))


def test_rows_of_two_dtypes_do_not_become_one_batch() -> None:
    state, origin = np.zeros((2, 2), np.int64), np.zeros(2, np.int64)
    batches = [
        Forward((torch.ones(2, dtype=d),), state, origin) for d in (torch.int64, torch.float32)
    ]
    with pytest.raises(gt.GraphError, match=r"rows of torch\.int64 and of torch\.float32 meet"):
        join_payload(batches)


def test_bundles_of_another_dtype_than_the_first_are_refused_by_name() -> None:
    graph = gt.Graph()
    graph.input("x", bundle=True).through(nn.Linear(4, 2)).output()
    data = [gt.Instance({"x": x}, key=f"line {i}") for i, x in enumerate((DOUBLE.float(), DOUBLE))]
    with pytest.raises(gt.DataError, match=r"line 1.*float64.*says torch\.float32"):
        gt.Session(graph).predict(data)


def test_rows_in_bfloat16_are_welcome_where_all_rows_are() -> None:
    graph = gt.Graph(value=("label",))
    graph.input("x").through(nn.Linear(4, 3)).loss(gt.cross_entropy, "label")
    data = [gt.Instance({"x": DOUBLE.bfloat16()}, value={"label": 1})] * 3
    gt.Session(graph, compute=gt.Compute(precision="bf16")).fit(data, epochs=1)
