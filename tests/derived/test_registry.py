"""Traces are made once for a structure, and never taken for another."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from geartrain import Graph, Instance, Part, Rules, Session, Simulated
from geartrain.derived.kernel import DerivedKernel
from geartrain.derived.registry import REGISTRY, Registry
from geartrain.derived.structure import Structure
from geartrain.nn import RowDropout
from geartrain.nodes.gradient import GradientSum
from geartrain.parts.rules import Flush

D = 3
SCALE = 2.0
TABLE = [1.0, 2.0]


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    REGISTRY.forget()
    yield
    REGISTRY.forget()


class Block(nn.Module):
    def __init__(self, gain: float = 1.0, activation: Callable[..., Tensor] = torch.tanh) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.gain, self.activation = gain, activation

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.activation(self.gain * self.a(x)))


class Louder(Block):
    def forward(self, x: Tensor) -> Tensor:
        return 10 * super().forward(x)


class Masked(nn.Module):
    """Holds a tensor that is neither a parameter nor a buffer."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() * self.mask


class Reading(nn.Module):
    """Reads a global, through a helper; a list; and a plain object."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(shift=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return _scaled(x.sin()) * TABLE[0] + self.config.shift


def _scaled(x: Tensor) -> Tensor:
    return SCALE * x


def _traces(*functions: Callable[..., object], dtype: torch.dtype = torch.float32) -> int:
    """How many traces these need, each with a kernel of its own that is compared to autograd."""
    before = REGISTRY.traced
    for k, function in enumerate(functions):
        kernel = DerivedKernel(f"f{k}", function)
        _right(kernel, function, torch.rand(4, D, dtype=dtype))
        assert kernel.refused is None
    return REGISTRY.traced - before


def _right(kernel: DerivedKernel, function: Callable[..., object], x: Tensor) -> None:
    parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
    into = GradientSum(parameters)
    with torch.no_grad():
        (y,), kept = kernel.forward((x,))
        (dx,) = kernel.backward((torch.ones_like(y),), kept, None, into)
    leaf = x.clone().requires_grad_()
    expected = function(leaf)
    assert isinstance(expected, Tensor)
    wanted = [leaf, *(p for p in parameters if p.requires_grad)]
    found = torch.autograd.grad(expected.sum(), wanted, allow_unused=True)
    assert_close(y, expected.detach())
    assert_close([dx, *(into.take(p) for p in wanted[1:])], list(found))


def test_equal_structures_share_one_trace_whatever_their_weights() -> None:
    frozen = Block()
    frozen.a.weight.requires_grad_(False)
    assert _traces(Block(), Block(), copy.deepcopy(Block()), frozen) == 1


def test_structures_that_differ_in_anything_do_not_share() -> None:
    tied, local = Block(), Block()
    tied.b.weight = tied.a.weight

    class Block2(Block):
        pass

    local.b = nn.Linear(D, D, bias=False)
    functions = [Block(), Block(2.0), Block(activation=F.gelu), Louder(), tied, Block2(), local]
    assert _traces(*functions) == len(functions)
    assert _traces(Block(2), Block(True), Block().double().float()) == 2
    assert _traces(Block().double(), dtype=torch.float64) == 1


def test_modules_that_hold_plain_tensors_do_not_share() -> None:
    one, other = Masked(torch.rand(D)), Masked(torch.rand(D))
    assert _traces(one, other) == 2
    assert _traces(one, other) == 0
    one.mask = torch.rand(D)
    assert _traces(one) == 1


def test_closures_are_known_by_what_they_enclose() -> None:
    def make(scale: float, shift: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: x.sin() * scale + shift

    shift = torch.rand(D)
    first = make(2.0, shift)
    assert _traces(first, make(3.0, shift), make(2.0, torch.rand(D))) == 3
    assert _traces(first) == 0


def test_numbers_that_code_reads_elsewhere_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Reading()
    kernel, x = DerivedKernel("reads", module), torch.rand(4, D)
    _right(kernel, module, x)
    monkeypatch.setitem(globals(), "SCALE", 5.0)
    _right(kernel, module, x)
    monkeypatch.setitem(globals(), "TABLE", [7.0])
    _right(kernel, module, x)
    module.config.shift = 9.0
    _right(kernel, module, x)
    before = REGISTRY.traced
    _right(DerivedKernel("again", Reading()), Reading(), x)
    assert REGISTRY.traced == before
    other = Reading()
    other.config.shift = 9.0
    assert _traces(other) == 0


def test_a_replaced_submodule_is_seen() -> None:
    module = Block()
    kernel, x = DerivedKernel("block", module), torch.rand(4, D)
    _right(kernel, module, x)
    module.a = nn.Sequential(nn.Linear(D, D), nn.ReLU())  # type: ignore[assignment]
    _right(DerivedKernel("block", module), module, x)


def test_what_nobody_can_look_into_is_traced_for_itself() -> None:
    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rate = memoryview(b"\x03")

        def forward(self, x: Tensor) -> Tensor:
            return x.sin() * self.rate[0]

    module = nn.Sequential(nn.Linear(D, D))
    module.extra = (i for i in range(3))  # type: ignore[assignment]
    assert Structure(module).key is None
    assert Structure(Opaque()).key is None


def test_hooks_are_seen_though_the_structure_is_known() -> None:
    module = Block()
    assert _traces(module) == 1
    other = Block()
    other.a.register_forward_hook(lambda *_: None)
    kernel = DerivedKernel("hooked", other)
    kernel.forward((torch.rand(4, D),))
    assert "hook" in (kernel.refused or "")
    assert _traces(Block()) == 0


def test_a_refusal_is_remembered_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    before = REGISTRY.traced
    with caplog.at_level(logging.INFO, "geartrain.nn"):
        for _ in range(3):
            kernel = DerivedKernel("odd", Centred())
            kernel.forward((torch.rand(4, D),))
            assert kernel.refused
        DerivedKernel("even", Block()).forward((torch.rand(4, D),))
        DerivedKernel("even", Block()).forward((torch.rand(4, D),))
    assert REGISTRY.traced == before + 2
    assert caplog.text.count("runs again for its gradient") == 1
    assert caplog.text.count("'even' was traced in ") == 1


def test_the_oldest_are_forgotten_and_nothing_is_kept_alive() -> None:
    registry = Registry(most=2)
    blocks = [Block(float(k)) for k in range(3)]
    for block in (*blocks, blocks[0]):
        registry.ask("block", block, Structure(block), [torch.rand(2, D)])
    assert registry.traced == 4
    gone = weakref.ref(blocks[0])
    del blocks, block
    gc.collect()
    assert gone() is None


def test_threads_that_ask_together_get_one_trace() -> None:
    before, kernels = REGISTRY.traced, [DerivedKernel(f"{k}", Block()) for k in range(4)]
    threads = [Thread(target=k.forward, args=((torch.rand(4, D),),)) for k in kernels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert REGISTRY.traced == before + 1


def test_three_fits_of_two_equal_parts_trace_once() -> None:
    before = REGISTRY.traced
    data = [Instance({"x": torch.randn(1, D)}, value={"y": k % 2}) for k in range(6)]
    for _ in range(3):
        graph = Graph(value=("y",))
        stream = graph.input("x").through(Part(Block(), keep="activations"), name="a")
        stream = stream.through(Part(Block(), keep="activations"), name="b")
        stream.loss(F.cross_entropy, target="y")
        rules = Rules(optimizer=partial(torch.optim.SGD, lr=0.5), update_every=Flush())
        Session(graph, rules=rules, runtime=Simulated(1)).fit(data, epochs=1)
    assert REGISTRY.traced == before + 1


def test_a_key_that_forgot_the_code_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above bites: a program of another structure is another function."""
    true = Structure.__init__

    def forgetful(self: Structure, function: Callable[..., object]) -> None:
        true(self, function)
        self.key = "any"

    monkeypatch.setattr(Structure, "__init__", forgetful)
    with pytest.raises(AssertionError):
        _traces(Block(), Louder())


class Named(nn.Module):
    """Looks at its mode under another name."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() if getattr(self, "training") else x.cos()  # noqa: B009


class Asking(nn.Module):
    """Asks a function."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() if _in_training(self) else x.cos()


def _in_training(module: nn.Module) -> bool:
    return module.training


def _in_both_modes(module: nn.Module) -> bool:
    """Whether what is traced in one mode holds in the other."""
    before = Structure(module)
    module.eval()
    same = before.now() == before.settings
    assert same is (before.key == Structure(module).key)
    return same


def test_the_mode_is_a_setting_of_who_looks_at_it() -> None:
    plain = (
        Block(),
        Reading(),
        nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Embedding(2, 3)),
    )
    assert all(map(_in_both_modes, plain))
    looking = (
        Named(),
        Asking(),
        nn.Dropout(0.5),
        nn.BatchNorm1d(D),
        nn.LSTM(D, D),
        RowDropout(0.5),
    )
    assert not any(map(_in_both_modes, looking))
    assert not any(_in_both_modes(nn.Sequential(nn.Linear(D, D), each.train())) for each in looking)
    assert _traces(Block(3.0), Block(3.0).eval()) == 1
    assert _traces(Named(), Named().eval()) == 2
