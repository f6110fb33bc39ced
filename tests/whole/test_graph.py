"""Gated graph networks: kernels give what autograd gives, and a bundle is not cut by its batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import geartrain as gt
from geartrain.errors import GraphError
from geartrain.native import library
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from geartrain.nodes.kernel import AbstractKernel, bundle_kernel_of
from geartrain.whole.graph.cell import GatedGraphCell
from geartrain.whole.graph.choice import VertexChoice
from geartrain.whole.graph.gated_sum import GatedSum
from tests.rigs.products import halved

H, TYPES = 5, 3


def inside(sizes: Sequence[int], seed: int = 0, edges_each: int = 4) -> Inside:
    draw = np.random.default_rng(seed)
    source, target = [], []
    start = 0
    for size in sizes:
        n = edges_each if size else 0
        source.append(np.sort(draw.integers(0, max(size, 1), n)) + start)
        target.append(draw.integers(0, max(size, 1), n) + start)
        start += size
    columns = {"source": np.concatenate(source), "target": np.concatenate(target)}
    columns["type"] = draw.integers(0, TYPES, columns["source"].size)
    columns["distance"] = draw.uniform(0.9, 1.6, columns["source"].size)
    return Inside(
        torch.tensor(sizes),
        torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)),
        {name: torch.from_numpy(column) for name, column in columns.items()},
    )


def kernel(module: nn.Module) -> AbstractKernel:
    found = bundle_kernel_of(module)
    assert found is not None
    return found


def check_kernel(module: nn.Module, inputs: Sequence[Tensor], within: Inside) -> None:
    """Outputs and all gradients of the kernel against the module's own, in float64."""
    leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    y = module(*leaves, within)
    dy = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
    wanted = [x for x in leaves if x.requires_grad]
    learning = [p for p in module.parameters() if p.requires_grad]
    expected = torch.autograd.grad(y, [*wanted, *learning], dy)
    own = kernel(module)
    with torch.no_grad():
        outputs, residuals = own.forward(inputs, inside=within)
        if own.room_for is not None:
            room = torch.full_like(residuals[own.room_for], torch.nan)
            outputs, residuals = own.forward(inputs, inside=within, room=room)
            assert residuals[own.room_for] is room
        into = GradientSum(list(module.parameters()))
        answers = own.backward((dy,), residuals, None, into, within)
    assert_close(outputs[0], y.detach())
    assert all(r.shape[0] == inputs[0].shape[0] for r in residuals)
    found = [answer for answer in answers if answer is not None]
    assert [a is not None for a in answers] == [x.is_floating_point() for x in inputs]
    for parameter in module.parameters():
        if not parameter.requires_grad:
            assert into.take(parameter) is None
    sums = [into.take(p) for p in learning]
    for have, want in zip([*found, *sums], expected, strict=True):
        assert have is not None
        assert_close(have, want)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("types", [1, TYPES])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("sizes", [(1,), (3, 1, 6), (40, 70)])
