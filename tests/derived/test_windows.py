"""Windows of rows in derived programs: convolutions, pools and norms of groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from geartrain.derived import auto
from geartrain.derived.derivation import derive
from geartrain.derived.kernel import running_again
from geartrain.derived.operands import Operands
from geartrain.derived.program import Program
from geartrain.derived.registry import Registry
from geartrain.derived.steps.places import Places
from geartrain.derived.told import windows
from geartrain.native.calls import RowsLearnt
from geartrain.native.fused import At, Op, Step, Steps
from geartrain.native.steady import steady
from geartrain.nodes.choice import Experience
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.slot import ALONE

N, C, L = 9, 4, 6
LINE, PLANE = (C, L), (C, 6, 4)
Make = Callable[[], nn.Module]

pytestmark = pytest.mark.usefixtures("needs_kernels")


class Rule(nn.Module):
    """A function of rows after a scale, so that there is something to learn."""

    def __init__(self, rule: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.rule, self.scale = rule, nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(x * self.scale)


class Residual(nn.Module):
    """Convolutions beside what they are added to, and a slope for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(C, C, 3, padding=1) for _ in range(2))
        self.norm, self.act = nn.GroupNorm(2, C), nn.PReLU(C)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(self.act(self.norm(self.one(x))))
        return x + 0.5 * y


