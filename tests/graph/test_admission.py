"""What modules demand of instances: found before anything enters, and told with the key."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.errors import DataError, GraphError
from geartrain.graph.admission import Brought, check_of, require_range
from tests.rigs.products import halved

Made = tuple[gt.Graph, Callable[..., gt.Instance], list[tuple[dict[str, object], str]]]
CASES: dict[str, Callable[[], Made]] = {}


def case(make: Callable[[], Made]) -> Callable[[], Made]:
    """A graph, a maker of good instances, and what to change for bad ones with what is said."""
    CASES[make.__name__] = make
    return make


def squares(x: Tensor) -> Tensor:
    return x.square().flatten(1).sum(1)


@case
def whole_tree() -> Made:
    graph = gt.Graph(vertex=("parent", "slot"))
    tree = gt.nn.WholeTree(gt.nn.TreeLSTMLeaf(3, 3, vocabulary=9), gt.nn.TreeLSTMBranch(3))
    words = graph.input("word", bundle=True)
    words.through(tree, read=("parent", "slot"), inside=True, name="tree").loss(squares)

    def make(key, parent=(2, 2, -1), slot=(0, 1, 0), word=(1, 8, -1)):
        columns = {"parent": np.array(parent), "slot": np.array(slot)}
        return gt.Instance({"word": torch.tensor(word)}, columns, key=key)

    return graph, make, [
        ({"parent": (2, -1, -1)}, "'tree': vertex 2 has one child; expected two, or none"),
        ({"parent": (1, 0, 1, 0), "slot": (0, 0, 1, 1), "word": (1, 1, 1, 1)}, "is below itself"),
        ({"parent": (2, 2, 7)}, "vertex 2 has parent 7"),
        ({"slot": (1, 1, 0)}, "is not the only child of 2 in slot 1"),
        ({"word": (1, 9, -1)}, r"'tree': word 9; expected 0\.\.8"),
        ({"word": (-1, 1, 1)}, r"'tree': word -1; expected 0\.\.8"),
        ({"word": (1, 2)}, "'tree': input 'word' has 2 rows, the instance 3 vertices"),
    ]  # fmt: skip


@case
def whole_tree_of_any_cells() -> Made:
    class Mean(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h.mean(1)

    graph = gt.Graph(vertex=("up", "side"))
    words = graph.input("word", bundle=True)
    tree = gt.nn.WholeTree(nn.Embedding(5, 3), Mean())
    words.through(tree, read=("up", "side"), inside=True, name="tree").loss(squares)

    def make(key, word=(1, 4, 99)):
        columns = {"up": np.array([2, 2, -1]), "side": np.array([0, 1, 0])}
        return gt.Instance({"word": torch.tensor(word)}, columns, key=key)

    return graph, make, [({"word": (5, 1, 1)}, r"'tree': id 5; expected 0\.\.4")]


@case
def whole_list() -> Made:
    graph = gt.Graph(value=("label",))
    reader = gt.nn.BundleSequential(gt.nn.WholeList(gt.nn.TokenRNN(10, 4)), nn.Linear(4, 3))
    scores = graph.input("tokens", bundle=True).through(
        reader, name="reader", inside=True, pool=True
    )
    scores.through(nn.Linear(3, 3)).loss(gt.cross_entropy, target="label", name="loss")

    def make(key, tokens=(0, 9, 3), label=2):
        return gt.Instance({"tokens": torch.tensor(tokens)}, value={"label": label}, key=key)

    return graph, make, [
        ({"tokens": (0, 10)}, r"'reader': token 10; expected 0\.\.9"),
        ({"tokens": (-3, 1)}, r"'reader': token -3"),
    ]  # fmt: skip


@case
def recurrent() -> Made:
    graph = gt.Graph(vertex=("token",))
    states = gt.nn.Recurrent(gt.nn.TokenRNN(10, 4), read="token", name="cell")
    states(graph.input("start")).loss(squares)

    def make(key, token=(0, 9, 3)):
        start = (torch.zeros(1, 4), [0])
        return gt.Instance({"start": start}, {"token": np.array(token)}, key=key)

    return graph, make, [({"token": (0, 1, 2, 10)}, r"'cell': token 10; expected 0\.\.9")]


@case
def gated() -> Made:
    graph = gt.Graph(vertex=("element",), edge=("type", "far"), value=("answer",))
    atoms = graph.input("element", bundle=True).through(nn.Embedding(4, 5), name="embed")
    cell = gt.nn.GatedGraphCell(5, types=3, length="far")
    passed = gt.nn.MessagePassing(cell, steps=2, name="cell")(atoms)
    choice = gt.nn.VertexChoice(5)
    passed.through(choice, read="answer", inside=True, pool=True, name="choice").loss(
        gt.nn.choice_loss, target="answer"
    )
    total = gt.nn.GatedSum(5, features=4)
    passed.through(total, read="element", inside=True, pool=True, name="sum").loss(squares)

    def make(key, element=(0, 3, 1), kind=(0, 2), far=(1.0, 1.5), answer=2, column=None):
        edge = {"source": np.array([0, 1]), "target": np.array([1, 2])}
        edge |= {"type": np.array(kind), "far": np.array(far)}
        column = np.array(element if column is None else column)
        inputs = {"element": torch.tensor(element)}
        return gt.Instance(inputs, {"element": column}, edge, {"answer": answer}, key=key)

    return graph, make, [
        ({"element": (0, 4, 1)}, r"'embed': id 4; expected 0\.\.3"),
        ({"kind": (3, 0)}, r"'cell': edge column 'type' has 3; expected 0\.\.2"),
        ({"kind": (0, -1)}, r"'cell': edge column 'type' has -1"),
        ({"far": (1.0, np.nan)}, "'cell': edge column 'far' holds NaN"),
        ({"answer": 3}, r"'choice': the answer 3 is no vertex .* vertices 0\.\.2"),
        ({"column": (0, 9, 1)}, r"'sum': column 'element' has 9; expected 0\.\.3"),
        ({"element": (0, 1), "column": (0, 1, 1)}, "has 2 rows, the instance 3 vertices"),
    ]  # fmt: skip


@case
def rows_and_classes() -> Made:
    graph = gt.Graph(vertex=("label",))
    ids = graph.input("id", shape=(), dtype=torch.int64)
    scores = ids.through(nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 3)), name="scores")
    scores.loss(gt.cross_entropy, target="label", name="loss")

    def make(key, rows=(0, 5), label=(0, 2, 1)):
        at = np.arange(len(rows)) + 1  # not at vertex 0
        return gt.Instance({"id": (torch.tensor(rows), at)}, {"label": np.array(label)}, key=key)

    return graph, make, [
        ({"rows": (0, 6)}, r"'scores': id 6; expected 0\.\.5"),
        ({"label": (0, 3, 1)}, r"'loss': target 'label' is 3; expected 0\.\.2"),
        ({"label": (0, 0, -1)}, r"'loss': target 'label' is -1"),
    ]  # fmt: skip


class Once:
    """Starts anew for every epoch, knows no length: its instances are packed as they come."""

    def __init__(self, items: list[gt.Instance]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[gt.Instance]:
        return iter(self._items)


RUNTIMES = [gt.Simulated(2), gt.Threads(1)]
BAD = [(name, i) for name, make in CASES.items() for i in range(len(make()[2]))]


@halved(case={f"{name}-{which}": (name, which) for name, which in BAD}, native=[True, False])
def test_what_cannot_be_computed_is_refused_by_key_before_anything_enters(
    case, native, monkeypatch
):
    from geartrain.native import library

    if not native:
        monkeypatch.setattr(library, "current", lambda: None)
    name, which = case
    graph, make, bad = CASES[name]()
    changed, said = bad[which]
    data = [make(f"line {i}") for i in range(9)]
    data[5] = make("line 5", **changed)
    for given in (data, Once(data)):
        session = gt.Session(graph, runtime=gt.Simulated(1), reading=gt.Reading(shuffle=False))
        with pytest.raises(DataError, match=rf"^instance line 5: .*{said}"):
            session.fit(given, epochs=1)
        with pytest.raises(DataError, match=r"^instance line 5: "):
            session.evaluate(given)


@pytest.mark.parametrize("runtime", RUNTIMES, ids=lambda r: r.name)
@pytest.mark.parametrize("name", CASES)
def test_it_is_skipped_alone_where_that_is_asked_for(name, runtime, caplog):
    graph, make, bad = CASES[name]()
    data = [make(f"line {i}") for i in range(20)]
    for i, (changed, _) in enumerate(bad):
        data[2 * i + 1] = make(f"line {2 * i + 1}", **changed)
    for given in (data, Once(data)):
        caplog.clear()
        session = gt.Session(
            graph, runtime=runtime, reading=gt.Reading(on_bad="skip", shuffle=False)
        )
        with caplog.at_level(logging.WARNING, "geartrain.runtime"):
            fit = session.fit(given, epochs=1)
        assert (fit.instances, fit.skipped) == (20 - len(bad), len(bad))
        told = "\n".join(record.message for record in caplog.records)
        assert all(f"instance line {2 * i + 1}:" in told for i in range(len(bad)))


def test_instances_in_columns_are_looked_at_too():
    graph = gt.Graph(vertex=("parent", "slot"))
    tree = gt.nn.WholeTree(gt.nn.TreeLSTMLeaf(3, 3, vocabulary=9), gt.nn.TreeLSTMBranch(3))
    words = graph.input("word", shape=(), dtype=torch.int64, bundle=True)
    words.through(tree, read=("parent", "slot"), inside=True, name="tree").loss(squares)
    parent, slot = np.tile([2, 2, -1], 30), np.tile([0, 1, 0], 30)
    word = torch.tensor([1, 2, -1] * 30)
    word[3 * 17 + 1], parent[3 * 4 + 1] = 77, -1
    columns = gt.Columns(
        np.full(30, 3), {"word": word}, {"parent": parent, "slot": slot}, called="tree"
    )
    session = gt.Session(
        graph, runtime=gt.Simulated(), reading=gt.Reading(on_bad="skip", shuffle=False)
    )
    assert session.fit(columns, epochs=1).skipped == 2
    session = gt.Session(graph, runtime=gt.Simulated(), reading=gt.Reading(shuffle=False))
    with pytest.raises(DataError, match=r"^instance tree 4: 'tree': vertex 2 has one child"):
        session.fit(columns, epochs=1)
    parent[3 * 4 + 1] = 2
    with pytest.raises(DataError, match=r"^instance tree 17: 'tree': word 77"):
        session.fit(columns, epochs=1)


class Words(nn.Module):
    """A user's, with a demand of its own; looks at how it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(1, 1)
        self.asked: list[Brought] = []

    def check_instances(self, brought: Brought) -> None:
        self.asked.append(brought)
        if brought.payload is not None and (brought.payload[0] == 13).any():
            raise DataError("thirteen is not computed here")

    def forward(self, x: Tensor, *columns: Tensor) -> Tensor:
        return self.table(x.float()[:, None])


