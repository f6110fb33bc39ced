"""Programs of modules that read memories or look inside bundles: gradients are autograd's, with
bundles of all sizes, and where nothing is padded nothing is computed of what would be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import geartrain as gt
from geartrain.derived.operands import Operands
from geartrain.derived.ragged import choice
from geartrain.derived.ragged.calls import call_of_inside, call_of_memory
from geartrain.derived.ragged.derivation import derive_inside, derive_memory
from geartrain.derived.ragged.for_nodes import DerivedRagged
from geartrain.derived.ragged.program import RaggedProgram
from geartrain.derived.steps.lower import MOST_WEIGHTS
from geartrain.errors import GraphError, ProtocolError
from geartrain.native.calls import SeveralForm
from geartrain.nodes.choice import Experience
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.held import Held, Recalled
from geartrain.nodes.inside import Inside
from geartrain.nodes.ragged import AbstractRaggedProgram, RaggedModule
from geartrain.nodes.remembering import RecordedCall, Remembering, RememberingRead
from tests.rigs.products import in_pairs
from tests.rigs.ragged_modules import H, Look, Mix, Pass, Point, Pool, Products

F64 = torch.float64


pytestmark = pytest.mark.usefixtures("in_float64")


def _inside(lengths: Sequence[int], edges: int = 0) -> Inside:
    sizes = torch.tensor(lengths)
    segment = torch.arange(len(lengths)).repeat_interleave(sizes)
    rng, n = torch.Generator().manual_seed(2), int(sizes.sum())
    if not edges:
        return Inside(sizes, segment, {})
    most = {"source": n, "target": n, "bond": 3}
    drawn = {k: torch.randint(0, m, (edges,), generator=rng) for k, m in most.items()}
    return Inside(sizes, segment, drawn)


def _check(
    module: nn.Module,
    run: Callable[[GradientSum], tuple[Sequence[Tensor], Sequence[Tensor | None]]],
    outputs: Sequence[Tensor],
    leaves: Sequence[Tensor],
) -> None:
    """What a program has found, of gradients of ones, against autograd."""
    weights = list(module.parameters())
    into = GradientSum(weights)
    with torch.no_grad():
        ys, found = run(into)
    for a, b in zip(ys, outputs, strict=True):
        assert_close(a, b)
    wanted = torch.autograd.grad(
        list(outputs), [*leaves, *weights], [torch.ones_like(y) for y in outputs], allow_unused=True
    )
    for mine, theirs in zip([*found, *map(into.take, weights)], wanted, strict=True):
        if theirs is None:
            assert mine is None or not mine.any()
        else:
            assert mine is not None
            assert_close(mine.to_dense(), theirs)


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("lengths", [[2, 1, 4], [1], [3] * 200])
@pytest.mark.parametrize("kind", [Point, Look, Products])
def test_rows_that_read_a_memory(kind: type[nn.Module], lengths: list[int]) -> None:
    torch.manual_seed(0)
    module, n = kind(), len(lengths)
    held = [torch.randn(sum(lengths) + 3, H) for _ in range(2 if kind is Point else 1)]
    starts = np.cumsum(lengths)[::-1].copy() - np.array(lengths)[::-1]  # from the last one on
    each = np.array(lengths[::-1])
    h, column = torch.randn(n, H), torch.zeros(n, dtype=torch.int64)
    cut = derive_memory(module, (h, column), tuple(held), 1)
    program = RaggedProgram(cut, Operands(module))

    def run(into: GradientSum) -> tuple[Any, list[Tensor | None]]:
        ys, kept = program.forward(call_of_memory((h, column), 1, tuple(held), starts, each))
        sums = {1 + k: torch.zeros_like(x) for k, x in enumerate(held)}
        back = program.backward(kept, tuple(torch.ones_like(y) for y in ys), into, sums)
        return ys, [back[0], *sums.values()]

    own, memory = h.clone().requires_grad_(), [x.clone().requires_grad_() for x in held]
    rows = []
    for k, (a, size) in enumerate(zip(starts, each, strict=True)):  # one row at a time, no padding
        mask = torch.ones(1, int(size), dtype=torch.bool)
        some = [x[int(a) : int(a + size)][None] for x in memory]
        y = module(own[k : k + 1], *some, mask, column[k : k + 1])
        rows.append(y if isinstance(y, tuple) else (y,))
    outputs = [torch.cat(ys) for ys in zip(*rows, strict=True)]
    _check(module, run, outputs, [own, *memory])


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("lengths", [[2, 3, 1], [5], [2] * 300])
@pytest.mark.parametrize("kind", [Pool, Mix, Pass])
def test_modules_that_look_inside_bundles(kind: type[nn.Module], lengths: list[int]) -> None:
    torch.manual_seed(0)
    module, n = kind(), sum(lengths)
    x, inside = torch.randn(n, H), _inside(lengths, 2 * n if kind is Pass else 0)
    cut = derive_inside(module, (x,), dict(inside.edges), pools=kind is Pool)
    program, names = RaggedProgram(cut, Operands(module)), dict.fromkeys(inside.edges, True)

    def run(into: GradientSum) -> tuple[Any, list[Tensor | None]]:
        ys, kept = program.forward(call_of_inside((x,), inside, names))
        back = program.backward(kept, tuple(torch.ones_like(y) for y in ys), into)
        return ys, [back[0]]

    leaf = x.clone().requires_grad_()
    _check(module, run, [module(leaf, inside)], [leaf])


@pytest.mark.usefixtures("needs_kernels")
def test_more_weights_than_are_packed_for_a_firing_are_left_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert MOST_WEIGHTS >= 2 * 9 * 256**2  # a gated cell, messages of three kinds, there and back
    edges = dict(_inside([5], 10).edges)
    for most, why in ((10 * H * H, ""), (10 * H * H - 1, "its weights are large")):
        monkeypatch.setattr("geartrain.derived.ragged.cut.MOST_WEIGHTS", most)
        with pytest.raises(GraphError, match=why) if why else nullcontext():
            derive_inside(Pass(), (torch.randn(5, H),), edges, pools=False)


def test_columns_that_number_members_are_told_to_come_as_edges() -> None:
    def parents(x: Tensor, parent: Tensor, inside: Inside) -> Tensor:
        first = (inside.lengths.cumsum(0) - inside.lengths)[inside.segment]
        return x + x[parent + first]

    parent = torch.full((5,), 4)
    assert parents(torch.randn(5, H), parent, _inside([5])).shape == (5, H)
    with pytest.raises(GraphError, match=r"it fails on bundles of \[2, 1, 4\] .* come as edges"):
        derive_inside(parents, (torch.randn(5, H), parent), {}, pools=False)


@pytest.mark.usefixtures("needs_kernels")
def test_an_empty_bundle_adds_nothing() -> None:
    torch.manual_seed(0)
    module, x, inside = Mix(), torch.randn(3, H), _inside([2, 0, 1])
    program = RaggedProgram(derive_inside(module, (x,), {}, pools=False), Operands(module))
    ys, _ = program.forward(call_of_inside((x,), inside, {}))
    assert_close(ys[0], module(x, inside).detach())


@pytest.mark.usefixtures("needs_kernels")
def test_a_row_that_is_not_there_is_refused() -> None:
    module, held = Point(), tuple(torch.randn(5, H) for _ in range(2))
    inputs = torch.randn(2, H), torch.zeros(2, dtype=torch.int64)
    program = RaggedProgram(derive_memory(module, inputs, held, 1), Operands(module))
    for right in ([0, 2], [-1, 0]):
        call = call_of_memory(
            (inputs[0], torch.tensor(right)), 1, held, np.array([0, 3]), np.array([3, 2])
        )
        with pytest.raises(IndexError, match="not there"):
            program.forward(call)


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("kind", [Mix, Pool])
@pytest.mark.parametrize("lengths", [[2, 3], [2, 1, -1, 2], [5], [-1, 5], [2, 1 << 62, 2]])
def test_bundles_that_are_not_those_of_the_rows_are_refused(
    lengths: list[int], kind: type[nn.Module]
) -> None:
    module, x, inside = kind(), torch.randn(4, H), _inside([2, 2])
    program = RaggedProgram(derive_inside(module, (x,), {}, pools=kind is Pool), Operands(module))
    program.forward(call_of_inside((x,), inside, {}))
    wrong = Inside(torch.tensor(lengths), inside.segment, {})
    with pytest.raises(ProtocolError, match="do not add up to their 4 members"):
        program.forward(call_of_inside((x,), wrong, {}))


class _Refused:
    class Mean(nn.Module):
        def forward(self, h: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
            return h + keys.mean(1)

    class Drop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, h: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
            return self.drop(h) + keys.sum(1)

    class Unmasked(nn.Module):
        """What is padded has a share."""

        def forward(self, h: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
            return h + ((keys * keys).sum(2).softmax(1)[..., None] * keys).sum(1)

    class Values(nn.Module):
        def forward(self, h: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
            return h * (2.0 if float(h.detach()[0, 0]) > 0 else 3.0) + keys.sum(1)

    class Words(nn.Module):
        def forward(self, h: Tensor, keys: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            y = h + keys.sum(1)
            return y, y.argmax(1)


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (_Refused.Mean, "a sum over rows"),
        (_Refused.Drop, "reads a memory"),
        (_Refused.Unmasked, "several sizes"),
        (_Refused.Values, "depends on values"),
        (_Refused.Words, "it gives integers; have a function behind it make them"),
    ],
)
def test_what_depends_on_padding_or_values_is_refused(kind: type[nn.Module], why: str) -> None:
    held = (torch.randn(5, H),)
    with pytest.raises(GraphError, match=why):
        derive_memory(kind(), (torch.randn(2, H),), held, 0)


@pytest.mark.usefixtures("needs_kernels")
def test_edges_on_the_host_are_not_looked_at() -> None:
    class Looks(nn.Module):
        def forward(self, x: Tensor, inside: gt.Inside) -> Tensor:
            return x * float(inside.on_host("source").max())

    x, inside = torch.randn(4, H), _inside([2, 2], 5)
    with pytest.raises(GraphError, match="on the host"):
        derive_inside(Looks(), (x,), dict(inside.edges), pools=False)


# Nodes.


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Little work is enough, and programs win."""
    choice.RAGGED_REGISTRY.forget()
    monkeypatch.setattr(choice, "FIRINGS", 3)
    monkeypatch.setattr(choice, "ROWS", 8)
    monkeypatch.setattr(choice, "_ratio", lambda *_: 0.5)
    yield
    choice.RAGGED_REGISTRY.forget()


