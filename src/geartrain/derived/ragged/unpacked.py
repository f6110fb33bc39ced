"""Bundles as a list of tensors, which a module puts side by side again, as it is traced.

x.split(lengths.tolist()) ─► pad_sequence  ─►  members put at (segment, place), in zeros
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class ListedLengths(list[int]):
    """Lengths of bundles, as numbers."""


@final
class Unpacked(TorchFunctionMode):
    """Knows again what a module has taken apart by the lengths of its bundles.

    Args:
        lengths, segment: Of the bundles, as the module sees them; all are of one length.
    """

    def __init__(self, lengths: Tensor, segment: Tensor) -> None:
        super().__init__()
        self._lengths, self._segment = lengths, segment
        self._apart: list[tuple[Sequence[Tensor], Tensor]] = []

    def __torch_function__(
        self,
        function: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.tolist and args[0] is self._lengths:
            n = len(self._lengths)
            return ListedLengths([len(self._segment) // n] * n)
        if function is torch._C._nn.pad_sequence:
            found = self._padded(*args, **kwargs)
            return function(*args, **kwargs) if found is None else found
        result = function(*args, **kwargs)
        if function in _SPLITS and any(isinstance(a, ListedLengths) for a in args):
            self._apart.append((result, args[0]))
        return result

    def _padded(
        self,
        sequences: Sequence[Tensor],
        batch_first: bool = False,
        padding_value: float = 0.0,
        padding_side: str = "right",
    ) -> Tensor | None:
        """What is known to be all bundles, padded; None: it is something else."""
        for parts, x in self._apart:
            if _are(parts, sequences) and padding_side == "right":
                most, n = len(self._segment) // len(self._lengths), len(self._lengths)
                first = self._lengths.cumsum(0) - self._lengths
                place = torch.arange(len(x)) - first[self._segment]
                empty = x.new_full((n, most, *x.shape[1:]), padding_value)
                found = empty.index_put((self._segment, place), x)
                return found if batch_first else found.transpose(0, 1)
        return None


_SPLITS = {Tensor.split, Tensor.split_with_sizes, torch.split, torch.split_with_sizes}


def _are(parts: Sequence[Tensor], sequences: Sequence[Tensor]) -> bool:
    pairs = zip(parts, sequences, strict=False)
    return len(parts) == len(sequences) and all(a is b for a, b in pairs)
