"""Functions are tried on a few rows before they run: who mixes rows, who does not, and no trace."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import geartrain as gt
from geartrain.nodes.stand_in import StandIn, shell_of

FLOATS = {"x": ((4,), torch.float32)}
IMAGE = {"x": ((2, 6, 6), torch.float32)}


def checked(module: Any, shapes: Any = FLOATS, **options: Any) -> None:
    """A graph with this module, checked."""
    graph = gt.Graph()
    bundle = options.pop("bundle", False)
    y = graph.input("x", bundle=bundle).through(module, name="node", **options)
    y.output()
    graph.check(shapes)


class Wraps(nn.Module):
    """A function as a module, perhaps in training mode alone."""

    def __init__(self, function: Callable[..., Any], *, training: bool = False) -> None:
        super().__init__()
        self.linear, self._function, self._only = nn.Linear(4, 4), function, training

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return y if self._only and not self.training else self._function(y)


MIXERS: dict[str, Callable[[Tensor], Any]] = {
    "the mean taken away": lambda x: x - x.mean(0),
    "softmax over rows": lambda x: x.softmax(0),
    "divided by their number": lambda x: x / x.shape[0],
    "the first taken away": lambda x: x - x[0],
    "sums from the first on": lambda x: x.cumsum(0),
    "sums to the last": lambda x: x.flip(0).cumsum(0).flip(0),
    "turned round": lambda x: x.flip(0),
    "sorted": lambda x: x.sort(0).values,
    "attention over rows": lambda x: (x @ x.T).softmax(1) @ x,
    "a little of the mean": lambda x: x + 1e-5 * x.mean(0),
    "one of two outputs": lambda x: (x, x - x.mean(0)),
    "the place of the largest": lambda x: (x == x.amax(0)).float() * x,
    "a norm over all": lambda x: x / x.norm(),
}


@pytest.mark.parametrize("keep", ["auto", "inputs", "activations"])
@pytest.mark.parametrize("how", MIXERS)
def test_modules_that_mix_rows_are_refused_as_batch_norm_is(how: str, keep: Any) -> None:
    torch.manual_seed(0)  # the largest of all may be in the first row, which then is as if alone
    for module in (Wraps(MIXERS[how]), MIXERS[how]):
        with pytest.raises(
            gt.GraphError, match=r"'node': .* mixes rows of different instances.*keep"
        ):
            checked(module, keep=keep)


@pytest.mark.parametrize("how", ["the mean taken away", "softmax over rows"])
def test_mixing_in_training_mode_alone_is_found(how: str) -> None:
    with pytest.raises(gt.GraphError, match="mixes rows"):
        checked(Wraps(MIXERS[how], training=True))


class Drops(nn.Module):
    """Two features with dropout; a norm of two is 1 and -1, whatever they are."""

    def __init__(self, share: float, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.share, self._then = nn.Linear(4, 2), share, then

    def forward(self, x: Tensor) -> Tensor:
        return self._then(F.dropout(self.linear(x), self.share, self.training))


@pytest.mark.parametrize("seed", [7, 19, 42, 51])
@pytest.mark.parametrize(
    ("share", "then"), [(0.2, nn.LayerNorm(2)), (0.05, nn.Identity())], ids=["norm", "few"]
)
def test_a_mask_that_seldom_differs_is_not_taken_for_mixing(
    share: float, then: Any, seed: int
) -> None:
    torch.manual_seed(seed)
    checked(Drops(share, then), keep="activations")


@pytest.mark.parametrize("seed", range(3))
def test_mixing_beside_a_mask_is_found(seed: int) -> None:
    torch.manual_seed(seed)
    with pytest.raises(gt.GraphError, match="mixes rows"):
        checked(Drops(0.5, lambda x: x + 0.1 * x.mean(0)), keep="activations")


def test_whole_minibatches_and_rows_that_are_alone_may_mix() -> None:
    for how in MIXERS.values():
        checked(Wraps(how), bundle=True, keep="graph")
        checked(Wraps(how), bundle=True, alone=True)
    with pytest.raises(gt.GraphError, match="mixes rows"):
        checked(Wraps(MIXERS["sorted"]), bundle=True)


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


class OwnNoise(nn.Module):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.draws, self.numbers = torch.Generator().manual_seed(3), np.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=self.draws) * self.numbers.standard_normal()


class Counts(nn.Module):
    """Has state of every kind, and writes to it."""

    calls: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(4))
        self.linear, self.seen, self.last = nn.Linear(4, 4), [0], torch.zeros(1)
        self.memory: dict[str, int] = {}
        self.times = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.times += 1
        self.seen.append(len(x))
        self.memory[f"call {self.times}"] = len(x)
        self.last = x
        return self.linear(x)


class Renormed(nn.Module):
    """Its table is written to by torch when it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, max_norm=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class InDouble(nn.Module):
    """Rows in a dtype of its choosing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.float() * torch.ones(4))


class Logarithm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if (x <= 0).any():
            raise ValueError("logarithms of positive numbers alone")
        return x.log()


class Headstrong(nn.Module):
    """Its modes are its own affair."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)
        self.linear.training = False

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Picks(nn.Module):
    """Looks integers up in a table that is none of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, 4))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[ids]


INTEGERS = {"x": ((), torch.int64)}
SEQUENCE = {"x": ((5, 4), torch.float32)}


class FirstOf(nn.Module):
    """The first thing that another module gives."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.module(x, x, x)[0]
            if isinstance(self.module, nn.MultiheadAttention)
            else (self.module(x)[0])
        )


