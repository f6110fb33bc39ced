"""Hooks of parameters (``Tensor.register_hook``) where autograd does not know the parameter itself.

torch copies and pickles parameters without their hooks, and a gradient by a copy of a parameter is
none of its own: what a hook does to gradients would be left out without a word.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn


def hooks_of(x: Tensor) -> tuple[Any, ...]:
    """Those that autograd calls with the gradient of a tensor, in their order."""
    return tuple((x._backward_hooks or {}).values())


def carry_hooks(hooks: tuple[Any, ...], to: Tensor) -> None:
    """Have autograd call them with the gradient of another tensor as well."""
    if to.requires_grad:
        for hook in hooks:
            to.register_hook(hook)  # type: ignore[no-untyped-call]


def hooked(parameter: nn.Parameter, gradient: Tensor | None) -> Tensor | None:
    """What the hooks of a parameter make of a gradient by a copy of it."""
    if gradient is not None and parameter._backward_hooks:
        for hook in hooks_of(parameter):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
    return gradient


def copied_with_hooks(module: nn.Module) -> nn.Module:
    """A copy of a module, with parameters of its own and the hooks of those of the module."""
    made = copy.deepcopy(module)
    for p, q in zip(module.parameters(), made.parameters(), strict=True):
        if p._backward_hooks and not q._backward_hooks:
            carry_hooks(hooks_of(p), q)
    return made
