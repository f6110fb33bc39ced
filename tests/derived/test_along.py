"""Along axes of rows: medians, what was largest so far, norms of any order, counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from geartrain.derived.derivation import derive
from geartrain.derived.operands import Operands
from geartrain.derived.program import Program
from geartrain.errors import GraphError
from geartrain.native.fused import At, Op, Step, Steps
from tests.rigs.rowwise import Rowwise, assert_as_autograd, both, in_c

N, K, D = 6, 5, 4
One = Callable[[Tensor], Tensor]

pytestmark = pytest.mark.usefixtures("needs_kernels")

ALONG: Mapping[str, One] = {
    "median": lambda x: x.median(1).values * x[:, 0],
    "median of an even number": lambda x: x.median(2, keepdim=True).values * x,
    "third": lambda x: x.kthvalue(3, 1).values,
    "first": lambda x: x.kthvalue(1, -1, keepdim=True).values + x,
    "quantile": lambda x: x.quantile(0.3, 1),
    "largest so far": lambda x: x.cummax(1).values * x,
    "least so far": lambda x: x.cummin(2).values * x,
    "products so far": lambda x: x.cumprod(1) * x,
    "products so far, of the last": lambda x: torch.cumprod(x, -1),
    "least and most": lambda x: torch.cat([*x.aminmax(dim=1, keepdim=True)], 1) * x[:, :1],
    "lines": lambda x: x.norm(1, dim=1),
    "cubes": lambda x: x.norm(3, dim=2, keepdim=True) * x,
    "halves": lambda x: torch.linalg.vector_norm(x, 0.5, dim=1),
    "most of all": lambda x: x.norm(math.inf, dim=1) * x[:, 0],
    "least of all": lambda x: torch.linalg.vector_norm(x, -math.inf, dim=2),
    "any": lambda x: x.norm(0, dim=1) * x[:, 0],
    "of both axes": lambda x: x.norm(dim=(1, 2)),
    "made one": lambda x: functional.normalize(x, 1, dim=1) + functional.normalize(x, 4, dim=2),
    "distance": lambda x: functional.pairwise_distance(x[:, 0], x[:, 1]),
    "distance in lines": lambda x: functional.pairwise_distance(x[:, 0], x[:, 1], p=1),
    "triplet": lambda x: functional.triplet_margin_loss(
        x[:, 0], x[:, 1], x[:, 2], reduction="none"
    ),
    "logarithm of sums": lambda x: x.logsumexp((1, 2)) * x.logsumexp((2,), True).sum((1, 2)),
    "variance and mean": lambda x: torch.cat(torch.var_mean(x, 1), 1),
    "deviation and mean": lambda x: torch.stack(torch.std_mean(x, (1, 2), correction=2), 1),
    "how many": lambda x: x * (x > 0.3).count_nonzero(2).unsqueeze(2),
    "how many in both": lambda x: x * x.round().count_nonzero((1, 2)).view(-1, 1, 1),
    "mean of those that are": lambda x: x.nanmean((1, 2)),
    "norm of two axes": lambda x: functional.layer_norm(x, (K, D)),
    "distances to others": lambda x: torch.cdist(x[:, 0], torch.ones(3, D).to(x).triu()),
    "dots": lambda x: torch.einsum("...i,...i->...", x, 2 * x),
    "dots of some": lambda x: torch.einsum("...ki,...ji->...kj", x, x[:, :2]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ALONG)
def test_what_goes_along_axes_is_torchs(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(N, K, D, dtype=dtype)
    close = 1e-10 if dtype is torch.float64 else 2e-5
    mine, torchs = both(ALONG[name], [x])
    assert_close(mine, torchs, rtol=close, atol=close)


@pytest.mark.parametrize(
    "name",
    [
        *("median", "third", "largest so far", "least so far", "most of all", "least and most"),
        *("any", "lines", "mean of those that are"),
    ],
)
def test_what_is_no_number_or_has_no_end_is_as_torchs(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(N, K, D, dtype=torch.float64)
    x[0, 1, 2], x[1, 4, 0], x[2, 0, :] = math.nan, math.inf, -math.inf
    x[3, 2, 1], x[3, 4, 1], x[4, 3] = math.nan, math.nan, 0
    assert_close(*both(ALONG[name], [x]), equal_nan=True)


@pytest.mark.parametrize(
    "name", ["largest so far", "least so far", "most of all", "least and most", "products so far"]
)
def test_those_that_are_alike_share_as_torch_has_it(name: str) -> None:
    x = torch.tensor([1.0, 0, 0, 2, 2]).repeat(N, 1).unsqueeze(2).repeat(1, 1, D)
    x[1], x[2, 3:] = 0, 1
    assert_close(*both(ALONG[name], [x.double()]))


def test_which_was_largest_is_the_last_of_those_alike() -> None:
    def function(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, ...]:
        return f(x), x.cummax(1).indices, x.cummin(1).indices * 2, x.median(1).indices

    x = torch.tensor([[1.0, 3, 2, 3, 0], [math.nan, 1, math.nan, 2, 9], [5, 1, 7, -8, 2]])
    samples = torch.randn(5, 5)
    assert_as_autograd(Rowwise(function, 5, 2), (x.nan_to_num(0.25),), (samples,))
    y = x.clone()
    out = torch.full((3, 5), -7.0)
    step = Step(Op.MOST_SO_FAR, 5, (At(1, 0, 5), At(0, 0, 5)), many=5, inner=1)
    Steps([step], [0, 0], x.dtype).run(3, [y.data_ptr(), out.data_ptr()])
    assert_close(out.long(), x.cummax(1).indices)


def test_norms_of_nothing_have_gradients_as_torchs() -> None:
    x = torch.zeros(N, K, D, dtype=torch.float64)
    for name in ("lines", "cubes", "most of all", "of both axes", "distance"):
        assert_close(*both(ALONG[name], [x]), equal_nan=True)


def test_long_axes_are_left_to_torch() -> None:
    x = torch.randn(5, 200)
    for function in (lambda f, x: f(x).median(1).values, lambda f, x: f(x).cumprod(1)):
        assert not in_c(Rowwise(function, 200, 200), (x,))


LAYERS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "norm of two axes": (lambda: nn.LayerNorm([K, D]), (K, D)),
    "norm with a scale alone": (lambda: nn.LayerNorm(D, bias=False), (K, D)),
    "norm of two axes with a scale": (lambda: nn.LayerNorm([K, D], bias=False), (K, D)),
    "settled": (lambda: nn.BatchNorm1d(D).eval(), (D,)),
    "settled plane": (lambda: nn.BatchNorm2d(2).eval(), (2, K, D)),
    "settled without weights": (lambda: nn.BatchNorm1d(K, affine=False).eval(), (K, D)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LAYERS)
def test_norms_are_torchs(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    module = make().to(dtype)
    for k, x in enumerate([*module.parameters(), *module.buffers()]):
        if x.is_floating_point():
            nn.init.uniform_(x, 0.5, 1.5 + k)
    assert_as_autograd(module, (torch.randn(N, *shape, dtype=dtype),))


def test_what_a_batch_settles_is_refused() -> None:
    with pytest.raises(GraphError):
        in_c(nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D)), (torch.randn(N, D),))


WORDS = torch.tensor([[0, 1, 2], [2, 2, 2], [3, 1, 0], [4, 4, 1]])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_words_are_torchs(mode: str) -> None:
    assert_as_autograd(nn.EmbeddingBag(5, D, mode=mode).double(), (WORDS,))


def test_bags_of_words_that_weigh_are_torchs() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.EmbeddingBag(5, D, mode="sum")

        def forward(self, words: Tensor, weights: Tensor) -> Tensor:
            found: Tensor = self.words(words, per_sample_weights=weights)
            return found

    assert_as_autograd(Bag().double(), (WORDS, torch.randn(4, 3).double()))


_WEIGHTS = [0.5, 1, 2, 3, 0.25]
_OF_CLASS: Mapping[str, Callable[..., Tensor]] = {
    "entropy": lambda y, k, w: functional.cross_entropy(y, k, reduction="none"),
    "entropy that weighs": lambda y, k, w: functional.cross_entropy(y, k, w, reduction="none"),
    "smooth": lambda y, k, w: functional.cross_entropy(y, k, label_smoothing=0.2, reduction="none"),
    "smooth, without some, weighing": lambda y, k, w: functional.cross_entropy(
        y, k, w, ignore_index=1, label_smoothing=0.2, reduction="none"
    ),
    "likelihood": lambda y, k, w: functional.nll_loss(y, k, reduction="none"),
    "likelihood without some": lambda y, k, w: functional.nll_loss(
        y.log_softmax(1), k, w, ignore_index=1, reduction="none"
    ),
    "of several": lambda y, k, w: functional.cross_entropy(
        torch.stack([y, 2 * y, y * y], 2), torch.stack([k, k, 0 * k], 1), reduction="none"
    ).sum(1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", _OF_CLASS)
def test_losses_of_classes_are_torchs(name: str, dtype: torch.dtype) -> None:
    """Also of those that are ignored, whatever number they have."""

    def function(f: Callable[[Tensor], Tensor], x: Tensor, k: Tensor) -> Tensor:
        return _OF_CLASS[name](f(x), k, torch.tensor(_WEIGHTS).to(x))

    kinds = torch.tensor([0, 1, 4, 1, 2, 3])
    if "without" not in name:
        kinds = kinds.masked_fill(kinds == 1, -100)
    if name == "of several":
        kinds = kinds.clamp_min(0)
    assert_as_autograd(Rowwise(function, D, 5).to(dtype), (torch.randn(N, D, dtype=dtype), kinds))


def test_a_class_that_there_is_not_is_refused() -> None:
    def function(f: Callable[[Tensor], Tensor], x: Tensor, k: Tensor) -> Tensor:
        return functional.cross_entropy(f(x), k, reduction="none")

    module, x = Rowwise(function, D, 5), torch.randn(N, D)
    program = Program(derive(module, (x, torch.arange(N) % 5)), Operands(module))
    assert program.in_c
    for wrong in (5, -1):
        with torch.no_grad(), pytest.raises(IndexError):
            program.forward((x, torch.full((N,), wrong)))


class Attending(nn.Module):
    """Rows that are stacks, by a function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function, self.map = function, nn.Linear(8, 8)
        self.leaving = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True)
        self.heads = nn.MultiheadAttention(8, 2, batch_first=True, kdim=3, vdim=5)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _grouped(m: Attending, x: Tensor) -> Tensor:
    q = m.map(x).view(-1, 3, 4, 2).transpose(1, 2)
    k = x[..., :4].view(-1, 3, 2, 2).transpose(1, 2)
    return functional.scaled_dot_product_attention(q, k, 2 * k, enable_gqa=True).flatten(1)


def test_heads_of_other_widths_and_heads_that_share_are_torchs() -> None:
    for function in (lambda m, x: m.heads(m.map(x), x[..., :3], x[..., 3:])[0], _grouped):
        assert_as_autograd(Attending(function).double(), (torch.randn(N, 3, 8).double(),))


def test_attention_that_leaves_out_shares_has_steps() -> None:
    """As in training by default: some of all shares, and the rest that much larger."""
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True)
    heads = Attending(lambda m, x: m.leaving(x, x, m.map(x))[1])
    function = functional.scaled_dot_product_attention
    for module in (layer, heads, Attending(lambda m, x: function(x, x, m.map(x), None, 0.4))):
        assert in_c(module, (torch.randn(N, 3, 8),))