RIGHT: dict[str, tuple[Callable[[], Any], Any]] = {
    "a linear map": (lambda: nn.Linear(4, 3), FLOATS),
    "a deep one": (
        lambda: nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(4, 4), nn.Tanh()))),
        FLOATS,
    ),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)), FLOATS),
    "group norm": (lambda: nn.GroupNorm(2, 4), FLOATS),
    "instance norm": (lambda: nn.InstanceNorm2d(2, track_running_stats=False), IMAGE),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten()), IMAGE),
    "attention inside a row": (
        lambda: FirstOf(nn.MultiheadAttention(4, 2, batch_first=True)),
        SEQUENCE,
    ),
    "an lstm inside a row": (lambda: FirstOf(nn.LSTM(4, 3, batch_first=True)), SEQUENCE),
    "an encoder layer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
        SEQUENCE,
    ),
    "weights that are normalised": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        FLOATS,
    ),
    "a spectral norm": (
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        FLOATS,
    ),
    "a table": (lambda: nn.Embedding(2, 3), INTEGERS),
    "tables of two sizes": (lambda: nn.Sequential(nn.Embedding(40, 3), nn.Linear(3, 2)), INTEGERS),
    "a table that is written": (Renormed, INTEGERS),
    "a parameter as table": (Picks, INTEGERS),
    "noise": (Noise, FLOATS),
    "noise of its own": (OwnNoise, FLOATS),
    "state": (Counts, FLOATS),
    "a dtype of its own": (InDouble, FLOATS),
    "logarithms": (Logarithm, FLOATS),
    "largest of a row": (lambda: lambda x: x.argmax(1), FLOATS),
    "softmax of a row": (lambda: lambda x: x.softmax(1), FLOATS),
    "not a number": (lambda: lambda x: (x - 100).log(), FLOATS),
    "no rows of floats": (lambda: lambda x: x > 0, FLOATS),
    "complex numbers": (lambda: lambda x: torch.fft.fft(x), FLOATS),
    "modes of its own": (Headstrong, FLOATS),
    "a bilinear map": (lambda: lambda x: torch.einsum("ni,nj->nij", x, x), FLOATS),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_modules_that_keep_rows_apart_are_not_refused(kind: str) -> None:
    make, shapes = RIGHT[kind]
    torch.manual_seed(0)
    checked(make(), shapes, keep="inputs")


@pytest.mark.parametrize("kind", RIGHT)
def test_a_trial_leaves_no_trace(kind: str) -> None:
    make, shapes = RIGHT[kind]
    torch.manual_seed(0)
    module = make()
    if not isinstance(module, nn.Module):
        module = Wraps(module) if shapes is FLOATS else nn.Identity()
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    next(module.modules()).train()
    for inner in list(module.modules())[1:]:
        inner.eval()
    before = copy.deepcopy(module.state_dict())
    modes = [inner.training for inner in module.modules()]
    versions = [p._version for p in module.parameters()]
    plain = {k: repr(v) for k, v in vars(module).items() if k[0] != "_" and not _draws(v)}
    np.random.seed(0)
    random.seed(0)
    torch.manual_seed(5)
    checked(module, shapes, keep="inputs")
    drawn = float(torch.rand(())), np.random.rand(), random.random()
    np.random.seed(0)
    random.seed(0)
    torch.manual_seed(5)
    assert drawn == (float(torch.rand(())), np.random.rand(), random.random())
    for name, x in module.state_dict().items():
        assert torch.equal(x, before[name]), name
    assert [inner.training for inner in module.modules()] == modes
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in module.parameters())
    assert [p._version for p in module.parameters()] == versions
    now = {k: repr(v) for k, v in vars(module).items() if k[0] != "_" and not _draws(v)}
    assert now == plain
    if isinstance(module, OwnNoise):
        assert torch.rand((), generator=module.draws) == torch.rand(
            (), generator=torch.Generator().manual_seed(3)
        )
        assert module.numbers.random() == np.random.default_rng(3).random()


