"""Whole lists in one firing: kernels give what autograd gives, the engine what the loop gives."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import geartrain as gt
from geartrain.errors import DataError
from geartrain.native import library
from geartrain.nn import Recurrent, TokenRNN, WholeList, first_states
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from geartrain.nodes.kernel import bundle_kernel_of
from geartrain.whole.list import loader as native
from tests.rigs.products import in_pairs

H, TOKENS, IN = 5, 7, 3
RAGGED = (3, 1, 4, 4, 2)


@pytest.fixture(params=["native", "torch"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "native" and library.current() is None:
        pytest.skip("no compiled kernels here")
    if request.param == "torch":
        library.current()
        monkeypatch.setattr(library, "_library", None)


def inside(lengths: Sequence[int]) -> Inside:
    n = torch.tensor(lengths)
    return Inside(n, torch.repeat_interleave(torch.arange(len(lengths)), n), {})


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make().double()


def tokens(n: int, most: int = TOKENS) -> Tensor:
    return torch.randint(0, most, (n,), generator=torch.Generator().manual_seed(4))


def features(n: int) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(n, IN, dtype=torch.float64, generator=generator)


def one_by_one(cell: nn.Module, x: Tensor, lengths: Sequence[int], *, every: bool) -> Tensor:
    """List by list and step by step."""
    found = []
    for part in x.split(list(lengths)):  # type: ignore[no-untyped-call]
        h = torch.zeros(1, H, dtype=torch.float64)
        states = [h]
        for at in range(len(part)):
            now = part[at : at + 1]
            states.append(cell(now, states[-1]) if cell_first(cell) else cell(states[-1], now))
        found += states[1:] if every else states[-1:]
    return torch.cat(found)


def cell_first(cell: nn.Module) -> bool:
    return isinstance(cell, nn.RNNCellBase)


CELLS: dict[str, Callable[[], nn.Module]] = {
    "tokens": partial(TokenRNN, TOKENS, H),
    "tokens, tanh": partial(TokenRNN, TOKENS, H, "tanh"),
    "tokens, input matrix": partial(TokenRNN, TOKENS, H, embedding_dim=4),
    "more tokens than rows": partial(TokenRNN, 400, H, "tanh", embedding_dim=4),
    "sparse table": partial(TokenRNN, TOKENS, H, sparse=True),
    "RNNCell": partial(nn.RNNCell, IN, H),
    "RNNCell, relu": partial(nn.RNNCell, IN, H, bias=False, nonlinearity="relu"),
}
LENGTHS = {
    "ragged": RAGGED,
    "one of one": (1,),
    "one": (6,),
    "of one": (1, 1, 1),
    "an empty one": (2, 0, 3),
    "many": tuple(np.random.default_rng(5).integers(1, 9, 130).tolist()),
}


@in_pairs(name=[*CELLS], lengths=LENGTHS, every={"last": False, "every": True})
def test_the_kernel_gives_what_autograd_gives(
    name: str, lengths: Sequence[int], every: bool
) -> None:
    cell = seeded(CELLS[name])
    n, within = sum(lengths), inside(lengths)
    x = features(n) if cell_first(cell) else tokens(n, 400 if "more" in name else TOKENS)
    leaf = x.clone().requires_grad_(x.is_floating_point())
    y = one_by_one(cell, leaf, lengths, every=every)
    dy = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
    wanted = [*cell.parameters(), *([leaf] if leaf.requires_grad else [])]
    expected = torch.autograd.grad(y, wanted, dy, allow_unused=True)
    whole = WholeList(cell, every=every)
    assert_close(whole(x, within).detach(), y.detach())
    kernel = bundle_kernel_of(whole)
    assert kernel is not None
    into = GradientSum(list(cell.parameters()))
    with torch.no_grad():
        room = torch.full((n, H), torch.nan, dtype=y.dtype)
        (out,), residuals = kernel.forward((x,), inside=within, room=room)
        assert residuals[1] is room
        (answer,) = kernel.backward((dy,), residuals, None, into, within)
    assert_close(out, y.detach())
    assert (answer is not None) == x.is_floating_point()
    found = [into.take(p) for p in cell.parameters()] + [answer] * x.is_floating_point()
    for have, want in zip(found, expected, strict=True):
        want = torch.zeros_like(have.to_dense()) if want is None else want
        assert_close(have.to_dense(), want.to_dense())


@pytest.mark.parametrize("name", ["tokens, input matrix", "more tokens than rows", "RNNCell"])
def test_residuals_are_read_where_they_lie(name: str) -> None:
    cell = seeded(CELLS[name])
    n = sum(RAGGED)
    x = features(n) if cell_first(cell) else tokens(n)
    kernel = bundle_kernel_of(WholeList(cell))
    assert kernel is not None
    with torch.no_grad():
        (out,), kept = kernel.forward((x,), inside=inside(RAGGED))
        lists = torch.tensor([4, 0, 2])
        starts = np.cumsum(RAGGED) - RAGGED
        rows = np.concatenate([np.arange(RAGGED[i]) + starts[i] for i in lists.tolist()])
        sums = [GradientSum(list(cell.parameters())) for _ in range(2)]
        dy, within = out[lists] + 1, inside([RAGGED[i] for i in lists.tolist()])
        there = kernel.backward((dy,), kept, rows, sums[0], within)
        gathered = tuple(r[rows] for r in kept)
        here = kernel.backward((dy,), gathered, None, sums[1], within)
    assert_close(there, here)
    for p in cell.parameters():
        assert_close(sums[0].take(p), sums[1].take(p))


@pytest.mark.parametrize("make", [partial(nn.GRUCell, IN, H), partial(nn.RNNCell, IN, H)])
def test_the_module_runs_torchs_cells(make: Callable[[], nn.Module]) -> None:
    cell = seeded(make)
    x = features(sum(RAGGED))
    for every in (False, True):
        expected = one_by_one(cell, x, RAGGED, every=every)
        assert_close(WholeList(cell, every=every)(x, inside(RAGGED)), expected)


def test_a_cell_of_two_states_gives_two() -> None:
    cell = seeded(partial(nn.LSTMCell, IN, H))
    x = features(sum(RAGGED))
    h, c = WholeList(cell)(x, inside(RAGGED))
    rnn = nn.LSTM(IN, H, batch_first=True).double()
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        getattr(rnn, f"{name}_l0").data = getattr(cell, name).data
    each = [rnn(part[None])[1] for part in x.split(list(RAGGED))]  # type: ignore[no-untyped-call]
    assert_close(h, torch.cat([last[0][0] for last in each]))
    assert_close(c, torch.cat([last[1][0] for last in each]))


class Mine(nn.Module):
    """A cell without a kernel; its state goes first."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(H + IN, H)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        y: Tensor = self.map(torch.cat([h, x], 1)).sigmoid()
        return y