def test_a_module_is_asked_with_what_it_will_be_called_with():
    words = Words()
    graph = gt.Graph(vertex=("slot",), value=("aim",))
    stream = graph.input("x", step=4)
    stream.through(words, read=("slot", "aim", "step", "size"), name="words").loss(squares)
    data = [
        gt.Instance(
            {"x": (torch.arange(n - 1), np.arange(n - 1)[::-1] + 1)},
            {"slot": np.arange(n) + 10 * n},
            value={"aim": 7 * n},
            key=n,
        )
        for n in (3, 5, 2)
    ]
    gt.Session(graph, runtime=gt.Simulated(), reading=gt.Reading(shuffle=False)).fit(data, epochs=1)
    rows: list[list[int]] = [[], [], [], [], []]
    for brought in words.asked:
        assert brought.payload is not None and brought.edges == {}
        assert list(brought.columns) == ["slot", "aim", "step", "size"]
        assert brought.lengths.sum() == len(brought.payload[0])
        for found, column in zip(
            rows, (brought.payload[0], *brought.columns.values()), strict=True
        ):
            found += column.tolist()  # type: ignore[attr-defined]
    assert rows[0] == [0, 1, 0, 1, 2, 3, 0]
    assert rows[1] == [32, 31, 54, 53, 52, 51, 21]
    assert rows[2] == [21, 21, 35, 35, 35, 35, 14]
    assert rows[3] == [4] * 7 and rows[4] == [3, 3, 5, 5, 5, 5, 2]