def _draws(value: object) -> bool:
    return isinstance(value, torch.Generator | np.random.Generator)


def test_a_shell_computes_what_the_module_does_and_shares_its_tensors() -> None:
    class Both(nn.Module):
        """Modules in attributes of all kinds."""

        __slots__ = ("gain",)

        def __new__(cls, gain: float) -> Both:
            return super().__new__(cls)

        def __init__(self, gain: float) -> None:
            super().__init__()
            self.gain = gain
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.rows, self.named = [self.a, self.b], {"b": self.b}
            self.bound = self.last

        def last(self, x: Tensor) -> Tensor:
            return self.gain * self.rows[1](x) + self.named["b"](x)

        def forward(self, x: Tensor) -> Tensor:
            return self.bound(self.rows[0](x))

    module, x = Both(3.0), torch.randn(3, 4)
    shell = shell_of(module)
    assert torch.equal(shell(x), module(x))
    assert [id(p) for p in shell.parameters()] == [id(p) for p in module.parameters()]
    (y,) = StandIn(module).play((x,), None)
    assert not y.requires_grad, "all of its weights were replaced, wherever they are held"
    assert torch.equal(y, module(x))
    (double,) = StandIn(module).play((x,), None, double=True)
    assert double.dtype == torch.float64


class Tables(nn.Module):
    """Says where its weights lie, and by what they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Embedding(5, 4)
        self.written = nn.Embedding(5, 4, max_norm=0.5)
        self.seen: list[tuple[int, int]] = []

    def forward(self, ids: Tensor) -> Tensor:
        self.seen.append((self.read.weight.data_ptr(), self.written.weight.data_ptr()))
        return self.read(ids) + self.written(ids)


def test_weights_that_are_only_read_are_brought_into_float64_once() -> None:
    module = Tables()
    stand_in, own = StandIn(module), module.read.weight.detach().clone()
    ids = torch.tensor([0, 3])
    (first,) = stand_in.play((ids,), None, double=True)
    (again,) = stand_in.play((ids,), None, double=True)
    assert first.dtype is torch.float64 and torch.equal(first, again)
    seen = stand_in._shell.seen  # type: ignore[union-attr]
    assert seen[0][0] == seen[1][0] != module.read.weight.data_ptr()
    assert not module.seen and torch.equal(module.read.weight, own)


def test_a_stand_in_computes_where_the_rows_are() -> None:
    """Trials run on the host, wherever the weights live."""
    tied = nn.Linear(4, 4)
    module = nn.Sequential(tied, nn.BatchNorm1d(4), tied)
    stand_in = StandIn(module)
    for rows in (torch.randn(3, 4), torch.empty(3, 4, device="meta")):
        (y,) = stand_in.play((rows,), None)
        assert y.device == rows.device and y.shape == (3, 4)
        (y,) = stand_in.play((rows,), None, double=True, train=True, learns=True)
        assert y.device == rows.device and y.dtype == torch.float64
    assert all(x.is_cpu for x in module.state_dict().values())


class Inner(nn.Module):
    """What a function of the rows and the ``Inside`` gives."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear, self._function = nn.Linear(4, 4), function

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return self._function(self.linear(x), rest[-1])


def means(x: Tensor, inside: gt.Inside) -> Tensor:
    total = x.new_zeros(len(inside.lengths), x.shape[1]).index_add(0, inside.segment, x)
    return total / inside.lengths[:, None]


def spread(x: Tensor, inside: gt.Inside) -> Tensor:
    return x - means(x, inside).index_select(0, inside.segment)


def passed(x: Tensor, inside: gt.Inside) -> Tensor:
    edges = inside.edges
    sent = x.index_select(0, edges["source"]) * (1 + edges["type"][:, None])
    return torch.zeros_like(x).index_add(0, edges["target"], sent)


def instances(n: int = 6) -> list[gt.Instance]:
    torch.manual_seed(0)
    found = []
    for k in range(n):
        size = 2 + k % 3
        v = np.arange(size)
        edge = {"source": v, "target": (v + 1) % size, "type": v % 2}
        found.append(gt.Instance({"x": torch.randn(size, 4)}, edge=edge, value={"label": k % 2}))
    return found


