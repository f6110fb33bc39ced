"""A local critic's two outputs, and which gradient each of them has."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from geartrain.nn import LocalCritic, RowLoss


def losses(prediction, y):
    return F.cross_entropy(prediction, y, reduction="none")


@pytest.fixture
def rows():
    torch.manual_seed(0)
    h = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    return h, torch.randint(0, 3, (6,))


def test_the_gradient_of_the_loss_reaches_the_rows_and_not_the_weights(rows):
    h, y = rows
    linear = nn.Linear(4, 3).double()
    loss, _ = LocalCritic(linear, losses)(h, y)
    found = torch.autograd.grad(loss.sum(), [h, *linear.parameters()], allow_unused=True)
    (want,) = torch.autograd.grad(losses(linear(h), y).sum(), h)
    torch.testing.assert_close(found[0], want)
    assert found[1] is None and found[2] is None


def test_the_gradient_of_the_critics_own_value_reaches_the_weights_and_not_the_rows(rows):
    h, y = rows
    linear = nn.Linear(4, 3).double()
    loss, own = LocalCritic(linear, losses)(h, y)
    assert torch.equal(loss, own)
    found = torch.autograd.grad(own.sum(), [h, *linear.parameters()], allow_unused=True)
    want = torch.autograd.grad(losses(linear(h), y).sum(), list(linear.parameters()))
    assert found[0] is None
    torch.testing.assert_close(found[1:], want)


def test_running_statistics_of_a_critic_see_a_message_once(rows):
    h, y = rows
    critic = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    LocalCritic(critic, losses)(h, y)
    assert int(critic[0].num_batches_tracked) == 1
    expected = nn.BatchNorm1d(4).double()
    expected(h)
    assert torch.equal(critic[0].running_mean, expected.running_mean)


def test_a_true_loss_is_one_number_a_row(rows):
    h, y = rows
    assert torch.equal(RowLoss(losses)(h, y), losses(h, y))