def test_a_cell_of_ones_own_wants_its_width_told() -> None:
    cell = seeded(Mine)
    with pytest.raises(ValueError, match=r"how wide is its state.*hidden=\.\.\."):
        WholeList(cell)
    whole, x = WholeList(cell, hidden=H), features(sum(RAGGED))
    assert bundle_kernel_of(whole) is None
    assert_close(whole(x, inside(RAGGED)), one_by_one(cell, x, RAGGED, every=False))
    with pytest.raises(ValueError, match=r"states=0\): give 1 or more"):
        WholeList(cell, hidden=H, states=0)


@pytest.mark.parametrize("name", ["tokens", "more tokens than rows"])
@pytest.mark.parametrize("token", [-1, 400])
def test_a_token_that_is_none_is_refused(name: str, token: int) -> None:
    cell = seeded(CELLS[name])
    kernel = bundle_kernel_of(WholeList(cell))
    assert kernel is not None
    x = tokens(9)
    x[4] = token
    with torch.no_grad(), pytest.raises(DataError, match=rf"token {token}; expected 0\.\."):
        kernel.forward((x,), inside=inside((9,)))


def lists(n: int) -> list[np.ndarray]:
    draw = np.random.default_rng(6)
    return [draw.integers(0, TOKENS, draw.integers(1, 9)) for _ in range(n)]


def loop_form(cell: nn.Module, readout: nn.Module) -> tuple[gt.Graph, list[gt.Instance]]:
    graph = gt.Graph(vertex=("token",), value=("label",))
    start = graph.input("start").through(first_states(H, dtype=torch.float64))
    ended = Recurrent(cell, read="token", name="cell")(start)
    ended.through(readout, name="readout").loss(gt.cross_entropy, "label")
    zero = (torch.zeros(1, 1, dtype=torch.float64), np.zeros(1, np.int64))
    return graph, [
        gt.Instance({"start": zero}, vertex={"token": t}, value={"label": t[0]}) for t in lists(25)
    ]


