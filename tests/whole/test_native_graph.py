"""Message passing and read-outs in C are their torch twins, over rows of a store, in any shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from geartrain.errors import DataError, ProtocolError
from geartrain.native import library
from geartrain.nn import (
    GatedGraphCell,
    GatedSum,
    TokenRNN,
    TreeLSTMBranch,
    TreeLSTMLeaf,
    VertexChoice,
    WholeList,
    WholeTree,
)
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from geartrain.nodes.kernel import AbstractKernel, bundle_kernel_of
from geartrain.whole.graph.loader import HEARD, EdgeIndex, Weights, gated_backward, gated_forward
from geartrain.whole.graph.readouts import (
    Maps,
    choice_backward,
    choice_forward,
    sum_backward,
    sum_forward,
)
from tests.rigs.products import halved

Use = Callable[[library.Library | None], None]
few = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
WIDTHS = st.sampled_from([1, 3, 16, 17, 49, 100])
DTYPES = st.sampled_from([torch.float32, torch.float64])
SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=4)
TOLERANCE = {torch.float32: {"rtol": 1e-3, "atol": 1e-4}, torch.float64: {}}


def graphs(sizes: Sequence[int], types: int, each: int) -> Inside:
    """Graphs of these sizes with so many edges each."""
    draw = np.random.default_rng(len(sizes))
    starts = np.cumsum(sizes) - sizes
    ends = [draw.integers(0, n, (2, each)) + s for n, s in zip(sizes, starts, strict=True)]
    source, target = map(torch.from_numpy, np.concatenate(ends, 1).astype(np.int64))
    kind = torch.from_numpy(draw.integers(0, types, source.numel()))
    lengths = torch.tensor(sizes)
    segment = torch.arange(len(sizes)).repeat_interleave(lengths)
    return Inside(lengths, segment, {"source": source, "target": target, "type": kind})


def passed(
    module: nn.Module,
    inputs: Sequence[Tensor],
    within: Inside,
    rows: np.ndarray,
    kernel: AbstractKernel | None = None,
) -> list[Tensor | None]:
    """Outputs, and all gradients, with residuals that lie in rows of a larger store."""
    kernel = kernel or bundle_kernel_of(module)
    assert kernel is not None
    into = GradientSum(module.parameters())
    with torch.no_grad():
        outputs, residuals = kernel.forward(inputs, inside=within)
        kept = []
        for residual in residuals:
            store = residual.new_full((2 * len(rows) + 1, *residual.shape[1:]), 0)
            store[torch.from_numpy(rows)] = residual
            kept.append(store)
        gradients = tuple(
            torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
            if y.is_floating_point()
            else None
            for y in outputs
        )
        answers = kernel.backward(gradients, tuple(kept), rows, into, within)
    return [*outputs, *answers, *map(into.take, module.parameters())]


def agree(
    use: Use, native: library.Library, module: nn.Module, inputs: Sequence[Tensor], within: Inside
) -> None:
    n = inputs[0].shape[0]
    rows = np.random.default_rng(n).permutation(2 * n + 1)[:n]
    use(native)
    have = passed(module, inputs, within, rows)
    use(None)
    want = passed(module, inputs, within, rows)
    for mine, theirs in zip(have, want, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert_close(mine, theirs, **TOLERANCE[inputs[0].dtype])


def states(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, width, dtype=dtype, generator=torch.Generator().manual_seed(rows))


@few
@given(WIDTHS, DTYPES, SIZES, st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_steps_in_c_are_steps_in_torch(
    native: library.Library,
    use: Use,
    width: int,
    dtype: torch.dtype,
    sizes: list[int],
    types: int,
    steps: int,
    bias: bool,
) -> None:
    torch.manual_seed(0)
    cell = GatedGraphCell(width, types, bias=bias, steps=steps).to(dtype)
    within = graphs(sizes, types, each=7)
    agree(use, native, cell, [states(sum(sizes), width, dtype)], within)


@halved(width=[8, 24, 32, 40, 56, 64, 72, 96, 112], dtype=[torch.float32, torch.float64])
def test_tiles_of_any_number_of_rows_and_columns(
    native: library.Library, use: Use, width: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    cell = GatedGraphCell(width).to(dtype)
    for rows in (*range(1, 10), 14, 17):
        h = states(rows, width, dtype)
        agree(use, native, cell, [h], graphs([rows], 1, each=rows + 1))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    "sizes",
    [[50, 50], [1, 99], [99, 1], [100], [33, 33, 34], [1] * 100, [10, 20, 30, 20, 10, 10]],
    ids=lambda sizes: f"{len(sizes)} graphs, {max(sizes)} at most",
)
def test_two_threads_share_the_graphs(native: library.Library, use: Use, sizes: list[int]) -> None:
    torch.manual_seed(0)
    cell = GatedGraphCell(64, 2, steps=4).double()
    h = states(100, 64, torch.float64)
    agree(use, native, cell, [h], graphs(sizes, 2, each=9))


@pytest.mark.usefixtures("two_threads")
def test_graphs_whose_edges_are_mixed_are_not_shared_out_and_right(
    native: library.Library, use: Use
) -> None:
    torch.manual_seed(0)
    cell = GatedGraphCell(64, 2, steps=4).double()
    within = graphs([50, 50], 2, each=20)
    mixed = torch.randperm(40)
    edges = {name: column[mixed] for name, column in within.edges.items()}
    within = Inside(within.lengths, within.segment, edges)
    agree(use, native, cell, [states(100, 64, torch.float64)], within)


@few
@given(WIDTHS, SIZES, st.integers(1, 3), st.integers(1, 4))
def test_short_products_are_as_exact_as_bfloat16(
    native: library.Library, use: Use, width: int, sizes: list[int], types: int, steps: int
) -> None:
    torch.manual_seed(0)
    cell = GatedGraphCell(width, types, steps=steps)
    kernel = bundle_kernel_of(cell)
    assert kernel is not None
    within = graphs(sizes, types, each=7)
    h = states(sum(sizes), width, torch.float32)
    rows = np.random.default_rng(0).permutation(2 * len(h) + 1)[: len(h)]
    use(native)
    exact = passed(cell, [h], within, rows)
    bf16 = passed(cell, [h], within, rows, kernel.rounded())
    for mine, theirs in zip(bf16, exact, strict=True):
        assert mine is not None and theirs is not None
        assert mine.dtype is torch.float32
        assert float((mine - theirs).norm()) <= 0.02 * float(theirs.norm()) + 1e-6


def test_weight_gradients_over_more_rows_than_are_packed_at_once(
    native: library.Library, use: Use
) -> None:
    torch.manual_seed(0)
    cell = GatedGraphCell(20, 2, steps=3).double()
    within = graphs([90, 110], 2, each=400)
    agree(use, native, cell, [states(200, 20, torch.float64)], within)


@few
@given(WIDTHS, DTYPES, SIZES, st.integers(0, 4), st.integers(1, 3))
def test_gated_sums_in_c_are_those_in_torch(
    native: library.Library,
    use: Use,
    width: int,
    dtype: torch.dtype,
    sizes: list[int],
    features: int,
    out: int,
) -> None:
    torch.manual_seed(0)
    n = sum(sizes)
    given_too = [torch.arange(n) % features] if features else []
    module = GatedSum(width, features, out).to(dtype)
    agree(use, native, module, [states(n, width, dtype), *given_too], graphs(sizes, 1, each=2))


@few
@given(WIDTHS, DTYPES, SIZES)
def test_choices_in_c_are_those_in_torch(
    native: library.Library, use: Use, width: int, dtype: torch.dtype, sizes: list[int]
) -> None:
    torch.manual_seed(0)
    within = graphs(sizes, 1, each=2)
    answers = (within.lengths - 1)[within.segment]
    h = states(sum(sizes), width, dtype)
    agree(use, native, VertexChoice(width).to(dtype), [h, answers], within)


def ring(n: int, kind: int = 0) -> EdgeIndex:
    at = torch.arange(n)
    return EdgeIndex(at, at.roll(1), torch.full((n,), kind))


def weights(width: int, types: int) -> Weights:
    cell = GatedGraphCell(width, types).requires_grad_(False)
    to, gru = cell.message, cell.update
    return Weights(to.weight, to.bias, gru.weight_ih, gru.bias_ih, gru.weight_hh, gru.bias_hh)


def test_an_edge_of_a_type_that_there_is_not_is_refused(native: library.Library, use: Use) -> None:
    use(native)
    h, kept = torch.zeros(3, 4), torch.zeros(3, 1, HEARD, 4)
    with pytest.raises(DataError, match=r"type 2; expected 0\.\.1"):
        gated_forward(h, ring(3, kind=2), weights(4, 2), kept)
    with pytest.raises(DataError, match=r"no vertex of its graph; expected 0\.\.2"):
        gated_forward(h, ring(5), weights(4, 2), kept)


def test_rows_that_there_are_not_are_refused(native: library.Library, use: Use) -> None:
    use(native)
    h, kept = torch.zeros(3, 4), torch.zeros(3, 1, HEARD, 4)
    rows = np.array([0, 1, 3])
    with pytest.raises(ProtocolError, match=r"rows \[3\] are to be read"):
        gated_backward(h, h, kept, rows, ring(3), weights(4, 2))
    with pytest.raises(ProtocolError, match=r"rows \[3\] are to be read"):
        d, slopes = torch.zeros(1), torch.zeros(3)
        choice_backward(d, h, slopes, rows, torch.tensor([3]), torch.zeros(1, 4))


def test_what_c_cannot_do_is_left_to_torch(native: library.Library, use: Use) -> None:
    use(native)
    h, kept = torch.zeros(3, 4), torch.zeros(3, 1, HEARD, 4)
    half = torch.bfloat16
    assert gated_forward(h.to(half), ring(3), weights(4, 2), kept.to(half)) is None
    assert gated_forward(h.double(), ring(3), weights(4, 2), kept.double()) is None
    answers, lengths, w = torch.zeros(3, dtype=torch.int64), torch.tensor([2]), torch.zeros(1, 4)
    assert choice_forward(h, answers, lengths, w) is None  # lengths of other rows


def test_a_gradient_that_nobody_wants_is_not_computed(native: library.Library, use: Use) -> None:
    use(native)
    h, kept, w = states(3, 4, torch.float32), torch.zeros(3, 2, HEARD, 4), weights(4, 2)
    gated_forward(h, ring(3), w, kept)
    whole = gated_backward(h, h, kept, None, ring(3), w)
    part = gated_backward(h, h, kept, None, ring(3), w, wanted=False)
    assert whole is not None and part is not None
    assert part.h is None and whole.h is not None
    for name in ("message", "message_bias", "ih", "ih_bias", "hh", "hh_bias"):
        assert_close(getattr(part, name), getattr(whole, name), rtol=0, atol=0)


@pytest.mark.parametrize("answer", [-1, 3])
def test_an_answer_that_is_no_vertex_is_refused(
    native: library.Library, use: Use, answer: int
) -> None:
    use(native)
    answers = torch.tensor([0, 0, answer, answer, answer])
    with pytest.raises(DataError, match=rf"answer {answer} is no vertex .* 0\.\.2"):
        choice_forward(torch.zeros(5, 4), answers, torch.tensor([2, 3]), torch.zeros(1, 4))


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("source", -1, r"from or to no vertex of its graph; expected 0\.\.2"),
        ("source", 2**63 - 1, r"from or to no vertex of its graph; expected 0\.\.2"),
        ("target", -1, r"from or to no vertex of its graph; expected 0\.\.2"),
        ("type", -1, r"edge 2 has type -1 in column 'type', expected 0\.\.1"),
        ("type", None, r"columns of shapes \[\(3,\), \(3,\), \(2,\)\]; give each edge one source"),
        ("source", None, r"columns of shapes \[\(2,\), \(3,\), \(3,\)\]"),
    ],
)
def test_edges_that_are_none_are_refused_with_kernels_and_without(
    native: library.Library, use: Use, kernels: bool, column: str, value: int | None, said: str
) -> None:
    """Without, -1 would be the last of all vertices; of a short column C would read too much."""
    use(native if kernels else None)
    edges = {"source": torch.arange(3), "target": torch.arange(3), "type": torch.zeros(3).long()}
    edges[column][2:] = -1 if value is None else value
    if value is None:
        edges[column] = edges[column][:2]
    kernel = bundle_kernel_of(GatedGraphCell(4, 2))
    assert kernel is not None
    inside = Inside(torch.tensor([3]), torch.zeros(3).long(), edges)
    with torch.no_grad(), pytest.raises(DataError, match=said):
        kernel.forward((torch.zeros(3, 4),), inside=inside)


def test_weights_and_states_of_other_widths_are_left_to_torch(
    native: library.Library, use: Use
) -> None:
    use(native)
    h, kept, w = torch.zeros(3, 4), torch.zeros(3, 1, HEARD, 4), weights(4, 2)
    for name, shape in (("ih", (12, 3)), ("hh", (9, 4)), ("message_bias", (4,)), ("ih_bias", (4,))):
        other = replace(w, **{name: torch.zeros(shape)})
        assert gated_forward(h, ring(3), other, kept) is None
        assert gated_backward(h, h, kept, None, ring(3), other) is None
    assert gated_backward(h, h[:2], kept, None, ring(3), w) is None
    maps = Maps(torch.zeros(2, 5), torch.zeros(2), torch.zeros(2, 4), torch.zeros(2))
    lengths, d, made = torch.tensor([3]), torch.zeros(1, 2), torch.zeros(3, 2, 2)
    x = torch.zeros(3, dtype=torch.int64)
    assert sum_forward(h, x, lengths, maps) is not None
    for name, shape in (("gate", (1, 5)), ("gate_bias", (1,)), ("value_bias", (1,))):
        other = replace(maps, **{name: torch.zeros(shape)})
        assert sum_forward(h, x, lengths, other) is None
        assert sum_backward(d, h, x, made, None, lengths, other) is None
    assert sum_backward(d, h, x, made[:2], None, lengths, maps) is None
    assert sum_backward(d, h, x[:2], made, None, lengths, maps) is None
    slopes, w = torch.zeros(3), torch.zeros(1, 4)
    assert choice_backward(torch.zeros(1), h, slopes[:2], None, lengths, w) is None
    assert choice_backward(torch.zeros(1), h, slopes, None, lengths, w[:, :3]) is None


@pytest.mark.parametrize("feature", [-1, 1, -(2**63)])
def test_a_feature_that_is_none_is_refused_on_the_way_back_too(
    native: library.Library, use: Use, feature: int
) -> None:
    use(native)
    maps = Maps(torch.zeros(2, 5), torch.zeros(2), torch.zeros(2, 4), torch.zeros(2))
    h, x, made = torch.zeros(3, 4), torch.tensor([0, feature, 0]), torch.zeros(3, 2, 2)
    lengths, rows = torch.tensor([2]), np.array([2, 1])
    with pytest.raises(DataError, match=rf"feature {feature}; expected 0\.\.0"):
        sum_backward(torch.zeros(1, 2), h, x, made, rows, lengths, maps)


@pytest.mark.parametrize("kernels", [True, False])
def test_no_rows_are_no_trouble(native: library.Library, use: Use, kernels: bool) -> None:
    use(native if kernels else None)
    none, rows = torch.zeros(0, dtype=torch.int64), np.zeros(0, np.int64)
    within = Inside(none, none, {"source": none, "target": none, "type": none})
    modules: list[tuple[nn.Module, list[Tensor]]] = [
        (GatedGraphCell(4, 2), []),
        (GatedSum(4, 2, 3), [none]),
        (VertexChoice(4), [none]),
        (WholeList(TokenRNN(5, 4)), []),
        (WholeList(nn.RNNCell(4, 4), every=True), []),
        (WholeTree(TreeLSTMLeaf(4, 4), TreeLSTMBranch(4)), [none, none]),
        (WholeTree(TreeLSTMLeaf(4, 4, vocabulary=5, sparse=False), TreeLSTMBranch(4)), [none] * 2),
    ]
    for module, others in modules:
        words = any(isinstance(inner, nn.Embedding) for inner in module.modules())
        x = none if words else torch.zeros(0, 4)
        found = passed(module, [x, *others], within, rows)
        assert all(not g.to_dense().any() for g in found if g is not None)
