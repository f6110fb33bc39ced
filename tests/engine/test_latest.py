"""What waits for its way back goes by the latest firing first, where a node asks for it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.engine.mailbox import Queue
from geartrain.engine.router import BACKWARD
from geartrain.frames.message import Backward, Forward, IntArray
from geartrain.nodes.remembering import Remembering


def _queue(*batches: list[int]) -> Queue:
    queue = Queue(0, BACKWARD, alone=False)
    for rows in batches:
        gradient = (torch.tensor(rows, dtype=torch.float32)[:, None],)
        queue.put(Backward(np.array(rows), gradient), 0)
    return queue


def _tens(batch: Backward) -> IntArray:
    """Rows 20 to 29 left by firing 2."""
    return batch.rows // 10


def _rows(taken: list[Forward | Backward]) -> list[list[int]]:
    found = []
    for batch in taken:
        assert isinstance(batch, Backward) and batch.gradient is not None
        (d,) = batch.gradient
        assert d is not None
        mine = d if batch.index is None else d[batch.index]
        assert mine[:, 0].tolist() == batch.rows.tolist()
        found.append(batch.rows.tolist())
    return found


def test_the_latest_goes_first_and_the_others_stay_in_their_order() -> None:
    queue = _queue([11, 32, 12], [31], [21, 13])
    assert _rows(queue.take_latest(99, _tens)) == [[32], [31]]
    assert queue.rows == 4
    assert _rows(queue.take_latest(99, _tens)) == [[21]]
    assert _rows(queue.take_latest(99, _tens)) == [[11, 12], [13]]
    assert queue.rows == 0


def test_more_than_may_be_taken_are_taken_as_they_came() -> None:
    queue = _queue([11, 32, 31, 33])
    assert _rows(queue.take_latest(2, _tens)) == [[11, 32]]
    assert queue.rows == 2


def test_a_node_that_does_not_ask_gets_the_oldest() -> None:
    queue = _queue([11, 32], [31])
    assert _rows(queue.take_latest(99, lambda batch: None)) == [[11, 32], [31]]


class Turn(nn.Module):
    """Rows of a bundle meet their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, inside: gt.Inside) -> Tensor:
        n = len(inside.lengths)
        mean = x.new_zeros(n, 3).index_add(0, inside.segment, x) / inside.lengths[:, None]
        return torch.tanh(self.linear(x + mean.index_select(0, inside.segment)))


class Pool(nn.Module):
    """A score of each bundle."""

    def forward(self, x: Tensor, inside: gt.Inside) -> Tensor:
        return x.new_zeros(len(inside.lengths), 3).index_add(0, inside.segment, x)


def test_turns_of_bundles_that_leave_a_loop_apart_go_back_as_they_came() -> None:
    """Without it the first to go back would be the last turns of all, of several firings."""
    torch.manual_seed(0)
    turn, items, used = Turn().double(), [], []
    for k in range(12):
        x = torch.rand(2 + k % 3, 3, dtype=torch.float64)
        items.append((x, 1 + k % 4, k % 3))
    graph = gt.Graph(value=("steps", "label"))
    rounds = graph.loop(name="rounds", run="steps")
    rounds.join(graph.input("x", bundle=True, step=0))
    done, more = rounds.through(turn, name="turn", inside=True).where(
        lambda m: m.step + 1 >= m.steps
    )
    rounds.join(more.move(step=lambda m: m.step + 1))
    scores = done.through(Pool(), name="pool", inside=True, pool=True)
    scores.loss(gt.cross_entropy, target="label")
    instances = [gt.Instance({"x": x}, value={"steps": s, "label": y}) for x, s, y in items]

    before = Remembering.backward

    def noted(self: Remembering, *args: object, **more: object) -> object:
        found = before(self, *args, **more)  # type: ignore[arg-type]
        used.append((self, self.used))
        return found

    plain = Turn().double()
    plain.load_state_dict(turn.state_dict())
    loss = torch.zeros((), dtype=torch.float64)
    for x, steps, label in items:
        for _ in range(steps):
            inside = gt.Inside(torch.tensor([len(x)]), torch.zeros(len(x), dtype=torch.int64), {})
            x = plain(x, inside)
        loss = loss + nn.functional.cross_entropy(x.sum(0)[None], torch.tensor([label]))
    (loss / len(items)).backward()
    rate = 0.1
    wanted = [p - rate * p.grad for p in plain.parameters() if p.grad is not None]

    Remembering.backward = noted  # type: ignore[method-assign, assignment]
    try:
        gt.Session(
            graph,
            rules=gt.Rules(
                optimizer=lambda ps: torch.optim.SGD(ps, lr=rate),
                update_every=gt.Instances(12),
                average="instances",
            ),
            max_active=12,
            schedule=gt.Schedule(ramp=gt.Ramp(over=0)),
        ).fit(instances, epochs=1)
    finally:
        Remembering.backward = before  # type: ignore[method-assign]
    torch.testing.assert_close(list(turn.parameters()), wanted)
    kernels = {id(kernel): count for kernel, count in used}
    turns = [count for count in kernels.values() if count > 1]
    assert turns == [4], "each of four turns is answered by its graph"
