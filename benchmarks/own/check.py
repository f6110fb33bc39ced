"""Whether the three ways of a program find the same loss and the same gradients, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import geartrain as gt
from benchmarks.own.programs.program import AbstractProgram, Item


def gradients(program: AbstractProgram, total: Callable[[], Tensor]) -> dict[str, Tensor]:
    """The gradients of a sum of losses, by the name of their parameter; and the sum itself."""
    program.zero_grad()
    loss = total()
    loss.backward()
    found = {n: _dense(p) for n, p in program.named_parameters()}
    return {"loss": loss.detach(), **found}


def gradients_of_the_graph(program: AbstractProgram, items: Sequence[Item]) -> dict[str, Tensor]:
    """The same by geartrain: of one update, with steps of plain descent at rate 1."""
    before = {n: p.detach().clone() for n, p in program.named_parameters()}
    session = gt.Session(
        program.graph(),
        rules=gt.Rules(
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
            update_every=gt.Flush(),
            average="none",
        ),
        runtime=gt.Threads(1, kernel_threads=1),
        max_active=len(items),
    )
    instances = [program.instance(item, program.dtype) for item in items]
    fit = session.fit(instances, epochs=1)
    found = {}
    with torch.no_grad():
        for name, parameter in program.named_parameters():
            found[name] = before[name] - parameter
            parameter.copy_(before[name])
    return {"loss": torch.tensor(fit.history[0].loss, dtype=program.dtype), **found}


def require_equal_gradients(program: AbstractProgram, items: Sequence[Item]) -> float:
    """Compare the three ways on a few examples.

    Returns:
        The largest difference, relative to the largest entry of its gradient.

    Raises:
        SystemExit: One of them finds something else.
    """
    program = program.double()
    want = gradients(program, lambda: torch.stack([program.plain(i) for i in items]).sum())
    ways = {
        "batching by hand": gradients(program, lambda: program.hand(items)),
        "geartrain": gradients_of_the_graph(program, items),
    }
    ways["geartrain"]["loss"] = ways["geartrain"]["loss"] * program.losses(items)
    worst = 0.0
    for way, got in ways.items():
        for name, expected in want.items():
            scale = max(float(expected.abs().max()), 1e-6)
            far = float((got[name] - expected).abs().max()) / scale
            worst = max(worst, far)
            if not far < 1e-8:
                raise SystemExit(f"{program.name}: {way} differs in {name}, by {far:.1e} of it")
    program.float()
    return worst


def _dense(parameter: torch.nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.to_dense().clone()
