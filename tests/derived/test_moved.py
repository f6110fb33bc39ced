"""What moves entries of rows to known places: slices, diagonals, what is written into rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from geartrain.derived.derivation import derive
from geartrain.derived.operands import Operands
from geartrain.derived.program import Program
from tests.rigs.products import halved
from tests.rigs.rowwise import Rowwise, assert_as_autograd, both, in_c

N = 6
One = Callable[[Tensor], Tensor]

pytestmark = pytest.mark.usefixtures("needs_kernels")


def written(write: Callable[[Tensor, Tensor], Any]) -> One:
    """What a row is after something has been written into a copy of it."""

    def function(x: Tensor) -> Tensor:
        found = x * 1.5
        write(found, x)
        return found * x

    return function


def _first(z: Tensor, x: Tensor) -> None:
    z[:, 0] = 1.0


def _some(z: Tensor, x: Tensor) -> None:
    z[:, 1:3] = 2 * x[:, :2]


def _gaps(z: Tensor, x: Tensor) -> None:
    z[:, ::2] = x[:, 1::2]


def _corner(z: Tensor, x: Tensor) -> None:
    z[:, 1:, ::2] += x[:, :-1, ::2]


def _below_zero(z: Tensor, x: Tensor) -> None:
    z[x < 0.5] = -0.25


def _row_of_row(z: Tensor, x: Tensor) -> None:
    z[:, -1] = x[:, 0].exp()


SQUARE: Mapping[str, One] = {
    "every other": lambda x: x[:, ::2],
    "every other, twice": lambda x: x[:, 1::2] * x[:, ::2, :],
    "every third entry": lambda x: x[..., ::3],
    "every third from the second on": lambda x: x[:, :, 0::3] * x[:, :, 1::2],
    "rotated pairs": lambda x: torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "diagonal above": lambda x: x.diagonal(1, -2, -1) * x.diagonal(-1, -1, -2),
    "trace": lambda x: x.diagonal(0, -2, -1).sum(-1),
    "trace of an equation": lambda x: torch.einsum("nii->n", x),
    "as a diagonal": lambda x: torch.diag_embed(x[:, 0]) @ x,
    "as a diagonal above": lambda x: torch.diag_embed(x, 1),
    "as a diagonal below, in front": lambda x: torch.diag_embed(x[:, 1], -2, 2, 1),
    "below": lambda x: x.tril(),
    "below the diagonal": lambda x: x.tril(-1) + x.triu(2),
    "turned about": lambda x: x.rot90(1, (1, 2)) * x,
    "turned twice": lambda x: x.rot90(2, (2, 1)),
    "cross": lambda x: torch.cross(x[:, 0, :3], x[:, 1, :3], dim=1),
    "cross along the first": lambda x: torch.linalg.cross(x[:, :3], x[:, 1:], dim=1),
    "taken apart": lambda x: x.unbind(1)[0] * x.unbind(1)[2],
    "taken apart along the last": lambda x: x.unbind(-1)[1] + x.unbind(2)[3],
    "softmax along the first": lambda x: x.softmax(1),
    "logarithms along the first": lambda x: x.log_softmax(1) * x,
    "written first": written(_first),
    "written": written(_some),
    "written last": written(_row_of_row),
    "written with gaps": written(_gaps),
    "added in a corner": written(_corner),
    "written by a mask": written(_below_zero),
    "one of them": lambda x: torch.select_scatter(x, 2 * x[:, 0], 1, -1),
    "some of them": lambda x: torch.slice_scatter(x, 2 * x[:, :, :2], 2, 1, 3),
    "all of them": lambda x: torch.slice_scatter(x, 2 * x, 1),
    "none of them": lambda x: torch.slice_scatter(x, x[:, :0], 1, 3, 3),
    "copied by number": lambda x: x.index_copy(1, torch.tensor([2, 0]), 3 * x[:, :2]),
    "filled by number": lambda x: x.index_fill(2, torch.tensor([2, 0]), 0.5),
    "added by number": lambda x: x.index_add(1, torch.tensor([2, 0, 2]), x[:, :3]),
    "added by number to nothing": lambda x: torch.zeros_like(x).index_add(
        2, torch.tensor([2, 0, 2]), x[..., :3]
    ),
    "added by numbers of rows": lambda x: x.scatter_add(
        1, torch.tensor([[[2, 0, 1, 1]]]).expand(len(x), -1, -1), x[:, :1]
    ),
    "filled by numbers of rows": lambda x: x[:, 0].scatter(
        1, torch.tensor([[2, 0]]).expand(len(x), -1), 0.5
    ),
    "channels": lambda x: functional.channel_shuffle(x, 2),
    "a shuffle of pixels": lambda x: functional.pixel_shuffle(x.view(len(x), 4, 2, 2), 2),
    "and back": lambda x: functional.pixel_unshuffle(x.unsqueeze(1), 2),
    "mirrors": lambda x: functional.pad(x, (2, 1), mode="reflect"),
    "mirrors on all sides": lambda x: functional.pad(x.unsqueeze(1), (2, 1, 0, 3), mode="reflect"),
    "edges": lambda x: functional.pad(x, (0, 3), mode="replicate"),
    "edges on all sides": lambda x: functional.pad(x.unsqueeze(1), (1, 1, 2, 0), mode="replicate"),
    "around": lambda x: functional.pad(x, (2, 1), mode="circular"),
    "a number around": lambda x: functional.pad(x, (2, 1), value=0.5),
    "a number around, and less": lambda x: functional.pad(x, (-1, 1, 2, 0), value=-math.inf),
}


@halved(name=[*SQUARE], dtype=[torch.float32, torch.float64])
def test_what_moves_is_where_torch_has_it(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(N, 4, 4, dtype=dtype)
    assert_close(*both(SQUARE[name], [x]))


@pytest.mark.parametrize("name", ["below", "as a diagonal above", "written", "a number around"])
def test_what_is_no_number_stays_where_it_is(name: str) -> None:
    """Nothing is multiplied by nothing."""
    x = torch.randn(N, 4, 4)
    x[1], x[2, 0, 3], x[3, 3, 0] = math.nan, math.inf, -math.inf
    assert_close(*both(SQUARE[name], [x]), equal_nan=True)


def _by_number(write: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda f, x, k: write(f(x), x, k.unsqueeze(1))


PUT: Mapping[str, Callable[..., Tensor]] = {
    "one": _by_number(lambda y, x, k: y.scatter(1, k, x[:, :1])),
    "one of nothing": _by_number(lambda y, x, k: torch.zeros_like(y).scatter(1, k, y[:, :1])),
    "a number": _by_number(lambda y, x, k: y.scatter(1, k, 1.0)),
    "a number twice": _by_number(lambda y, x, k: y.scatter(1, torch.cat([k, k // 2], 1), 1.0)),
    "added": _by_number(lambda y, x, k: y.scatter_add(1, torch.cat([k, k], 1), x[:, :2])),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", PUT)
def test_what_goes_by_number_is_where_torch_has_it(name: str, dtype: torch.dtype) -> None:
    module = Rowwise(PUT[name], 5, 5).to(dtype)
    assert_as_autograd(module, (torch.randn(N, 5, dtype=dtype), torch.tensor([0, 4, 2, 1, 0, 3])))


@pytest.mark.parametrize("name", PUT)
def test_a_number_that_there_is_not_is_refused(name: str) -> None:
    module, x = Rowwise(PUT[name], 5, 5), torch.randn(N, 5)
    program = Program(derive(module, (x, torch.arange(N) % 5)), Operands(module))
    with torch.no_grad(), pytest.raises((IndexError, RuntimeError), match="out of"):
        program.forward((x, torch.tensor([0, 5, 1, 1, 1, 1])))


def test_of_several_that_go_to_one_place_torch_says_which_stays() -> None:
    def function(f: Any, x: Tensor, k: Tensor) -> Tensor:
        return f(x).scatter(1, k, x[:, :2])

    module, x = Rowwise(function, 5, 5), torch.randn(N, 5)
    assert not in_c(module, (x, torch.tensor([[1, 1], [0, 2]]).repeat(3, 1)))


def _best(x: Tensor, many: int = 2) -> tuple[Tensor, Tensor]:
    best, which = x.topk(many, -1)
    return best, which


def _masked(x: Tensor) -> Tensor:
    """Of each row the best, and the others as far off as can be."""
    best, which = _best(x)
    return torch.full_like(x, -1e9).scatter(-1, which, best).softmax(-1)


def _in_their_place(x: Tensor) -> Tensor:
    best, which = _best(x, 3)
    return x.sin().scatter(-1, which, best.exp()) * x


def _in_order(x: Tensor) -> Tensor:
    """Along the axis before the last one."""
    ordered, which = x.view(len(x), 2, 3).sort(1)
    return torch.zeros_like(ordered).scatter(1, which, ordered.exp()).flatten(1) * x


def _gate(x: Tensor) -> Tensor:
    best, which = _best(x)
    return torch.zeros_like(x).scatter(1, which, best.softmax(1)) * x


RANKED = {f.__name__: f for f in (_masked, _in_their_place, _in_order, _gate)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", RANKED)
def test_the_first_of_an_order_go_each_to_a_place_of_its_own(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert_close(*both(RANKED[name], [torch.randn(N, 6, dtype=dtype)]))


def test_the_first_along_one_axis_may_meet_along_another() -> None:
    def function(f: Any, x: Tensor) -> Tensor:
        best, which = f(x).view(len(x), 3, 3).topk(2, 1)
        return torch.zeros_like(best).scatter(2, which, best)

    assert not in_c(Rowwise(function, 9, 9), (torch.randn(N, 9),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [1, 0.5])
def test_products_are_added_with_weights_anywhere(value: float, dtype: torch.dtype) -> None:
    def function(f: Any, x: Tensor, y: Tensor) -> Tensor:
        one = torch.addcmul(x, f.bias, y, value=value) + y.addcmul(x, f.bias, value=value)
        return one + x.addcdiv(f.bias, 2 + y * y, value=value) + torch.addcdiv(f.bias, x, f.bias)

    given = torch.randn(N, 5, dtype=dtype), torch.randn(N, 5, dtype=dtype)
    module = Rowwise(function, 5, 5).to(dtype)
    with torch.no_grad():
        module.map.bias += 2
    assert_as_autograd(module, given)


BUCKETS = [-1.0, -0.5, 0.0, 0.5, 1.0]


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_buckets_are_torchs(right: bool, dtype: torch.dtype) -> None:
    """Of edges, of what has no end, and of what is no number."""

    def function(f: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        edges = torch.tensor(BUCKETS).to(x)
        one = torch.bucketize(x, edges, right=right)
        other = torch.searchsorted(edges, x, right=right)
        return f(x.nan_to_num(0, 0, 0)), one, other + 1

    x = torch.tensor([[-2.0, -1, -0.5], [0.2, 0.5, 1], [math.inf, -math.inf, math.nan]])
    assert_as_autograd(Rowwise(function, 3, 2).to(dtype), (x.to(dtype),))


def test_rows_are_looked_up_by_bucket() -> None:
    table = torch.randn(6, 3)

    def function(f: Any, x: Tensor) -> Tensor:
        return f(
            functional.embedding(
                torch.bucketize(x[:, 0].contiguous(), torch.tensor(BUCKETS)), table
            )
        )

    assert_as_autograd(Rowwise(function, 3, 2), (torch.randn(N, 3),))


def test_places_among_what_a_row_has_are_torchs() -> None:
    def function(f: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return f(x), torch.searchsorted(x.sort(1).values, x * 0.5)

    assert_as_autograd(Rowwise(function, 4, 2), (torch.randn(N, 4),))


@pytest.mark.parametrize("invert", [False, True])
def test_what_is_among_others_is_torchs(invert: bool) -> None:
    def function(f: Any, x: Tensor, k: Tensor) -> Tensor:
        return f(x) * torch.isin(k, torch.tensor([0, 3]), invert=invert).unsqueeze(1)

    assert_as_autograd(Rowwise(function, 3, 2), (torch.randn(N, 3), torch.arange(N)))


def test_numbers_become_integers_as_torch_has_it() -> None:
    """Towards zero, and as large as they are."""

    def function(f: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return f(x), (x * 3).long(), (x.clamp(0, 1) * 3).long() % 2

    x = torch.tensor([[0.4, -0.4, 0.9], [-0.9, 1e9, -1e9], [123456789.0, 0.0, -0.0]])
    assert_as_autograd(Rowwise(function, 3, 2).double(), (x.double(),))


def test_what_is_told_of_rows_is_not_told_of_weights() -> None:
    """Slices and diagonals of what a module has are computed of it, once a firing."""

    def function(f: Any, x: Tensor) -> Tensor:
        return f(x[:, ::2]) * f.weight[::2, 0].repeat(2) + f.weight[:, ::2].diagonal()[0]

    assert_as_autograd(Rowwise(function, 3, 4).double(), (torch.randn(N, 6).double(),))


class Placed(nn.Module):
    """What a row's entries have by their place is some of a longer table."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.read, self.places = read, nn.Parameter(torch.randn(9, 3, 2))
        self.map = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.map(x) * self.read(self.places)
        return found