def test_it_is_not_asked_of_rows_that_may_not_come():
    words, graph = Words(), gt.Graph()
    some, rest = graph.input("x").where(lambda m: m.payload[0] != 13)
    rest.stop()
    some.through(words).loss(squares)
    data = [gt.Instance({"x": torch.tensor([13, 2])})]
    assert gt.Session(graph, runtime=gt.Simulated()).fit(data, epochs=1).skipped == 0
    assert not words.asked


def test_behind_another_module_the_payload_is_unknown_and_the_columns_are_not():
    words, graph = Words(), gt.Graph(vertex=("slot",))
    graph.input("x").through(torch.abs).through(words, read="slot").loss(squares)
    data = [gt.Instance({"x": torch.tensor([13, 2])}, {"slot": np.array([5, 6])})]
    gt.Session(graph, runtime=gt.Simulated()).fit(data, epochs=1)
    assert [b.payload for b in words.asked] == [None]
    assert words.asked[0].columns["slot"].tolist() == [5, 6]


def test_columns_that_have_been_moved_are_not_those_of_the_input():
    words, graph = Words(), gt.Graph(vertex=("slot",))
    stream = graph.input("x", step=1)
    stream.move(step=2).through(words, read="step", name="one").loss(squares)
    stream.move(vertex=0).through(words, read="slot", name="two").loss(squares)
    data = [gt.Instance({"x": torch.tensor([1, 2])}, {"slot": np.array([5, 6])})]
    gt.Session(graph, runtime=gt.Simulated()).fit(data, epochs=1)
    assert not words.asked


