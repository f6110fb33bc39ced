"""Programs over bundles with edges are done for some bundles at a time, where edges stay inside,
and what weights learn of their rows is added then."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from geartrain.derived.operands import Operands
from geartrain.derived.ragged.calls import call_of_inside
from geartrain.derived.ragged.derivation import derive_inside
from geartrain.derived.ragged.program import RaggedProgram
from geartrain.derived.ragged.values import EDGES, MEMBERS
from geartrain.native import pool
from geartrain.native.fused import At, Op, Step
from geartrain.native.ragged import RaggedStep, RaggedSteps, Way
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from tests.rigs.ragged import assert_as_torch, tangents
from tests.rigs.ragged_modules import H, Pass

pytestmark = pytest.mark.usefixtures("needs_kernels", "in_float64")
LENGTHS = {"short": [2] * 300, "long": [1, 300, 2], "none": [3, 0, 130, 0, 0, 140, 1]}


def _inside(lengths: Sequence[int], each: int = 2) -> Inside:
    """Bundles with so many edges a member, all of them inside."""
    sizes, rng = torch.tensor(lengths), torch.Generator().manual_seed(2)
    segment = torch.arange(len(lengths)).repeat_interleave(sizes)
    of = segment.repeat_interleave(each)
    first, size = (sizes.cumsum(0) - sizes)[of], sizes[of]
    ends = [(torch.rand(of.shape, generator=rng) * size).long() + first for _ in range(2)]
    bond = torch.randint(0, 3, of.shape, generator=rng)
    return Inside(sizes, segment, {"source": ends[0], "target": ends[1], "bond": bond})


def _program(module: Pass) -> RaggedProgram:
    small = _inside([2, 3])
    cut = derive_inside(module, (torch.randn(5, H),), dict(small.edges), pools=False)
    return RaggedProgram(cut, Operands(module))


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_gradients_are_those_of_torch(lengths: list[int]) -> None:
    torch.manual_seed(0)
    module, inside = Pass(), _inside(lengths)
    program, x = _program(module), torch.randn(sum(lengths), H)
    for plan in program.plans:
        assert "ends" in dict(plan.numbers).values() and not plan.routine.steps.apart

    def run(into: GradientSum) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        names = dict.fromkeys(inside.edges, True)
        ys, kept = program.forward(call_of_inside((x,), inside, names))
        return ys, [program.backward(kept, tangents(ys), into)[0]]

    leaf = x.clone().requires_grad_()
    assert_as_torch(module, run, [module(leaf, inside)], [leaf])


def test_who_only_follows_edges_does_without_lengths() -> None:
    torch.manual_seed(0)
    module, inside = Pass(), _inside([2, 3, 4])
    program, x, names = _program(module), torch.randn(9, H), dict.fromkeys(inside.edges, True)
    other = Inside(torch.tensor([2, 3, 1]), inside.segment, dict(inside.edges))
    ys, zs = (program.forward(call_of_inside((x,), each, names))[0] for each in (inside, other))
    assert_close(ys, zs)


def _taken(source: Sequence[int], lengths: Sequence[int], bad: int) -> Tensor:
    """What a program has written to edges when a row of it was found not to be there: rows of
    members by number, copied once more at its end."""
    n, edges = sum(lengths), len(source)
    words = torch.zeros(n, dtype=torch.int64)
    words[bad] = 9  # of a table of one row
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    memory = [torch.ones(n, 1), words, torch.zeros(1, 1), torch.zeros(n, 1)]
    memory += [torch.tensor(source), torch.zeros(edges, 1), torch.zeros(edges, 1), ends]
    members, table, to, taken, copied = (At(k, 0, 1) for k in (1, 2, 3, 5, 6))
    steps = [
        RaggedStep(Way.PLAIN, Step(Op.EMBED, 1, (to, members, table), many=1), MEMBERS),
        RaggedStep(Way.TAKE, Step(Op.COPY, 1, (taken, At(0, 0, 1))), EDGES, 1, MEMBERS, 1, 4),
        RaggedStep(Way.PLAIN, Step(Op.COPY, 1, (copied, taken)), EDGES),
    ]
    ragged = RaggedSteps(steps, [0] * 8, [0] * 8, torch.float64, 7)
    with pytest.raises(IndexError):
        ragged.run([len(lengths), n, edges, 0, 0], [x.data_ptr() for x in memory])
    return memory[6][:, 0]


def test_bundles_before_are_done_when_others_begin() -> None:
    lengths = [200, 200, 200]
    source = [0, 199, 200, 399, 400, 599]
    assert _taken(source, lengths, 599).tolist() == [1, 1, 1, 1, 0, 0]
    assert not _taken(source, lengths, 0).any()


@pytest.mark.parametrize(
    "source", [[0, 200, 199, 399], [0, 200, -1, 399], [0, 600], [400, 0], [200, 0, 400]]
)
def test_all_are_done_at_a_time_where_edges_lead_to_others_or_do_not_lie_by_bundle(
    source: list[int],
) -> None:
    assert not _taken(source, [200, 200, 200], 599).any()


def test_numbers_of_members_too_are_looked_at() -> None:
    """A program that reads rows by number for members, not for edges."""
    n = 400
    for number, apart in ((5, True), (n - 1, False)):
        index = torch.arange(n)
        index[7] = number
        words = torch.zeros(n, dtype=torch.int64)
        words[-1] = 9
        memory = [torch.ones(n, 1), words, torch.zeros(1, 1), torch.zeros(n, 1), index]
        memory += [torch.zeros(n, 1), torch.tensor([0, 200, 400])]
        steps = [
            RaggedStep(Way.PLAIN, Step(Op.EMBED, 1, (At(3, 0, 1), At(1, 0, 1), At(2)), many=1), 1),
            RaggedStep(Way.TAKE, Step(Op.COPY, 1, (At(5, 0, 1), At(0, 0, 1))), 1, 1, 1, 1, 4),
        ]
        ragged = RaggedSteps(steps, [0] * 7, [0] * 7, torch.float64, 6)
        with pytest.raises(IndexError):
            ragged.run([2, n, 0, 0, 0], [x.data_ptr() for x in memory])
        assert bool(memory[5].any()) is apart


def _learnt(
    lengths: list[int],
    into: GradientSum,
    program: RaggedProgram,
    weights: Sequence[nn.Parameter],
    times: int = 1,
) -> list[Tensor | None]:
    """The gradients of the weights of so many calls alike; not to be written to."""
    inside, x = _inside(lengths), torch.ones(sum(lengths), H)
    for _ in range(times):
        names = dict.fromkeys(inside.edges, True)
        ys, kept = program.forward(call_of_inside((x,), inside, names))
        program.backward(kept, tuple(torch.ones_like(y) for y in ys), into)
    found = [into.take(p) for p in weights]
    return [d if d is None else d.clone() for d in found]


def _assert_alike(
    found: Sequence[Tensor | None], wanted: Sequence[Tensor | None], times: int = 1
) -> None:
    assert any(d is not None for d in wanted)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert_close(a, times * b)


def test_weights_learn_while_rows_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = Pass()
    program, weights = _program(module), list(module.parameters())

    def never(self: GradientSum, *_: object, **__: object) -> None:
        raise AssertionError("a product or a sum came later")

    for name in ("add_product", "add_sum", "add_later"):
        monkeypatch.setattr(GradientSum, name, never)
    with pytest.raises(AssertionError, match="came later"):  # few rows wait for others
        _learnt([9] * 3, GradientSum(weights), program, weights)
    once = _learnt([9] * 60, GradientSum(weights), program, weights)
    _assert_alike(_learnt([9] * 60, GradientSum(weights), program, weights, 2), once, 2)


def test_rows_of_a_later_update_wait_for_it() -> None:
    torch.manual_seed(0)
    module = Pass()
    program, weights = _program(module), list(module.parameters())
    wanted = _learnt([9] * 60, GradientSum(weights), program, weights)
    into = GradientSum(weights)
    with into.of_updates(1):
        now = _learnt([9] * 60, into, program, weights)
    assert all(d is None for d in now)
    into.next_update()
    _assert_alike([into.take(p) for p in weights], wanted)


def test_what_is_kept_of_many_rows_is_lent() -> None:
    program, x = _program(Pass()), torch.ones(2 * pool.LEAST // 8 // H, H)
    inside = _inside([len(x)])
    before = pool.shared.nbytes()
    ys, kept = program.forward(call_of_inside((x,), inside, dict.fromkeys(inside.edges, True)))
    lent = pool.shared.nbytes() - before
    assert lent >= kept.residuals.nbytes + ys[0].nbytes


def test_edges_of_which_nobody_says_where_they_lead_are_done_all_the_same() -> None:
    memory = [torch.arange(7.0)[:, None], torch.zeros(7, 1), torch.tensor([0, 200, 400])]
    steps = [RaggedStep(Way.PLAIN, Step(Op.COPY, 1, (At(1, 0, 1), At(0, 0, 1))), EDGES)]
    ragged = RaggedSteps(steps, [0] * 3, [0] * 3, torch.float64, 2)
    ragged.run([2, 400, 7, 0, 0], [x.data_ptr() for x in memory])
    assert torch.equal(memory[1], memory[0])
