"""What a forward has drawn comes again when the module runs again, for other weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from geartrain.nodes.chance import Evened, Remembered
from tests.rigs.programs import Nursery, Program

ROWS, DIM = 40, 5


def fused(x: Tensor, p: float) -> Tensor:
    """Dropout as one operator with a mask, which is what accelerators run."""
    dropped: Tensor = torch.native_dropout(x, p, True)[0]
    return dropped


@pytest.mark.parametrize("p", [0.3, 0.75])
def test_the_mask_of_a_native_dropout_comes_again_with_its_gradient(p: float) -> None:
    torch.manual_seed(0)
    then, now = torch.rand(2, ROWS, DIM, dtype=torch.float64) + 1
    with Remembered() as chance:
        first, second = fused(then, p), fused(then, p)
    assert not torch.equal(first, second)
    leaf = now.clone().requires_grad_()
    torch.manual_seed(1)
    with chance.repeated():
        again = [fused(leaf, p), fused(leaf, p)]
    dy = torch.randn(ROWS, DIM, dtype=torch.float64)
    for y, was in zip(again, (first, second), strict=True):
        factors = was / then  # 0 or 1 / (1 - p)
        assert_close(y.detach(), now * factors)
        (dx,) = torch.autograd.grad(y, leaf, dy)
        assert_close(dx, dy * factors)


DRAWS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "dropout": (lambda x: F.dropout(x, 0.25), lambda x: x / 0.75),
    "one operator with a mask": (lambda x: fused(x, 0.25), lambda x: x),
    "uniform": (lambda x: x + torch.rand_like(x), lambda x: x + 0.75),
    "normal": (lambda x: x + torch.empty_like(x).normal_(), lambda x: x + 0.75),
    "by chances of its own": (lambda x: x + torch.bernoulli(x / 2), lambda x: x + 1),
    "by chances, in place": (lambda x: x + x.clone().bernoulli_(x / 2), lambda x: x + 1),
    "integers": (lambda x: x + torch.randint(5, x.shape), lambda x: x),
    "an order": (lambda x: x[torch.randperm(len(x))], lambda x: x[[0] * len(x)]),
    "one of several": (lambda x: torch.multinomial(x, 1), lambda x: 0 * x[:, :1].long()),
}


@pytest.mark.parametrize("how", DRAWS)
def test_nothing_is_left_to_chance_where_all_draws_are_even(how: str) -> None:
    draws, known = DRAWS[how]
    x = torch.rand(ROWS, DIM, dtype=torch.float64) + 0.5
    with Evened():
        found = draws(x)
    assert_close(found, known(x))


def test_what_draws_inside_a_kernel_is_as_ever() -> None:
    x = -torch.ones(ROWS, DIM)
    with Evened():
        y = F.rrelu(x, 0.1, 0.9, training=True)
    assert len(y.unique()) > ROWS


def test_a_native_dropout_of_all_is_zero_again() -> None:
    x = torch.ones(3, 2, dtype=torch.float64)
    with Remembered() as chance:
        assert not fused(x, 1.0).any()
    with chance.repeated():
        assert not fused(x, 1.0).any()


def test_a_native_dropout_in_evaluation_draws_nothing() -> None:
    x = torch.ones(3, 2, dtype=torch.float64)
    with Remembered() as chance:
        y = torch.native_dropout(x, 0.5, False)[0]
    assert torch.equal(y, x)
    assert chance.drawn == [] and chance.nbytes() == 0
    with chance.repeated():
        assert torch.equal(torch.native_dropout(x, 0.5, False)[0], x)


def test_of_a_native_dropout_the_mask_alone_is_kept() -> None:
    x = torch.ones(ROWS, DIM, dtype=torch.float64)
    with Remembered() as chance:
        fused(x, 0.5)
    (mask,) = chance.drawn
    assert mask.dtype == torch.bool and chance.nbytes() == ROWS * DIM


def test_threads_that_keep_the_generators_do_not_wait_for_each_other_for_ever(
    nursery: Nursery, tmp_path: Path
) -> None:
    """torch collects garbage while it holds the generator's lock; in a process of its own, as it
    would hold the interpreter for ever."""
    program = """
import gc, sys, threading
import torch
from geartrain.nodes.chance import generators_kept

def work():
    for _ in range(4000):
        ring = [torch.ones(1)]
        ring.append(ring)  # garbage that gives up the interpreter when it is collected
        with generators_kept(None):
            pass

torch.set_num_threads(1)
sys.setswitchinterval(1e-5)
gc.set_threshold(10)
workers = [threading.Thread(target=work) for _ in range(2)]
for each in workers: each.start()
for each in workers: each.join()
print("both are done")
"""
    assert Program(nursery, tmp_path / "run", program).line() == "both are done"
