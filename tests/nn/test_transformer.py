"""The decoder: causality, attention as its formula, tied weights, dropout."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from geartrain.nn import DecoderBlock, decoder


def small(**changes: object) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return decoder(11, dim=8, blocks=2, heads=2, length=6, **changes).double()


def test_scores_depend_on_earlier_tokens_and_on_no_later_one() -> None:
    net, x = small(), torch.tensor([[1, 2, 3, 4, 5, 6]])
    scores = net(x)
    assert scores.shape == (1, 6, 11)
    for place in range(6):
        other = x.clone()
        other[0, place] = 9
        changed = (net(other) != scores).any(-1)[0].tolist()
        assert changed == [later >= place for later in range(6)]


def test_a_block_is_its_formula() -> None:
    torch.manual_seed(1)
    block, x = DecoderBlock(8, 2).double(), torch.randn(3, 5, 8, dtype=torch.float64)
    h = F.layer_norm(x, (8,), block.norm1.weight, block.norm1.bias)
    q, k, v = (part.view(3, 5, 2, 4) for part in block.qkv(h).split(8, -1))
    weight = torch.einsum("bihc,bjhc->bhij", q, k) / math.sqrt(4)
    weight = weight.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf).softmax(-1)
    y = x + block.mix(torch.einsum("bhij,bjhc->bihc", weight, v).reshape(3, 5, 8))
    h = F.layer_norm(y, (8,), block.norm2.weight, block.norm2.bias)
    y = y + block.down(F.gelu(block.up(h), approximate="tanh"))
    torch.testing.assert_close(block(x), y)


def test_shorter_texts_are_read_from_the_first_place() -> None:
    net, x = small(), torch.tensor([[1, 2, 3, 4, 5, 6]])
    torch.testing.assert_close(net(x[:, :3]), net(x)[:, :3])


def test_a_tied_readout_has_the_weights_of_the_embedding() -> None:
    free, tied = small(), small(tied=True)
    sizes = [sum(p.numel() for p in net.parameters()) for net in (free, tied)]
    assert sizes[0] - sizes[1] == 11 * 8
    assert tied[-1].linear.weight is tied[0].token.weight


def test_dropout_is_for_training_alone() -> None:
    net, x = small(dropout=0.5), torch.tensor([[1, 2, 3, 4, 5, 6]])
    assert not torch.equal(net(x), net(x))
    net.eval()
    torch.testing.assert_close(net(x), net(x))


def test_at_the_start_all_tokens_are_about_as_likely() -> None:
    torch.manual_seed(0)
    net, x = decoder(65, dim=64, blocks=8), torch.randint(65, (4, 32))
    loss = F.cross_entropy(net(x).flatten(0, 1), torch.randint(65, (128,)))
    assert loss.item() == pytest.approx(math.log(65), abs=0.3)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of heads"):
        decoder(5, dim=10, heads=4)
    with pytest.raises(ValueError, match="blocks=0"):
        decoder(5, blocks=0)
