"""Keys and values of several heads, made by one product and told apart by an axis in front."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from geartrain.derived.ragged.derivation import derive_memory
from geartrain.errors import GraphError
from tests.rigs.ragged import check_memory

H, HEADS = 6, 2
pytestmark = pytest.mark.usefixtures("needs_kernels", "in_float64")
Apart = Callable[[Tensor], tuple[Tensor, ...]]


class ManyHeads(nn.Module):
    """Attends with keys, values and a scale of each, told apart in a way of its own."""

    def __init__(self, apart: Apart, parts: int) -> None:
        super().__init__()
        self.apart, self.parts = apart, parts
        self.query, self.all = nn.Linear(H, H), nn.Linear(H, parts * H)

    def forward(self, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
        n, most = mask.shape
        k, v = self.apart(self.all(m).view(n, most, self.parts, HEADS, H // HEADS))
        score = self.query(h).view(n, HEADS, 1, -1) @ k.transpose(-1, -2)
        share = score.masked_fill(~mask[:, None, None], -1e9).softmax(-1)
        return h + (share @ v).transpose(1, 2).reshape(n, H)


def _front(x: Tensor) -> Tensor:
    return x.permute(2, 0, 3, 1, 4)


WAYS: Mapping[str, tuple[Apart, int]] = {
    "unpacked": (lambda x: tuple(_front(x)), 2),
    "by number": (lambda x: (_front(x)[0], _front(x)[1]), 2),
    "from the end": (lambda x: (_front(x)[-2], _front(x)[-1]), 2),
    "contiguous": (lambda x: _front(x).contiguous().unbind(0), 2),
    "the same": (lambda x: (_front(x)[1], _front(x)[1]), 2),
    "one of three is of no use": (lambda x: (_front(x)[0], _front(x)[2]), 3),
    "three": (lambda x: (_front(x)[0] * torch.tanh(_front(x)[1]), _front(x)[2]), 3),
}


@pytest.mark.parametrize("name", WAYS)
def test_parts_of_an_axis_in_front_are_torchs(name: str) -> None:
    torch.manual_seed(0)
    module = ManyHeads(*WAYS[name])
    for lengths in ([2, 1, 4], [1], [3, 300, 2]):
        check_memory(module, lengths, H)


REFUSED: Mapping[str, Apart] = {
    "heads in front": lambda x: (x.permute(3, 0, 2, 1, 4)[0], x.permute(3, 0, 2, 1, 4)[1]),
    "turned": lambda x: (x.permute(2, 0, 4, 1, 3)[0].transpose(1, 3), _front(x)[1]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_parts_that_lie_otherwise_are_left_to_torch(name: str) -> None:
    module = ManyHeads(REFUSED[name], 2)
    with pytest.raises(GraphError):
        derive_memory(module, (torch.randn(2, H),), (torch.randn(5, H),), 0)
