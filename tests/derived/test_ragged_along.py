"""What goes along the members of each bundle that is padded: moved, convolved, added up so far, and
its first member; beside torch in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from geartrain.derived.ragged.derivation import derive_inside
from geartrain.errors import GraphError
from geartrain.nodes.inside import Inside
from tests.rigs.ragged import check_inside

H, OUT = 6, 5
LENGTHS = [[2, 3, 1], [1], [5, 9], [3, 4, 2, 1], [1 + k * 7 % 30 for k in range(60)]]

pytestmark = pytest.mark.usefixtures("needs_kernels", "in_float64")

Going = Callable[["Goes", Tensor, Tensor], Tensor]


class Goes(nn.Module):
    """Pads its bundles; ``way`` says what goes along them."""

    def __init__(self, way: Going) -> None:
        super().__init__()
        self.way = way
        self.one, self.two, self.three = (
            nn.Linear(H, H),
            nn.Linear(2 * H, OUT),
            nn.Linear(3 * H, OUT),
        )
        self.near = nn.Conv1d(H, OUT, 3, padding=1)
        self.wide = nn.Conv1d(H, OUT, 5, padding="same", dilation=2, bias=False)
        self.causal, self.again = nn.Conv1d(H, OUT, 3), nn.Conv1d(OUT, OUT, 3, padding=1)
        self.every = nn.Conv1d(H, OUT, 1)
        self.four = nn.Conv1d(H, OUT, 4, padding=1)

    def forward(self, x: Tensor, inside: Inside) -> Tensor:
        mask = torch.arange(int(inside.lengths.max())) < inside.lengths[:, None]
        out = x.new_zeros(*mask.shape, H)
        out[mask] = x
        found = self.way(self, out, mask)
        return found if found.ndim == 2 else found[mask]


def behind_zeros(s: Goes, x: Tensor, mask: Tensor) -> Tensor:
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    found: Tensor = s.two(torch.cat([x, before], 2))
    return found


def before_zeros(s: Goes, x: Tensor, mask: Tensor) -> Tensor:
    y = s.one(x) * mask[..., None]
    found: Tensor = s.two(torch.cat([x, torch.cat([y[:, 1:], y.new_zeros(len(y), 1, H)], 1)], 2))
    return found


def padded_behind(s: Goes, x: Tensor, mask: Tensor) -> Tensor:
    before = functional.pad(torch.tanh(x), (0, 0, 1, 0))[:, :-1]
    found: Tensor = s.two(torch.cat([x, before], 2))
    return found


def windows(s: Goes, x: Tensor, mask: Tensor) -> Tensor:
    y = functional.pad(x, (0, 0, 1, 1))
    return torch.tanh(s.three(torch.cat([y[:, :-2], y[:, 1:-1], y[:, 2:]], 2)))


def differences(s: Goes, x: Tensor, mask: Tensor) -> Tensor:
    found: Tensor = s.one(x) - functional.pad(s.one(x), (0, 0, 3, 0))[:, :-3]
    return found


def convolved(s: Goes, x: Tensor, mask: Tensor) -> Tensor:
    return torch.relu(s.near(x.transpose(1, 2))).transpose(1, 2)


def convolved_twice(s: Goes, x: Tensor, mask: Tensor) -> Tensor:
    y = torch.relu(s.near(x.transpose(1, 2))) * mask[:, None]
    found: Tensor = s.again(y).transpose(1, 2)
    return found


def convolved_wide(s: Goes, x: Tensor, mask: Tensor) -> Tensor:
    y = torch.tanh(s.one(x)) * mask[..., None]
    found: Tensor = (s.wide(y.transpose(1, 2)) + s.every(x.transpose(1, 2))).transpose(1, 2)
    return found


def convolved_from_before(s: Goes, x: Tensor, mask: Tensor) -> Tensor:
    y = functional.pad(s.one(x).transpose(1, 2), (2, 0))
    return torch.tanh(s.causal(y)).transpose(1, 2)


def padded_and_convolved(s: Goes, x: Tensor, mask: Tensor) -> Tensor:
    y = functional.pad((s.one(x) * mask[..., None]).transpose(1, 2), (1, 0))
    return torch.tanh(s.four(y)).transpose(1, 2)


def most_of_convolved(s: Goes, x: Tensor, mask: Tensor) -> Tensor:
    y = s.near(x.transpose(1, 2)).masked_fill(~mask[:, None], -1e9)
    found: Tensor = y.amax(2)[:, None].expand(-1, x.shape[1], -1)
    return found


def so_far(s: Goes, x: Tensor, mask: Tensor) -> Tensor:
    found: Tensor = s.one(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
    return found


def so_far_turned(s: Goes, x: Tensor, mask: Tensor) -> Tensor:
    found: Tensor = s.one(x).transpose(1, 2).cumsum(2).transpose(1, 2).exp()
    return found


def from_the_last(s: Goes, x: Tensor, mask: Tensor) -> Tensor:
    found: Tensor = s.one(torch.tanh(x).flip(1).cumsum(1).flip(1))
    return found


def beside_the_first(s: Goes, x: Tensor, mask: Tensor) -> Tensor:
    y = s.one(x)
    found: Tensor = torch.tanh(y) * y[:, :1] + y[:, 0][:, None]
    return found


WAYS = [
    behind_zeros,
    before_zeros,
    padded_behind,
    windows,
    differences,
    convolved,
    convolved_twice,
    convolved_wide,
    convolved_from_before,
    padded_and_convolved,
    most_of_convolved,
    so_far,
    so_far_turned,
    from_the_last,
    beside_the_first,
]


@pytest.mark.parametrize("way", WAYS)
def test_what_goes_along_members(way: Going) -> None:
    """One program for bundles of all lengths, longer ones than windows and shorter."""
    torch.manual_seed(1)
    check_inside(Goes(way), *LENGTHS, width=H)


def test_the_first_of_each_bundle() -> None:
    torch.manual_seed(1)
    check_inside(Goes(lambda s, x, mask: s.one(x[:, 0])), *LENGTHS, width=H, pools=True)


def reads_what_is_padded(s: Goes, x: Tensor, mask: Tensor) -> Tensor:
    return functional.pad(s.one(x), (0, 0, 0, 1))[:, 1:]


def convolves_what_is_padded(s: Goes, x: Tensor, mask: Tensor) -> Tensor:
    found: Tensor = s.again(s.near(x.transpose(1, 2))).transpose(1, 2)
    return found


def pads_the_longest(s: Goes, x: Tensor, mask: Tensor) -> Tensor:
    return functional.pad(x[:, :-1], (0, 0, 0, 1))


def takes_the_last(s: Goes, x: Tensor, mask: Tensor) -> Tensor:
    return x - x[:, -1:]


def takes_the_second(s: Goes, x: Tensor, mask: Tensor) -> Tensor:
    return x - x[:, 1:2]


def turns_round(s: Goes, x: Tensor, mask: Tensor) -> Tensor:
    return x.flip(1)


def goes_by_twos(s: Goes, x: Tensor, mask: Tensor) -> Tensor:
    y = functional.conv1d(x.transpose(1, 2), s.near.weight, stride=2)
    found: Tensor = x + y.sum(2)[:, None, :1]
    return found


REFUSED = [
    reads_what_is_padded,
    convolves_what_is_padded,
    pads_the_longest,
    takes_the_last,
    takes_the_second,
    turns_round,
    goes_by_twos,
]


@pytest.mark.parametrize("way", REFUSED)
def test_what_depends_on_what_is_padded_is_refused(way: Going) -> None:
    torch.manual_seed(1)
    with pytest.raises(GraphError):
        derive_inside(Goes(way), (torch.randn(5, H),), {}, pools=False)