def over_bundles(function: Callable[..., Tensor], *, pool: bool, **options: Any) -> gt.Session:
    graph = gt.Graph(edge=("type",), value=("label",))
    x = graph.input("x", bundle=True)
    y = x.through(Inner(function), name="node", inside=True, pool=pool, **options)
    y.loss(gt.cross_entropy, "label")
    return gt.Session(graph, runtime=gt.Simulated(1))


@pytest.mark.parametrize(("function", "pool"), [(means, True), (spread, False), (passed, False)])
def test_rows_of_a_bundle_may_see_each_other(function: Any, pool: bool) -> None:
    over_bundles(function, pool=pool).fit(instances(), epochs=1)


@pytest.mark.parametrize(
    ("function", "pool"),
    [
        (lambda x, inside: means(x, inside) - x.mean(0), True),
        (lambda x, inside: means(x, inside).cumsum(0), True),
        (lambda x, inside: x.softmax(0), False),
        (lambda x, inside: x / len(inside.lengths), False),
        (lambda x, inside: x.flip(0).cumsum(0).flip(0), False),
    ],
)
def test_bundles_that_see_each_other_are_refused(function: Any, pool: bool) -> None:
    with pytest.raises(gt.GraphError, match=r"'node': .* mixes bundles.*inside\.segment"):
        over_bundles(function, pool=pool).fit(instances(), epochs=1)
    over_bundles(function, pool=pool, keep="graph").fit(instances(), epochs=1)