def whole_form(cell: nn.Module, readout: nn.Module) -> tuple[gt.Graph, list[gt.Instance]]:
    graph = gt.Graph(value=("label",))
    words = graph.input("tokens", bundle=True)
    ended = words.through(WholeList(cell), name="cell", inside=True, pool=True)
    ended.through(readout, name="readout").loss(gt.cross_entropy, "label")
    return graph, [
        gt.Instance({"tokens": torch.from_numpy(t)}, value={"label": t[0]}) for t in lists(25)
    ]


@in_pairs(keep=["auto", "inputs"], embedding_dim=[None, 4], in_flight=[1, 16])
def test_through_the_engine_it_is_the_loop(
    in_flight: int, embedding_dim: int | None, keep: str
) -> None:
    found = []
    for form in (loop_form, whole_form):
        cell = seeded(partial(TokenRNN, TOKENS, H, "tanh", embedding_dim=embedding_dim))
        readout = seeded(partial(nn.Linear, H, TOKENS))
        graph, instances = form(cell, readout)
        sgd = partial(torch.optim.SGD, lr=0.1)
        rules = gt.Rules(optimizer=sgd, update_every=gt.Flush(), average="instances")
        session = gt.Session(
            graph, rules=rules, max_active=in_flight, schedule=gt.Schedule(ramp=gt.Ramp(over=0))
        )
        before = session.evaluate(instances)
        session.fit(instances, epochs=2)
        weights = [p.detach().clone() for m in (cell, readout) for p in m.parameters()]
        found.append((before.metrics["loss"], weights))
    assert_close(found[0][0], found[1][0])
    assert_close(found[0][1], found[1][1])


@pytest.mark.parametrize("every", [False, True], ids=["last", "every"])
@pytest.mark.parametrize("name", ["tokens, input matrix", "RNNCell"])
def test_many_lists_are_spread_over_threads(
    name: str, every: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = seeded(CELLS[name])
    lengths = np.random.default_rng(5).integers(1, 9, 230).tolist()
    x = features(sum(lengths)) if cell_first(cell) else tokens(sum(lengths))
    kernel = bundle_kernel_of(WholeList(cell, every=every))
    assert kernel is not None
    monkeypatch.setattr(native, "_MUCH_WORK", 0)
    found = []
    for threads in (1, 3, 40):
        torch.set_num_threads(threads)
        into = GradientSum(list(cell.parameters()))
        with torch.no_grad():
            (y,), residuals = kernel.forward((x,), inside=inside(lengths))
            (answer,) = kernel.backward((y + 1,), residuals, None, into, inside(lengths))
        found.append([y, answer, *(into.take(p) for p in cell.parameters())])
    assert_close(found[1], found[0])
    assert_close(found[2], found[0])


@pytest.mark.parametrize("every", [False, True], ids=["last", "every"])
def test_long_lists_are_multiplied_part_by_part(every: bool) -> None:
    """More rows wait for the weight's product than are kept for it at one time."""
    lengths = (1700, 1, 900, *[31] * 60)
    cell = seeded(partial(TokenRNN, TOKENS, H, "tanh"))
    x, found = tokens(sum(lengths)), []
    kernel = bundle_kernel_of(WholeList(cell, every=every))
    assert kernel is not None
    for kernels in (library.current(), None):
        into = GradientSum(list(cell.parameters()))
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(library, "_library", kernels)
            (y,), residuals = kernel.forward((x,), inside=inside(lengths))
            kernel.backward((y + 1,), residuals, None, into, inside(lengths))
        found.append([y, *(into.take(p) for p in cell.parameters())])
    assert_close(found[0], found[1])


def test_a_list_as_long_as_a_book_takes_no_more_memory_than_its_rows() -> None:
    n, width = 40_000 if library.current() else 1_000, 64
    cell = TokenRNN(TOKENS, width, "tanh")
    kernel = bundle_kernel_of(WholeList(cell))
    assert kernel is not None
    x = tokens(n)
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(re.search(r"VmSize:\s*(\d+)", Path("/proc/self/status").read_text())[1]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (now + (400 << 20), before[1]))
    try:
        with torch.no_grad():
            (y,), residuals = kernel.forward((x,), inside=inside((n,)))
            into = GradientSum(list(cell.parameters()))
            kernel.backward((y,), residuals, None, into, inside((n,)))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert into.take(cell.weight).isfinite().all()
