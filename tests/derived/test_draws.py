"""What a module draws for its rows: in C as by torch, and one mask there and on the way back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from geartrain.derived.derivation import derive
from geartrain.derived.draws import ones_of, seeded_by, shares_of
from geartrain.derived.operands import Operands
from geartrain.derived.program import Program
from geartrain.derived.told.chances import CHANCES
from geartrain.native.fused import At, Op, Step, Steps
from geartrain.nodes.chance import row_seeds
from geartrain.nodes.gradient import GradientSum

N, D = 40, 12
F64 = torch.float64


def drawn_in_c(seeds: Tensor, width: int, p: float, number: int, dtype: torch.dtype) -> Tensor:
    step = Step(Op.DRAW, width, (At(1, 0, width), At(0, 0, 1)), many=number, number=p)
    found = torch.full((len(seeds), width), 7.0, dtype=dtype)
    Steps([step], [0, 0], dtype).run(len(seeds), [seeds.data_ptr(), found.data_ptr()])
    return found


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("width", [1, 3, 16, 67])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_c_draws_what_torch_draws(width: int, p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ends = torch.tensor([0, 1, -1, 2**32, 2**32 - 1, 2**63 - 1, -(2**63)])
    seeds = torch.cat([row_seeds(9), ends])
    for number in (0, 1, 7):
        found = drawn_in_c(seeds, width, p, number, dtype)
        assert torch.equal(found, ones_of(seeds, (width,), p, number).to(dtype))
    if p in (0.0, 1.0):
        assert (found == p).all()


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("width", [1, 3, 67])
def test_c_draws_the_same_numbers_from_zero_to_one(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    seeds = torch.cat([row_seeds(900), torch.tensor([0, -1, 2**63 - 1])])
    for number in (0, 5):
        found = drawn_in_c(seeds, width, 2.0, number, dtype)
        assert torch.equal(found, shares_of(seeds, (width,), number, dtype))
        assert found.min() >= 0 and found.max() < 1
        assert abs(float(found.double().mean()) - 0.5) * (12 * found.numel()) ** 0.5 < 4


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_a_share_of_p_is_ones_and_none_tells_of_another(p: float) -> None:
    torch.manual_seed(0)
    n, width = 5000, 48
    seeds = row_seeds(n)

    def signs(number: int, of: Tensor = seeds) -> Tensor:
        return (ones_of(of, (width,), p, number).double() - p) / (p * (1 - p)) ** 0.5

    first, second = signs(0), signs(1)
    assert abs(float(first.mean())) * (n * width) ** 0.5 < 4
    columns = (first.T @ first / n - torch.eye(width)) * n**0.5
    assert float(columns.fill_diagonal_(0).abs().max()) < 6
    assert float((first.T @ second / n).abs().max()) * n**0.5 < 6
    rows = (first[:500] @ first[:500].T / width).fill_diagonal_(0) * width**0.5
    assert 0.9 < float(rows.square().mean()) < 1.1
    near = signs(0, torch.arange(n))  # neighbouring seeds are no worse
    assert abs(float(near.mean())) * (n * width) ** 0.5 < 4


def test_seeds_are_the_same_however_many_calls_ask_for_them() -> None:
    torch.manual_seed(0)
    one = torch.cat([row_seeds(n) for n in (3, 0, 1, 700)])
    after = torch.get_rng_state()
    torch.manual_seed(0)
    assert torch.equal(one, row_seeds(704)) and torch.equal(after, torch.get_rng_state())
    assert one.unique().numel() == 704


class Twice(nn.Module):
    """Drops twice: what comes in, and gates; once by a module, once by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.map, self.out = nn.Dropout(0.3), nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.map(self.drop(x)))
        return self.out(functional.dropout(y, 0.6, self.training) + x)


def _by_hand(module: Twice, x: Tensor, seeds: Tensor) -> Tensor:
    one, two = (ones_of(seeds, (D,), 1 - p, k) / (1 - p) for k, p in enumerate((0.3, 0.6)))
    return module.out(torch.tanh(module.map(x * one)) * two + x)


