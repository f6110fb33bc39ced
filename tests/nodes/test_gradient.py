"""The sum of a part's gradients: whatever is added in whatever order, each update gets its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from geartrain.errors import ProtocolError
from geartrain.frames.message import Payload
from geartrain.native.sums import GradientPlace
from geartrain.nodes.apart import PutApart
from geartrain.nodes.computed import IDLE
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.looked_up import Lookup
from geartrain.observe.flops import FlopMeter

UPDATES = 3
ROWS = (0, 1, 3, 40, 130, 520)
COLUMNS = (None, ((1, 3),), ((0, 1), (2, 4)))


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=torch.float64))


class Doubled:
    """A weight that is twice another."""

    key = "twice"

    def __init__(self, of: nn.Parameter) -> None:
        self.of, self.stand_ins = of, [parameter(*of.shape)]

    def back(self, gradients: Sequence[Tensor | None]) -> list[tuple[nn.Parameter, Tensor]]:
        (gradient,) = gradients
        assert gradient is not None
        return [(self.of, 2 * gradient)]


class Later:
    """Finds a product for a weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight

    def add_all(self, found: Sequence[Payload], into: GradientSum) -> None:
        into.add_products(self.weight, [(left, right) for left, right in found])


class Both:
    """A sum, and the same sums dense, row by row."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.draw = random.Random(seed)
        self.weight, self.wide, self.bias = parameter(5, 4), parameter(4, 3, 2), parameter(5)
        self.table, self.places, self.rows = parameter(7, 4), parameter(6, 3), parameter(9, 2)
        self.parameters = [v for v in vars(self).values() if isinstance(v, nn.Parameter)]
        self.sum = GradientSum(self.parameters)
        self.lookup = Lookup(self.table, self.weight, weighs=True, bias=self.bias, padding=0)
        self.by_two = Lookup(self.wide, rows=12)
        self.computed, self.later = Doubled(self.wide), Later(self.weight)
        self.dense = [{p: torch.zeros_like(p) for p in self.parameters} for _ in range(UPDATES)]
        self.came = [set[nn.Parameter]() for _ in range(UPDATES)]

    def note(self, p: nn.Parameter, update: int, value: Tensor) -> None:
        self.dense[update][p] += value.detach().view(p.shape)
        self.came[update].add(p)

    def add(self) -> None:
        """One gradient of some kind, of rows of one update or of several."""
        n = self.draw.choice(ROWS)
        kind = self.draw.choice([self.product, self.of_rows, self.whole, self.looked_up, self.sort])
        match self.draw.randrange(3):
            case 0:
                each, within = np.zeros(n, np.int64), nullcontext()
            case 1:
                update = self.draw.randrange(UPDATES)
                each, within = np.full(n, update), self.sum.of_updates(update)
            case _:
                some = np.array([self.draw.randrange(UPDATES) for _ in range(n)], np.int64)
                if self.draw.random() < 0.5:  # those of an update lie side by side
                    some.sort()
                within = self.sum.of_updates(some)
                each = some
                if n and self.draw.random() < 0.3:  # a call of half as many rows
                    each = some.repeat(2)
        with within:
            kind(each)

    def product(self, each: np.ndarray) -> None:
        n, columns = len(each), self.draw.choice(COLUMNS)
        width = 4 if columns is None else sum(end - first for first, end in columns)
        left, right = (torch.randn(n, k, dtype=torch.float64) for k in (5, width))
        self.sum.add_product(self.weight, left, right, columns=columns)
        high = torch.randn(n, 4, dtype=torch.float64), torch.randn(n, 6, dtype=torch.float64)
        self.sum.of_computed(self.computed).add_product(self.computed.stand_ins[0], *high)
        self.sum.add_sum(self.bias, left)
        for update in sorted({*each.tolist()}):
            at = torch.from_numpy(each == update)
            whole, at_column = torch.zeros(5, 4, dtype=torch.float64), 0
            for first, end in columns or ((0, 4),):
                some = right[:, at_column : at_column + end - first]
                whole[:, first:end] = left[at].T @ some[at]
                at_column += end - first
            self.note(self.weight, update, whole)
            self.note(self.wide, update, 2 * high[0][at].T @ high[1][at])
            self.note(self.bias, update, left[at].sum(0))

    def of_rows(self, each: np.ndarray) -> None:
        for p, add in ((self.rows, self.sum.add_rows), (self.places, self.sum.add_at)):
            ids = torch.randint(p.shape[0], (len(each),))
            rows = torch.randn(len(each), p.shape[1], dtype=torch.float64)
            add(p, ids, rows)
            for update in {*each.tolist()}:
                at = torch.from_numpy(each == update)
                self.note(p, update, torch.zeros_like(p).index_add(0, ids[at], rows[at]))

    def whole(self, each: np.ndarray) -> None:
        """Dense, or sparse: of rows of one update."""
        if self.sum.of_several and self.sum.whole is None:
            with pytest.raises(ProtocolError, match="of several updates at once"):
                self.sum.add(self.bias, torch.ones_like(self.bias))
            return
        (update,) = {*each.tolist()} or {0}
        if not len(each):
            return
        assert (self.sum.whole is self.sum) is (update == 0)
        value = torch.randn(5, 4, dtype=torch.float64)
        self.note(self.weight, update, value)
        self.sum.add(self.weight, value.clone(), given=self.draw.random() < 0.5)
        rows = torch.randn(2, 2, dtype=torch.float64)
        at = torch.tensor([[3, 3]])
        value = torch.sparse_coo_tensor(at, rows, (9, 2), check_invariants=False)
        self.note(self.rows, update, value.to_dense())
        self.sum.add(self.rows, value)

    def looked_up(self, each: np.ndarray) -> None:
        ids = torch.randint(7, (len(each),))
        rows = torch.randn(len(each), 5, dtype=torch.float64)
        assert self.sum.updates_of(len(each)).tolist() == each.tolist()
        self.sum.add_looked_up(self.lookup, [(rows, ids)])
        for update in {*each.tolist()}:
            at = torch.from_numpy(each == update)
            its, of = rows[at], ids[at]
            self.note(self.weight, update, its.T @ self.table[of])
            self.note(self.bias, update, its.sum(0))
            kept = of != 0
            back = torch.zeros_like(self.table)
            back.index_add_(0, of[kept], (its @ self.weight)[kept])
            self.note(self.table, update, back)
        self.seen_otherwise(each)

    def seen_otherwise(self, each: np.ndarray) -> None:
        """Of two numbers a row, as of a table of more rows than the weight has."""
        for add in (lambda ids, rows: self.sum.add_looked_up(self.by_two, [(rows, ids)]), self.at):
            ids = torch.randint(12, (len(each),))
            rows = torch.randn(len(each), 2, dtype=torch.float64)
            add(ids, rows)
            for update in {*each.tolist()}:
                at = torch.from_numpy(each == update)
                back = torch.zeros(12, 2, dtype=torch.float64).index_add(0, ids[at], rows[at])
                self.note(self.wide, update, back)

    def at(self, ids: Tensor, rows: Tensor) -> None:
        self.sum.add_at(self.wide, ids, rows)

    def sort(self, each: np.ndarray) -> None:
        pair = (torch.randn(len(each), 5).double(), torch.randn(len(each), 4).double())
        if not self.sum.add_later(self.later, pair, len(each)):
            assert len(each) >= 128 or each.any() or self.sum.whole is not self.sum
        elif len(each):
            self.note(self.weight, 0, pair[0].T @ pair[1])

    def require(self, found: Sequence[Tensor | None], update: int) -> None:
        for p, gradient in zip(self.parameters, found, strict=True):
            if p not in self.came[update]:
                assert gradient is None or not gradient.to_dense().any()
                continue
            assert gradient is not None
            assert_close(gradient.to_dense(), self.dense[update][p], rtol=1e-9, atol=1e-9)


def by_one(both: Both) -> list[Tensor | None]:
    return [both.sum.take(p) for p in both.parameters]


def at_once(both: Both) -> list[Tensor | None]:
    found, squares = both.sum.take_each(both.parameters)
    if squares is not None:
        each = [float(x.square().sum()) for x in found if x is not None]
        assert squares == pytest.approx(sum(each))
    return found


def ahead_of_time(both: Both) -> list[Tensor | None]:
    with both.sum.multiplied():
        return at_once(both)


def elsewhere(both: Both) -> list[Tensor | None]:
    """Some is absorbed by another sum, which is taken."""
    other = GradientSum(both.parameters)
    other.add(both.weight, torch.zeros(5, 4).double())
    other.add_sum(both.bias, torch.zeros(1, 5).double())
    other.absorb(both.sum)
    assert all(gradient is None for gradient in by_one(both))
    return [other.take(p) for p in both.parameters]


@pytest.mark.parametrize("take", [by_one, at_once, ahead_of_time, elsewhere])
@pytest.mark.parametrize("seed", range(6))
def test_each_update_gets_what_is_its_own_whatever_the_order(
    seed: int, take: Callable[[Both], list[Tensor | None]]
) -> None:
    both = Both(seed)
    for _ in range(30):
        both.add()
    assert both.sum.ahead
    for update in range(UPDATES):
        both.require(take(both), update)
        both.sum.next_update()
        assert both.sum.ahead is (update == 0)  # there are three, and this was the first
    assert all(gradient is None for gradient in by_one(both))


@pytest.mark.parametrize("seed", range(3))
def test_what_nobody_has_taken_goes_with_the_next_update(seed: int) -> None:
    both = Both(seed)
    for _ in range(30):
        both.add()
    for update in range(1, UPDATES):
        both.sum.next_update()
        both.came[0] |= both.came[update]
        for p, value in both.dense[update].items():
            both.dense[0][p] += value
    assert not both.sum.ahead
    both.require(at_once(both), 0)


@pytest.mark.parametrize("kind", ["product", "looked up", "computed"])
@pytest.mark.parametrize("updates", [1, np.array([0, 1])])
def test_what_is_ahead_is_known_of_each_kind(kind: str, updates: Any) -> None:
    both = Both(0)
    two = {n: torch.ones(2, n).double() for n in (4, 5, 6)}
    with both.sum.of_updates(updates):
        if kind == "product":
            both.sum.add_product(both.weight, two[5], two[4])
        elif kind == "looked up":
            both.sum.add_looked_up(both.lookup, [(two[5], torch.tensor([1, 2]))])
        else:
            into = both.sum.of_computed(both.computed)
            into.add_product(both.computed.stand_ins[0], two[4], two[6])
    assert both.sum.ahead
    both.sum.take_each(both.parameters)
    assert both.sum.ahead
    both.sum.next_update()
    assert not both.sum.ahead
    assert any(x is not None and x.to_dense().any() for x in by_one(both))


def test_rows_of_the_next_firing_are_of_its_own_updates() -> None:
    both = Both(4)
    for each in ([0, 0, 1, 1], [0, 1, 1, 2], [1, 1, 1, 2]):
        updates = np.array(each)
        with both.sum.of_updates(updates):
            both.product(updates)
    for update in range(UPDATES):
        both.require(by_one(both), update)
        both.sum.next_update()


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("updates", [[0, 0, 1, 2, 2], [1, 2, 2, 2, 2], [1, 0, 1, 2, 2]])
def test_rows_of_updates_that_lie_in_order_wait_where_they_lie(
    updates: list[int], twice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, put = Both(3), [0]
    before = PutApart.put

    def counted(self: PutApart, *args: Any) -> bool:
        put[0] += 1
        return before(self, *args)

    monkeypatch.setattr(PutApart, "put", counted)
    each = np.array(updates)
    with both.sum.of_updates(each):
        both.product(each.repeat(2) if twice else each)
        both.product(each)
    ordered = updates == sorted(updates)
    assert put[0] == (0 if ordered else 6)  # two calls of a product, one of computed, and a sum
    assert both.sum.ahead
    for update in range(UPDATES):
        both.require(by_one(both), update)
        both.sum.next_update()


def test_what_is_forgotten_is_gone_of_all_updates() -> None:
    both = Both(9)
    for _ in range(30):
        both.add()
    both.sum.forget()
    assert not both.sum.ahead
    for _ in range(UPDATES):
        assert all(gradient is None for gradient in by_one(both))
        both.sum.next_update()
    both.dense[0], both.came[0] = {p: torch.zeros_like(p) for p in both.parameters}, set()
    both.product(np.zeros(3, np.int64))
    both.require(at_once(both), 0)


def test_rows_that_do_not_go_with_those_of_the_call_are_refused() -> None:
    both = Both(0)
    with (
        both.sum.of_updates(np.array([0, 1])),
        pytest.raises(ProtocolError, match="3 rows of a gradient came of a call with 2 rows"),
    ):
        both.sum.add_sum(both.bias, torch.ones(3, 5).double())


def test_what_computed_weights_get_is_let_go_when_nothing_has_come_for_a_while() -> None:
    both = Both(0)
    first = both.sum.of_computed(both.computed)
    for _ in range(IDLE - 1):
        both.sum.settle()
    assert both.sum.of_computed(both.computed) is first
    first.add(both.computed.stand_ins[0], torch.ones(4, 3, 2).double())
    for _ in range(IDLE):
        both.sum.settle()
        assert both.sum.of_computed(both.computed) is first
    both.sum.settle()
    assert both.sum.of_computed(both.computed) is not first
    assert float(both.sum.take(both.wide).sum()) == 48


class Noting:
    """What would add from where rows lie; notes what it is to add to."""

    def __init__(self, *wide: int) -> None:
        self.wide, self.added = wide, list[tuple[int, Any, bool]]()

    def may_add(self, out: GradientPlace, n: int) -> bool:
        return out.out.shape[-1] in self.wide and n < 100

    def add(self, out: GradientPlace, pieces: Any, *, add: bool) -> None:
        self.added.append((out.at, pieces, add))


def test_a_call_adds_to_all_of_several_gradients_or_to_none() -> None:
    both = Both(0)
    some = [(both.sum, both.weight, (7, 8, 5)), (both.sum, both.bias, (9, 5))]
    one, every = Noting(4), Noting(4, 5)
    assert not GradientSum.add_all_in(one, some) and not one.added
    assert not GradientSum.add_all_in(every, [(both.sum, both.weight, (7, 8, 100))])
    with both.sum.of_updates(1):
        assert not GradientSum.add_all_in(every, some)
        assert not both.sum.adds_lying
    assert both.sum.adds_lying
    assert by_one(both) == [None] * 6 and not every.added
    both.sum.add(both.bias, torch.ones(5).double())
    assert GradientSum.add_all_in(every, some) and GradientSum.add_all_in(every, some[:1])
    assert [(pieces, add) for _, pieces, add in every.added] == [
        ([(7, 8, 5)], False),
        ([(9, 5)], True),
        ([(7, 8, 5)], True),
    ]
    found = by_one(both)
    assert [x is None or x.data_ptr() for x in found[:3]] == [
        every.added[0][0],
        True,
        every.added[1][0],
    ]


KINDS: dict[str, Callable[[GradientSum, nn.Parameter, nn.Parameter, Tensor, Tensor], object]] = {
    "products": lambda into, w, b, left, right: into.add_products(w, [(left, right)]),
    "product": lambda into, w, b, left, right: into.add_product(w, left, right),
    "sums": lambda into, w, b, left, right: into.add_sums(b, [left]),
    "sum": lambda into, w, b, left, right: into.add_sum(b, left),
    "later": lambda into, w, b, left, right: into.add_later(Later(w), (left, right), len(left)),
}


@pytest.mark.parametrize("absorbed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_no_more_rows_wait_than_are_worth_it(kind: str, absorbed: bool) -> None:
    weight, bias = parameter(72, 64), parameter(72)
    into, total = GradientSum([weight, bias]), torch.zeros(72).double()
    for _ in range(50):
        left, right = torch.randn(100, 72).double(), torch.randn(100, 64).double()
        total += left.sum(0)
        other = GradientSum([weight, bias]) if absorbed else into
        KINDS[kind](other, weight, bias, left, right)
        if absorbed:
            into.absorb(other)
        slots = into._slots.values()
        products = sum(len(x) for slot in slots for x, _ in slot.products)
        later = sum(len(x) for found in into._later.values() for x, _ in found)
        assert products + later + sum(len(x) for slot in slots for x in slot.sums) < 2048
    of = bias if "sum" in kind else weight
    found = into.take(of)
    assert found is not None
    if of is bias:
        assert_close(found, total)


@pytest.mark.parametrize("n", [1, 40, 130, 300, 520])
@pytest.mark.parametrize("updates", [None, 1, "several"])
def test_products_are_counted_once_wherever_they_are_multiplied(n: int, updates: Any) -> None:
    both, meter = Both(0), FlopMeter()
    left, right = torch.randn(n, 5).double(), torch.randn(n, 4).double()
    of = np.arange(n) % 2 if updates == "several" else updates
    with meter.firing("node", forward=False):
        with nullcontext() if of is None else both.sum.of_updates(of):
            both.sum.add_product(both.weight, left, right)
        for _ in range(2):
            both.sum.take_each(both.parameters)
            both.sum.next_update()
    assert meter.total().backward == 2 * n * 5 * 4


@pytest.mark.parametrize("updates", [None, 1, "several"])
def test_products_of_what_is_looked_up_are_counted_by_the_rows_that_ask_for_them(
    updates: Any,
) -> None:
    both, meter, n = Both(0), FlopMeter(), 40
    of = np.arange(n) % 2 if updates == "several" else updates
    with meter.firing("node", forward=False):
        with nullcontext() if of is None else both.sum.of_updates(of):
            ids = torch.randint(1, 7, (n,))
            both.sum.add_looked_up(both.lookup, [(torch.randn(n, 5).double(), ids)])
        for _ in range(2):
            both.sum.take_each(both.parameters)
            both.sum.next_update()
    assert meter.total().backward == 2 * (2 * n * 5 * 4)  # of the table and of the weight
