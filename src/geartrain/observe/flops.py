"""Floating-point operations of training, counted node by node, and those that gears have spared.

    node fires ─► every torch operation in it ─► its formula ─► forward, backward of that node
                  products inside native kernels, or done with the next step ─► as well
    off-turn   ─► one imagined message on meta tensors ─► what the turn would have cost

Matrix products, convolutions and attention count, two operations for a multiplication and an
addition; everything else is free, as is usual. Evaluation is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from geartrain.engine.instrument import AbstractMeter
from geartrain.native.operations import Counted, is_told_before
from geartrain.nodes.node import Spared
from geartrain.nodes.uncompiled import UncompiledMode

Shapes: TypeAlias = tuple[tuple[torch.Size, torch.dtype], ...]


@final
@dataclass(frozen=True, slots=True)
class Flops:
    """Operations of a node, or of several.

    Args:
        forward, backward: What was computed.
        spared: What the same messages would have cost besides, without gears.
    """

    forward: int = 0
    backward: int = 0
    spared: int = 0

    @property
    def executed(self) -> int:
        return self.forward + self.backward

    @property
    def share_spared(self) -> float:
        """Of what it would have been without gears; 0 where there is nothing."""
        whole = self.executed + self.spared
        return self.spared / whole if whole else 0.0

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.forward + other.forward,
            self.backward + other.backward,
            self.spared + other.spared,
        )


@final
class FlopMeter(AbstractMeter):
    """Counts while a session trains: ``Session(..., compute=Compute(meter=meter))``.

    Every operation passes through Python while it counts, which costs some microseconds each; the
    results do not change. Nodes with a gear tell what they were spared: with ``Gear()`` also one
    that is always on turn, as it need not compute gradients for a part below that skips.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, Flops] = {}
        self._costs: dict[tuple[str, Shapes], Cost] = {}

    def firing(self, node: str, *, forward: bool) -> _Counting:
        def add(flops: int) -> None:
            more = Flops(forward=flops) if forward else Flops(backward=flops)
            self._nodes[node] = self._nodes.get(node, Flops()) + more

        return _Counting(add)

    def spared(self, node: str, work: Sequence[Spared]) -> None:
        for one in work:
            key = node, one.inputs
            if key not in self._costs:
                self._costs[key] = cost_of(one.function, one.inputs)
            cost = self._costs[key]
            done = {"nothing": 0, "input": cost.input, "weights": cost.weights}[one.done]
            flops = (cost.backward if one.input_wanted else cost.weights) - done
            self._nodes[node] = self._nodes.get(node, Flops()) + Flops(spared=flops)

    def nodes(self) -> dict[str, Flops]:
        """By node name, since the meter was made or reset."""
        return dict(self._nodes)

    def total(self) -> Flops:
        """Of all nodes together."""
        return sum(self._nodes.values(), Flops())

    def reset(self) -> None:
        """Begin anew."""
        self._nodes.clear()


@final
@dataclass(frozen=True, slots=True)
class Cost:
    """What one message costs a module.

    Args:
        forward: On the way forward.
        backward: For the gradients of input and weights together.
        input: For the gradient of the input alone.
        weights: For those of the weights alone.
    """

    forward: int
    backward: int
    input: int
    weights: int


def cost_of(function: Callable[..., Any], inputs: Shapes) -> Cost:
    """Count one message of a module or function.

    Args:
        function: Runs on meta tensors, where that works; else on zeros.
        inputs: Shape, rows included, and dtype of its arguments.
    """
    try:
        return _cost_on(function, inputs, "meta")
    except (NotImplementedError, RuntimeError):  # it looks at values
        with torch.random.fork_rng(devices=[]):
            return _cost_on(function, inputs, "cpu")


def _cost_on(function: Callable[..., Any], inputs: Shapes, device: str) -> Cost:
    def run() -> tuple[int, list[Tensor], list[Tensor], list[Tensor]]:
        arguments = [_zeros(shape, dtype, device) for shape, dtype in inputs]
        called, weights = _copied(function, device)
        counted: list[int] = []
        with torch.enable_grad(), _Counting(counted.append):
            outputs = called(*arguments)
        several = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        return (
            counted[0],
            [y for y in several if y.requires_grad],
            [x for x in arguments if x.requires_grad],
            weights,
        )

    def back(of_input: bool, of_weights: bool) -> tuple[int, int]:
        forward, outputs, arguments, weights = run()
        wanted = [*(arguments if of_input else ()), *(weights if of_weights else ())]
        if not outputs or not wanted:
            return forward, 0
        counted: list[int] = []
        with _Counting(counted.append):
            ones = [torch.ones_like(y) for y in outputs]
            torch.autograd.grad(outputs, wanted, ones, allow_unused=True)
        return forward, counted[0]

    forward, both = back(of_input=True, of_weights=True)
    return Cost(forward, both, back(True, False)[1], back(False, True)[1])


def _zeros(shape: torch.Size, dtype: torch.dtype, device: str) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device, requires_grad=dtype.is_floating_point)


def _copied(function: Callable[..., Any], device: str) -> tuple[Callable[..., Any], list[Tensor]]:
    """The function on copies of its weights, and those of them that want a gradient."""
    if not isinstance(function, nn.Module):
        return function, []
    module = function
    tensors: dict[str, Tensor] = {
        name: torch.empty_like(p, device=device).copy_(p.detach()).requires_grad_(p.requires_grad)
        for name, p in module.named_parameters()
    }
    weights = [p for p in tensors.values() if p.requires_grad]
    tensors |= {name: b.detach().clone().to(device) for name, b in module.named_buffers()}

    def called(*arguments: Tensor) -> Any:
        return torch.func.functional_call(module, tensors, arguments)

    return called, weights


@final
class _Counting(UncompiledMode):
    """Sees every operation of its thread while it is entered; tells the sum at the end.

    Added are products inside native kernels, and those that are asked for now and done later.
    """

    def __init__(self, done: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._done, self._flops = done, 0
        self._hidden = Counted()

    def __enter__(self) -> Any:
        self._hidden.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = _formula(func)
        if formula is not None and not is_told_before():
            self._flops += int(formula(*args, **(kwargs or {}), out_val=out))
        return out

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._hidden.__exit__(kind, error, trace)
        self._done(self._flops + self._hidden.operations)


def _formula(func: Any) -> Callable[..., Any] | None:
    packet = getattr(func, "_overloadpacket", None)
    if packet is None:
        return None
    return _OURS.get(packet._qualified_op_name) or flop_registry.get(packet)


def _linear(x: Tensor, weight: Tensor, *rest: Any, out_val: Tensor, **options: Any) -> int:
    return 2 * out_val.numel() * x.shape[-1]


def _added(x: Tensor, left: Tensor, right: Tensor, **options: Any) -> int:
    return 2 * left.numel() * right.shape[-1]


def _vector(left: Tensor, right: Tensor, **options: Any) -> int:
    return 2 * left.numel()


def _added_vector(x: Tensor, left: Tensor, right: Tensor, **options: Any) -> int:
    return 2 * left.numel()


def _attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> int:
    return int(sdpa_flop_count(q.shape, k.shape, v.shape))  # type: ignore[no-untyped-call]


def _attention_backward(
    d: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any
) -> int:
    shapes = d.shape, q.shape, k.shape, v.shape
    return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]


_OURS: dict[str, Callable[..., Any]] = {
    "mkldnn::_linear_pointwise": _linear,
    "aten::addmm_": _added,
    "aten::baddbmm_": _added,
    "aten::mv": _vector,
    "aten::addmv": _added_vector,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
"""What torch's registry does not have."""