class Tied(nn.Module):
    """One weight twice, and another that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Conv1d(C, C, 3, padding=1), nn.Parameter(torch.rand(C, C, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(torch.tanh(self.inner(x)))
        return functional.conv1d(y, self.scale.exp() * self.inner.weight)


def _rule(rule: Callable[[Tensor], Tensor]) -> Make:
    return lambda: Rule(rule)


_LINES: dict[str, Make] = {
    "conv": lambda: nn.Conv1d(C, 5, 3),
    "conv without bias": lambda: nn.Conv1d(C, 5, 2, bias=False),
    "padded": lambda: nn.Conv1d(C, 5, 3, padding=2),
    "same": lambda: nn.Conv1d(C, 5, 4, padding="same"),
    "valid": lambda: nn.Conv1d(C, 5, 4, padding="valid"),
    "strides": lambda: nn.Conv1d(C, 5, 3, stride=2, padding=1),
    "apart": lambda: nn.Conv1d(C, 5, 3, padding=2, dilation=2),
    "of all": lambda: nn.Conv1d(C, 5, L),
    "of one": lambda: nn.Conv1d(C, 5, 1),
    "tied": Tied,
    "most": _rule(lambda x: functional.max_pool1d(x, 2)),
    "most, in part": _rule(lambda x: functional.max_pool1d(x, 3, 2, 1)),
    "most, apart": _rule(lambda x: functional.max_pool1d(x, 2, 1, dilation=2)),
    "mean": _rule(lambda x: functional.avg_pool1d(x, 2)),
    "mean, in part": _rule(lambda x: functional.avg_pool1d(x, 3, 2, 1)),
    "adaptive most": _rule(lambda x: functional.adaptive_max_pool1d(x, 3)),
    "adaptive mean": _rule(lambda x: functional.adaptive_avg_pool1d(x, 2)),
    "unfold": _rule(lambda x: x.unfold(2, 3, 2).sum(3)),
    "unfold of channels": _rule(lambda x: x.unfold(-2, 2, 1)),
    "channels apart": lambda: nn.Conv1d(C, C, 3, padding=1, groups=C),
    "several of a channel": lambda: nn.Conv1d(C, 3 * C, 3, groups=C, bias=False),
    "channels in groups": lambda: nn.Conv1d(C, 6, 3, padding=1, stride=2, groups=2),
    "most, with a rest": _rule(lambda x: functional.max_pool1d(x, 4, ceil_mode=True)),
    "most, with a rest in part": _rule(lambda x: functional.max_pool1d(x, 3, 2, 1, ceil_mode=True)),
    "mean, with a rest": _rule(lambda x: functional.avg_pool1d(x, 4, ceil_mode=True)),
    "mean, with a rest in part": _rule(lambda x: functional.avg_pool1d(x, 3, 2, 1, ceil_mode=True)),
    "mean, but of what begins behind": _rule(
        lambda x: functional.avg_pool1d(x, 3, 4, 1, ceil_mode=True)
    ),
    "mean, with a rest and less around": _rule(
        lambda x: functional.avg_pool1d(x, 4, 3, 2, ceil_mode=True, count_include_pad=False)
    ),
    "mean, less around": _rule(
        lambda x: functional.avg_pool1d(x, 3, 2, 1, count_include_pad=False)
    ),
    "uneven most": _rule(lambda x: functional.adaptive_max_pool1d(x, 4)),
    "uneven mean": _rule(lambda x: functional.adaptive_avg_pool1d(x, 4)),
    "roots of powers": _rule(lambda x: functional.lp_pool1d(x.abs(), 3, 2)),
    "channels by themselves": lambda: nn.InstanceNorm1d(C, affine=True),
    "groups": lambda: nn.GroupNorm(2, C),
    "groups without weights": lambda: nn.Sequential(nn.GroupNorm(2, C, affine=False), nn.PReLU()),
    "layers without weights": _rule(lambda x: functional.layer_norm(x, (L,))),
    "slopes": lambda: nn.PReLU(C),
}
_PLANES: dict[str, Make] = {
    "conv": lambda: nn.Conv2d(C, 5, 3),
    "padded": lambda: nn.Conv2d(C, 5, 3, padding=1),
    "sides": lambda: nn.Conv2d(C, 5, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
    "same": lambda: nn.Conv2d(C, 5, (3, 2), padding="same"),
    "two": lambda: nn.Sequential(nn.Conv2d(C, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 2)),
    "residual": Residual,
    "most": _rule(lambda x: functional.max_pool2d(x, 2)),
    "most, in part": _rule(lambda x: functional.max_pool2d(x, (3, 2), (2, 1), (1, 0))),
    "mean": _rule(lambda x: functional.avg_pool2d(x, 2)),
    "mean, in part": _rule(lambda x: functional.avg_pool2d(x, 3, 1, 1)),
    "mean, less around": _rule(lambda x: functional.avg_pool2d(x, 2, 1, count_include_pad=False)),
    "adaptive most": _rule(lambda x: functional.adaptive_max_pool2d(x, (3, 2))),
    "adaptive mean": _rule(lambda x: functional.adaptive_avg_pool2d(x, (None, 1))),
    "adaptive mean of all": _rule(lambda x: functional.adaptive_avg_pool2d(x, 1)),
    "channels apart": lambda: nn.Conv2d(C, 2 * C, 3, padding=1, groups=C),
    "channels in groups": lambda: nn.Conv2d(C, 6, (3, 2), groups=2),
    "most, with a rest": _rule(lambda x: functional.max_pool2d(x, 4, 3, 1, ceil_mode=True)),
    "mean, with a rest": _rule(lambda x: functional.avg_pool2d(x, (4, 3), 3, 1, ceil_mode=True)),
    "mean by another number": _rule(lambda x: functional.avg_pool2d(x, 2, divisor_override=3)),
    "uneven mean": _rule(lambda x: functional.adaptive_avg_pool2d(x, (4, 3))),
    "roots of powers": _rule(lambda x: functional.lp_pool2d(x.abs(), 2, (3, 2), 2)),
    "channels by themselves": lambda: nn.InstanceNorm2d(C),
    "unfold": _rule(lambda x: functional.unfold(x, (3, 2), padding=1, stride=2)),
    "unfold twice": _rule(lambda x: x.unfold(2, 2, 2).unfold(3, 2, 2).flatten(3).mean(3)),
    "groups": lambda: nn.GroupNorm(4, C),
}
_SOLIDS: dict[str, Make] = {
    "conv": lambda: nn.Conv3d(C, 3, 2, padding=(1, 0, 0)),
    "most": _rule(lambda x: functional.max_pool3d(x, (1, 2, 2))),
    "mean": _rule(lambda x: functional.avg_pool3d(x, 2, 1)),
    "adaptive mean": _rule(lambda x: functional.adaptive_avg_pool3d(x, (1, 2, 2))),
}
CASES = {
    **{f"line: {k}": (make, LINE) for k, make in _LINES.items()},
    **{f"plane: {k}": (make, PLANE) for k, make in _PLANES.items()},
    **{f"solid: {k}": (make, (C, 2, 3, 3)) for k, make in _SOLIDS.items()},
    "flat: groups": (lambda: nn.GroupNorm(2, C), (C,)),
}


def _made(make: Make, shape: tuple[int, ...], n: int = N) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    module = make().double()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1 * torch.rand_like(p))  # biases of zero would hide what they miss
    return module, torch.randn((n, *shape), dtype=torch.float64)


def _plainly(module: nn.Module, x: Tensor, rows: list[int]) -> list[Tensor]:
    """Output, and gradients of the input and of parameters."""
    leaf = x[rows].clone().requires_grad_()
    y = module(leaf)
    found = torch.autograd.grad(y, [leaf, *module.parameters()], torch.cos(y.detach()))
    return [y.detach(), *found]


def _by_program(module: nn.Module, program: Program, x: Tensor, rows: list[int]) -> list[Tensor]:
    into = GradientSum(list(module.parameters()))
    with torch.no_grad():
        (y,), kept = program.forward((x,))
        (dx,) = program.backward((torch.cos(y[rows]),), kept, np.array(rows), into)
        sums = [into.take(p) for p in module.parameters()]
    assert dx is not None
    return [y[rows], dx, *(d.clone() for d in sums if d is not None)]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", CASES)
def test_steps_give_what_autograd_does(name: str) -> None:
    module, x = _made(*CASES[name])
    cut = derive(module, [x])
    assert cut.parts.fused is not None
    for rows in (list(range(N)), [4, 0, 7]):
        wanted = _plainly(module, x, rows)
        for fused in (True, False):
            found = _by_program(module, Program(cut, Operands(module), fused=fused), x, rows)
            assert_close(found, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["line: padded", "plane: residual", "line: tied"])
def test_many_rows_are_taken_in_pieces(name: str) -> None:
    """What they compute in between has room for some of them at a time."""
    module, x = _made(*CASES[name], n=1500)
    program = Program(derive(module, [x[:5]]), Operands(module))
    rows = list(range(x.shape[0]))
    found = _by_program(module, program, x, rows)
    assert_close(found, _plainly(module, x, rows), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["line: padded", "plane: residual", "line: groups", "line: tied"])
@pytest.mark.parametrize("times", [1, 40], ids=("few rows", "many"))
def test_rows_of_several_updates_go_each_to_their_own(name: str, times: int) -> None:
    module, x = _made(*CASES[name], n=N * times)
    program = Program(derive(module, [x]), Operands(module))
    assert program.apart
    updates = np.tile([0, 1, 1, 0, 2, 0, 1, 2, 0], times)
    into = GradientSum(list(module.parameters()))
    with torch.no_grad(), steady():
        (y,), kept = program.forward((x,))
        with into.of_updates(updates):
            program.backward((torch.cos(y),), kept, None, into)
    for update in range(3):
        wanted = _plainly(module, x, np.flatnonzero(updates == update).tolist())[2:]
        assert_close([into.take(p) for p in module.parameters()], wanted)
        into.next_update()


def test_the_first_of_several_that_are_largest_gets_the_gradient() -> None:
    """As in pools of torch, and not each of them a share."""
    for rule in (
        lambda x: functional.max_pool2d(x, (3, 2), (2, 1), (1, 0)),
        lambda x: functional.adaptive_max_pool2d(x, (3, 2)),
    ):
        module, x = _made(_rule(rule), PLANE)
        x = x.sign().relu()
        program = Program(derive(module, [x]), Operands(module))
        rows = list(range(N))
        assert program.in_c
        assert_close(_by_program(module, program, x, rows), _plainly(module, x, rows))


def test_a_weight_of_more_axes_waits_as_a_product() -> None:
    """Nothing is computed of it, and several calls are multiplied at once."""
    module, x = _made(*CASES["plane: padded"])
    cut = derive(module, [x])
    assert cut.computed is None
    assert cut.parts.fused is not None
    assert [term.how for term in cut.parts.fused.terms] == ["product", "sum"]


def test_windows_are_made_again_and_not_kept() -> None:
    module, x = _made(*CASES["plane: padded"])
    program = Program(derive(module, [x]), Operands(module))
    with torch.no_grad():
        _, kept = program.forward((x,))
    assert [k[0].numel() for k in kept] == [x[0].numel() + 1]  # with the zero around it


def test_scales_of_channels_get_sums_of_rows() -> None:
    """So they wait with those of other calls; axes within a row have been added up before."""
    module, x = _made(*CASES["plane: groups"])
    parts = derive(module, [x]).parts
    assert parts.fused is not None
    assert [term.how for term in parts.fused.terms] == ["sum", "sum"]


@pytest.mark.parametrize(
    "rule",
    [
        lambda x: functional.max_pool1d(x, 2, return_indices=True)[0],
        lambda x: functional.conv1d(
            x.repeat(1, 5, 1), torch.ones(10, 2, 2, dtype=x.dtype), groups=10
        ),
    ],
)
def test_what_is_not_told_is_left_to_torch(rule: Callable[[Tensor], Tensor]) -> None:
    module, x = _made(_rule(rule), LINE)
    cut, rows = derive(module, [x]), [4, 0, 7]
    assert cut.parts.fused is None
    found = _by_program(module, Program(cut, Operands(module)), x, rows)
    assert_close(found, _plainly(module, x, rows))


def test_windows_of_many_entries_are_left_to_torch_which_keeps_none() -> None:
    most = windows.MOST_ENTRIES // (3 * C)
    for length, in_c in ((most, True), (most + 1, False)):
        module, x = _made(lambda: nn.Conv1d(C, 2, 3, padding=1), (C, length))
        cut = derive(module, [x])
        assert (cut.parts.fused is not None) == in_c
        assert in_c or "entries" in cut.parts.unfused


class Cumulating(nn.Module):
    """What has no step comes after a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(C, C, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x).mode(2).values
        return found


