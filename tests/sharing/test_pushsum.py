"""Push-sum: weights and their ω."""

from __future__ import annotations

import pytest
import torch

from geartrain.sharing.exchanges.pushsum import PushSum
from geartrain.sharing.letters import Inbox
from geartrain.sharing.topology import Exponential
from tests.rigs.products import halved, in_pairs

RATE = 0.1  # of the copies' optimisers
CIRCLE = Exponential()
SEEDS = range(4)


class OneWay:
    """A directed ring."""

    def neighbours(self, copies):
        return [[(k + 1) % copies] for k in range(copies)]


def omegas(hand):
    return [m.numbers["omega"] for m in hand.members]


def totals(hand):
    """Σ x and Σ ω, with what is under way."""
    under_way = [letter for link in hand.links.values() for letter in link]
    omega = sum(omegas(hand)) + sum(x.weight for x in under_way)
    x = sum(w * z for w, z in zip(omegas(hand), hand.x, strict=True))
    return x + sum(x.tensors[0].flatten() for x in under_way), omega


DIRECTED = {
    "circle": CIRCLE,
    "one way": OneWay(),
    "torus": "torus",
    "star": [(0, 1), (0, 2), (0, 3)],
}


@in_pairs(topology=DIRECTED, seed=SEEDS, rotate=[True, False])
def test_the_weights_sum_to_n_and_sums_move_by_the_steps_alone(
    copies, noise, topology, rotate, seed
):
    hand = copies(PushSum(rotate=rotate), topology=topology)
    before = hand.x.sum(0)
    given = hand.shuffle(seed, 200, noise, after=lambda: _omega_is(hand, 4))
    torch.testing.assert_close(totals(hand)[0], before - RATE * given, rtol=1e-9, atol=1e-9)
    hand.settle()
    assert sum(omegas(hand)) == pytest.approx(4)


def _omega_is(hand, n):
    assert totals(hand)[1] == pytest.approx(n)
    assert min(omegas(hand)) >= 0.1


@halved(
    topology={
        "circle": CIRCLE,
        "one way": OneWay(),
        "tree": [(0, 1), (0, 2), (0, 3), (3, 4), (4, 5)],
    },
    rotate=[True, False],
)
def test_without_gradients_all_tend_to_the_mean(copies, still, topology, rotate):
    hand = copies(PushSum(rotate=rotate), n=6, topology=topology)
    mean = hand.x.mean(0)
    hand.shuffle(0, 3000, still)
    hand.settle()
    torch.testing.assert_close(hand.x, mean.expand(6, 3), rtol=1e-6, atol=1e-6)


def test_rounds_on_the_rotating_exponential_graph_are_exact_after_log_n(copies):
    hand = copies(PushSum(), n=8, topology=CIRCLE)
    mean = hand.x.mean(0)
    hand.rounds(torch.zeros(3, 8, 3, dtype=torch.float64))
    torch.testing.assert_close(hand.x, mean.expand(8, 3), rtol=1e-12, atol=1e-12)
    assert omegas(hand) == [1.0] * 8


def test_pushes_go_to_one_neighbour_after_the_other_in_the_order_of_the_topology(copies, still):
    hand, hops = copies(PushSum(), n=8, topology=CIRCLE), []
    for _ in range(5):
        for k in range(8):
            hand.step(k, still(k))
        hops.append({(to - sender) % 8 for sender, to in hand.links})
        hand.deliver_all()
    assert hops == [{1}, {2}, {4}, {1}, {2}]


def test_a_step_moves_x_by_as_much_whatever_omega_is(copies):
    hand = copies(PushSum(every=2), n=2)
    zero, one = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    for _ in range(2):
        hand.step(0, zero)
    assert omegas(hand) == [0.5, 1.0]
    before = hand.x[0]
    hand.step(0, one)
    torch.testing.assert_close(hand.x[0], before - RATE / 0.5)


def test_consensus_is_the_mean_weighted_by_omega(copies, noise):
    hand = copies(PushSum(), n=5, topology=OneWay())
    hand.shuffle(2, 101, noise)
    hand.deliver_all()
    x, omega = totals(hand)
    assert len({round(w, 6) for w in omegas(hand)}) > 1
    (found,) = hand.exchange.consensus(hand.members)
    torch.testing.assert_close(found.flatten(), x / omega)


def test_a_full_inbox_merges_without_loss(copies, noise):
    hand = copies(PushSum(inbox=Inbox(limit=1, full="merge")), n=3, topology=OneWay())
    before = hand.x.sum(0)
    given = torch.zeros(3, dtype=torch.float64)
    for _ in range(3):
        g = noise(0)
        given += g
        hand.step(0, g)
    for letter in hand.links.pop((0, 1)):
        hand.replicas.put(letter)
    assert hand.members[1].ledger.merged == 2
    hand.endpoints[1].receive()
    hand.settle()
    torch.testing.assert_close(totals(hand)[0], before - RATE * given)


def test_equal_copies_stay_equal(copies, still):
    hand = copies(PushSum(), n=5, equal=True, topology=CIRCLE)
    before = hand.x
    hand.shuffle(3, 200, still)
    hand.settle()
    torch.testing.assert_close(hand.x, before, rtol=1e-12, atol=1e-12)


def test_shares_may_be_given(copies, still):
    matrix = [[0.9, 0, 0.2], [0.1, 0.5, 0], [0, 0.5, 0.8]]
    hand = copies(PushSum(matrix=matrix), n=3, topology=OneWay())
    mean = hand.x.mean(0)
    hand.shuffle(0, 2000, still)
    hand.settle()
    torch.testing.assert_close(hand.x, mean.expand(3, 3), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("seed", SEEDS)
def test_copies_leave_and_join(copies, noise, seed):
    hand = copies(PushSum())
    hand.shuffle(seed, 40, noise)
    hand.replicas.leave(1)
    hand.shuffle(seed, 100, noise)
    hand.replicas.join(1)
    hand.shuffle(seed, 100, noise)
    hand.settle()
    assert torch.isfinite(hand.x).all()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"inbox": Inbox(full="drop")}, "give full='merge'"),
        ({"least": 0.0}, "least=0.0"),
        ({"every": 0}, "every=0"),
        ({"matrix": [[0.5, 0.5], [0.3, 0.5]]}, "column 0 sums to 0.8"),
        ({"matrix": [[1.0]]}, "2 rows of 2 were expected"),
    ],
)
def test_what_cannot_work_is_refused(copies, settings, reason):
    with pytest.raises(ValueError, match=reason):
        copies(PushSum(**settings), n=2)
