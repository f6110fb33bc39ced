"""Memories that are held and read: what is refused, where they live, and what they leave behind."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.engine.engine import Engine
from geartrain.engine.parts import make_parts
from geartrain.engine.settings import Settings
from geartrain.errors import GraphError, ProtocolError
from geartrain.frames.frame import Arena, Schema
from geartrain.frames.message import Backward, Forward
from geartrain.graph.memory import LENGTH
from geartrain.nodes.held import Held, Recalled
from geartrain.nodes.memory import HoldNode
from geartrain.nodes.node import Place

H = 3


class Pool(nn.Module):
    """A row for each bundle."""

    def forward(self, x: Tensor, inside: gt.Inside) -> Tensor:
        return x.new_zeros(len(inside.lengths), x.shape[1]).index_add(0, inside.segment, x)


class Read(nn.Module):
    """The masked sum of what is read, through a map."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(H, H)

    def forward(self, h: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        return torch.tanh(h + self.map((memory * mask[..., None]).sum(1)))


class Unmasked(Read):
    """The same, of what is padded, too: through a softmax that the mask is not asked about."""

    def forward(self, h: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        share = (memory @ h[:, :, None])[..., 0].softmax(1)
        return torch.tanh(h + self.map((share[:, None] @ memory)[:, 0]))


class OfOneLength(Read):
    """It wants as many as a made-up memory has, so it is never padded."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Linear(LENGTH, 1)

    def forward(self, h: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        return torch.tanh(h + self.map(self.places(memory.transpose(1, 2))[..., 0]))


class Drawing(Read):
    """By chance: what it makes of a wider memory says nothing."""

    def forward(self, h: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        return super().forward(h, memory, mask) * torch.rand(())


def loss(y: Tensor) -> Tensor:
    return (y**2).sum(-1)


def begun():
    """A graph, what it holds, and rows that know where."""
    graph = gt.Graph(value=("n",))
    encode = graph.input("x", shape=(H,), dtype=torch.float32, bundle=True)
    held = encode.through(nn.Linear(H, H), name="encode").hold(name="states")
    return graph, held, held.through(Pool(), name="pool", inside=True, pool=True)


def data(n: int = 12):
    rng = torch.Generator().manual_seed(0)
    return [
        gt.Instance({"x": torch.randn(1 + i % 4, H, generator=rng)}, value={"n": i % 3})
        for i in range(n)
    ]


def engine(graph, workers=1, placement=None, replicas=None):
    graph.check()
    return Engine(graph, make_parts(graph, gt.Rules()), Settings(), workers, placement)


def test_a_reader_that_does_not_come_from_the_memory_is_refused():
    graph, held, rows = begun()
    rows.stop()
    other = graph.input("h", shape=(H,), dtype=torch.float32)
    other.attend(held, Read(), name="read").loss(loss)
    with pytest.raises(GraphError, match=r"'read' reads memory 'states', but not all rows"):
        graph.check()


@pytest.mark.parametrize(
    ("kind", "told"),
    [(Read, False), (Unmasked, True), (OfOneLength, False), (Drawing, False)],
)
def test_it_is_told_once_who_makes_another_row_of_a_memory_that_is_padded_further(
    kind: type[nn.Module], told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    graph, held, rows = begun()
    rows.attend(held, kind(), name="read").loss(loss)
    for _ in range(2):
        graph.check(data(1)[0])
    said = [r.getMessage() for r in caplog.records if "padded" in r.getMessage()]
    assert len(said) == told
    for line in said:
        assert line.startswith(f"'read': {kind.__name__}, attends to states makes something else")
        assert "masked_fill(~mask" in line


def test_a_reader_behind_a_merge_with_rows_from_elsewhere_is_refused():
    graph, held, rows = begun()
    other = graph.input("h", shape=(H,), dtype=torch.float32)
    graph.merge(rows, other).attend(held, Read(), name="read").loss(loss)
    with pytest.raises(GraphError, match="'read' reads memory 'states', but not all rows"):
        graph.check()


def test_a_join_knows_what_each_of_its_streams_does():
    graph, held, rows = begun()
    other = graph.input("h", shape=(H,), dtype=torch.float32)
    both = graph.concat(other, rows, on="instance", how="tuple").through(lambda a, b: a + b)
    both.attend(held, Read(), name="read").loss(loss)
    graph.check()


def test_attending_to_what_is_not_held_is_refused():
    _, _, rows = begun()
    with pytest.raises(GraphError, match=r"what hold\(\) gave, not 'pool' \(through\)"):
        rows.attend(rows, Read())


def test_holding_single_rows_is_refused():
    graph = gt.Graph()
    held = graph.input("h", shape=(H,), dtype=torch.float32).hold(name="states")
    held.attend(held, Read()).loss(loss)
    with pytest.raises(GraphError, match=r"'states': hold\(\) is for bundles"):
        graph.check()


def test_a_memory_with_which_no_row_begins_says_who_should():
    graph = gt.Graph()
    held = graph.input("x", shape=(H,), dtype=torch.float32, bundle=True).hold(name="states")
    graph.input("h", shape=(H,), dtype=torch.float32).attend(held, Read()).loss(loss)
    with pytest.raises(GraphError, match="rows that attend to it begin with it: pooled"):
        graph.check()


def test_a_memory_that_nobody_reads_is_refused():
    graph, _, rows = begun()
    rows.loss(loss)
    with pytest.raises(GraphError, match="memory 'states' is read by nobody"):
        graph.check()


@pytest.mark.parametrize("reads", [False, True])
def test_a_memory_with_nothing_behind_it_is_named_with_the_remedy(reads: bool):
    graph = gt.Graph()
    states = graph.input("h", shape=(H,), dtype=torch.float32, bundle=True)
    held = states.hold(name="states")
    rows = states.through(Pool(), inside=True)  # of what has not been held
    (rows.attend(held, Read()) if reads else rows).loss(loss)
    told = r"'states' is read by nobody; it holds memory 'states'.* rows\.attend\(held, module\)"
    with pytest.raises(GraphError, match=told):
        graph.check()


def test_a_reader_behind_what_answers_early_is_refused():
    graph, held, rows = begun()
    rows.detach(name="cut").attend(held, Read(), name="read").loss(loss)
    with pytest.raises(GraphError, match=r"'read' reads memory 'states' behind 'cut' \(detach\)"):
        graph.check()


def test_a_module_that_does_not_take_the_memory_is_told_its_shape():
    graph, held, rows = begun()
    rows.attend(held, nn.Bilinear(H, H, H), name="read").loss(loss)
    with pytest.raises(GraphError, match=r"'read'.*with a memory of float32 \(n, 4, 3\)"):
        graph.check()


def test_a_module_that_mixes_rows_is_refused():
    class Mixes(Read):
        def forward(self, h: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
            return super().forward(h - h.mean(0), memory, mask)

    graph, held, rows = begun()
    rows.attend(held, Mixes(), name="read").loss(loss)
    with pytest.raises(GraphError, match="'read'"):
        graph.check()


class Dropping(Read):
    """With dropout inside."""

    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.drop = drop

    def forward(self, h: Tensor, memory: Tensor, mask: Tensor, *key: Tensor) -> Tensor:
        return self.drop(super().forward(h, memory, mask), *key)


@pytest.mark.parametrize("keep", ["auto", "inputs"])
def test_dropout_inside_a_reader_is_refused_with_what_may_be_done_instead(keep):
    graph, held, rows = begun()
    rows.attend(held, Dropping(nn.Dropout(0.5)), name="read", keep=keep).loss(loss)
    with pytest.raises(GraphError, match=r"'read': Dropout \(drop\) would draw") as refusal:
        graph.check()
    told = str(refusal.value)
    assert "a node of its own before or behind" in told and "RowDropout inside the module" in told
    assert "keep=" not in told  # attend() knows no other
    graph, held, rows = begun()
    read = rows.attend(held, Read(), keep=keep)
    keyed = Dropping(gt.nn.RowDropout(0.5))
    read.through(nn.Dropout(0.5)).attend(held, keyed, keep=keep, read="n").loss(loss)
    graph.check()


def test_other_keeps_are_refused():
    _, held, rows = begun()
    with pytest.raises(GraphError, match=r"attend\(keep='graph'\)"):
        rows.attend(held, Read(), keep="graph")


def test_no_function_sees_the_handle():
    graph, held, rows = begun()
    with pytest.raises(GraphError, match=r"rows can read \['instance', 'lengths', 'n'"):
        rows.attend(held, Read(), read="@states").loss(loss)
        graph.check()


def test_the_printed_graph_says_who_reads_and_that_they_are_together():
    graph, held, rows = begun()
    rows.attend(held, Read(), name="read").loss(loss)
    assert "hold read by read, on one worker" in str(graph)
    told = "attends to states [auto: autograd's graph of a call where a loop runs whole"
    assert told in str(graph)
    graph, held, rows = begun()
    rows.attend(held, Read(), name="read", keep="inputs").loss(loss)
    assert "attends to states [inputs]" in str(graph)


@pytest.mark.parametrize(("keep", "often"), [("auto", 1), ("inputs", 2)])
def test_in_a_loop_that_runs_whole_a_reader_runs_once_unless_it_is_to_run_again(keep, often):
    class Counts(Read):
        seen = 0

        def forward(self, h: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
            Counts.seen += len(h) == 12  # those of a trial are fewer
            return super().forward(h, memory, mask)

    graph, held, rows = begun()
    steps = graph.loop(name="steps")
    steps.join(rows.move(step=0))
    read = steps.attend(held, Counts(), name="read", keep=keep)
    done, more = read.move(step=lambda m: m.step + 1).where(lambda m: m.step == 3)
    steps.join(more)
    done.loss(loss)
    gt.Session(
        graph,
        rules=gt.Rules(update_every=gt.Flush()),
        runtime=gt.Simulated(1),
        max_active=12,
        schedule=gt.Schedule(ramp=gt.Ramp(over=0)),
    ).fit(data(12), epochs=1)
    assert Counts.seen == often * 3  # turns


def test_a_memory_and_its_readers_live_on_one_worker():
    graph, held, rows = begun()
    once = rows.attend(held, Read(), name="read")
    once.through(nn.Linear(H, H), name="between").attend(held, Read(), name="again").loss(loss)
    home = engine(graph, 3).nodes_by_worker()
    assert home["states"] == home["read"] == home["again"]
    assert len({home["read"], home["encode"], home["between"]}) == 3


def test_readers_that_are_placed_apart_are_refused():
    graph, held, rows = begun()
    rows.attend(held, Read(), name="read").attend(held, Read(), name="again").loss(loss)
    with pytest.raises(ValueError, match="'again' on 1, 'read' on 0; all that reads a memory"):
        engine(graph, 2, {"read": 0, "again": 1})


def test_a_memory_that_is_placed_apart_from_its_reader_is_refused():
    graph, held, rows = begun()
    rows.attend(held, Read(), name="read").loss(loss)
    with pytest.raises(ValueError, match="memory 'states' on 1 and what reads it"):
        engine(graph, 2, {"read": 0, "states": 1})


@cache
def loss_before_training():
    return trained()[0]


def trained(sharing=None, workers=1, precision="full"):
    torch.manual_seed(0)
    graph, held, rows = begun()
    state = graph.loop()
    state.join(rows.move(step=0))
    after = state.attend(held, Read(), name="read").move(step=lambda m: m.step + 1)
    more, done = after.where(lambda m: m.step <= m.n)
    state.join(more)
    done.through(nn.Linear(H, 2), name="readout").loss(loss)
    session = gt.Session(
        graph,
        rules=gt.Rules(optimizer=lambda p: torch.optim.SGD(p, lr=0.05), update_every=4),
        runtime=gt.Threads(workers, kernel_threads=1),
        sharing=sharing,
        compute=gt.Compute(precision=precision),
        max_active=5,
    )
    begun_with = session.evaluate(data()).metrics["loss"]
    return begun_with, [each.loss for each in session.fit(data(), epochs=3).history]


@pytest.mark.parametrize(
    ("sharing", "workers"),
    [
        (None, 2),
        (gt.PartCopies({"read": 2}), 2),
        (gt.PartCopies({"encode": 2}), 2),
        (gt.PartCopies({"encode": 3, "read": 2}), 3),
        (gt.SharedWeights(), 2),
    ],
    ids=["parts apart", "copies of the reader", "of the encoder", "of both", "shared weights"],
)
def test_copies_read_what_the_copy_beside_them_holds(sharing, workers):
    alone = loss_before_training()
    begun_with, (first, *_, last) = trained(sharing, workers)
    assert begun_with == pytest.approx(alone, rel=1e-5)
    assert last < first


def test_rows_in_bfloat16_read():
    _, (first, *_, last) = trained(precision="bf16")
    assert last < first


def test_readers_of_different_numbers_of_copies_are_refused():
    graph, held, rows = begun()
    rows.attend(held, Read(), name="read").attend(held, Read(), name="again").loss(loss)
    sharing = gt.PartCopies({"read": 2, "again": 3})
    with pytest.raises(GraphError, match="'read' has 2, 'again' has 3"):
        gt.Session(graph, runtime=gt.Threads(3, kernel_threads=1), sharing=sharing).fit(
            data(), epochs=1
        )


def hold_node():
    schema = Schema(["instance", "vertex", "@states"], (), None, ())
    return HoldNode(Place(7, "states", Arena(), schema), 2)


def held_bundles(node, lengths, train=True):
    lengths = np.array(lengths)
    x = torch.arange(float(lengths.sum() * 2)).view(-1, 2)
    state = np.zeros((3, lengths.size), np.int64)
    origin = np.arange(lengths.size) + (3 << 40)
    ((_, sent),) = node.forward(0, [Forward((x,), state, origin, lengths)], train).forward
    return x, sent


def test_bundles_of_no_row_and_of_one_are_held_and_answered():
    node = hold_node()
    x, sent = held_bundles(node, [0, 1, 3])
    memory = Recalled(node.held, sent.state[2][[2, 0, 1, 2]])
    (padded,), mask = memory.padded()
    assert mask.sum(1).tolist() == [3, 0, 1, 3]
    assert torch.equal(padded[0], x[1:]) and torch.equal(padded[2, 0], x[0])
    assert not padded[1].any() and not padded[2, 1:].any()
    memory.add_padded((torch.ones_like(padded),))
    emission = node.backward([Backward(sent.origin, None)])
    (answer,) = emission.backward
    assert answer.lengths.tolist() == [0, 1, 3]
    assert answer.gradient[0].tolist() == [[1, 1], [2, 2], [2, 2], [2, 2]]
    node.check_empty()


def test_what_nobody_has_read_is_answered_zero_and_no_gradient_is_left_over():
    node = hold_node()
    for _ in range(3):
        _, sent = held_bundles(node, [2, 1])
        Recalled(node.held, sent.state[2][:1]).add_padded((torch.ones(1, 2, 2),))
        zero, some = node.backward([Backward(sent.origin, None)]).backward
        assert zero.gradient is None and zero.rows.tolist() == [1 + (3 << 40)]
        assert some.gradient[0].tolist() == [[1, 1], [1, 1]]
    node.check_empty()


def test_the_gradient_of_the_bundle_itself_joins_that_of_its_readers():
    node = hold_node()
    _, sent = held_bundles(node, [2])
    Recalled(node.held, sent.state[2]).add_padded((torch.ones(1, 2, 2),))
    answer = Backward(sent.origin, (torch.full((2, 2), 5.0),), np.array([2]))
    (found,) = node.backward([answer]).backward
    assert found.gradient[0].tolist() == [[6, 6], [6, 6]]


def test_reading_what_is_held_no_more_is_a_protocol_error():
    node = hold_node()
    _, sent = held_bundles(node, [2])
    node.backward([Backward(sent.origin, None)])
    with pytest.raises(ProtocolError, match="'states' that it holds no more"):
        Recalled(node.held, sent.state[2])


def test_members_of_a_group_that_read_different_bundles_are_refused():
    graph = gt.Graph()
    held = graph.input("x", shape=(H,), dtype=torch.float32, bundle=True)
    once = held.through(lambda x: x * 1).hold(name="once")
    rows = once.ungroup(index="part")
    # Each row becomes a bundle of its own, which is held: two handles of one instance.
    again = rows.group(by=("instance", "part"), size=1, how="bundle").hold(name="again")
    row = again.through(Pool(), name="pool", inside=True, pool=True)
    one = row.attend(again, Read(), name="a").attend(once, Read(), name="b")
    grouped = one.group(by="instance", size=2, how="sum")
    grouped.attend(again, Read(), name="c").loss(loss)
    session = gt.Session(graph, runtime=gt.Threads(1, kernel_threads=1))
    with pytest.raises(GraphError, match="read different bundles of memory 'again'"):
        session.fit([gt.Instance({"x": torch.ones(2, H)})], epochs=1)


def test_a_bundle_of_more_tensors_than_a_number_has_bits_is_refused():
    payload, one = (torch.ones(1, 1),) * 63, np.array([1])
    Held("memory").hold(payload, np.array([5]), one, sums=True)
    with pytest.raises(GraphError, match="at most 63"):
        Held("memory").hold((*payload, payload[0]), np.array([5]), one, sums=True)


def test_a_bundle_of_twenty_tensors_keeps_each_apart_from_the_sums_of_all():
    held, handles = Held("memory"), np.zeros(1, np.int64)
    payload = tuple(torch.full((2, 1), float(j)) for j in range(20))
    held.hold(payload, np.array([5]), np.array([2]), sums=True)
    for _ in range(2):
        held.add(handles, tuple(x + 1 for x in payload), held.at(handles), None)
    for j, (x, total) in enumerate(zip(held.payload(), held.sums(), strict=True)):
        assert total is not None
        assert x[held.at(handles)].tolist() == [[j], [j]]
        assert total[held.at(handles)].tolist() == [[2 * (j + 1)]] * 2
