"""In which precision rows travel: as they come, or in bfloat16 around weights in float32.

    "full"   rows, products and residuals have the dtype of the data and the modules
    "bf16"   entry ─► bfloat16 rows ─► kernel ─► bfloat16 rows ─► loss in float32
                                       │ a kernel that can: residuals and products in bfloat16
                                       └ any other: float32, with a cast at either border

Weights, the sums of their gradients and what the optimiser keeps are float32 in both.

Source: Kalamkar et al. 2019, arXiv:1905.12322; weights of full precision beside short ones as in
Micikevicius et al. 2018, arXiv:1710.03740. bfloat16 has float32's range: no loss is scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor

from geartrain.errors import GraphError

Precision: TypeAlias = Literal["full", "bf16"]
PRECISIONS: Final[tuple[str, ...]] = get_args(Precision)


def require_precision(value: str, where: str) -> Precision:
    """The value, if it is one.

    Raises:
        ValueError: It is not.
    """
    if value not in PRECISIONS:
        raise ValueError(f"{where}{value!r}: expected one of {', '.join(PRECISIONS)}")
    return cast(Precision, value)


def require_float32(part: str, parameters: Mapping[str, Tensor]) -> None:
    """Refuse weights that bfloat16 rows are not meant for.

    Raises:
        GraphError: A parameter of a part is not float32.
    """
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            raise GraphError(
                f"part '{part}': '{name}' is {parameter.dtype}, but precision='bf16' keeps weights "
                "in torch.float32; convert the module with .float(), or give the session "
                "precision='full'"
            )


def narrowed(x: Tensor) -> Tensor:
    """A row in bfloat16; integers stay."""
    return x.to(torch.bfloat16) if x.is_floating_point() else x


def widened(x: Tensor) -> Tensor:
    """A bfloat16 row in float32; others stay."""
    return x.float() if x.dtype is torch.bfloat16 else x
