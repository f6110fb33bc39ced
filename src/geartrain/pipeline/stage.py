"""One part of a pipeline: blocks that a minibatch goes through, and the head beside it.

(h, y) ─► blocks ─► (h', y)        targets ride along untouched, so that heads far behind, and
                                   replays, need nothing of a finished instance
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from geartrain.errors import GraphError
from geartrain.graph.admission import Brought, check_of
from geartrain.pipeline.cutter import quiet


@final
class Stage(nn.Module):
    """Blocks one after the other, on the first payload tensor; the others pass.

    Args:
        blocks: One or more.
        first: Whether inputs of the network come in, for which no gradient is wanted.
    """

    def __init__(self, blocks: Iterable[nn.Module], *, first: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self._first = first
        # What comes in belongs to the part before, which needs it for its own gradient.
        begins = next(iter(self.blocks), nn.Identity()).modules()
        self._copies = any(getattr(inner, "inplace", False) for inner in begins)

    def check_instances(self, brought: Brought) -> None:
        """What the first block demands.

        Raises:
            DataError: One of the instances brings something else.
        """
        check = check_of(self.blocks[0])
        if check is not None and brought.payload is not None:
            check(Brought(brought.lengths, brought.payload[:1]))

    def forward(self, h: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """``(n, ...)`` and what rides along to the same of the next part."""
        if self._first:
            h = h.detach()
        if self._copies:
            h = h.clone()
        for block in self.blocks:
            h = block(h)
        if not isinstance(h, Tensor):
            raise GraphError(
                f"{type(self.blocks[-1]).__name__} returns {type(h).__name__}; between the parts "
                "of a pipeline goes one tensor of rows: cut elsewhere, or wrap the block"
            )
        return (h, *(x.detach() for x in rest))


def boundaries(stages: Sequence[Stage], sample: Tensor) -> list[Tensor]:
    """What leaves each stage for a minibatch ``(n, ...)``, in evaluation mode."""
    found = []
    with quiet(stages):
        h = sample
        for stage in stages:
            (h,) = stage(h)
            found.append(h)
    return found


def refuse_shared(modules: Mapping[str, nn.Module], whole: nn.Module) -> None:
    """Parts have parameters of their own.

    Args:
        modules: By the name of their part.
        whole: The user's module that was cut; parameters are called as in it.

    Raises:
        GraphError: Two of them share a parameter.
    """
    for (one, first), (other, second) in itertools.combinations(modules.items(), 2):
        mine, others = _names(first, whole), _names(second, whole)
        for parameter, name in others.items():
            if parameter in mine:
                raise GraphError(
                    f"parameter '{mine[parameter]}' of {one} is also '{name}' of {other}: "
                    "weights have one owner; move the cut so that both uses are in one part, or "
                    "untie them (a copy for each use)"
                )


def _names(module: nn.Module, whole: nn.Module) -> dict[nn.Parameter, str]:
    """The parameters of a module by the names that they have in another where they are in it."""
    known = {
        (id(inner), name): f"{path}.{name}" if path else name
        for path, inner in whole.named_modules()
        for name in inner._parameters
    }
    return {
        parameter: known.get((id(inner), name), f"{path}.{name}" if path else name)
        for path, inner in module.named_modules()
        for name, parameter in inner._parameters.items()
        if parameter is not None
    }


@final
class Channels(nn.Module):
    """A module of features on dimension 1 of images ``(n, c, height, width)``.

    Args:
        module: Maps ``(..., c)`` to ``(..., k)``.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, h: Tensor) -> Tensor:
        """``(n, c, ...)`` to ``(n, k, ...)``."""
        y: Tensor = self.module(h.movedim(1, -1)).movedim(-1, 1)
        return y


def zero_map(h: Tensor) -> nn.Module:
    """A synthesiser: two linear maps of the features, the last of which begins with zeros.

    Source: Jaderberg et al. 2016, arXiv:1608.05343; the sizes are ours.

    Args:
        h: Rows ``(n, c)``, ``(n, t, c)``, or ``(n, c, height, width)``.
    """
    at = 1 if h.ndim == 4 else -1
    width = h.shape[at]
    last = nn.Linear(width, width, dtype=h.dtype, device=h.device)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    first = nn.Linear(width, width, dtype=h.dtype, device=h.device)
    maps = nn.Sequential(first, nn.ReLU(), last)
    return Channels(maps) if at == 1 else maps


@final
class Pooled(nn.Module):
    """The mean over all dimensions between rows and features.

    Args:
        features: The dimension that stays: 1 for images ``(n, c, h, w)``, -1 for sequences.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self._features = features

    def forward(self, h: Tensor) -> Tensor:
        """``(n, ..., c)`` or ``(n, c, ...)`` to ``(n, c)``."""
        return h.movedim(self._features, 1).flatten(2).mean(2)


def linear_head(h: Tensor, prediction: Tensor) -> nn.Module:
    """A local head: (pooling and) a linear map from what leaves a part to a prediction.

    Source: the heads of Laskin et al. 2020, arXiv:2012.03837; their sizes are ours.

    Args:
        h: Rows ``(n, c)``, ``(n, t, c)``, or ``(n, c, height, width)``.
        prediction: The whole module's, ``(n, k)`` or ``(n, t, k)``.

    Raises:
        GraphError: The shapes tell no head.
    """
    like = {"dtype": h.dtype if h.is_floating_point() else torch.float32, "device": h.device}
    classes = prediction.shape[-1]
    if prediction.ndim == h.ndim and h.shape[:-1] == prediction.shape[:-1]:
        return nn.Linear(h.shape[-1], classes, **like)  # type: ignore[arg-type]
    if prediction.ndim == 2 and h.ndim in (3, 4):
        at = 1 if h.ndim == 4 else -1
        linear = nn.Linear(h.shape[at], classes, **like)  # type: ignore[arg-type]
        return nn.Sequential(Pooled(at), linear)
    raise GraphError(
        f"no local head is known from {tuple(h.shape)} to a prediction {tuple(prediction.shape)}; "
        "give heads=, a function of the part's number and a sample of its rows"
    )
