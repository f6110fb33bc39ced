"""Hooks of parameters do the same to gradients as in plain PyTorch, whatever nodes keep."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import geartrain as gt
from geartrain.nodes.hooks import carry_hooks, copied_with_hooks, hooked, hooks_of
from geartrain.runtime.base import AbstractRuntime
from geartrain.sharing.sharing import AbstractSharing
from tests.rigs.passes import hosts, processes

SUM = gt.Rules(optimizer=partial(torch.optim.SGD, lr=1.0), update_every=gt.Flush(), average="none")


class Waved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x @ self.weight.t())


def hooked_module(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Linear(2, 3).double() if kind is nn.Linear else kind().double()
    weight: nn.Parameter = module.weight  # type: ignore[assignment]
    weight.register_hook(lambda g: g * torch.tensor([[2.0], [0.0], [-1.0]], dtype=g.dtype))
    weight.register_hook(lambda g: None if g.ndim == 1 else g / 2)
    return module


def rows(n: int) -> list[gt.Instance]:
    g = torch.Generator().manual_seed(1)
    return [gt.Instance({"x": torch.randn(1, 2, generator=g).double()}) for _ in range(n)]


def squares(y: Tensor) -> Tensor:
    return y.square().sum(1)


def moved(
    module: nn.Module,
    runtime: AbstractRuntime,
    sharing: AbstractSharing | None = None,
    **told: object,
) -> Tensor:
    """What an epoch of SGD takes off the weight, which is the gradient of all rows."""
    before = module.weight.detach().clone()  # type: ignore[operator, union-attr]
    graph = gt.Graph()
    told = {"keep": "auto", **told}
    graph.input("x").through(gt.Part(module, **told), name="it").loss(squares)  # type: ignore[arg-type]
    session = gt.Session(graph, rules=SUM, runtime=runtime, sharing=sharing, max_active=4)
    session.fit(rows(12), epochs=1)
    return before - module.weight.detach()  # type: ignore[operator, union-attr, no-any-return]


def plain(module: nn.Module) -> Tensor:
    squares(module(torch.cat([i.inputs["x"] for i in rows(12)]))).sum().backward()
    gradient = module.weight.grad
    assert isinstance(gradient, Tensor) and not gradient[1].any() and gradient[0].any()
    return gradient


@pytest.mark.parametrize("kind", [nn.Linear, Waved])
@pytest.mark.parametrize(
    "told",
    [
        {"keep": "inputs"},
        {"keep": "activations"},
        {"keep": "graph"},
        {"keep": "graph", "view": gt.Mixed()},
        {"keep": "graph", "view": gt.Predicted()},
    ],
    ids=["inputs", "activations", "stashed", "mixed", "predicted"],
)
def test_a_hook_changes_the_gradient_as_in_plain_pytorch(kind, told) -> None:
    assert_close(moved(hooked_module(kind), gt.Threads(1), **told), plain(hooked_module(kind)))


@pytest.mark.parametrize(
    "runtime", [partial(gt.Threads, 2), partial(processes, 2), partial(hosts, 2)]
)
def test_hooks_go_to_workers_and_to_copies(runtime) -> None:
    wanted = plain(hooked_module(nn.Linear))
    assert_close(moved(hooked_module(nn.Linear), runtime()), wanted)
    for sharing in (gt.PartCopies(2), gt.Neighbours(copies=2, exchange="all-reduce")):
        assert_close(moved(hooked_module(nn.Linear), runtime(), sharing) * 2, wanted)


def test_hooks_are_carried_once_and_to_what_learns_alone() -> None:
    module = hooked_module(nn.Linear)
    copy = copied_with_hooks(module)
    assert len(hooks_of(copy.weight)) == 2  # type: ignore[arg-type]
    frozen = nn.Parameter(torch.ones(3, 2), requires_grad=False)
    carry_hooks(hooks_of(copy.weight), frozen)  # type: ignore[arg-type]
    assert not hooks_of(frozen)
    weight: nn.Parameter = module.weight  # type: ignore[assignment]
    assert hooked(weight, None) is None
    assert_close(
        hooked(weight, torch.ones(3, 2)), torch.tensor([[1.0], [0.0], [-0.5]]).expand(3, 2)
    )
