"""Instances in columns: packed at once or one by one, cut anywhere, they are the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.engine.engine import Engine
from geartrain.engine.settings import Settings
from geartrain.errors import DataError
from geartrain.frames import packer as packing
from geartrain.frames.frame import BY_SOURCE, FIRST_OUT, Arena
from geartrain.frames.instance import Instance
from geartrain.frames.packed import Packed
from geartrain.frames.packer import Packer
from geartrain.frames.table import Table
from geartrain.graph.graph import Graph

DRAWN = settings(deadline=None, derandomize=True, max_examples=40)


def engine() -> Engine:
    made = Graph(vertex=("slot",), edge=("type",), value=("aim",))
    made.input("x").stop()
    made.input("bag", bundle=True).stop()
    return Engine(made, {}, Settings())


def packer() -> Packer:
    return engine().controller.packer


def drawn(seed: int, n: int) -> list[Instance]:
    """Random instances; some bring lists, some no edges, some nothing to an input."""
    random = np.random.default_rng(seed)
    made = []
    for i in range(n):
        v, e = int(random.integers(1, 5)), int(random.integers(0, 6))
        slot = random.integers(0, 9, v)
        where = random.permutation(v)[: int(random.integers(1, v + 1))]
        x = torch.from_numpy(random.normal(size=(len(where), 2)))
        inputs = {"x": (x, where), "bag": torch.ones(v, 3)}
        if i % 4 == 1:
            del inputs["bag"]
        edge = {
            "source": random.integers(0, v, e),
            "target": random.integers(0, v, e),
            "type": random.integers(0, 3, e).astype(np.int32),
        }
        made.append(
            Instance(
                inputs,
                {"slot": slot.tolist() if i % 5 == 2 else slot},
                edge,
                {"aim": float(i)},
                key=("tuple", i),
            )
        )
    return made


def same(one: Packed, other: Packed) -> None:
    assert one.keys.tolist() == other.keys.tolist()
    for name in ("sizes", "edge_sizes", "counts"):
        assert np.array_equal(getattr(one, name), getattr(other, name))
    assert one.edge.keys() == {"source", "target", "type", BY_SOURCE}
    for name in ("source", "target", "type"):
        assert np.array_equal(one.edge[name], other.edge[name])
    for name, column in one.value.items():
        assert np.array_equal(column, other.value[name])
    for name in ("slot", "out_degree", "in_degree"):
        assert np.array_equal(one.vertex[name], other.vertex[name])
    first, begin = int(one.edge_ends[0]), int(other.edge_ends[0])
    assert np.array_equal(one.vertex[FIRST_OUT] - first, other.vertex[FIRST_OUT] - begin)
    assert np.array_equal(one.edge[BY_SOURCE] - first, other.edge[BY_SOURCE] - begin)
    for name, rows in one.inputs.items():
        twin = other.inputs[name]
        assert np.array_equal(rows.lengths, twin.lengths) and np.array_equal(rows.at, twin.at)
        assert (rows.payload is None) == (twin.payload is None)
        if rows.payload is not None and twin.payload is not None:
            assert torch.equal(rows.payload, twin.payload)


@DRAWN
@given(seed=st.integers(0, 999), n=st.integers(1, 12), data=st.data())
def test_a_part_is_what_its_instances_pack_to_by_themselves(seed, n, data):
    instances = drawn(seed, n)
    whole = packer().pack(instances)
    i = data.draw(st.integers(0, n - 1))
    j = data.draw(st.integers(i + 1, n))
    same(whole.part(i, j), packer().pack(instances[i:j]))
    k = data.draw(st.integers(i + 1, j))
    same(whole.part(i, j).part(0, k - i), whole.part(i, k))


@DRAWN
@given(seed=st.integers(0, 999), order=st.permutations(range(3)))
def test_the_arena_holds_what_each_instance_brought(seed, order):
    instances = drawn(seed, 9)
    made = engine()
    arena: Arena = made.wiring.arena
    whole = made.controller.packer.pack(instances)
    cut = [slice(0, 2), slice(2, 7), slice(7, 9)]
    slots = {k: arena.admit(whole.part(cut[k].start, cut[k].stop), cut[k].start) for k in order}
    for k in order:
        for slot, instance in zip(slots[k].tolist(), instances[cut[k]], strict=True):
            base, size = int(arena.base[slot]), int(arena.size[slot])
            first, edges = int(arena.edge_base[slot]), int(arena.edge_size[slot])
            here = slice(base, base + size)
            assert arena.vertices["slot"][here].tolist() == list(instance.vertex["slot"])
            assert arena.values["aim"][slot] == instance.value["aim"]
            assert arena.describe(slot) == f"instance {int(arena.serial[slot])} ({instance.key})"
            source = np.asarray(instance.edge["source"])
            kept = arena.edges["target"][first : first + edges]
            assert np.array_equal(kept, instance.edge["target"])
            leaving = first + np.argsort(source, kind="stable")
            assert np.array_equal(arena.edges[BY_SOURCE][first : first + edges], leaving)
            degrees = np.bincount(source, minlength=size)
            assert np.array_equal(arena.vertices["out_degree"][here], degrees)
            starts = first + np.cumsum(degrees) - degrees
            assert np.array_equal(arena.vertices[FIRST_OUT][here], starts)
    for k in order:
        arena.release(slots[k])
    assert arena.active == 0
    assert arena.vertices.ranges.free() == arena.vertices.ranges.capacity
    assert arena.edges.ranges.free() == arena.edges.ranges.capacity


def test_the_cost_of_a_block_counts_columns_and_rows():
    packed = packer().pack(drawn(0, 4))
    rows = packed.inputs["x"]
    assert packed.nbytes() > rows.nbytes() >= rows.at.nbytes + 16 * int(rows.lengths.sum())


def test_a_sum_that_overflows_is_no_infinity_among_the_rows():
    made = Graph()
    made.input("x").stop()
    large = Instance({"x": torch.full((2, 2), 3e38)}, key="large")
    pack = Engine(made, {}, Settings()).controller.packer.pack
    assert pack([large]).counts.tolist() == [2]
    broken = Instance({"x": torch.tensor([[1.0, 1.0], [torch.inf, -torch.inf]])}, key="broken")
    with pytest.raises(DataError, match="instance broken: input 'x' holds NaN or infinity"):
        pack([large, broken])


def rows_of(packed: Packed, name: str) -> tuple[list[object], list[int], list[int]]:
    rows = packed.inputs[name]
    assert rows.payload is not None
    return rows.payload.tolist(), rows.at.tolist(), rows.ends.tolist()


def test_rows_brought_as_tensors_are_those_brought_with_their_vertices():
    random = np.random.default_rng(0)
    plain = [torch.from_numpy(random.normal(size=(n, 2))) for n in (2, 1, 0, 3, 4)]
    slots = [np.zeros(max(len(x), 1), np.int64) for x in plain]

    def instances(*, pairs: bool) -> list[Instance]:
        edges = dict.fromkeys(("source", "target", "type"), np.zeros(0, np.int64))
        return [
            Instance(
                {"x": (x, np.arange(len(x))) if pairs else x, "bag": torch.ones(1, 3)},
                {"slot": slot},
                edges,
                {"aim": 0.0},
            )
            for x, slot in zip(plain, slots, strict=True)
        ]

    packers = packer(), packer()
    for each, pairs in zip(packers, (True, False), strict=True):
        each.pack(instances(pairs=pairs)[:1])  # the first says what rows look like
    with_vertices, alone = (
        each.pack(instances(pairs=pairs))
        for each, pairs in zip(packers, (True, False), strict=True)
    )
    for name in ("x", "bag"):
        assert rows_of(with_vertices, name) == rows_of(alone, name)


@pytest.mark.parametrize("kind", [np.asarray, np.ndarray.tolist])
def test_pairs_of_rows_and_vertices_are_joined_as_those_that_are_looked_at(monkeypatch, kind):
    edges = dict.fromkeys(("source", "target", "type"), np.zeros(0, np.int64))

    def instances(*, wrong: object = None) -> list[Instance]:
        found = []
        for k, n in enumerate((2, 1, 3, 4)):
            at = kind(np.arange(n)[::-1]) if wrong is None or k != 2 else wrong
            rows = torch.full((n, 2), float(k), dtype=torch.float64), at
            inputs = {"x": rows, "bag": torch.ones(1, 3)}
            found.append(Instance(inputs, {"slot": [0] * n}, edges, {"aim": 0.0}, key=k))
        return found

    looked: list[str] = []
    pair = Packer._pair
    monkeypatch.setattr(
        Packer, "_pair", lambda self, o, *given: looked.append(o.name) or pair(self, o, *given)
    )
    made = packer()
    joined = made.pack(instances())
    assert sorted(looked) == ["bag", "x"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "stacked", lambda given, known: None)
        assert rows_of(joined, "x") == rows_of(made.pack(instances()), "x")
    with pytest.raises(DataError, match="instance 2: input 'x' has 3 rows and vertices of shape"):
        made.pack(instances(wrong=kind(np.arange(2))))
    with pytest.raises(DataError, match="instance 2"):
        made.pack(instances(wrong=kind(np.array([0, 1, 7]))))
    floats = made.pack(instances(wrong=kind(np.array([2.0, 1.0, 0.0]))))
    assert rows_of(floats, "x") == rows_of(joined, "x")


@pytest.mark.parametrize(
    "wrong", [torch.ones(2, 2), torch.ones(2, 3).double(), torch.ones(2).double()]
)
def test_one_that_brings_other_rows_than_all_others_is_named(wrong):
    edges = dict.fromkeys(("source", "target", "type"), np.zeros(0, np.int64))
    given = [
        Instance({"x": torch.ones(2, 2).double()}, {"slot": [0, 0]}, edges, {"aim": 0.0}, key=k)
        for k in range(4)
    ]
    given[2] = Instance({"x": wrong}, {"slot": [0, 0]}, edges, {"aim": 0.0}, key=2)
    made = packer()
    made.pack(given[:1])
    with pytest.raises(DataError, match="instance 2: input 'x' has rows of"):
        made.pack(given)
    data = torch.ones(2, 2, dtype=torch.float64, requires_grad=True)
    given[2] = Instance({"x": data}, {"slot": [0, 0]}, edges, {"aim": 0.0}, key=2)
    payload = made.pack(given).inputs["x"].payload
    assert payload is not None and not payload.requires_grad


COLUMNS = {
    "lists": np.ndarray.tolist,
    "tuples": lambda x: tuple(x.tolist()),
    "numbers of numpy's": list,
    "tensors": torch.from_numpy,
    "short ones": lambda x: torch.from_numpy(x.astype(np.int32)),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_of_one_kind_are_joined_as_those_that_are_looked_at(monkeypatch, kind):
    """And not instance by instance."""
    column = COLUMNS[kind]
    given = [
        Instance(
            {"x": torch.ones(n, 2).double()},
            {"slot": column(np.arange(n))},
            {name: column(np.arange(n) // 2) for name in ("source", "target", "type")},
            {"aim": 0.5},
            key=n,
        )
        for n in (3, 1, 4)
    ]
    made = packer()
    first = made.pack(given[:2])
    with monkeypatch.context() as patch:
        patch.setattr(packing, "side_by_side", lambda given, lengths: None)
        wanted = made.pack(given)
    with monkeypatch.context() as patch:
        patch.setattr(Table, "fitting", None)
        found = made.pack(given)
    for a, b in ((found.vertex, wanted.vertex), (found.edge, wanted.edge)):
        assert a.keys() == b.keys()
        for name, values in a.items():
            assert values.dtype == np.int64 and np.array_equal(values, b[name])
    assert np.array_equal(found.sizes, [3, 1, 4]) and np.array_equal(found.edge_sizes, [3, 1, 4])
    assert np.array_equal(first.vertex["slot"], [0, 1, 2, 0])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ([0, 1], "expected 3 entries"),
        ([0, 1, 2**63], "came as float64"),
        ([0, 1, 0.5], "came as float64"),
        ([[0], [1], [2]], r"came as int64 \(1,\)"),
        (["a", "b", "c"], "holds <U1"),
        (torch.tensor(0), "expected 3 entries"),
        (torch.zeros(3, dtype=torch.complex64), "holds complex64"),
    ],
    ids=str,
)
def test_a_column_unlike_those_of_all_others_is_named(wrong, told):
    tensors = isinstance(wrong, torch.Tensor)
    types = [torch.arange(3) if tensors else [0, 1, 2] for _ in range(4)]
    types[2] = wrong
    edge = {"source": [0] * 3, "target": [0] * 3}
    given = [
        Instance(
            {"x": torch.ones(1, 2).double()}, {"slot": [0]}, edge | {"type": x}, {"aim": 0.5}, k
        )
        for k, x in enumerate(types)
    ]
    made = packer()
    made.pack(given[:2])
    with pytest.raises(DataError, match=f"instance 2: .*{told}"):
        made.pack(given)


def test_the_first_instances_of_a_packer_are_joined_as_later_ones_are(monkeypatch):
    """One of them says what rows look like; the others are not looked at one by one."""
    edges = dict.fromkeys(("source", "target", "type"), np.zeros(0, np.int64))
    rows = [torch.full((2, 2), float(k), dtype=torch.float64) for k in range(5)]
    given = [
        Instance({"x": x, "bag": x[:, :1]}, {"slot": np.zeros(2, np.int64)}, edges, {"aim": 0.5})
        for x in rows
    ]
    looked: list[str] = []
    pair = Packer._pair
    monkeypatch.setattr(
        Packer, "_pair", lambda self, o, *given: looked.append(o.name) or pair(self, o, *given)
    )
    made = packer()
    first, later = made.pack(given), made.pack(given)
    assert sorted(looked) == ["bag", "x"]
    for name in ("x", "bag"):
        assert rows_of(first, name) == rows_of(later, name)
    given[0] = Instance({"x": torch.ones(1, 3)}, {"slot": [0]}, edges, {"aim": 0.5}, key="first")
    given[4] = Instance({"x": torch.ones(1, 2)}, {"slot": [0]}, edges, {"aim": 0.5}, key="last")
    with pytest.raises(DataError, match="instance without a key: input 'x' has rows of"):
        packer().pack(given)  # of the second: the first is right whatever it brings


@pytest.mark.parametrize("kind", [float, np.float32, np.float64, int, np.int64])
def test_values_of_one_type_are_those_that_are_packed_one_by_one(kind):
    edges = dict.fromkeys(("source", "target", "type"), np.zeros(0, np.int64))

    def instance(k: int, aim: object) -> Instance:
        inputs = {"x": torch.ones(1, 2)}
        return Instance(inputs, {"slot": [0]}, edges, {"aim": aim}, key=k)

    given = [instance(k, kind(k)) for k in range(4)]
    together = packer().pack(given).value["aim"]
    single = [packer().pack([each]).value["aim"] for each in given]
    assert together.dtype == single[0].dtype
    assert np.array_equal(together, np.concatenate(single))
    whole = np.issubdtype(together.dtype, np.integer)
    given[2] = instance(2, 1.5 if whole else 1)
    with pytest.raises(DataError, match="instance 2: value column 'aim' came as"):
        packer().pack(given)