def _program(module: nn.Module, x: Tensor) -> Program:
    return Program(derive(module, (x,)), Operands(module))


@pytest.mark.parametrize("rows", [None, [4, 0, 19, 7]])
def test_gradients_are_those_of_autograd_with_the_masks_of_the_rows(
    rows: list[int] | None,
) -> None:
    torch.manual_seed(0)
    module, x = Twice().double(), torch.randn(N, D, dtype=F64)
    program = _program(module, x)
    torch.manual_seed(3)
    with torch.no_grad():
        (y,), kept = program.forward((x,))
    state = torch.get_rng_state()
    torch.manual_seed(3)
    seeds = row_seeds(N)
    assert torch.equal(state, torch.get_rng_state())  # a seed for each row, and no more
    mine = slice(None) if rows is None else torch.tensor(rows)
    leaf = x.clone().requires_grad_()
    wanted = _by_hand(module, leaf, seeds)
    torch.testing.assert_close(y, wanted.detach())
    dy = torch.randn_like(y)[mine]
    expected = torch.autograd.grad(wanted[mine], [leaf, *module.parameters()], dy)
    into = GradientSum(list(module.parameters()))
    with torch.no_grad():
        which = None if rows is None else np.array(rows)
        (dx,) = program.backward((dy,), kept, which, into)
        found = [dx, *map(into.take, module.parameters())]
    torch.testing.assert_close(found, [expected[0][mine], *expected[1:]])