def test_the_kernel_of_the_cell_gives_what_autograd_gives(
    types: int, bias: bool, steps: int, sizes: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    cell = GatedGraphCell(H, types, bias=bias, steps=steps).double()
    check_kernel(cell, [random(sum(sizes), H)], inside(sizes, edges_each=2 * max(sizes)))


def test_steps_of_one_call_are_that_many_calls() -> None:
    torch.manual_seed(0)
    one, three = GatedGraphCell(H, TYPES).double(), GatedGraphCell(H, TYPES, steps=3).double()
    three.load_state_dict(one.state_dict())
    h, within = random(9, H), inside((4, 5))
    want = one(one(one(h, within), within), within)
    assert_close(three(h, within), want)
    with pytest.raises(ValueError, match=r"steps=0.*1 or more"):
        GatedGraphCell(H, steps=0)


@pytest.mark.parametrize("native", [True, False])
def test_without_anybody_below_the_cell_its_weights_learn_the_same(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(library, "current", lambda: None)
    torch.manual_seed(0)
    cell, h, within = GatedGraphCell(H, TYPES, steps=2).double(), random(9, H), inside((4, 5))
    own, rows = kernel(cell), np.arange(9)
    found = []
    with torch.no_grad():
        (y,), kept = own.forward((h,), inside=within)
        for wanted in (True, False):
            into = GradientSum(list(cell.parameters()))
            (dh,) = own.backward((y,), kept, rows, into, within, wanted=wanted)
            assert dh is not None or not wanted
            found.append([into.take(p) for p in cell.parameters()])
    for with_h, without in zip(*found, strict=True):
        assert with_h is not None and without is not None
        assert_close(with_h, without)


def test_steps_with_lengths_scale_every_message() -> None:
    torch.manual_seed(0)
    one = GatedGraphCell(H, TYPES, length="distance").double()
    two = GatedGraphCell(H, TYPES, length="distance", steps=2).double()
    two.load_state_dict(one.state_dict())
    h, within = random(9, H), inside((4, 5))
    assert_close(two(h, within), one(one(h, within), within))


def test_a_batch_without_edges_still_passes_through_the_gates() -> None:
    torch.manual_seed(0)
    check_kernel(GatedGraphCell(H, TYPES).double(), [random(4, H)], inside((3, 1), edges_each=0))


def test_frozen_messages_get_no_gradient() -> None:
    torch.manual_seed(0)
    cell = GatedGraphCell(H, TYPES).double()
    cell.message.requires_grad_(False)
    check_kernel(cell, [random(9, H)], inside((4, 5)))


@pytest.mark.parametrize("what", ["nothing", "floats", "classes"])
@pytest.mark.parametrize("out", [1, 3])
def test_the_kernel_of_the_read_out_gives_what_autograd_gives(what: str, out: int) -> None:
    torch.manual_seed(0)
    given = {
        "nothing": [],
        "floats": [random(10, 4)],
        "classes": [torch.tensor([0, 1, 3, 3, 2, 0, 0, 1, 2, 3])],
    }[what]
    module = GatedSum(H, 4 if given else 0, out).double()
    check_kernel(module, [random(10, H), *given], inside((3, 1, 6)))


@pytest.mark.parametrize("sizes", [(1,), (3, 1, 6)])
def test_the_kernel_of_a_choice_gives_what_autograd_gives(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    within = inside(sizes)
    choice, h = VertexChoice(H).double(), random(sum(sizes), H)
    answers = (within.lengths - 1)[within.segment]
    leaf = h.clone().requires_grad_()
    losses, choices = choice(leaf, answers, within)
    dy = torch.linspace(1, 2, len(sizes), dtype=torch.float64)
    want = torch.autograd.grad(losses, [leaf, choice.score.weight], dy)
    own, into = kernel(choice), GradientSum(choice.parameters())
    with torch.no_grad():
        outputs, residuals = own.forward((h, answers), inside=within)
        answered = own.backward((dy, None), residuals, None, into, within)
        nothing = own.backward((None, None), residuals, None, into, within)
    assert_close(outputs, (losses.detach(), choices))
    assert answered[1] is None and nothing == (None, None)
    assert_close((answered[0], into.take(choice.score.weight)), want)


def test_classes_are_a_one_among_zeros() -> None:
    torch.manual_seed(0)
    module = GatedSum(H, 4).double()
    classes = torch.tensor([0, 3, 1])
    ones = torch.eye(4, dtype=torch.float64)[classes]
    h, within = random(3, H), inside((2, 1))
    assert_close(module(h, classes, within), module(h, ones, within))


def test_a_message_is_that_of_its_type_and_its_edge_s_length() -> None:
    torch.manual_seed(0)
    cell = GatedGraphCell(H, TYPES, length="distance").double()
    h, within = random(6, H), inside((6,))
    assert cell.scale is not None
    heard = torch.zeros(6, H, dtype=torch.float64)
    edges = {name: column.tolist() for name, column in within.edges.items()}
    centres = torch.linspace(0.8, 2.0, 16, dtype=torch.float64)
    for u, v, t, d in zip(
        *(edges[n] for n in ("source", "target", "type", "distance")), strict=True
    ):
        rows = slice(t * H, (t + 1) * H)
        sent = cell.message.weight[rows] @ h[u] + cell.message.bias[rows]
        bumps = torch.exp(-(((d - centres) / (centres[1] - centres[0])) ** 2))
        heard[v] += 2 * torch.sigmoid(cell.scale(bumps)) * sent
    assert_close(cell(h, within), cell.update(heard, h))
    assert bundle_kernel_of(cell) is None


def graph_of(keep: str, seed: int = 3) -> tuple[gt.Graph, list[nn.Module]]:
    torch.manual_seed(seed)
    graph = gt.Graph(vertex=("kind",), edge=("type",), value=("y",))
    cell, readout = GatedGraphCell(H, TYPES).double(), GatedSum(H, 4).double()
    rows = graph.input("x", bundle=True)
    rows = rows.through(cell, name="one", inside=True, keep=keep)
    rows = rows.through(cell, name="two", inside=True, keep=keep)
    y = rows.through(readout, name="sum", read="kind", inside=True, pool=True, keep=keep)
    y.loss(lambda p, t: (p[:, 0] - t) ** 2, "y")
    return graph, [cell, readout]


def molecules(n: int) -> list[gt.Instance]:
    draw = np.random.default_rng(5)
    made = []
    for i in range(n):
        size = 1 + i % 7
        within = inside((size,), seed=i, edges_each=size)
        made.append(
            gt.Instance(
                {"x": torch.from_numpy(draw.normal(size=(size, H)))},
                {"kind": draw.integers(0, 4, size)},
                {name: within.edges[name].numpy() for name in ("source", "target", "type")},
                {"y": float(draw.normal())},
            )
        )
    return made


@pytest.mark.parametrize("max_active", [1, 8])
def test_training_with_kernels_is_training_that_runs_modules_again(max_active: int) -> None:
    weights = []
    for keep in ("inputs", "activations"):
        graph, modules = graph_of(keep)
        rules = gt.Rules(
            optimizer=lambda p: torch.optim.SGD(p, lr=0.05),
            update_every=gt.Flush(),
            average="instances",
        )
        session = gt.Session(
            graph, rules=rules, runtime=gt.Simulated(2, seed=1), max_active=max_active
        )
        session.fit(molecules(20), epochs=2)
        weights.append(torch.cat([p.detach().flatten() for m in modules for p in m.parameters()]))
    assert_close(weights[1], weights[0], rtol=1e-9, atol=1e-12)


def test_updates_of_graphs_in_lockstep_have_the_size_that_was_asked_for() -> None:
    torch.manual_seed(0)
    graph = gt.Graph(vertex=("kind",), edge=("type",), value=("y",))
    kinds = graph.input("kinds", shape=(), dtype=torch.int64, bundle=True)
    rows = kinds.through(lambda k: torch.eye(4).repeat(1, 2)[k][:, :H], name="one-hot")
    rows = rows.through(GatedGraphCell(H, TYPES, steps=2), name="cell", inside=True)
    total = rows.through(GatedSum(H), name="sum", inside=True, pool=True)
    total.loss(lambda p, t: (p[:, 0] - t.to(p.dtype)) ** 2, "y")
    rules = gt.Rules(
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
        update_every=gt.Instances(4),
        average="instances",
    )
    session = gt.Session(graph, rules=rules, runtime=gt.Threads(1), max_active=32)
    kinds_too = [
        gt.Instance({"kinds": torch.from_numpy(m.vertex["kind"])}, m.vertex, m.edge, m.value)
        for m in molecules(64)
    ]
    session.fit(kinds_too, epochs=1)
    assert 14 <= session.parts["cell"].version <= 16


def test_a_module_whose_forward_is_overridden_runs_again() -> None:
    class Other(nn.Module):
        def bundle_kernel(self) -> object:
            return "no kernel"

        def forward(self, h: Tensor, within: Inside) -> Tensor:
            return h

    class Heir(Other):
        def forward(self, h: Tensor, within: Inside) -> Tensor:
            return -h

    assert bundle_kernel_of(Heir()) is None
    with pytest.raises(GraphError, match="expected an AbstractKernel"):
        bundle_kernel_of(Other())


@pytest.mark.parametrize(
    ("features", "given", "said"),
    [
        (2, (), r"features=2\) got 0 columns beside h, expected 1: name it by read="),
        (0, (torch.zeros(3, dtype=torch.int64),), r"features=0\) got 1 columns .*expected 0"),
        (2, (torch.zeros(3, 4),), r"got x \(3, 4\); give features its width, 4"),
    ],
)
def test_a_sum_refuses_features_that_it_was_not_made_for(features, given, said) -> None:
    module, within = GatedSum(H, features).double(), inside([1, 2], edges_each=0)
    h = random(3, H)
    with pytest.raises(GraphError, match=said):
        module(h, *given, within)
    with pytest.raises(GraphError, match=said), torch.no_grad():
        kernel(module).forward((h, *given), inside=within)


def typed_ring(kinds: Sequence[object], key: object = None) -> gt.Instance:
    """A ring whose edges have these types; not sorted by source, as instances may be."""
    v = np.arange(len(kinds))[::-1].copy()
    edge = {"source": v, "target": (v + 1) % v.size, "type": list(kinds), "length": [1.0] * v.size}
    return gt.Instance({"h": torch.randn(v.size, H)}, edge=edge, value={"aim": 0.5}, key=key)


@halved(
    native=[True, False],
    length=[None, "length"],
    keep=["auto", "inputs", "graph"],
    wrong=[-1, TYPES],
)
def test_an_edge_of_a_type_that_there_is_not_is_refused_with_its_instance(
    wrong: int, keep: str, length: str | None, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken for granted, the type -1 of an edge would be another vertex's last type."""
    if not native:
        monkeypatch.setattr(library, "current", lambda: None)
    for steps in (1, 2):
        graph = gt.Graph(edge=("type", "length"), value=("aim",))
        cell = GatedGraphCell(H, TYPES, length=length, steps=steps)
        h = graph.input("h", bundle=True).through(cell, inside=True, keep=keep, name="cell")
        total = h.through(GatedSum(H), inside=True, pool=True, name="total")
        total.loss(nn.functional.mse_loss, "aim")
        data = [typed_ring([0, 1, 2], key=f"line {k}") for k in range(4)]
        data.append(typed_ring([0, wrong, 2], key="line 4"))
        words = rf"instance line 4: 'cell': edge column 'type' has {wrong}; expected 0\.\.2"
        for act in ("fit", "evaluate", "predict"):
            session = gt.Session(graph, runtime=gt.Simulated(1), reading=gt.Reading(shuffle=False))
            with pytest.raises(gt.DataError, match=words):
                session.fit(data, epochs=1) if act == "fit" else getattr(session, act)(data)


@pytest.mark.parametrize("native", [True, False])
def test_types_that_are_no_integers_or_not_there_are_refused(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(library, "current", lambda: None)
    for edge, kinds, error, words in (
        (("type",), [0.0, 1.0, 2.0], gt.DataError, "'type' holds float64; types are integers"),
        ((), [0, 1, 2], GraphError, r"reads edge column 'type'.*Graph\(edge=\('type',\)\)"),
    ):
        graph = gt.Graph(edge=edge)
        cell = GatedGraphCell(H, TYPES)
        graph.input("h", bundle=True).through(cell, inside=True, name="cell").output()
        with pytest.raises(error, match=words):
            gt.Session(graph).predict([typed_ring(kinds)] * 2)
