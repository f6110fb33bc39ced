"""Functions of torch that traces tell by others: they give the same, and have steps in C."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from geartrain.derived.derivation import derive
from geartrain.derived.told.otherwise import OTHERWISE, dropped
from tests.rigs.rowwise import Rowwise, assert_as_autograd

SIZES = {"n": 6, "i": 3, "j": 4, "k": 5, "h": 2, "d": 3, "e": 4}

MAPS = [
    "ni,ij->nj",
    "ni,ji->nj",
    "ni,kij->nkj",
    "ni,kij->njk",
    "ij,ni->nj",
    "nhd,de->nhe",
    "nhd,hde->ne",
    "nhd,hd->n",
    "nd,d->n",
    "ni, kij, nj -> nk",
    "ni,nj,kij->nk",
    "nk,nd,kde->ne",
    "nhd,hd->nh",
    "hd,nhd->nh",
    "ni,i->ni",
    "nhd,nhd->nh",
    "nhd,ndh->nd",
]
OTHERS = ["ni,nj->nij", "nd,nkd->nk", "nk,nkd->nd", "ni,nij->nj", "nhd,hde->nhe"]
OTHERS += ["nhd,dh->nd", "nh,nh->hn"]


def operands(equation: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    left = equation.replace(" ", "").split("->")[0]
    shapes = [[SIZES[x] for x in each] for each in left.split(",")]
    return [torch.randn(s, generator=generator, dtype=dtype) for s in shapes]


@pytest.mark.parametrize("equation", [*MAPS, *OTHERS, "...i,ij->...j", "ni->n", "nii,nj->nj"])
def test_einsum_is_torchs(equation: str) -> None:
    some = operands(equation.replace("...", "n"))
    mine, torchs = OTHERWISE[torch.einsum](equation, *some), torch.einsum(equation, *some)
    torch.testing.assert_close(mine, torchs)
    assert mine.shape == torchs.shape


def test_einsum_takes_a_list_and_its_other_form() -> None:
    x, w = operands("ni,ij->nj")
    wanted = x @ w
    torch.testing.assert_close(OTHERWISE[torch.einsum]("ni,ij->nj", [x, w]), wanted)
    torch.testing.assert_close(OTHERWISE[torch.einsum](x, [0, 1], w, [1, 2], [0, 2]), wanted)


class Summed(nn.Module):
    """Rows and weights meet as an equation says, and a map follows."""

    def __init__(self, equation: str) -> None:
        super().__init__()
        self.equation = equation
        left = equation.replace(" ", "").split("->")[0].split(",")
        self.rows = [k for k, each in enumerate(left) if "n" in each]
        self.weights = nn.ParameterDict(
            {
                str(k): nn.Parameter(x)
                for k, x in enumerate(operands(equation))
                if k not in self.rows
            }
        )

    def forward(self, *rows: Tensor) -> Tensor:
        given = dict(zip(self.rows, rows, strict=True))
        many = len(given) + len(self.weights)
        some = [given[k] if k in given else self.weights[str(k)] for k in range(many)]
        return torch.tanh(torch.einsum(self.equation, *some))


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("equation", MAPS)
def test_maps_that_an_equation_tells_have_programs_in_c(equation: str) -> None:
    module = Summed(equation)
    some = operands(equation)
    cut = derive(module, [some[k] for k in module.rows])  # is tried against autograd
    assert cut.parts.fused is not None


class Added(nn.Module):
    """Maps that are laid out as they are read, with what is added."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.map = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(torch.tensordot(x, self.map, dims=1))
        return torch.addmm(self.bias, y, self.map, alpha=0.5)


@pytest.mark.usefixtures("needs_kernels")
def test_maps_that_are_read_as_they_lie_are_not_computed_before() -> None:
    cut = derive(Added().double(), [torch.randn(5, 4).double()])
    assert cut.parts.fused is not None and cut.computed is None


@pytest.mark.parametrize("how", [{}, {"beta": 0}, {"alpha": 2, "beta": 0.5}])
def test_products_that_are_added_are_torchs(how: dict[str, float]) -> None:
    some = operands("nj,ni,ij->n")
    mine, torchs = OTHERWISE[torch.addmm](*some, **how), torch.addmm(*some, **how)
    torch.testing.assert_close(mine, torchs)


@pytest.mark.usefixtures("needs_kernels")
def test_rows_that_meet_a_vector_have_a_program_in_c() -> None:
    def function(f: Any, x: Tensor) -> Tensor:
        y = torch.tanh(f(x))
        return torch.stack([torch.mv(y, f.bias), y.mv(f.weight[:, 0])], 1)

    x = torch.randn(5, 4, dtype=torch.float64)
    assert_as_autograd(Rowwise(function, 4, 3).double(), (x,))


def test_bilinear_is_torchs() -> None:
    module = nn.Bilinear(3, 4, 5).double()
    x, y = (torch.randn(6, k, dtype=torch.float64) for k in (3, 4))
    mine = OTHERWISE[nn.functional.bilinear](x, y, module.weight, module.bias)
    torch.testing.assert_close(mine, module(x, y))


@pytest.mark.parametrize("many", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("keepdim", [False, True])
def test_products_along_an_axis_have_steps_and_gradients_of_zeros(many: int, keepdim: bool) -> None:
    def function(f: Any, x: Tensor) -> Tensor:
        return f(x).prod(1, keepdim=keepdim).reshape(-1, 3) + torch.prod(x, 2).sum(1, True)

    x = torch.randn(5, many, 3, dtype=torch.float64)
    x[0, 0], x[1, :, 1] = 0, 0
    assert_as_autograd(Rowwise(function, 3, 3).double(), (x,))


def test_products_of_all_or_of_rows_are_torchs() -> None:
    mine, x = OTHERWISE[torch.prod], torch.randn(4, 3)
    for given in ((), (0,), (1,), (-1, True), (-2,)):
        torch.testing.assert_close(mine(x, *given), torch.prod(x, *given))
    torch.testing.assert_close(mine(x, dtype=torch.float64), torch.prod(x, dtype=torch.float64))
    assert int(mine(torch.tensor([[2, 3]]), 1)) == 6


class Pooled(nn.Module):
    """Means of powers by exponents that are learnt (Radenovic et al. 2018)."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.power = nn.Parameter(torch.full(shape, 3.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        mean = (x.abs() + 0.1).view(-1, 2, 4).pow(self.power).mean(1)
        return torch.pow(mean, 1 / self.power) + mean**self.power


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("shape", [(), (1,), (4,)])
def test_powers_by_weights_have_programs_in_c(shape: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    assert_as_autograd(Pooled(*shape), [torch.randn(6, 8, dtype=torch.float64)])


def test_powers_are_torchs() -> None:
    x, y = (torch.rand(2, 3, dtype=torch.float64) + 0.5 for _ in range(2))
    for base, exponent in ((x, y), (x, y[:1]), (x[0], y), (2.0, y), (x, 2.0)):
        torch.testing.assert_close(OTHERWISE[torch.pow](base, exponent), torch.pow(base, exponent))


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_is_torchs_bit_for_bit(p: float, training: bool, inplace: bool) -> None:
    found = []
    for function in (dropped, nn.functional.dropout):
        torch.manual_seed(1)
        x = torch.randn(6, 4)
        y = function(x, p, training, inplace)
        found += [y, x]
    mine, its, torchs, own = found
    assert torch.equal(mine, torchs) and torch.equal(its, own)
    with pytest.raises(ValueError, match="probability"):
        dropped(x, 1.5)
