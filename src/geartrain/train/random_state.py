"""Where the random number generators stand, as JSON.

    random_state_to_json() ─► document ─► load_random_state(document): the same numbers again

Covers the global generators of torch (CPU, and CUDA once it is in use), numpy and Python, and any
generators of your own, by name.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from geartrain.errors import CheckpointError
from geartrain.optim.plain import Json, decode, encode

RandomSource: TypeAlias = torch.Generator | np.random.Generator | random.Random

_NONE: Final[Mapping[str, RandomSource]] = MappingProxyType({})


def random_state_to_json(generators: Mapping[str, RandomSource] = _NONE) -> dict[str, Json]:
    """The states of the global generators and of these; some 15 kB of JSON, no tensors.

    Args:
        generators: Own generators by name. numpy's may use any of its bit generators.
    """
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch left it so
    cuda = torch.cuda.get_rng_state_all() if used else []
    return {
        "torch": encode(torch.get_rng_state().numpy(), "torch"),
        "cuda": [encode(state.numpy(), "cuda") for state in cuda],
        "numpy": encode(np.random.get_state(legacy=False), "numpy"),
        "python": encode(random.getstate(), "python"),
        "own": {name: _state(generator, name) for name, generator in generators.items()},
    }


def load_random_state(
    document: Mapping[str, Json], generators: Mapping[str, RandomSource] = _NONE
) -> None:
    """Set the global generators and these, in place, to where they stood.

    CUDA states are set if this process sees as many CUDA devices as there are states, and are
    otherwise left out: a run that moves to other devices draws other numbers there anyway.

    Raises:
        CheckpointError: A state is missing, damaged, or that of another kind of generator.
    """
    own = document.get("own")
    own = own if isinstance(own, Mapping) else {}
    for name, generator in generators.items():
        _set(name, own.get(name), _setter(generator))
    _set("torch", document.get("torch"), lambda state: torch.set_rng_state(_tensor(state)))
    _set("numpy", document.get("numpy"), np.random.set_state)
    _set("python", document.get("python"), random.setstate)
    cuda = document.get("cuda")
    if isinstance(cuda, list) and cuda and len(cuda) == torch.cuda.device_count():
        _set("cuda", cuda, lambda s: torch.cuda.set_rng_state_all([_tensor(x) for x in s]))


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Whatever is drawn from the global generators meanwhile, they stand afterwards as before."""
    before = random_state_to_json()
    try:
        yield
    finally:
        load_random_state(before)


def _state(generator: RandomSource, name: str) -> Json:
    match generator:
        case torch.Generator():
            return encode(generator.get_state().numpy(), name)
        case np.random.Generator():
            return encode(generator.bit_generator.state, name)
        case random.Random():
            return encode(generator.getstate(), name)
    raise TypeError(
        f"generator '{name}' is a {type(generator).__name__}; expected a torch.Generator, "
        f"numpy.random.Generator or random.Random"
    )


def _setter(generator: RandomSource) -> Callable[[Any], object]:
    match generator:
        case torch.Generator():
            return lambda state: generator.set_state(_tensor(state))
        case np.random.Generator():
            return lambda state: setattr(generator.bit_generator, "state", state)
        case random.Random():
            return generator.setstate


def _set(name: str, document: Json, setter: Callable[[Any], object]) -> None:
    state = decode(document, name)
    try:
        setter(state)
    except (TypeError, ValueError, KeyError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"random generator '{name}': a state of type {type(state).__name__} cannot be set "
            f"({error}); expected one that random_state_to_json took from such a generator. Pass "
            f"the generators under the names and of the kinds that were saved"
        ) from error


def _tensor(state: Any) -> torch.Tensor:
    if not isinstance(state, np.ndarray) or state.dtype != np.uint8:
        raise TypeError("it is no array of bytes")
    return torch.from_numpy(state)
