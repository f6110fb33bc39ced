"""Torch's criteria of entries, as one loss a row with its gradient: bit for bit as by autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import geartrain as gt
from geartrain.nodes import criteria
from geartrain.nodes.criteria import InnerMean
from geartrain.nodes.loss import per_row

ALL = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
SHAPES = ((7,), (7, 1), (7, 3), (7, 2, 4), (0, 3))


@pytest.mark.parametrize("criterion", ALL)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("aim", ["same", "flat", "whole", "infinite"])
def test_the_gradient_of_each_row_is_that_of_autograd(
    criterion: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype, aim: str
) -> None:
    torch.manual_seed(0)
    prediction = 3 * torch.randn(shape, dtype=dtype)
    target = 3 * torch.randn(shape, dtype=dtype)
    if aim == "flat":
        target = target.flatten()
    elif aim == "whole":
        target = target.round().long()
    elif aim == "infinite" and target.numel():
        target.view(-1)[0], prediction.view(-1)[-1] = torch.inf, torch.nan
    losses, d = InnerMean(criterion).with_gradient(prediction, target)
    leaf = prediction.clone().requires_grad_()
    each = criterion(leaf, target.view(shape).to(dtype), reduction="none")
    by_torch = each.flatten(1).mean(1) if each.ndim > 1 else each
    (wanted,) = torch.autograd.grad(by_torch.sum(), [leaf])
    for found, known in ((losses, by_torch.detach()), (d, wanted)):
        assert found.dtype is dtype and found.shape == known.shape
        assert torch.equal(found.nan_to_num(7), known.nan_to_num(7))
    assert torch.equal(InnerMean(criterion)(prediction, target).nan_to_num(7), losses.nan_to_num(7))


def test_others_are_not_of_this_kind() -> None:
    assert all(isinstance(per_row(each, "loss"), InnerMean) for each in ALL)
    for other in (F.cross_entropy, F.poisson_nll_loss, nn.MSELoss(reduction="none"), lambda y: y):
        assert not isinstance(per_row(other, "loss"), InnerMean)


@pytest.mark.parametrize("weight", [None, lambda m: m.aim * 0.5])
def test_a_fit_is_that_of_a_criterion_which_autograd_follows(
    weight: Callable[..., object] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randn(1, 3, generator=draw) for _ in range(40)]
    data = [gt.Instance({"x": x}, value={"aim": float(x.sum())}) for x in rows]
    asked: list[int] = []
    before = criteria._BACK[F.mse_loss]

    def watched(*given: Tensor) -> Tensor:
        asked.append(len(given[1]))
        return before(*given)

    def trained(criterion: Callable[..., Tensor]) -> tuple[list[float], Tensor]:
        torch.manual_seed(0)
        module, graph = nn.Linear(3, 1), gt.Graph(value=("aim",))
        graph.input("x").through(module).loss(criterion, target="aim", weight=weight)
        session = gt.Session(graph, rules=gt.Rules(update_every=8), runtime=gt.Simulated(1))
        history = session.fit(data, epochs=3).history
        return [epoch.loss for epoch in history], module.weight.detach()

    monkeypatch.setitem(criteria._BACK, F.mse_loss, watched)  # type: ignore[index]
    mine, weights = trained(F.mse_loss)
    assert sum(asked) == 3 * len(data)
    by_torch, its = trained(
        lambda y, aim: (
            F.mse_loss(y, aim.view_as(y).to(y.dtype), reduction="none").flatten(1).mean(1)
        )
    )
    assert mine == by_torch
    assert torch.equal(weights, its)


def test_a_criterion_is_asked_for_a_loss_a_row_where_it_says_that_it_takes_that() -> None:
    def of_its_own(p: Tensor, t: Tensor, *, reduction: str = "mean") -> Tensor:
        return F.mse_loss(p, t, reduction=reduction)

    def plain(p: Tensor, t: Tensor) -> Tensor:
        reduction = "none"
        return F.mse_loss(p, t, reduction=reduction)

    @wraps(of_its_own)
    def wrapped(*args: Any, **rest: Any) -> Tensor:
        return of_its_own(*args, **rest)

    p, t = torch.arange(3.0), torch.ones(3)
    for criterion in (of_its_own, wrapped, plain):
        assert torch.equal(per_row(criterion, "loss")(p, t), (p - t) ** 2), criterion
    assert per_row(plain, "loss") is plain


@pytest.mark.parametrize(
    "how", [lambda f: 0.3 * f, lambda f: f * 2, lambda f: f / 2, lambda f: 1 + f]
)
def test_who_scales_a_criterion_is_told_what_to_write(how: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"weight=lambda m: 0\.3.*0\.3 \* cross_entropy\(y, t\)"):
        how(gt.cross_entropy)


def trained(criterion: Callable[..., Tensor], weight: Any) -> Tensor:
    """The weights after a step of a loss with this criterion and weight."""
    torch.manual_seed(0)
    linear = nn.Linear(3, 4).double()
    graph = gt.Graph(vertex=("label",))
    graph.input("x").through(linear, name="m").loss(criterion, target="label", weight=weight)
    rules = gt.Rules(optimizer=lambda p: torch.optim.SGD(p, lr=1.0), update_every=10)
    rows = [
        gt.Instance({"x": torch.randn(2, 3, dtype=torch.float64)}, {"label": [i % 4, 1]})
        for i in range(5)
    ]
    gt.Session(graph, rules=rules).fit(rows, epochs=1)
    return linear.weight.detach()


def test_both_ways_that_it_is_told_of_scale_the_loss() -> None:
    scaled = trained(gt.cross_entropy, lambda m: 0.3)
    assert_close(scaled, trained(lambda y, t: 0.3 * gt.cross_entropy(y, t), None))
    assert not torch.allclose(scaled, trained(gt.cross_entropy, None))
