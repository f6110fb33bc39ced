"""Derived programs as steps in C: what torch computes, of every operator that has a step."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from geartrain.derived import fused
from geartrain.derived.derivation import derive
from geartrain.derived.fused import PackedWeights
from geartrain.derived.operands import Operands
from geartrain.derived.packs import OperandPlaces
from geartrain.derived.program import Program
from geartrain.errors import ProtocolError
from geartrain.native import library, pool
from geartrain.native.fused import AT_A_TIME, At, Op, Packing, Reckoning, Step, Steps
from geartrain.native.pool import LEAST
from geartrain.native.ragged import RaggedStep, RaggedSteps, Way
from geartrain.native.steady import steady
from geartrain.nodes.gradient import GradientSum
from tests.rigs.products import in_pairs
from tests.rigs.programs_in_c import ops_of

N, D, WORDS = 23, 6, 9


pytestmark = pytest.mark.usefixtures("needs_kernels")


class Gates(nn.Module):
    """Products, a table, splits and a cat in the backward; what it reads of c is wide."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(WORDS, D), nn.Linear(D, 3 * D)
        self.had = nn.Linear(D, 3 * D, bias=False)

    def forward(self, h: Tensor, word: Tensor) -> tuple[Tensor, Tensor]:
        i, o, u = (self.inner(self.words(word)) + self.had(h)).chunk(3, 1)
        c = torch.sigmoid(i) * torch.tanh(u) + h
        return torch.sigmoid(o) * torch.tanh(c), c


class Normed(nn.Module):
    """A norm, a pair of rows that is flattened and averaged, and functions of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(D), nn.Linear(2 * D, D)
        self.shift = nn.Parameter(torch.rand(D))

    def forward(self, pair: Tensor) -> Tensor:
        both = nn.functional.gelu(self.inner(pair.flatten(1)))
        y = self.norm(both - 0.5 * pair.mean(1)) * self.shift
        return nn.functional.silu(y) + torch.relu(y - 0.1) / 3 - y.neg().exp()


class Halting(nn.Module):
    """A minimum, whose slope is chosen by comparing, and one number a row that meets many."""

    def __init__(self) -> None:
        super().__init__()
        self.halt, self.worth = nn.Linear(D, 1), nn.Linear(D, 3)

    def forward(self, h: Tensor, spent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        share = torch.minimum(torch.sigmoid(self.halt(h)), 1 - spent)
        worth = self.worth(h).softmax(1)
        return share * h + worth[:, 1:2], spent + share, h / (2 + worth.sum(1, keepdim=True))


class Stacked(nn.Module):
    """A cat, items of a pair, another maximum; an input that is handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Linear(3 * D, D)

    def forward(self, pair: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        left, right = pair[:, 0], pair[:, 1]
        y = self.new(torch.cat([left, torch.maximum(right, h), h * right], 1))
        return y + pair.sum(1), h


def _rows(*tail: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(N, *tail, dtype=dtype)


def _words(dtype: torch.dtype) -> Tensor:
    return torch.randint(0, WORDS, (N,))


_CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.dtype], tuple[Tensor, ...]]]] = {
    "gates": (Gates, lambda t: (_rows(D, dtype=t), _words(t))),
    "normed": (Normed, lambda t: (_rows(2, D, dtype=t),)),
    "halting": (Halting, lambda t: (_rows(D, dtype=t), torch.rand(N, 1, dtype=t))),
    "stacked": (Stacked, lambda t: (_rows(2, D, dtype=t), _rows(D, dtype=t))),
}