def test_what_torch_computes_makes_no_windows() -> None:
    """Its convolutions take less than entries that are taken one by one, and keep what came in."""
    for make in (Cumulating, lambda: nn.Conv1d(C, C, 3, padding=1)):
        module, x = _made(make, LINE)
        program = Program(derive(module, [x]), Operands(module), fused=False)
        with torch.no_grad():
            _, kept = program.forward((x,))
        assert kept[0] is x
    assert "mode" in derive(Cumulating().double(), [x]).parts.unfused


@pytest.mark.parametrize("ratio", [auto.BY_TORCH - 0.1, auto.BY_TORCH + 0.1])
def test_auto_leaves_to_torch_what_takes_less_there(
    ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C and torch are measured against each other, then who is chosen against running again."""
    module, x = _made(*CASES["line: padded"], n=32)
    against: list[tuple[bool, bool | None]] = []

    def told(one: Program, other: object, *more: object) -> float:
        against.append((one.in_c, other.in_c if isinstance(other, Program) else None))
        return ratio if isinstance(other, Program) else 0.5

    monkeypatch.setattr(auto, "compare", told)
    monkeypatch.setattr(auto, "REGISTRY", Registry())
    choice = auto.MeasuredChoice("x", module, running_again(module), Experience())
    for _ in range(40):
        found = choice.kernel((x,))
    assert isinstance(found, Program)
    by_torch = ratio < auto.BY_TORCH
    assert found.in_c is not by_torch
    assert against == [(False, True), (not by_torch, None)]


@pytest.mark.parametrize(("n", "waits"), [(2, True), (ALONE // L + 1, False)])
def test_windows_count_as_rows_where_products_may_wait(n: int, waits: bool) -> None:
    module, x = _made(lambda: nn.Conv1d(C, C, 3, padding=1), LINE, n=n)
    program = Program(derive(module, [x]), Operands(module))
    into = GradientSum(list(module.parameters()))
    with torch.no_grad():
        outputs, kept = program.forward((x,))
        program.backward(outputs, kept, None, into)
    assert bool(into._later) is waits
    leaf = module(x)
    expected = torch.autograd.grad(leaf, list(module.parameters()), outputs[0])
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        assert_close(into.take(parameter), gradient)


def _choice(monkeypatch: pytest.MonkeyPatch, before: Experience) -> tuple[Any, list[int]]:
    """Of torch from 32 rows on; and the rows of each measurement of torch."""
    module, _ = _made(*CASES["line: padded"], n=1)
    measured: list[int] = []

    def told(one: Program, other: object, inputs: Any, *more: object) -> float:
        if not isinstance(other, Program):
            return 0.5
        measured.append(inputs[0].shape[0])
        return 0.1 if measured[-1] >= 32 else 0.9

    monkeypatch.setattr(auto, "compare", told)
    return auto.MeasuredChoice("x", module, running_again(module), before), measured


def test_of_several_times_as_many_rows_windows_are_measured_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auto, "REGISTRY", Registry())
    before = Experience()
    choice, measured = _choice(monkeypatch, before)
    (_, x), (_, more) = (_made(*CASES["line: padded"], n=n) for n in (8, 100))
    monkeypatch.setattr(auto, "ROWS", 8)
    for _ in range(auto.FIRINGS):
        first = choice.kernel((x,))
    assert first.in_c and measured == [8] and before.story == "derived, 0.50 of running again"
    assert choice.kernel((x[:4],)) is first and choice.kernel((more[:31],)) is first
    second = choice.kernel((more,))
    assert not second.in_c and measured == [8, 100]
    assert "as many rows as come now; by torch" in before.story
    assert choice.kernel((x,)) is second and choice.kernel((more,)) is second
    again, asked = _choice(monkeypatch, before)
    again.recall((x[:3],))  # rows that mean nothing
    assert not again.chosen((x,)).in_c and asked == []


@pytest.mark.parametrize("n", [3, 200, 1100], ids=("waiting", "by C", "by torch"))
def test_products_of_rows_are_a_gradient_of_more_axes(n: int) -> None:
    """However many rows there are, and with what was there before."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(256, 32, 16))
    into, left, right = GradientSum([weight]), torch.randn(n, 256), torch.randn(n, 512)
    with torch.no_grad():
        for _ in range(2):
            into.add_product(weight, left, right)
    found = into.take(weight)
    assert found is not None
    assert_close(found, 2 * (left.T @ right).view(weight.shape), rtol=1e-3, atol=1e-3)


def test_rows_that_lie_somewhere_are_as_wide_as_all_other_axes() -> None:
    weight = nn.Parameter(torch.randn(5, 2, 3))
    into = GradientSum([weight])
    assert RowsLearnt(into, into.slot(weight), None, 0, 1).widths == (5, 6)
    assert RowsLearnt(into, into.slot(weight), None, 0, None).widths == (0, 0)


PLACES = torch.tensor([3, 0, 0, C - 1])


def test_places_that_a_rule_names_are_steps_too() -> None:
    """Some of them twice, some never."""
    module, x = _made(_rule(lambda x: x.index_select(1, PLACES)), (C,))
    program, rows = Program(derive(module, [x]), Operands(module)), [4, 0, 7]
    assert program.in_c
    assert_close(_by_program(module, program, x, rows), _plainly(module, x, rows))


def test_a_place_that_is_not_there_is_refused() -> None:
    """Before anything is read or written."""
    x, at = torch.arange(6.0).view(2, 3), torch.tensor([0, 3, 2])
    for op in (Op.ENTRIES, Op.ENTRIES_BACK):
        out = torch.full((2, 3), -7.0)
        steps = Steps([Step(op, 3, (At(2, 0, 3), At(0, 0, 3), At(1)), many=3)], [0] * 3, x.dtype)
        addresses = [x.data_ptr(), at.data_ptr(), out.data_ptr()]
        with pytest.raises(IndexError):
            steps.run(2, addresses)
        assert (out == -7).all()
        at[1] = 0
        steps.run(2, addresses)
        assert not (out == -7).any()
        at[1] = 3


LISTS = torch.tensor([0, 2, 2, 5, 1, 3, 0, 2, 4])
"""Of five entries two come to the first of three places, and none to the second."""


@pytest.mark.parametrize("n", [1, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entries_are_added_up_by_lists_as_they_are_one_by_one(n: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, places = torch.randn(n, 5, generator=generator, dtype=dtype), torch.tensor([2, 0, 2, 0, 2])
    found = []
    for at, inner in ((places, 0), (LISTS, 1)):
        out = torch.full((n, 3), -7.0, dtype=dtype)
        where = At(2, 0, 3), At(0, 0, 5), At(1)
        steps = Steps([Step(Op.ENTRIES_BACK, 3, where, many=5, inner=inner)], [0] * 3, x.dtype)
        steps.run(n, [x.data_ptr(), at.data_ptr(), out.data_ptr()])
        found.append(out)
    assert torch.equal(*found)


@pytest.mark.parametrize("wrong", [{3: 6}, {1: 3, 2: 2}, {0: 1}, {8: 5}, {4: -1}])
def test_lists_that_lead_elsewhere_are_refused(wrong: dict[int, int]) -> None:
    """Before anything is read or written."""
    x, lists, out = torch.ones(2, 5), LISTS.clone(), torch.full((2, 3), -7.0)
    for k, value in wrong.items():
        lists[k] = value
    where = At(2, 0, 3), At(0, 0, 5), At(1)
    steps = Steps([Step(Op.ENTRIES_BACK, 3, where, many=5, inner=1)], [0] * 3, x.dtype)
    with pytest.raises(IndexError):
        steps.run(2, [x.data_ptr(), lists.data_ptr(), out.data_ptr()])
    assert (out == -7).all()


@pytest.mark.parametrize(("size", "listed"), [(3, [1]), (1, [])], ids=("overlap", "apart"))
def test_what_comes_back_to_places_that_many_windows_have_is_listed_by_place(
    size: int, listed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    true = Places.add

    def add(self: Places, op: Op, *more: Any, inner: int = 0, **named: Any) -> None:
        if op is Op.ENTRIES_BACK:
            found.append(inner)
        true(self, op, *more, inner=inner, **named)

    monkeypatch.setattr(Places, "add", add)
    module, x = _made(lambda: nn.Conv1d(C, C, size, padding=size // 2), LINE)
    assert Program(derive(module, [x]), Operands(module)).in_c
    assert [inner for inner in found if inner] == listed
