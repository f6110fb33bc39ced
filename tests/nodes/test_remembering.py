"""Bundles that left by one firing, and come back together or apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from geartrain.nodes.payload import Recompute
from geartrain.nodes.remembering import MOST_GRAPHS, PATIENCE, Remembering, RememberingRead

D = 4


class Mixing(nn.Module):
    """Each row meets the mean of its bundle."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2 * D, D)
        self.calls = 0

    def forward(self, x: Tensor, inside: Inside) -> Tensor:
        self.calls += 1
        n = len(inside.lengths)
        mean = x.new_zeros(n, D).index_add(0, inside.segment, x) / inside.lengths[:, None]
        return torch.tanh(self.inner(torch.cat([x, mean.index_select(0, inside.segment)], 1)))


class Pooling(Mixing):
    """A row for each bundle."""

    def forward(self, x: Tensor, inside: Inside) -> Tensor:
        y = super().forward(x, inside)
        return y.new_zeros(len(inside.lengths), D).index_add(0, inside.segment, y)


def _inside(lengths: Sequence[int]) -> Inside:
    sizes = torch.tensor(lengths)
    return Inside(sizes, torch.arange(len(lengths)).repeat_interleave(sizes), {})


def _kernels(module: Mixing) -> tuple[Remembering, Recompute, GradientSum, GradientSum]:
    weights = list(module.parameters())
    sums = GradientSum(weights), GradientSum(weights)
    return Remembering(module, weights), Recompute(module, weights), *sums


def _equal_sums(module: nn.Module, one: GradientSum, other: GradientSum) -> None:
    for weight in module.parameters():
        a, b = one.take(weight), other.take(weight)
        assert a is not None and b is not None
        torch.testing.assert_close(a, b)


def _bundles(lengths: Sequence[int], order: Sequence[int]) -> np.ndarray:
    """Rows of these bundles, in this order."""
    starts = np.cumsum(lengths) - lengths
    return np.concatenate([np.arange(starts[k], starts[k] + lengths[k]) for k in order])


def test_all_of_a_firing_is_answered_without_running_again_in_any_order_of_bundles() -> None:
    for kind in (Mixing, Pooling):
        for order in ([0, 1, 2], [2, 0, 1]):
            torch.manual_seed(0)
            module = kind().double()
            mine, again, got, wanted = _kernels(module)
            lengths, x = [2, 3, 1], torch.rand(6, D, dtype=torch.float64)
            with torch.no_grad():
                (y,), kept = mine.forward((x,), _inside(lengths))
            assert module.calls == 1 and not y.requires_grad
            rows, inside = _bundles(lengths, order), _inside([lengths[k] for k in order])
            dy = torch.rand(3 if kind is Pooling else 6, D, dtype=torch.float64)
            (found,) = mine.backward((dy,), kept, rows, got, inside)
            assert module.calls == 1 and mine.used == 1
            (right,) = again.backward((dy,), (x,), rows, wanted, inside)
            assert found is not None and right is not None
            torch.testing.assert_close(found, right)
            _equal_sums(module, got, wanted)


def test_a_part_of_a_firing_runs_again_and_so_does_what_is_left_of_it() -> None:
    module = Mixing().double()
    mine, again, got, wanted = _kernels(module)
    lengths, x = [2, 3, 1], torch.rand(6, D, dtype=torch.float64)
    with torch.no_grad():
        _, kept = mine.forward((x,), _inside(lengths))
    for order in ([1], [2, 0]):
        rows, inside = _bundles(lengths, order), _inside([lengths[k] for k in order])
        dy = torch.rand(rows.size, D, dtype=torch.float64)
        (found,) = mine.backward((dy,), kept, rows, got, inside)
        (right,) = again.backward((dy,), (x,), rows, wanted, inside)
        assert found is not None and right is not None
        torch.testing.assert_close(found, right)
    assert not mine.used
    _equal_sums(module, got, wanted)


