"""Dropout over bundles, of members, edges and pairs: torch's with the masks that seeds give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import geartrain as gt
from geartrain.derived.draws import ones_of, shares_of
from geartrain.derived.operands import Operands
from geartrain.derived.ragged.calls import RaggedCall, call_of_inside
from geartrain.derived.ragged.derivation import derive_inside, derive_memory
from geartrain.derived.ragged.listed import inputs_of, listed
from geartrain.derived.ragged.program import RaggedProgram
from geartrain.errors import GraphError
from geartrain.nodes.chance import row_seeds
from geartrain.nodes.choice import Experience
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from geartrain.nodes.ragged import RaggedModule, ragged_choice_of
from geartrain.nodes.remembering import Remembering
from tests.rigs.ragged import assert_as_torch, tangents

H, HEADS, WIDE = 6, 2, 9
LENGTHS = [[2, 3, 1], [1], [5], [1 + k * 7 % 30 for k in range(40)]]
aten = torch.ops.aten

pytestmark = pytest.mark.usefixtures("needs_kernels", "in_float64")

Dropping = Callable[["Drops", Tensor, Inside], Tensor]


class Drops(nn.Module):
    """``way`` says of what some is left out."""

    def __init__(self, way: Dropping) -> None:
        super().__init__()
        self.way = way
        self.one, self.other = nn.Linear(H, H), nn.Linear(H, H)
        self.drop, self.whole = nn.Dropout(0.3), nn.Dropout1d(0.4)
        self.layer = nn.TransformerEncoderLayer(H, HEADS, WIDE, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor, inside: Inside) -> Tensor:
        y = self.way(self, x, inside)
        return (
            y + y.new_zeros(len(inside.lengths), H).index_add(0, inside.segment, y)[inside.segment]
        )


def padded(x: Tensor, inside: Inside) -> tuple[Tensor, Tensor]:
    mask = torch.arange(int(inside.lengths.max())) < inside.lengths[:, None]
    out = x.new_zeros(*mask.shape, H)
    out[mask] = x
    return out, mask


def of_members(s: Drops, x: Tensor, inside: Inside) -> Tensor:
    hidden = s.drop(torch.relu(s.one(x)))
    return functional.dropout(s.other(hidden), 0.1, s.training)


def of_padded_members(s: Drops, x: Tensor, inside: Inside) -> Tensor:
    y, mask = padded(x, inside)
    return s.drop(torch.tanh(s.one(y)))[mask]


def of_bundles(s: Drops, x: Tensor, inside: Inside) -> Tensor:
    total = x.new_zeros(len(inside.lengths), H).index_add(0, inside.segment, s.one(x))
    return s.drop(total)[inside.segment] * s.other(x)


def of_pairs(s: Drops, x: Tensor, inside: Inside) -> Tensor:
    y, mask = padded(x, inside)
    score = (s.one(y) @ s.other(y).transpose(1, 2)).masked_fill(~mask[:, None], -1e9)
    return (s.drop(score.softmax(2)) @ y)[mask]


def of_heads(s: Drops, x: Tensor, inside: Inside) -> Tensor:
    y, mask = padded(x, inside)
    q, k = (z.view(*mask.shape, HEADS, -1).transpose(1, 2) for z in (s.one(y), s.other(y)))
    found = functional.scaled_dot_product_attention(q, k, k, mask[:, None, None], dropout_p=0.2)
    return found.transpose(1, 2).reshape(y.shape)[mask]


def of_a_layer(s: Drops, x: Tensor, inside: Inside) -> Tensor:
    y, mask = padded(x, inside)
    return s.layer(y, src_key_padding_mask=~mask)[mask]  # type: ignore[no-any-return]


def with_noise(s: Drops, x: Tensor, inside: Inside) -> Tensor:
    return s.one(x) * torch.rand_like(x) + torch.rand(len(x), H, dtype=x.dtype)


WAYS = [of_members, of_padded_members, of_bundles, of_pairs, of_heads, of_a_layer, with_noise]


@final
class Drawn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What C draws of seeds, in the same order.

    Args:
        seeds: Of members.
        inside: The bundles.
    """

    def __init__(self, seeds: Tensor, inside: Inside) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seeds, self._inside, self.number = seeds, inside, 0

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is aten.bernoulli_.float:
            return args[0].copy_(self._found(args[0].shape, float(args[1])))
        if function in (aten.rand_like.default, aten.rand.default):
            shape = args[0].shape if function is aten.rand_like.default else args[0]
            return self._found(shape, None)
        return function(*args, **(kwargs or {}))

    def _found(self, shape: Sequence[int], share: float | None) -> Tensor:
        lengths = self._inside.lengths
        most, n = int(lengths.max()), int(lengths.sum())
        first = lengths.cumsum(0) - lengths
        if len(shape) == 2:
            seeds = self._seeds if shape[0] == n else self._seeds[first]
            found = self._of(seeds, (shape[1],), share)
        elif len(shape) == 3 and shape[2] in (H, WIDE):
            found = torch.zeros(tuple(shape))
            mask = torch.arange(most) < lengths[:, None]
            found[mask] = self._of(self._seeds, (shape[2],), share)
        else:
            heads = shape[1] if len(shape) == 4 else 1
            found = torch.zeros(len(lengths), heads, most, most)
            for b, (at, size) in enumerate(zip(first.tolist(), lengths.tolist(), strict=True)):
                mine = self._of(self._seeds[at : at + size], (size, heads), share)
                found[b, :, :size, :size] = mine.permute(2, 0, 1)
        self.number += 1
        return found.view(tuple(shape))

    def _of(self, seeds: Tensor, tail: tuple[int, ...], share: float | None) -> Tensor:
        if share is None:
            return shares_of(seeds, tail, self.number, torch.float64)
        return ones_of(seeds, tail, share, self.number).to(torch.float64)


