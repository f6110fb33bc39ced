"""What a DataLoader draws, set by a seed: its order, and the seeds of its workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader


@contextmanager
def seeded(loader: DataLoader[Any], seed: int, number: int) -> Iterator[None]:
    """While this is entered, what the loader draws follows from the seed and the epoch."""
    found = (loader.generator, getattr(loader.sampler, "generator", None))
    own = list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())
    states = [g.get_state() for g in own]
    for generator in (torch.default_generator, *own):
        salt = generator.initial_seed() if generator is not torch.default_generator else 0
        drawn = np.random.SeedSequence((seed, number, salt)).generate_state(1, np.uint64)
        generator.manual_seed(int(drawn[0] >> np.uint64(1)))
    try:
        yield
    finally:
        for generator, state in zip(own, states, strict=True):
            generator.set_state(state)
