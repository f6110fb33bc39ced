"""The gradient that waits for a step, in a checkpoint: as tensors, looked at, and put back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from geartrain.errors import CheckpointError
from geartrain.nodes.gradient import GradientSum


def gradients_to_tensors(module: nn.Module, total: GradientSum) -> dict[str, Tensor]:
    """A sum by parameter name, rows as indices and values; it goes on waiting."""
    found: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        gradient = total.take(parameter)
        if gradient is None:
            continue
        if gradient.is_sparse:
            # Rows as they came, not added up: a resumed run adds them in the same order.
            total.add(parameter, gradient)
            found[f"{name}/indices"] = gradient._indices()[0]
            found[f"{name}/values"] = gradient._values()
        else:
            found[name] = gradient.clone()
            total.add(parameter, found[name])
    return found


def check_gradients(module: nn.Module, found: Mapping[str, Tensor]) -> None:
    """Refuse what ``gradients_to_tensors`` of such a module cannot have given.

    Raises:
        CheckpointError: A gradient of another shape or dtype than its parameter, of rows that it
            does not have, or of a parameter that is not there.
    """
    left = dict(found)
    for name, parameter in module.named_parameters():
        dense = left.pop(name, None)
        indices, values = left.pop(f"{name}/indices", None), left.pop(f"{name}/values", None)
        if dense is not None:
            _require_tensor(dense, parameter.shape, parameter.dtype, f"gradient/{name}")
        if indices is not None and values is not None and dense is None and parameter.dim():
            n, rows = indices.numel(), parameter.shape[0]
            _require_tensor(indices, (n,), torch.int64, f"gradient/{name}/indices")
            shape = (n, *parameter.shape[1:])
            _require_tensor(values, shape, parameter.dtype, f"gradient/{name}/values")
            if n and not 0 <= int(indices.min()) <= int(indices.max()) < rows:
                raise CheckpointError(
                    f"the gradient that waits for '{name}' is of rows {int(indices.min())} to "
                    f"{int(indices.max())}, the parameter has {rows}; use another checkpoint"
                )
        elif indices is not None or values is not None:
            left[f"{name}/..."] = parameter
    if left:
        raise CheckpointError(
            f"gradients wait for {sorted(left)[:3]}, which the part has not, or not so; use "
            "another checkpoint of the run"
        )


def load_gradients(module: nn.Module, total: GradientSum, found: Mapping[str, Tensor]) -> None:
    """Put back what ``gradients_to_tensors`` gave, and ``check_gradients`` let pass."""
    for name, parameter in module.named_parameters():
        total.take(parameter)
        if name in found:
            total.add(parameter, found[name])
        elif f"{name}/indices" in found:
            indices, values = found[f"{name}/indices"], found[f"{name}/values"]
            device = parameter.device
            total.add_rows(parameter, indices.to(device), values.to(device))


def _require_tensor(found: Tensor, shape: Sequence[int], dtype: torch.dtype, called: str) -> None:
    if found.shape != tuple(shape) or found.dtype != dtype:
        raise CheckpointError(
            f"'{called}' has shape {tuple(found.shape)} and dtype {found.dtype}, expected "
            f"{tuple(shape)} and {dtype}; use another checkpoint of the run"
        )