def program_of(module: nn.Module) -> RaggedProgram:
    return RaggedProgram(
        derive_inside(module, (torch.randn(5, H),), {}, pools=False), Operands(module)
    )


def inside_of(lengths: Sequence[int]) -> tuple[Tensor, Inside]:
    sizes = torch.tensor(lengths)
    segment = torch.arange(len(sizes)).repeat_interleave(sizes)
    return torch.randn(len(segment), H), Inside(sizes, segment, {})


@pytest.mark.parametrize("way", WAYS)
def test_masks_are_those_of_seeds(way: Dropping) -> None:
    """Forward and back, of bundles of several lengths; torch gets the same masks."""
    torch.manual_seed(1)
    module = Drops(way)
    program = program_of(module)
    for lengths in LENGTHS:
        x, inside = inside_of(lengths)
        seeds = row_seeds(len(x))
        call = call_of_inside((x,), inside, {}, seeds)

        def run(into: GradientSum, call: RaggedCall = call) -> tuple[Any, list[Tensor | None]]:
            ys, kept = program.forward(call)
            return ys, [program.backward(kept, tangents(ys), into)[0]]

        leaf = x.clone().requires_grad_()
        with Drawn(seeds, inside):
            y = module(leaf, inside)
        assert_as_torch(module, run, [y], [leaf])


def test_each_forward_draws_anew_and_the_way_back_sees_its_own() -> None:
    """Whatever was drawn in between: x shows through where its mask is."""
    torch.manual_seed(3)
    program = program_of(Only(nn.Dropout(0.5)))
    x, inside = inside_of([4, 9])
    x = x.abs() + 1
    call = call_of_inside((x,), inside, {})
    (one,), first = program.forward(call)
    (other,), second = program.forward(call)
    assert not torch.equal(one, other)
    torch.manual_seed(3)
    into = GradientSum([])
    for y, kept in ((other, second), (one, first)):
        back = program.backward(kept, (torch.ones_like(y),), into)[0]
        assert back is not None
        assert_close(back * x, y)