def test_targets_that_nobody_judges_are_not_looked_at():
    graph, make, _ = CASES["rows_and_classes"]()
    session = gt.Session(graph, runtime=gt.Simulated())
    unlabelled = make("new", label=(-1, -1, -1))
    assert len(session.predict([unlabelled])) == 1
    with pytest.raises(DataError, match="target 'label' is -1"):
        session.evaluate([unlabelled])


def test_a_module_that_is_not_what_its_class_says_is_not_asked():
    class Shifted(gt.nn.TokenRNN):
        def forward(self, h: Tensor, token: Tensor) -> Tensor:
            return super().forward(h, token % 10)

    class Same(gt.nn.TokenRNN):
        pass

    assert check_of(gt.nn.TokenRNN(10, 4)) is not None and check_of(Same(10, 4)) is not None
    assert check_of(Shifted(10, 4)) is None
    hooked = nn.Embedding(3, 2)
    assert check_of(hooked) is not None
    hooked.register_forward_pre_hook(lambda module, inputs: (inputs[0] % 3,))
    assert check_of(hooked) is None
    assert check_of(torch.sin) is None and check_of(nn.Linear(1, 1)) is None


def test_an_own_check_for_a_module_that_is_not_ours():
    class Theirs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, None].float()

    def small(module: Theirs, brought: Brought) -> None:
        assert isinstance(module, Theirs) and brought.payload is not None
        require_range("x", brought.payload[0], 3)

    gt.register_check(Theirs, small)
    graph = gt.Graph()
    graph.input("x").through(Theirs(), name="theirs").loss(squares)
    session = gt.Session(graph, runtime=gt.Simulated(), reading=gt.Reading(shuffle=False))
    with pytest.raises(DataError, match=r"instance b: 'theirs': x 3; expected 0\.\.2"):
        session.fit(
            [gt.Instance({"x": torch.tensor([k])}, key=n) for n, k in (("a", 2), ("b", 3))],
            epochs=1,
        )


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (torch.tensor([[0, 3], [4, 1]]), r"it 4; expected 0\.\.3"),
        (np.array([-2, 9]), r"it -2; expected 0\.\.3"),
        (torch.tensor([0, 3]), None),
        (torch.tensor([7.5]), None),
        (np.zeros(0, np.int64), None),
        (torch.zeros(0, dtype=torch.int32), None),
    ],
)
def test_ranges(found, said):
    if said is None:
        require_range("it", found, 4)
    else:
        with pytest.raises(DataError, match=said):
            require_range("it", found, 4)