def _pointing(keep: str) -> gt.Graph:
    """A set that is held, pooled, and read at each step of a loop."""
    torch.manual_seed(1)
    graph = gt.Graph(vertex=("right",))
    encode = nn.Linear(2, 2 * H)
    held = graph.input("x", bundle=True).through(_Halves(encode), name="encode").hold(name="set")
    steps = graph.loop(name="steps")
    steps.join(held.through(gt.Part(_First(), keep=keep), name="first", inside=True, pool=True))
    new = steps.attend(held, gt.Part(Point(), keep=keep), name="point", read="right")
    new.through(nn.Identity(), take=1).loss(_told)
    more, done = new.through(nn.Identity(), take=0).where(lambda m: m.vertex + 1 < m.size)
    steps.join(more.move(vertex=lambda m: m.vertex + 1))
    done.stop()
    return graph


def _told(missed: Tensor) -> Tensor:
    return missed[:, 0]


class _Halves(nn.Module):
    def __init__(self, map_: nn.Linear) -> None:
        super().__init__()
        self.map = map_

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.map(x).chunk(2, 1)
        return keys, values


class _First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(H, H)

    def forward(self, keys: Tensor, values: Tensor, inside: gt.Inside) -> Tensor:
        total = values.new_zeros(len(inside.lengths), H)
        return torch.tanh(self.map(total.index_add(0, inside.segment, values)))