def test_rows_of_several_firings_run_again() -> None:
    module = Mixing().double()
    mine, again, got, wanted = _kernels(module)
    x = torch.rand(4, D, dtype=torch.float64)
    with torch.no_grad():
        (_, one), (_, other) = (mine.forward((x[k : k + 2],), _inside([2])) for k in (0, 2))
    kept = tuple(torch.cat(pair) for pair in zip(one, other, strict=True))
    dy = torch.rand(4, D, dtype=torch.float64)
    (found,) = mine.backward((dy,), kept, None, got, _inside([2, 2]))
    (right,) = again.backward((dy,), (x,), None, wanted, _inside([2, 2]))
    assert found is not None and right is not None and not mine.used
    torch.testing.assert_close(found, right)
    _equal_sums(module, got, wanted)


def test_after_a_step_the_gradient_is_that_of_the_weights_of_now() -> None:
    module = Mixing().double()
    mine, again, got, wanted = _kernels(module)
    x, dy = torch.rand(3, D, dtype=torch.float64), torch.rand(3, D, dtype=torch.float64)
    with torch.no_grad():
        _, kept = mine.forward((x,), _inside([3]))
        module.inner.weight.mul_(1.5)
    (found,) = mine.backward((dy,), kept, None, got, _inside([3]))
    (right,) = again.backward((dy,), (x,), None, wanted, _inside([3]))
    assert found is not None and right is not None and not mine.used
    torch.testing.assert_close(found, right)


def test_rows_beside_its_own_may_be_written_to_meanwhile() -> None:
    module = Mixing().double()
    mine, again, got, wanted = _kernels(module)
    store, dy = torch.rand(8, D, dtype=torch.float64), torch.rand(3, D, dtype=torch.float64)
    x = store[2:5]
    with torch.no_grad():
        _, kept = mine.forward((x,), _inside([3]))
        store[5:] = 0.0
    (found,) = mine.backward((dy,), kept, None, got, _inside([3]))
    (right,) = again.backward((dy,), (x,), None, wanted, _inside([3]))
    assert found is not None and right is not None and mine.used == 1
    torch.testing.assert_close(found, right)


def test_graphs_that_are_of_no_use_are_kept_no_more() -> None:
    module = Mixing().double()
    mine, _, into, _ = _kernels(module)
    x, dy = torch.rand(2, D, dtype=torch.float64), torch.rand(1, D, dtype=torch.float64)
    for _ in range(PATIENCE):
        assert mine.remembers
        with torch.no_grad():
            _, kept = mine.forward((x,), _inside([1, 1]))
        for row in range(2):
            mine.backward((dy,), kept, np.array([row]), into, _inside([1]))
    assert not mine.remembers and not mine.used
    with torch.no_grad():
        _, kept = mine.forward((x,), _inside([1, 1]))
    mine.backward((torch.cat([dy, dy]),), kept, None, into, _inside([1, 1]))
    assert not mine.used


def test_so_many_graphs_are_kept_and_the_oldest_runs_again() -> None:
    module = Mixing().double()
    mine, _, into, _ = _kernels(module)
    x = torch.rand(1, D, dtype=torch.float64)
    with torch.no_grad():
        all_kept = [mine.forward((x,), _inside([1]))[1] for _ in range(MOST_GRAPHS + 1)]
    before = module.calls
    mine.backward((x,), all_kept[0], None, into, _inside([1]))
    assert module.calls == before + 1 and not mine.used
    mine.backward((x,), all_kept[1], None, into, _inside([1]))
    assert module.calls == before + 1 and mine.used == 1


def test_evaluation_keeps_no_graph() -> None:
    module = Mixing().double()
    mine, *_ = _kernels(module)
    with torch.no_grad():
        for _ in range(MOST_GRAPHS + PATIENCE + 1):
            mine.evaluate((torch.rand(1, D, dtype=torch.float64),), _inside([1]))
    assert mine.remembers


def test_rows_of_several_updates_may_come_back_together_where_no_weight_learns() -> None:
    """Autograd adds up what a weight gets, and there is none: rows have their own gradients."""
    weights = [*Mixing().parameters()]
    for some in (weights, [w.detach() for w in weights], []):
        apart = not any(w.requires_grad for w in some)
        assert Remembering(torch.tanh, some).apart is apart  # type: ignore[arg-type]
        assert RememberingRead(torch.tanh, some, 0).apart is apart  # type: ignore[arg-type]
