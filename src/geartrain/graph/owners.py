"""What the modules of a graph run with, and on which devices that lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from geartrain.graph.region import Region
from geartrain.nodes.call import where_its_tensors_lie
from geartrain.nodes.weights import AbstractWeights


@final
@dataclass(frozen=True, slots=True)
class Owner:
    """What one copy of a ``through`` runs with.

    Args:
        function: Its module or function.
        weights: Its part's, or None.
    """

    function: Callable[..., Any]
    weights: AbstractWeights | None


def devices_of(region: Region, owned: Mapping[int, Sequence[Owner]]) -> set[torch.device]:
    """Where the modules in a region compute, all copies of them; of functions nobody knows."""
    owners = [owner for number in region.operators for owner in owned.get(number, ())]
    found = [where_its_tensors_lie(owner.function, owner.weights) for owner in owners]
    return {device for device in found if device is not None}


def why_not_there(region: Region, owned: Mapping[int, Sequence[Owner]]) -> str | None:
    """Why a region does not run whole where rows may lie on a device; None: it does."""
    if not asked_for(region):
        return "rows may lie on a device, where run='whole' has it run whole"
    devices = devices_of(region, owned)
    if not devices:
        return "rows may lie on a device, and none of its modules says on which"
    if len(devices) > 1:
        return f"its modules lie on several devices: {', '.join(sorted(map(str, devices)))}"
    return None


def asked_for(region: Region) -> bool:
    """Whether a region is to run whole on a device: what that gains there was not measured yet."""
    return region.run == "whole"
