"""The same numbers again, from every generator."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from geartrain.codec import decode, encode
from geartrain.errors import CheckpointError
from geartrain.train.random_state import load_random_state, random_state_to_json


def draw() -> list[float]:
    return [
        *torch.randn(5).tolist(),
        *np.random.randn(3).tolist(),  # an odd number: legacy numpy keeps the other of a pair
        *(random.gauss(0, 1) for _ in range(3)),
    ]


def test_the_global_generators_repeat_themselves() -> None:
    draw()
    document = json.loads(json.dumps(random_state_to_json()))
    first = draw()
    assert draw() != first
    load_random_state(document)
    assert draw() == first


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_numpy_generators_of_every_kind_repeat_themselves(kind: str) -> None:
    generator = np.random.Generator(getattr(np.random, kind)(3))
    generator.integers(0, 9, dtype=np.int32)  # leaves half a word behind
    document = json.loads(json.dumps(random_state_to_json({"data": generator})))
    first = generator.integers(0, 1 << 30, 5, dtype=np.int32).tolist()
    fresh = np.random.Generator(getattr(np.random, kind)(4))
    load_random_state(document, {"data": fresh})
    assert fresh.integers(0, 1 << 30, 5, dtype=np.int32).tolist() == first


def test_generators_of_torch_and_python_repeat_themselves() -> None:
    own: dict[str, Any] = {"a": torch.Generator().manual_seed(1), "b": random.Random(2)}
    torch.randn(3, generator=own["a"])
    document = json.loads(json.dumps(random_state_to_json(own)))
    first = torch.randn(3, generator=own["a"]).tolist(), own["b"].random()
    fresh: dict[str, Any] = {"a": torch.Generator(), "b": random.Random()}
    load_random_state(document, fresh)
    assert (torch.randn(3, generator=fresh["a"]).tolist(), fresh["b"].random()) == first


def test_a_state_of_another_kind_or_name_is_refused_by_name() -> None:
    document = random_state_to_json({"data": np.random.default_rng(0)})
    for own in ({"data": torch.Generator()}, {"data": random.Random()}, {"order": random.Random()}):
        with pytest.raises(CheckpointError, match=f"'{next(iter(own))}'"):
            load_random_state(document, own)
    other = np.random.Generator(np.random.MT19937(0))
    with pytest.raises(CheckpointError, match=r"'data'.*for a MT19937 PRNG"):
        load_random_state(document, {"data": other})


@pytest.mark.parametrize("name", ["torch", "numpy", "python"])
@pytest.mark.parametrize(
    "damage", [None, 3, "x", {"array": "|u1", "shape": [2], "base64": "AAA="}, {"tuple": [1]}]
)
def test_a_damaged_global_state_is_refused_by_name(name: str, damage: Any) -> None:
    document = {**random_state_to_json(), name: damage}
    with pytest.raises(CheckpointError, match=f"'{name}'"):
        load_random_state(document)


def test_a_generator_of_no_known_kind_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="'data' is a RandomState"):
        random_state_to_json({"data": np.random.RandomState(0)})  # type: ignore[dict-item]


def forged(name: str, **changes: Any) -> dict[str, Any]:
    """A good document but for one entry of a generator's state."""
    document: Any = json.loads(json.dumps(random_state_to_json()))
    state = decode(document[name], name)
    assert isinstance(state, dict)
    state.update({k: v for k, v in changes.items() if k in state})
    state["state"].update({k: v for k, v in changes.items() if k in state["state"]})
    document[name] = encode(state, name)
    return document


def torch_places(left: int, place: int) -> dict[str, Any]:
    state = torch.get_rng_state().numpy().copy()
    state[8:12] = np.frombuffer(np.int32(left).tobytes(), np.uint8)
    state[16:24] = np.frombuffer(np.uint64(place).tobytes(), np.uint8)
    return {**random_state_to_json(), "torch": encode(state, "torch")}


@pytest.mark.parametrize(
    "document",
    [
        *(forged("numpy", pos=place) for place in (-1, 625, 10**6, -(2**62))),
        forged("numpy", key=np.zeros(3, np.uint32)),
        forged("numpy", gauss=math.inf),
        *(torch_places(*place) for place in ((624, 624), (1, 2**32 - 1), (600, 623), (0, 0))),
        {**random_state_to_json(), "own": None},
        {**random_state_to_json(), "cuda": "x"},
        {**random_state_to_json(), "cuda": [None]},
        {**random_state_to_json(), "python": encode((3, (1,) * 625, "x"), "p")},
        {**random_state_to_json(), "python": encode((3, (1,) * 624 + (1000,), None), "p")},
    ],
)
def test_a_state_that_would_be_read_beside_its_block_is_refused_and_nothing_is_set(
    document: Any,
) -> None:
    before = json.dumps(random_state_to_json())
    with pytest.raises(CheckpointError):
        load_random_state(json.loads(json.dumps(document)))
    assert json.dumps(random_state_to_json()) == before


@pytest.mark.parametrize(("kind", "key"), [("Philox", "buffer_pos"), ("MT19937", "pos")])
def test_a_place_outside_of_the_block_of_an_own_generator_is_refused(kind: str, key: str) -> None:
    bits = getattr(np.random, kind)
    state = bits(3).state
    inner = state if key in state else state["state"]
    inner[key] = 10**6
    document = {**random_state_to_json(), "own": {"data": encode(state, "data")}}
    with pytest.raises(CheckpointError, match=f"'data'.*{key} is 1000000, expected 0 to"):
        load_random_state(document, {"data": np.random.Generator(bits(4))})


def test_states_of_any_number_of_draws_are_taken() -> None:
    for n in (0, 1, 2, 15, 16, 17, 623, 624, 625, 1300):
        torch.manual_seed(n)
        np.random.seed(n)
        torch.rand(n), np.random.rand(n), random.gauss(0, 1)
        document = json.loads(json.dumps(random_state_to_json()))
        drawn = [(float(torch.rand(())), np.random.rand(), random.gauss(0, 1)) for _ in range(2)]
        load_random_state(document)
        again = [(float(torch.rand(())), np.random.rand(), random.gauss(0, 1)) for _ in range(2)]
        assert again == drawn