_PARTS_OF: Mapping[str, tuple[One, bool]] = {
    "the first": (lambda w: w[:5, 0, :1], True),
    "some": (lambda w: w[2:7, 1:2].squeeze(1), True),
    "one": (lambda w: w[-2, 1], False),
    "one, some of it": (lambda w: w[3, 1:2], False),
    "the last": (lambda w: w[-1:, 0], False),
    "two": (lambda w: w[0, 0] * w[1, 2] + w[1, 1], True),
    "columns": (lambda w: w[1:6, :, 1].sum(1, keepdim=True), True),
    "with gaps": (lambda w: w[::2, 2], True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", _PARTS_OF)
def test_parts_of_weights_are_theirs(name: str, dtype: torch.dtype) -> None:
    """Where they lie side by side, what comes back is added up there; else they are computed."""
    read, computed = _PARTS_OF[name]
    module, x = Placed(read).to(dtype), torch.randn(N, 5, 3, dtype=dtype)
    assert (derive(module, (x,)).computed is not None) == computed
    assert_as_autograd(module, (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_places_of_a_longer_table_are_added_up_where_they_lie(dtype: torch.dtype) -> None:
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places, self.map = nn.Parameter(torch.randn(9, 3)), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.map(x + self.places[2 : 2 + x.shape[1]]) * self.places[0, :2]
            return found

    module, x = Added().to(dtype), torch.randn(N, 5, 3, dtype=dtype)
    cut = derive(module, (x,))
    assert cut.computed is None and cut.parts.fused is not None
    assert_as_autograd(module, (x,))