def test_columns_that_a_module_reads_are_those_of_the_data() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(3, 4)

        def forward(self, x: Tensor, token: Tensor) -> Tensor:
            if not ((token == 7) | (token == 9)).all():
                raise ValueError("there are tokens 7 and 9 alone")
            y = x + self.table(token // 4)
            return y - y.mean(0)

    graph = gt.Graph(vertex=("token",), value=("label",))
    graph.input("x").through(Reads(), read="token", name="node").loss(gt.cross_entropy, "label")
    data = [gt.Instance({"x": torch.zeros(2, 4)}, {"token": [7, 9]}, value={"label": 1})] * 4
    with pytest.raises(gt.GraphError, match="'node': Reads mixes rows"):
        gt.Session(graph).predict(data)


def test_where_made_up_rows_do_not_do_the_first_real_ones_are_looked_at() -> None:
    class Marked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not (x[:, 0] > 5).all():
                raise RuntimeError("no data")
            return x - x.mean(0)

    graph = gt.Graph(value=("label",))
    x = graph.input("x").through(lambda x: F.relu(x) + 6)
    x.through(Marked(), name="node").loss(gt.cross_entropy, "label")
    data = [gt.Instance({"x": torch.randn(1, 4)}, value={"label": k % 4}) for k in range(8)]
    session = gt.Session(graph, runtime=gt.Simulated(1))
    with pytest.raises(gt.GraphError, match="'node': Marked mixes rows"):
        session.fit(data, epochs=1)


def test_a_criterion_that_mixes_rows_is_refused() -> None:
    def centred(y: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(y - y.mean(0), target, reduction="none")

    def shared(y: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(y, target, reduction="none") / len(y)

    data = [gt.Instance({"x": torch.randn(3, 4)}, value={"label": k % 4}) for k in range(8)]
    for criterion in (centred, shared):
        for behind in (None, lambda view: np.asarray(view.label)):
            graph = gt.Graph(value=("label",))
            x = graph.input("x").through(nn.Linear(4, 4))
            x.loss(criterion, behind or "label", name="judge")
            with pytest.raises(gt.GraphError, match=r"'judge': \w+ mixes rows.*alone=True"):
                gt.Session(graph).fit(data, epochs=1)
        graph = gt.Graph(value=("label",))
        x = graph.input("x", bundle=True, alone=True).through(nn.Linear(4, 4), keep="graph")
        x.loss(criterion, "label", alone=True)
        gt.Session(graph).fit(data, epochs=1)


def test_a_check_by_hand_wants_no_data() -> None:
    graph = gt.Graph(vertex=("token", "label"), edge=("type",))
    x = graph.input("x", shape=(4,), dtype=torch.float32)
    x.through(Wraps(torch.tanh), name="node").loss(gt.cross_entropy, "label")
    graph.check()
    graph.check(like=gt.Instance({"x": torch.zeros(1, 9)}))  # no instance of this graph


class Doubles(nn.Module):
    """Writes over what it is given, perhaps in training mode alone."""

    def __init__(self, *, training: bool = False) -> None:
        super().__init__()
        self.linear, self._only = nn.Linear(4, 4), training

    def forward(self, x: Tensor) -> Tensor:
        if self.training or not self._only:
            x.mul_(2)
        y: Tensor = self.linear(x)
        return y


@pytest.mark.parametrize(
    "module",
    [
        Doubles(),
        Doubles(training=True),
        nn.Sequential(nn.Hardswish(inplace=True), nn.Linear(4, 4)),
        lambda x: x.add_(1),
    ],
    ids=["module", "in training", "hardswish", "function"],
)
@pytest.mark.parametrize("keep", ["auto", "inputs"])
def test_who_writes_over_its_input_is_refused(module: Any, keep: str) -> None:
    with pytest.raises(gt.GraphError, match=r"'node': .* writes over its input \(payload 0\)"):
        checked(module, keep=keep)


def test_what_is_traced_or_writes_to_its_own_may_write() -> None:
    checked(Doubles(), keep="activations")
    checked(nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(4, 4)))
    checked(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), keep="inputs")


class Remembers(nn.Module):
    """Adds what it made before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.before = nn.Linear(4, 4), 0.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) + self.before
        self.before = float(y.detach().sum()) + 1
        return y


class NumpyNoise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + float(np.random.standard_normal())


@pytest.mark.parametrize(
    ("make", "keep", "why"),
    [
        (Remembers, "auto", "keeps something between calls"),
        (NumpyNoise, "auto", "random numbers that are not torch's"),
        (Noise, "inputs", "keep='activations' keeps what is drawn"),
        (Noise, "auto", None),
        (Noise, "activations", None),
        (Counts, "inputs", None),
        (lambda: nn.Linear(4, 4), "inputs", None),
    ],
)
def test_it_is_told_once_that_results_are_not_repeated(
    make: Callable[[], nn.Module], keep: str, why: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    graph = gt.Graph()
    graph.input("x").through(make(), name="node", keep=keep).output()  # type: ignore[arg-type]
    for _ in range(2):
        graph.check(FLOATS)
    told = [r.getMessage() for r in caplog.records if r.name == "geartrain.graph"]
    assert len(told) == (why is not None)
    if why is not None:
        assert told[0].startswith("'node': ") and why in told[0]


DECIDERS: dict[str, Callable[[Tensor], Any]] = {
    "the sign of the sum": lambda x: x if x.sum() > 0 else -x,
    "the largest": lambda x: x / 2 if x.abs().max() > 4 else x,
    "all positive": lambda x: x if bool((x[:, 0] > 0).all()) else 2 * x,
}


@pytest.mark.parametrize("how", DECIDERS)
def test_what_python_decides_for_all_rows_by_some_is_refused(how: str) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        with pytest.raises(gt.GraphError, match="mixes rows of different instances"):
            checked(Wraps(DECIDERS[how]))


def test_who_looks_at_numbers_and_decides_nothing_is_not_refused() -> None:
    def bounded(x: Tensor) -> Tensor:
        if x.abs().max() > 1e6:
            raise ValueError("too large")
        return x

    checked(Wraps(bounded))
    checked(Wraps(lambda x: torch.stack([r if r.sum() > 0 else -r for r in x])))


class Severed(nn.Module):
    """Has weights, and gives what has no gradient of them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self._function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Any:
        return self._function(self.linear, x)


def silent(linear: nn.Linear, x: Tensor) -> Tensor:
    with torch.no_grad():
        y: Tensor = linear(x)
    return y


@pytest.mark.parametrize(
    ("function", "frozen", "told"),
    [
        (silent, False, True),
        (lambda linear, x: linear(x).detach(), False, True),
        (lambda linear, x: x + 0 * linear(x).argmax(1)[:, None], False, True),
        (silent, True, False),
        (lambda linear, x: linear(x), False, False),
        (lambda linear, x: (linear(x), linear(x).argmax(1)), False, False),
    ],
)
def test_it_is_told_that_no_gradient_comes_to_the_weights(
    function: Callable[..., Any], frozen: bool, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    graph = gt.Graph(value=("label",))
    module = Severed(function).requires_grad_(not frozen)
    rows = graph.input("x").through(nn.Linear(4, 4), name="before").through(module, name="node")
    rows.through(nn.Linear(4, 2), name="readout", take=0).loss(gt.cross_entropy, target="label")
    data = [gt.Instance({"x": torch.randn(1, 4)}, value={"label": k % 2}) for k in range(8)]
    gt.Session(graph, runtime=gt.Threads(1, kernel_threads=1)).fit(data, epochs=1)
    found = [r.getMessage() for r in caplog.records if "'node' never learns" in r.getMessage()]
    assert len(found) == told