def _made(name: str, dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    make, given = _CASES[name]
    return make().to(dtype), given(dtype)


def _both_ways(
    module: nn.Module, program: Program, inputs: tuple[Tensor, ...], rows: list[int] | None
) -> list[Tensor]:
    """Outputs, gradients of inputs and of weights."""
    torch.manual_seed(1)
    into = GradientSum(list(module.parameters()))
    with torch.no_grad():
        outputs, kept = program.forward(inputs)
        n = N if rows is None else len(rows)
        dys = tuple(torch.randn(n, *y.shape[1:], dtype=y.dtype) for y in outputs)
        which = None if rows is None else torch.tensor(rows).numpy()
        back = program.backward(dys, kept, which, into)
        sums = [into.take(p) for p in module.parameters()]
    found = [*outputs, *(d for d in back if d is not None)]
    return found + [d.to_dense().clone() for d in sums if d is not None]


@in_pairs(
    name=[*_CASES],
    rows=[None, [4, 0, 19, 4, 7], [5, 6, 7, 8], [8, 7, 6], [3]],
    dtype=[torch.float64, torch.float32],
)
def test_steps_compute_what_torch_does(
    name: str, rows: list[int] | None, dtype: torch.dtype
) -> None:
    module, inputs = _made(name, dtype)
    cut = derive(module, inputs)
    assert cut.parts.fused is not None
    operands = Operands(module)
    found = _both_ways(module, Program(cut, operands), inputs, rows)
    wanted = _both_ways(module, Program(cut, operands, fused=False), inputs, rows)
    close = 1e-12 if dtype is torch.float64 else 2e-5
    torch.testing.assert_close(found, wanted, rtol=close, atol=close)


def test_what_is_kept_beside_inputs_and_outputs_is_one_tensor() -> None:
    module, inputs = _made("gates", torch.float32)
    cut = derive(module, inputs)
    with torch.no_grad():
        outputs, kept = Program(cut, Operands(module)).forward(inputs)
    own = [x for x in kept if not any(x is y for y in (*inputs, *outputs))]
    lone = Program(cut, Operands(module), fused=False)
    with torch.no_grad():
        _, many = lone.forward(inputs)
    assert len(own) < len(kept) < len(many)
    assert sum(x.numel() for x in kept) <= sum(x.numel() for x in many)


@pytest.mark.parametrize("name", list(_CASES))
def test_what_is_kept_is_written_where_there_is_room_for_it(name: str) -> None:
    module, inputs = _made(name, torch.float64)
    program = Program(derive(module, inputs), Operands(module))
    k = program.room_for
    with torch.no_grad():
        outputs, kept = program.forward(inputs)
        assert k == len(kept) - 1
        store = kept[k].new_full((N + 9, *kept[k].shape[1:]), float("nan"))
        again, there = program.forward(inputs, room=store[4 : 4 + N])
        short = program.forward(inputs, room=store[:3])[1][k]
    torch.testing.assert_close(again, outputs, rtol=0, atol=0)
    assert there[k].data_ptr() == store[4].data_ptr() and torch.equal(store[4 : 4 + N], kept[k])
    assert torch.equal(short, kept[k]) and short.data_ptr() != store.data_ptr()
    assert bool(store[:4].isnan().all()) and bool(store[4 + N :].isnan().all())
    assert Program(program.cut, Operands(module), fused=False).room_for is None
    lone = nn.Linear(D, D)
    assert Program(derive(lone, (torch.rand(3, D),)), Operands(lone)).room_for is None


@pytest.mark.parametrize("name", list(_CASES))
def test_rows_that_are_neighbours_are_read_where_they_lie_and_lent_to_nobody(name: str) -> None:
    """Their place may be another's before gradients are taken."""
    module, inputs = _made(name, torch.float64)
    program, rows = Program(derive(module, inputs), Operands(module)), np.arange(6, 11)
    found = []
    with torch.no_grad():
        outputs, kept = program.forward(inputs)
        dys = tuple(torch.ones(5, *y.shape[1:], dtype=y.dtype) for y in outputs)
        for spoilt in (False, True):
            into, mine = GradientSum(list(module.parameters())), tuple(x.clone() for x in kept)
            back = program.backward(dys, mine, rows, into)
            for x in mine if spoilt else ():
                x.fill_(-1) if x.is_floating_point() else x.zero_()
            sums = [into.take(p) for p in module.parameters()]
            found.append([d.to_dense() for d in (*back, *sums) if d is not None])
        with pytest.raises(ProtocolError, match=r"out of range|rows of"):
            program.backward(dys, kept, rows + N - 8, GradientSum(list(module.parameters())))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_rows_that_do_not_lie_side_by_side_are_read_as_they_are() -> None:
    module, (pair, h) = _made("stacked", torch.float64)
    cut = derive(module, (pair, h))
    turned = pair.transpose(1, 2).contiguous().transpose(1, 2), h.t().contiguous().t()
    found = _both_ways(module, Program(cut, Operands(module)), turned, None)
    wanted = _both_ways(module, Program(cut, Operands(module)), (pair, h), None)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_row_that_a_table_lacks_is_refused_as_torch_does_it() -> None:
    module, (h, word) = _made("gates", torch.float32)
    program = Program(derive(module, (h, word)), Operands(module))
    word[3] = WORDS
    with pytest.raises(IndexError, match="index out of range"), torch.no_grad():
        program.forward((h, word))


def test_weights_are_packed_once_a_firing_and_anew_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed: list[Packing] = []
    before = Packing.run

    def watched(self: Packing) -> None:
        packed.append(self)
        before(self)

    monkeypatch.setattr(Packing, "run", watched)
    module, inputs = _made("stacked", torch.float64)
    assert isinstance(module, Stacked)
    program = Program(derive(module, inputs), Operands(module))
    packed.clear()
    with torch.no_grad(), steady():
        program.forward(inputs)
        program.forward(inputs)
    assert len(packed) == 1
    module.new.weight.data.mul_(2)  # which torch does not count
    with torch.no_grad(), steady():
        (y, _), _ = program.forward(inputs)
    assert packed == packed[:1] * 2  # where they were packed
    torch.testing.assert_close(y, module(*inputs)[0].detach())


@pytest.mark.parametrize("most", [None, 0])
def test_outside_of_a_firing_weights_are_packed_at_each_call_where_they_were_if_that_is_little(
    most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[Packing] = []
    before = Packing.run

    def watched(self: Packing) -> None:
        packed.append(self)
        before(self)

    if most is not None:
        monkeypatch.setattr(fused, "_FEW_BYTES", most)
    module, inputs = _made("stacked", torch.float64)
    assert isinstance(module, Stacked)
    program = Program(derive(module, inputs), Operands(module))
    monkeypatch.setattr(Packing, "run", watched)
    with torch.no_grad():
        program.forward(inputs)
        module.new.weight.data.mul_(2)  # which torch does not count
        (y, _), _ = program.forward(inputs)
        torch.testing.assert_close(y, module(*inputs)[0])
        with steady():
            program.forward(inputs)
    assert len(packed) == 3
    assert len(set(packed)) == (1 if most is None else 3)


def _moved(module: nn.Module) -> None:
    for p in module.parameters():
        p.data = p.data * 2


def _turned(module: nn.Module) -> None:
    for p in module.parameters():
        if p.ndim == 2:
            p.data = p.data.t().contiguous().t()


def _replaced(module: nn.Module) -> None:
    for each in module.modules():
        for name, p in list(each.named_parameters(recurse=False)):
            setattr(each, name, nn.Parameter(p.detach() / 2))


@pytest.mark.parametrize("change", [_moved, _turned, _replaced])
@pytest.mark.parametrize("name", ["stacked", "gates", "normed"])
def test_weights_that_lie_elsewhere_are_found_there(
    name: str, change: Callable[[nn.Module], None]
) -> None:
    module, inputs = _made(name, torch.float64)
    program = Program(derive(module, inputs), Operands(module))
    for _ in range(2):
        with torch.no_grad(), steady():
            found, _ = program.forward(inputs)
            want = module(*inputs)
        torch.testing.assert_close(found, want if isinstance(want, tuple) else (want,))
        change(module)


def test_another_thread_packs_weights_elsewhere() -> None:
    """Nobody writes where a thread may be reading."""
    module, inputs = _made("stacked", torch.float64)
    program = Program(derive(module, inputs), Operands(module))
    places: list[OperandPlaces] = []

    def look() -> None:
        with torch.no_grad(), steady():
            operands = program.operands.tensors()
            places.append(program._packed.of(program.pair.forward, operands))

    look()
    look()
    other = threading.Thread(target=look)
    other.start()
    other.join()
    look()
    assert places[0] is places[1]
    assert len({*map(id, places)}) == 3


def test_threads_share_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = _made("gates", torch.float64)
    program = Program(derive(module, inputs), Operands(module))
    alone = _both_ways(module, program, inputs, None)
    monkeypatch.setattr(library, "threads_for", lambda work: 3)
    torch.testing.assert_close(_both_ways(module, program, inputs, None), alone, rtol=0, atol=0)


class MostFrequent(nn.Module):
    """Nothing in C knows which comes most often."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mode(1, True)[0] * x


def test_large_results_are_lent_by_the_pool() -> None:
    """malloc would find another place for each, and keep all of them."""
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(D, 32), nn.Tanh())
    x = torch.randn(LEAST // 128, D)
    program = Program(derive(module, (x,)), Operands(module))
    before = pool.shared.nbytes()
    (few, *_), _ = program.forward((x[:-1],))
    assert pool.shared.nbytes() == before
    (y, *_), residuals = program.forward((x,))
    assert pool.shared.nbytes() - before == y.nbytes == LEAST
    assert torch.equal(y[:-1], few)
    torch.testing.assert_close(y, module(x))
    del y, residuals
    assert pool.shared.nbytes() == before


def test_what_has_no_step_is_left_to_torch() -> None:
    cut = derive(MostFrequent(), (torch.rand(N, D),))
    assert cut.parts.fused is None


def test_large_weights_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = nn.Linear(D, 600_000 // D)  # as cells of some hundred columns have
    assert derive(wide, (torch.rand(N, D),)).parts.fused is not None
    for most in (D * D, D * D - 1):
        monkeypatch.setattr("geartrain.derived.steps.lower.MOST_WEIGHTS", most)
        fused = derive(nn.Linear(D, D), (torch.rand(N, D),)).parts.fused
        assert (fused is None) == (most < D * D)


def test_rows_of_another_width_are_refused() -> None:
    module, (pair, h) = _made("stacked", torch.float64)
    cut = derive(module, (pair, h))
    assert cut.parts.fused is not None
    operands = Operands(module).tensors()
    with pytest.raises(ProtocolError, match="rows of"), torch.no_grad():
        cut.parts.fused.forward(N, [*operands, pair, h[:, 1:]], PackedWeights())


@pytest.mark.parametrize(("name", "copies"), [("gates", (0, 0)), ("stacked", (1, 2))])
def test_what_only_a_cat_reads_is_written_where_it_lies_there(
    name: str, copies: tuple[int, int]
) -> None:
    module, inputs = _made(name, torch.float64)
    pair = derive(module, inputs).parts.fused
    assert pair is not None
    found = tuple(ops_of(r._steps).count(Op.COPY) for r in (pair.forward, pair.backward))
    assert found == copies


@pytest.mark.parametrize("op", sorted(AT_A_TIME))
def test_a_step_that_would_never_end_is_refused(op: Op) -> None:
    with pytest.raises(ProtocolError, match=f"{op.name} of 4 entries takes 0 at a time"):
        Step(op, 4, ())
    Step(op, 4, (), many=2)
    Step(op, 0, ())


_MANY_AND_INNER = (Op.MOST_BACK, Op.SCATTER, Op.CUMULATE, Op.FLIP, Op.DISTANCES)
_INNER = (Op.EXPAND, Op.REDUCE, Op.MOST, Op.MOST_AT, Op.ONE_HOT)
_NAMING = (Op.GATHER, Op.RANK, Op.RANK_UP)
_ENDLESS = [
    *((op, "many") for op in (*AT_A_TIME, *_MANY_AND_INNER, Op.TURN)),
    *((op, "inner") for op in (*_INNER, *_MANY_AND_INNER, *_NAMING, Op.MATRICES, Op.TURN)),
    *((op, "number") for op in (*_NAMING, Op.MATRICES, Op.TURN, Op.PIECES)),
]


@pytest.mark.parametrize("op", [Op.GATHER, Op.SCATTER])
def test_c_names_no_more_neighbours_than_there_are(op: Op) -> None:
    memory = torch.zeros(3, 64)

    def run(neighbours: int) -> None:
        places = At(0, 0, 16), At(1, 0, 16), At(2, 0, 16), At(at=neighbours)
        step = Step(op, 12, places, many=1, inner=6, number=2.0)
        Steps([step], [0, 0, 0], torch.float32).run(3, [x.data_ptr() for x in memory])

    for sound in (0, 1, 2, 3, 6):
        run(sound)
    for wrong in (4, 7, 12):
        with pytest.raises(ProtocolError, match="would never end"):
            run(wrong)


@pytest.mark.parametrize("by", [0, -1])
@pytest.mark.parametrize("how", [Reckoning.DIVIDED, Reckoning.LEFT])
def test_c_divides_by_nothing_below_one(how: Reckoning, by: int) -> None:
    """The processor would stop at 0, and at the least integer by -1."""
    memory = torch.full((2, 3), -(1 << 63))

    def run(many: int, *others: At) -> None:
        step = Step(Op.RECKON, 1, (At(0, 0, 1), At(1, 0, 1), *others), many=many, inner=int(how))
        Steps([step], [0, 0], torch.float32).run(3, [x.data_ptr() for x in memory])

    run(1)
    for wrong in ((by,), (1, At(1, 0, 1))):
        with pytest.raises(ProtocolError, match="would never end"):
            run(*wrong)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("op", "word"), sorted(_ENDLESS), ids=str)
def test_c_refuses_what_would_never_end_as_well(op: Op, word: str, dtype: torch.dtype) -> None:
    memory = torch.zeros(3, 64, dtype=torch.float64)
    out, a, b = (At(k, 0, 16) for k in range(3))
    where = (out, a, b) if op is Op.MATRICES else (out, a, b, b, b, b)
    step = Step(op, 4, where, many=1, inner=1, number=1.0)

    def run() -> None:
        Steps([step], [0, 0, 0], dtype).run(3, [x.data_ptr() for x in memory])

    run()
    object.__setattr__(step, word, 0)
    with pytest.raises(ProtocolError, match="takes no entries at a time"):
        run()


@pytest.mark.parametrize("ends", [-1, 1])
def test_nor_do_programs_over_rows_of_several_kinds(ends: int) -> None:
    memory = torch.zeros(3, 64, dtype=torch.float64)
    memory[1] = torch.arange(64).view(torch.float64)
    step = Step(Op.SOFTMAX, 4, (At(0, 0, 4), At(2, 0, 4)), many=2)

    def run() -> None:
        steps = [RaggedStep(Way.PLAIN, step, 0)]
        ragged = RaggedSteps(steps, [0, 0, 0], [0, 0, 0], torch.float64, ends)
        ragged.run([5, 5, 0, 0, 0], [x.data_ptr() for x in memory])

    run()
    object.__setattr__(step, "many", 0)
    with pytest.raises(ProtocolError, match="takes no entries at a time"):
        run()


def test_of_programs_beside_one_another_large_results_are_lent() -> None:
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(2)]
    one, other = (Program(derive(m, (torch.randn(5, 64),)), Operands(m)) for m in modules)
    beside = one.beside([other])
    assert beside is not None
    n = LEAST // 256
    with torch.no_grad(), steady():
        for rows, lends in ((n // 8, False), (n, True)):
            before, x = pool.shared.nbytes(), torch.randn(2 * rows, 64)
            (y,), kept = beside.forward((x,), [rows, rows])
            assert (pool.shared.nbytes() > before) is lends
            torch.testing.assert_close(y[rows:], modules[1](x[rows:]))
            del y, kept
