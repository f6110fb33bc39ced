"""The residual network: shapes, shortcuts, equal work per block."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from geartrain.nn import PooledHead, ResidualBlock, residual_network


def test_stages_halve_the_sides_and_double_the_channels():
    net = residual_network(10, width=4, blocks=2)
    x = torch.randn(3, 3, 32, 32)
    shapes = []
    for module in net:
        x = module(x)
        shapes.append(tuple(x.shape[1:]))
    wide, middle, narrow = (4, 32, 32), (8, 16, 16), (16, 8, 8)
    assert shapes == [wide, wide, wide, middle, middle, narrow, narrow, (10,)]


@pytest.mark.parametrize(("out", "stride"), [(4, 1), (8, 2), (6, 1), (4, 2)])
def test_a_block_whose_convolutions_are_zero_is_its_shortcut(out: int, stride: int) -> None:
    block = ResidualBlock(4, out, stride)
    torch.nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 4, 8, 8)
    y = block(x)
    kept = x.view(2, 4, 8 // stride, stride, 8 // stride, stride).mean((3, 5))
    torch.testing.assert_close(y[:, :4], kept)
    assert not y[:, 4:].any()
    assert y.shape == (2, out, 8 // stride, 8 // stride)


def test_every_block_costs_the_same_but_for_those_that_halve() -> None:
    net = residual_network(10, width=4, blocks=2).eval()
    x, costs = torch.randn(1, 3, 32, 32), []
    for module in net:
        with FlopCounterMode(display=False) as counter:
            x = module(x)
        if isinstance(module, ResidualBlock):
            costs.append(counter.get_total_flops())
    assert costs[0] == costs[1] == costs[3] == costs[5]
    assert costs[2] == costs[4] == 3 * costs[0] // 4


def test_the_head_does_not_mind_where_something_is() -> None:
    head = PooledHead(5, 3).eval()
    x = torch.randn(2, 5, 4, 4)
    moved = x.flatten(2)[:, :, torch.randperm(16)].view_as(x)
    torch.testing.assert_close(head(x), head(moved))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="give out of channels or more"):
        ResidualBlock(8, 4)
    with pytest.raises(ValueError, match="stride 1 or 2"):
        ResidualBlock(4, 4, 3)
    with pytest.raises(ValueError, match="blocks=0"):
        residual_network(10, blocks=0)