def test_a_check_that_refuses_many_and_none_of_them_is_told():
    class Fickle(nn.Module):
        def check_instances(self, brought: Brought) -> None:
            if brought.lengths.size > 1:
                raise DataError("too many")

        def forward(self, x: Tensor) -> Tensor:
            return x

    graph = gt.Graph()
    graph.input("x").through(Fickle(), name="fickle").loss(squares)
    packer = gt.Session(graph, runtime=gt.Simulated()).state.ready
    from geartrain.engine.engine import Engine
    from geartrain.engine.settings import Settings

    engine = Engine(graph, {}, Settings())
    assert packer is not None
    with pytest.raises(DataError, match="'fickle' refuses instances together that it takes one"):
        engine.controller.packer.pack([gt.Instance({"x": torch.ones(1, 1)})] * 2)


def test_minibatches_of_a_pipeline_are_looked_at_by_its_first_block():
    """Inputs and targets are joined first, which changes neither."""
    torch.manual_seed(0)
    network = gt.nn.decoder(7, dim=8, blocks=1, heads=2, length=5)

    def criterion(scores: Tensor, target: Tensor) -> Tensor:
        return squares(scores)

    pipe = gt.Pipeline(network, parts=2, criterion=criterion)
    data = [
        gt.minibatch(torch.randint(0, 7, (3, 4)), torch.randint(0, 7, (3, 4)), key=f"batch {k}")
        for k in range(5)
    ]
    data[2].inputs["x"][1, 1] = 7
    data[4] = gt.minibatch(torch.zeros(2, 6).long(), torch.zeros(2, 6).long(), key="batch 4")
    runs = gt.Session(
        pipe.graph, runtime=gt.Simulated(2), reading=gt.Reading(on_bad="skip", shuffle=False)
    )
    fit = runs.fit(data, epochs=1)
    assert (fit.instances, fit.skipped) == (3, 2)
    runs = gt.Session(pipe.graph, runtime=gt.Simulated(2), reading=gt.Reading(shuffle=False))
    with pytest.raises(DataError, match=r"^instance batch 2: 'part 0': token 7; expected 0\.\.6"):
        runs.fit(data, epochs=1)
    with pytest.raises(DataError, match=r"^instance batch 4: 'part 0': 6 tokens in a row"):
        runs.fit(data[3:], epochs=1)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_class_in_brackets_is_refused_with_what_to_give(rows: int) -> None:
    graph = gt.Graph(value=("label",))
    scores = graph.input("x").through(nn.Linear(2, 3), name="scores")
    scores.loss(gt.cross_entropy, target="label", name="loss")
    data = [gt.Instance({"x": torch.ones(rows, 2)}, value={"label": [2]}, key=4)]
    said = r"^instance 4: 'loss': target 'label' has the shape \(1,\); .* 0 to 2: give 2 rather"
    with pytest.raises(DataError, match=said):
        gt.Session(graph).fit(data, epochs=1)


def test_a_prediction_that_is_broadcast_against_its_target_is_told_by_the_shapes() -> None:
    graph = gt.Graph(value=("label",))
    graph.input("x").through(nn.Linear(2, 1)).loss(lambda y, t: (y - t) ** 2, target="label")
    data = [gt.Instance({"x": torch.ones(2, 2)}, value={"label": float(k)}) for k in range(3)]
    said = r"the shapes \(n, 1\) and \(n,\), which together make \(n, n\): .* y\.squeeze\(1\)"
    with pytest.raises(GraphError, match=said):
        gt.Session(graph).fit(data, epochs=1)