def _sets(n: int = 24) -> list[gt.Instance]:
    rng = torch.Generator().manual_seed(0)
    sizes = [2 + k % 4 for k in range(n)]
    return [
        gt.Instance(
            {"x": torch.randn(k, 2, generator=rng)},
            {"right": torch.randperm(k, generator=rng).numpy()},
        )
        for k in sizes
    ]


def _learned(graph: gt.Graph, active: int, every: int) -> Mapping[str, Tensor]:
    rules = gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.05), update_every=every)
    session = gt.Session(
        graph, rules=rules, runtime=gt.Threads(1, kernel_threads=1), max_active=active
    )
    session.fit(_sets(), epochs=4)
    return {
        f"{t.name} {name}": p.detach()
        for t in graph.throughs()
        if isinstance(t.function, nn.Module)
        for name, p in t.function.named_parameters()
    }


@pytest.mark.parametrize(
    ("active", "every", "light"), [(8, 8, 512), (24, 24, 512), (24, 6, 512), (24, 6, 0)]
)
@pytest.mark.usefixtures("needs_kernels", "soon")
def test_a_loop_learns_the_same_by_programs(
    active: int, every: int, light: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where rows of several updates go by one firing, and where calls have too many rows."""
    monkeypatch.setattr(choice, "MOST_LIGHT", light)
    computed = []
    true = RaggedProgram.backward

    def backward(self: RaggedProgram, *args: Any) -> Any:
        computed.append(args[0].call.sizes)
        return true(self, *args)

    monkeypatch.setattr(RaggedProgram, "backward", backward)
    graph = _pointing("auto")
    found = _learned(graph, active, every)
    assert len(computed) > 10
    choice.RAGGED_REGISTRY.forget()
    monkeypatch.setattr(choice, "_ratio", lambda *_: 2.0)
    wanted = _learned(_pointing("auto"), active, every)
    stories = {t.name: t.experience.story for t in graph.throughs()}
    assert stories["point"] == stories["first"] == "derived, 0.50 of autograd"
    assert "auto: derived, 0.50 of autograd" in str(graph)
    for name, weight in wanted.items():
        assert_close(found[name], weight, rtol=1e-9, atol=1e-11)


class _Begin(nn.Module):
    """Rows of a table, less their mean over the bundle."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(5, H, sparse=sparse)

    def forward(self, word: Tensor, inside: gt.Inside) -> Tensor:
        x = self.table(word)
        mean = x.new_zeros(len(inside.lengths), H).index_add(0, inside.segment, x)
        return x - (mean / inside.lengths[:, None])[inside.segment]


class _Round(nn.Module):
    """A weight meets the rows as they came, and others what has been computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x: Tensor, inside: gt.Inside) -> Tensor:
        total = x.new_zeros(len(inside.lengths), H).index_add(0, inside.segment, self.first(x))
        return torch.tanh(self.other(total)[inside.segment] + x)


def _rounds_by_steps(keep: str, active: int, sparse: bool) -> tuple[list[Tensor], set[str]]:
    """All weights after updates of all instances; rows of the stores are used again and again."""
    torch.manual_seed(1)
    graph = gt.Graph(vertex=("y",), run="steps")
    begin, turn, last = _Begin(sparse=sparse), _Round(), nn.Linear(H, 2)
    rounds = graph.loop(name="rounds")
    first = graph.input("word", bundle=True, step=0)
    rounds.join(first.through(gt.Part(begin, keep=keep), name="begin", inside=True))
    after = rounds.through(gt.Part(turn, keep=keep), name="turn", inside=True)
    done, more = after.move(step=lambda m: m.step + 1).where(lambda m: m.step > m.size % 3)
    rounds.join(more)
    done.through(last, name="last").loss(gt.cross_entropy, target="y")
    words = [torch.arange(1 + k % 4) * (k + 1) % 5 for k in range(30)]
    data = [gt.Instance({"word": w}, {"y": (w % 2).numpy()}) for w in words]
    rules = gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.5), update_every=gt.Instances(30))
    ramp = gt.Schedule(ramp=gt.Ramp(over=0))
    gt.Session(graph, rules=rules, max_active=active, schedule=ramp).fit(data, epochs=3)
    stories = {t.experience.story for t in graph.throughs() if t.name in ("begin", "turn")}
    return [p.detach() for m in (begin, turn, last) for p in m.parameters()], stories


@cache
def _rounds_by_autograd(sparse: bool) -> list[Tensor]:
    """The same however many are in flight, as each update has them all; nobody changes them."""
    return _rounds_by_steps("inputs", 1, sparse)[0]


@in_pairs(active=[1, 4, 30], sparse=[False, True], story=["undecided", "derived, 0.50 of autograd"])
@pytest.mark.usefixtures("soon")
def test_what_waits_for_a_step_is_not_overwritten_in_the_store(
    active: int,
    sparse: bool,
    story: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Products and row numbers are read when the rows of the store have been given away."""
    if story == "undecided":
        monkeypatch.setattr(choice, "FIRINGS", 10_000)
    else:
        request.getfixturevalue("needs_kernels")
    found, stories = _rounds_by_steps("auto", active, sparse)
    assert stories == {story}
    for a, b in zip(found, _rounds_by_autograd(sparse), strict=True):
        assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.usefixtures("needs_kernels", "soon")
def test_a_graph_that_has_chosen_goes_to_other_processes() -> None:
    graph = _pointing("auto")
    _learned(graph, 8, 8)
    other = cloudpickle.loads(cloudpickle.dumps(graph))
    stories = [{t.name: t.experience.story for t in g.throughs()} for g in (graph, other)]
    assert stories[0] == stories[1]
    assert "derived" in stories[0]["point"]
    assert _learned(other, 8, 8)


@pytest.mark.usefixtures("needs_kernels", "soon")
def test_the_program_of_another_fit_is_taken_as_long_as_settings_are_the_same() -> None:
    module, experience = Scaled(), Experience()
    of = RaggedModule("first", module, 0, True, experience)
    kernel = Remembering(module, list(module.parameters()), choice.RaggedChoice(of))
    inputs, inside = (torch.randn(6, H), torch.randn(6, H)), _inside([2, 3, 1])
    for _ in range(4):
        kernel.record(inputs, inside)
    assert choice.RaggedChoice(of).program is not None
    module.gain = 2.0
    assert choice.RaggedChoice(of).program is None


@pytest.mark.usefixtures("needs_kernels", "soon")
def test_passes_after_one_another_make_programs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of a module that looks inside bundles and of one that reads a memory, where they run
    whole."""
    graph, made = _pointing("auto"), list[RaggedProgram]()
    rules = gt.Rules(update_every=gt.Instances(8))
    begin = partial(gt.Session, graph, runtime=gt.Threads(1, kernel_threads=1), rules=rules)
    session = begin(max_active=8)
    session.fit(_sets(), epochs=4)
    true = DerivedRagged.__init__

    def noted(self: Any, program: RaggedProgram, *rest: Any) -> None:
        made.append(program)
        true(self, program, *rest)

    monkeypatch.setattr(DerivedRagged, "__init__", noted)
    session.fit(_sets(), epochs=7)
    assert not made
    begin(max_active=8).fit(_sets(), epochs=2)
    assert len(made) == 2


@pytest.mark.usefixtures("needs_kernels", "soon")
def test_what_another_fit_made_of_a_program_is_taken_over_if_it_would_be_made_again() -> None:
    module, experience = Scaled(), Experience()
    of = RaggedModule("first", module, 0, True, experience)
    fits = [Remembering(module, [*module.parameters()], choice.RaggedChoice(of))]
    inputs, inside = (torch.randn(6, H), torch.randn(6, H)), _inside([2, 3, 1])
    for _ in range(4):
        fits[0].record(inputs, inside)

    def later() -> tuple[AbstractRaggedProgram | None, SeveralForm | None]:
        found = choice.RaggedChoice(of)
        kernel = Remembering(module, [*module.parameters()], found)
        kernel.take_over(fits[-1])
        fits.append(kernel)
        return found.program, kernel.listed_inside(inputs)

    program, form = later()
    assert program is not None and form is not None
    assert later() == (program, form)
    module.map.weight = nn.Parameter(torch.randn_like(module.map.weight))
    others, other = later()
    assert others is not program and other is not form
    (found,), _ = fits[-1].record(inputs, inside)
    assert_close(found, module(*inputs, inside))
    module.gain = 2.0
    assert later() == (None, None)


@pytest.mark.usefixtures("needs_kernels", "soon")
def test_a_program_is_tried_on_rows_of_a_memory_that_somebody_holds() -> None:
    """Between bundles lies what others have left there; nobody reads it."""
    module, experience, held = Look().double(), Experience(), Held("memory")
    lengths = np.array([3, 2, 4])
    origin = np.full(lengths.size, 1 << 60)
    held.hold((torch.randn(9, H),), origin, lengths, sums=True)
    first = held.hold((torch.randn(9, H),), origin, lengths, sums=True)
    memory = Recalled(held, first + np.array([2, 0]))
    cells = held.payload()[0]
    left = np.setdiff1d(np.arange(cells.shape[0]), held.at(memory.handles))
    cells[torch.from_numpy(left)] = 1e270
    at = torch.from_numpy(held.at(memory.handles))
    assert torch.equal(memory.some(5)[0], cells[at[:5]])
    chosen = choice.RaggedChoice(RaggedModule("look", module, 1, False, experience))
    kernel = RememberingRead(module, list(module.parameters()), 1, chosen)
    inputs = torch.randn(2, H), torch.tensor([0, 1])
    for _ in range(4):
        kernel.record(inputs, memory)
    assert chosen.program is not None, experience.story


@pytest.mark.usefixtures("needs_kernels", "soon")
def test_evaluations_neither_find_a_program_nor_give_one_up() -> None:
    module, experience, held = Look(), Experience(), Held("memory")
    lengths = np.array([3, 2, 4])
    origin = np.full(lengths.size, 1 << 60)
    first = held.hold((torch.randn(9, H),), origin, lengths, sums=True)
    memory = Recalled(held, first + np.array([2, 0]))
    chosen = choice.RaggedChoice(RaggedModule("look", module, 1, False, experience))
    kernel = RememberingRead(module, list(module.parameters()), 1, chosen)
    inputs = torch.randn(2, H), torch.tensor([0, 1])
    module.eval()
    for _ in range(8):
        (wanted,), _ = kernel.forward(inputs, memory)
    assert chosen.undecided and not experience.done.firings
    module.train()
    for _ in range(4):
        kernel.record(inputs, memory)
    assert kernel.replaced, experience.story
    module.eval()
    (found,), _ = kernel.forward(inputs, memory)
    assert_close(found, wanted)
    module.train()
    (found,), graph = kernel.record(inputs, memory)
    assert kernel.replaced and isinstance(graph, RecordedCall), experience.story


class Scaled(_First):
    def __init__(self) -> None:
        super().__init__()
        self.gain = 1.0

    def forward(self, keys: Tensor, values: Tensor, inside: gt.Inside) -> Tensor:
        return super().forward(keys, self.gain * values, inside)


@pytest.mark.usefixtures("needs_kernels", "soon")
def test_settings_that_change_bring_autograd_back(monkeypatch: pytest.MonkeyPatch) -> None:
    module, experience = Scaled(), Experience()
    chosen = choice.RaggedChoice(RaggedModule("first", module, 0, True, experience))
    kernel = Remembering(module, list(module.parameters()), chosen)
    inputs, inside = (torch.randn(6, H), torch.randn(6, H)), _inside([2, 3, 1])
    for _ in range(4):
        kernel.record(inputs, inside)
    assert kernel.replaced and kernel.apart
    monkeypatch.setattr(choice, "MOST_LIGHT", 1)
    assert kernel.replaced and not kernel.apart
    module.gain = 2.0
    (y,), _ = kernel.record(inputs, inside)
    assert not kernel.replaced and "settings" in experience.story
    assert_close(y, module(*inputs, inside).detach())