class Only(nn.Module):
    """Of members alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, inside: Inside) -> Tensor:
        found: Tensor = self.inner(x)
        return found


def test_seeds_of_torch_say_what_is_drawn() -> None:
    program = program_of(Drops(of_pairs))
    x, inside = inside_of([4, 9])
    found = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        found.append(program.forward(call_of_inside((x,), inside, {}))[0][0])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_c_does_not_call_what_draws() -> None:
    """Calls in loops count integers when it suits them."""
    for drop, may in ((0.0, True), (0.2, False)):
        module = Only(nn.Sequential(nn.Linear(H, H), nn.Dropout(drop)))
        program = program_of(module)
        assert (listed(program, inputs_of(program.cut, {})) is not None) is may


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, h: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = h + self.drop(keys * mask[..., None]).sum(1)
        return found


def test_what_reads_a_memory_draws_nothing() -> None:
    with pytest.raises(GraphError, match="chance"):
        derive_memory(Reader(), (torch.randn(3, H),), (torch.randn(5, H),), 0)


def kernel_of(module: nn.Module) -> Remembering:
    choice = ragged_choice_of(RaggedModule("drops", module, 0, False, Experience()))
    return Remembering(module, list(module.parameters()), choice, draws=True)


def test_rows_that_come_back_apart_see_the_mask_that_they_had() -> None:
    """Some bundles of a firing, and in another order, when other firings have been."""
    torch.manual_seed(1)
    kernel = kernel_of(Only(nn.Dropout(0.5)))
    x, inside = inside_of([4, 9, 3])
    x = x.abs() + 1
    (y,), kept = kernel.forward((x,), inside)
    kernel.forward((x,), inside)
    rows = np.array([13, 14, 15, 0, 1, 2, 3])
    some = Inside(torch.tensor([3, 4]), torch.tensor([0, 0, 0, 1, 1, 1, 1]), {})
    (dx,) = kernel.backward((torch.ones(7, H),), kept, rows, GradientSum([]), some)
    assert dx is not None
    assert_close(dx * x[rows], y[rows])
    (outputs, call) = kernel.record((x,), inside)
    (dx,) = kernel.answer(call, (torch.ones(7, H),), (x,), rows, GradientSum([]), some)
    assert dx is not None
    assert_close(dx * x[rows], outputs[0][rows])


def test_what_draws_and_has_no_program_is_refused() -> None:
    kernel = kernel_of(Only(nn.Sequential(nn.Dropout(0.5), Sorted())))
    x, inside = inside_of([4, 9, 3])
    with pytest.raises(GraphError, match=r"it draws random numbers, and no program"):
        kernel.forward((x,), inside)


class Sorted(nn.Module):
    """Has no steps."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sort(1).values


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, HEADS, WIDE, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor, inside: Inside) -> Tensor:
        mask = torch.arange(int(inside.lengths.max())) < inside.lengths[:, None]
        y = x.new_zeros(*mask.shape, 8)
        y[mask] = x
        y = self.layer(y, src_key_padding_mask=~mask)[mask]
        return y.new_zeros(len(inside.lengths), 8).index_add(0, inside.segment, y)


def test_a_session_trains_with_dropout_inside_bundles(caplog: pytest.LogCaptureFixture) -> None:
    """By a program from the first firing on; evaluations leave nothing out."""
    torch.manual_seed(1)
    graph = gt.Graph(value=("label",))
    sets = graph.input("x", bundle=True).through(nn.Linear(2, 8), name="embed")
    pooled = sets.through(Encoder(), name="encoder", inside=True, pool=True)
    pooled.through(nn.Linear(8, 2), name="out").loss(gt.cross_entropy, target="label")
    assert "derived, for the mask" in str(graph)
    some = [
        gt.Instance({"x": torch.randn(n, 2) + n % 2}, value={"label": n % 2})
        for n in [1, 4, 2, 3, 5, 8] * 8
    ]
    session = gt.Session(graph, rules=gt.Rules(optimizer=partial(gt.FusedAdam, lr=1e-2)))
    session.fit(some, epochs=12)
    first, again = (session.evaluate(some) for _ in range(2))
    assert first.metrics["loss"] == again.metrics["loss"] < 0.6
    assert not caplog.records