@pytest.mark.usefixtures("needs_kernels")
def test_rows_calls_and_programs_beside_have_masks_of_their_own() -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.2)), torch.ones(N, 64)
    program, other = _program(module, x), _program(module, x)
    one, two = (program.forward((x,))[0][0] != 0 for _ in range(2))
    assert one.unique(dim=0).shape[0] == N
    assert not (one == two).all(1).any()
    beside = program.beside([other])
    assert beside is not None
    torch.manual_seed(1)
    (together,), _ = beside.forward((torch.cat([x, x]),), [N, N])
    torch.manual_seed(1)
    apart = torch.cat([each.forward((x,))[0][0] for each in (program, other)])
    assert torch.equal(together, apart)


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize(
    ("make", "share"),
    [
        (nn.Dropout1d, lambda kept: kept[..., :1].expand_as(kept)),
        (nn.AlphaDropout, lambda kept: kept),
        (nn.FeatureAlphaDropout, lambda kept: kept[..., :1].expand_as(kept)),
    ],
)
def test_other_dropouts_are_in_c_too(
    make: Callable[[float], nn.Module], share: Callable[[Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    module, x = make(0.25), torch.rand(N, 6, 4) + 1
    cut = derive(module, (x,))
    assert cut.parts.fused is not None and cut.parts.fused.draws
    torch.manual_seed(5)
    (y,), _ = Program(cut, Operands(module)).forward((x,))
    torch.manual_seed(5)
    seeds = row_seeds(N)
    with seeded_by(seeds):
        (by_torch, *_) = cut.parts.forward(N, x)
    torch.testing.assert_close(y, by_torch)
    wide = 1 if make is not nn.AlphaDropout else 4
    kept = ones_of(seeds, (6, wide), 0.75, 0).expand_as(x)
    change = y / x
    assert torch.equal(share(kept), kept)
    if make is nn.Dropout1d:
        torch.testing.assert_close(change, kept / 0.75)
    else:  # what is dropped is a number, whatever it was
        assert y[~kept].unique().numel() == 1 and y[kept].unique().numel() > 1


def test_evaluation_drops_nothing_and_the_ends_are_right() -> None:
    x = torch.randn(N, D)
    for p, training, factor in ((0.5, False, 1.0), (0.0, True, 1.0), (1.0, True, 0.0)):
        module = nn.Sequential(nn.Dropout(p), nn.Tanh()).train(training)
        before = torch.get_rng_state()
        (y,), kept = _program(module, x).forward((x,))
        torch.testing.assert_close(y, torch.tanh(x * factor))
        assert torch.equal(before, torch.get_rng_state())
        (dx,) = _program(module, x).backward((torch.ones(N, D),), kept, None, GradientSum(()))
        torch.testing.assert_close(dx, (1 - y * y) * factor)


NOISE: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: torch.randn_like(x),
    "normal of a size": lambda x: torch.randn(x.shape[0], D, dtype=x.dtype),
    "normal in place": lambda x: torch.empty_like(x).normal_(0, 1),
    "even": lambda x: (torch.rand_like(x) - 0.5) * 12**0.5,
    "even of a size": lambda x: (torch.rand(x.shape[0], D, dtype=x.dtype) - 0.5) * 12**0.5,
    "even in place": lambda x: torch.empty_like(x).uniform_(-(3**0.5), 3**0.5),
    "exponential": lambda x: torch.empty_like(x).exponential_(2.0) * 2 - 1,
    "ones or zeros": lambda x: (torch.bernoulli(torch.full_like(x, 0.2)) - 0.2) / 0.4,
}


class Noisy(nn.Module):
    """A map of rows, and noise of no mean and a deviation of one."""

    def __init__(self, noise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.noise, self.map = noise, nn.Linear(D, D)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        noise = self.noise(x)
        return self.map(x) * noise, noise


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", NOISE)
def test_noise_has_a_mean_and_a_deviation_and_comes_back(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    n = 4000
    module, x = Noisy(NOISE[name]).to(dtype), torch.randn(n, D, dtype=dtype)
    program = _program(module, x)
    assert program.in_c
    with torch.no_grad():
        (y, noise), kept = program.forward((x,))
        again = program.forward((x,))[0][1]
        into = GradientSum(list(module.parameters()))
        (dx,) = program.backward((torch.ones_like(y), None), kept, None, into)
    assert dx is not None
    torch.testing.assert_close(y, module.map(x).detach() * noise)
    torch.testing.assert_close(dx, noise @ module.map.weight.detach())
    many = noise.numel() ** 0.5
    assert abs(float(noise.mean())) * many < 4
    assert abs(float(noise.double().square().mean()) - 1) * many < 12
    for other in (again, noise.roll(1, 0), noise.roll(1, 1)):
        assert abs(float((noise * other).mean())) * many < 5


@pytest.mark.usefixtures("needs_kernels")
def test_a_normal_number_is_of_two_even_ones() -> None:
    torch.manual_seed(0)
    module, x = Noisy(NOISE["normal"]).double(), torch.randn(N, D, dtype=F64)
    program = _program(module, x)
    torch.manual_seed(3)
    with torch.no_grad():
        (_, noise), _ = program.forward((x,))
    torch.manual_seed(3)
    seeds = row_seeds(N)
    one, other = (shares_of(seeds, (D,), k, F64) for k in (0, 1))
    wanted = (-2 * (1 - one).log()).sqrt() * (2 * torch.pi * other).cos()
    torch.testing.assert_close(noise, wanted)


@pytest.mark.usefixtures("needs_kernels")
def test_what_has_a_generator_of_its_own_is_torchs() -> None:
    own = torch.Generator().manual_seed(1)
    module = Noisy(lambda x: torch.empty_like(x).normal_(0, 1, generator=own))
    assert not _program(module, torch.randn(N, D)).in_c


def test_what_is_exponential_is_above_zero_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks takes its logarithm; the even number that it is made of may be zero."""
    exponential = CHANCES[torch.ops.aten.exponential.default]
    for even in (0.0, 1 - 2.0**-24):
        monkeypatch.setattr(torch, "rand_like", lambda x, even=even: torch.full_like(x, even))
        found = exponential(torch.empty(3))
        assert found.log().isfinite().all()
