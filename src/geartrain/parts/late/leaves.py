"""Weights besides those of a module, by parameter: what views keep, and write into."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


def copies_of(module: nn.Module) -> dict[nn.Parameter, Tensor]:
    """The weights of now, without a gradient."""
    return {p: p.data.clone() for p in module.parameters()}


def new_leaves(module: nn.Module) -> dict[nn.Parameter, Tensor]:
    """The weights of now as leaves for autograd, with storage of their own."""
    return {p: p.data.clone().requires_grad_(p.requires_grad) for p in module.parameters()}


def write_now(copies: Mapping[nn.Parameter, Tensor]) -> None:
    """The weights of now into copies of them."""
    for p, copy in copies.items():
        copy.data.copy_(p.data)


def by_name(module: nn.Module, tensors: Mapping[nn.Parameter, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names of their parameters, for a checkpoint; themselves, not copies."""
    return {n: tensors[p].data for n, p in module.named_parameters() if p in tensors}


def restore(
    module: nn.Module, into: Mapping[nn.Parameter, Tensor], found: Mapping[str, Tensor]
) -> None:
    """Write what ``by_name`` gave back into the tensors of the same parameters."""
    for name, p in module.named_parameters():
        if p in into:
            into[p].data.copy_(found[name])
