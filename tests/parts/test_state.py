"""An optimiser that was saved and loaded goes on as if nothing had happened."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

from geartrain.codec import decode, encode
from geartrain.errors import CheckpointError
from geartrain.parts.state import (
    load_optimizer_state,
    load_scheduler_state,
    optimizer_state_to_tensors,
    scheduler_state_to_json,
)

Make = Callable[[Any], torch.optim.Optimizer]
O = torch.optim  # noqa: E741
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: O.SGD(p, lr=0.1),
    "sgd momentum": lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd fused": lambda p: O.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: O.Adam(p, lr=0.01),
    "adam amsgrad": lambda p: O.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "adam tensor lr": lambda p: O.Adam(p, lr=torch.tensor(0.01)),
    "adamw fused": lambda p: O.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: O.Adagrad(p, lr=0.05, lr_decay=0.01, initial_accumulator_value=0.1),
    "rmsprop": lambda p: O.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda p: O.NAdam(p, lr=0.01),
    "radam": lambda p: O.RAdam(p, lr=0.01),
    "adamax": lambda p: O.Adamax(p, lr=0.01),
    "adadelta": lambda p: O.Adadelta(p, lr=0.5),
    "adafactor": lambda p: O.Adafactor(p, lr=0.01),
    "asgd": lambda p: O.ASGD(p, lr=0.05, t0=2.0),
    "rprop": lambda p: O.Rprop(p, lr=0.01),
    "lbfgs": lambda p: O.LBFGS(p, lr=0.1, max_iter=2),
}


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(module.parameters()).dtype
    for _ in range(steps):
        x = torch.randn(5, 3, generator=generator).to(dtype)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = module(x).square().sum() + module(x).sum()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]


def through_json(document: Any) -> Any:
    return json.loads(json.dumps(document))


def saved(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], Any]:
    tensors, document = optimizer_state_to_tensors(optimizer)
    return {name: t.clone() for name, t in tensors.items()}, through_json(document)


def flat_state(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor):
        yield (value.dtype, tuple(value.shape), value.tolist())
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from flat_state(item)
    elif isinstance(value, list | tuple):
        yield type(value)
        for item in value:
            yield from flat_state(item)
    else:
        yield (type(value), value)


def assert_continues(make: Make, dtype: torch.dtype = torch.float32) -> None:
    first = model(dtype=dtype)
    one = make(first.parameters())
    train(first, one, 3, seed=1)
    second = copy.deepcopy(first)
    two = make(second.parameters())
    tensors, document = saved(one)
    kept = {name: t.clone() for name, t in tensors.items()}
    load_optimizer_state(two, tensors, document)
    assert list(flat_state(two.state_dict())) == list(flat_state(one.state_dict()))
    train(first, one, 3, seed=2)
    train(second, two, 3, seed=2)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(tensors[name], kept[name]) for name in kept)  # its own copy


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loaded_optimizer_continues_to_the_last_bit(name: str) -> None:
    assert_continues(OPTIMIZERS[name])


@pytest.mark.parametrize("name", ["nadam", "asgd", "adam", "adafactor", "lbfgs"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_state_of_another_dtype_than_its_parameter_is_not_rounded(
    name: str, dtype: torch.dtype
) -> None:
    assert_continues(OPTIMIZERS[name], dtype)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_continues_to_the_last_bit() -> None:
    assert_continues(lambda p: O.Muon([x for x in p if x.dim() == 2], lr=0.01))


def test_sparse_adam_continues_to_the_last_bit() -> None:
    torch.manual_seed(0)
    first = nn.Embedding(6, 2, sparse=True)
    one = O.SparseAdam(first.parameters(), lr=0.1)

    def step(table: nn.Embedding, optimizer: O.SparseAdam, rows: list[int]) -> None:
        optimizer.zero_grad()
        table(torch.tensor(rows)).square().sum().backward()
        optimizer.step()

    step(first, one, [0, 1, 1])
    second = copy.deepcopy(first)
    two = O.SparseAdam(second.parameters(), lr=0.1)
    load_optimizer_state(two, *saved(one))
    for rows in ([1, 2], [0, 5]):
        step(first, one, rows)
        step(second, two, rows)
    assert torch.equal(first.weight, second.weight)


def test_groups_keep_their_own_options() -> None:
    def groups(module: nn.Sequential, lr: Any) -> O.AdamW:
        return O.AdamW(
            [
                {"params": module[0].named_parameters(), "lr": lr},
                {"params": module[2].named_parameters(), "betas": (0.5, 0.9)},
            ]
        )

    one, two = groups(model(), torch.tensor(0.3)), groups(model(), 0.1)
    load_optimizer_state(two, *saved(one))
    assert isinstance(two.param_groups[0]["lr"], Tensor)
    assert float(two.param_groups[0]["lr"]) == float(torch.tensor(0.3))
    assert two.param_groups[1]["betas"] == (0.5, 0.9)
    assert two.param_groups[0]["param_names"] == ["weight", "bias"]


class Odd(O.SGD):
    """Keeps what torch's own optimisers do not."""


def test_state_of_every_plain_kind_comes_back() -> None:
    state = {"n": 3, "on": True, "none": None, "rate": 0.1, "kind": "fast", "past": [torch.ones(2)]}
    module, other = model(), model()
    one, two = Odd(module.parameters(), lr=0.1), Odd(other.parameters(), lr=0.1)
    one.state[module[0].weight].update(state)
    load_optimizer_state(two, *saved(one))
    found = two.state[other[0].weight]
    assert list(flat_state(found)) == list(flat_state(state))


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x", 1j, len, torch.Size([1])])
def test_state_of_an_unknown_type_is_refused_by_name(value: object) -> None:
    module = model()
    optimizer = Odd(module.parameters(), lr=0.1)
    optimizer.state[module[2].bias]["secret"] = value
    with pytest.raises(CheckpointError, match=r"optimizer Odd: 'state\.3\.secret' is a .*expected"):
        optimizer_state_to_tensors(optimizer)


def test_an_option_of_an_unknown_type_is_refused_by_name() -> None:
    optimizer = Odd(model().parameters(), lr=0.1)
    optimizer.param_groups[0]["rule"] = len
    with pytest.raises(CheckpointError, match=r"'groups\.0\.rule' is a builtins\.builtin_function"):
        optimizer_state_to_tensors(optimizer)


def trained_adam(module: nn.Module) -> O.Adam:
    optimizer = O.Adam(module.parameters())
    train(module, optimizer, 1, seed=0)
    return optimizer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: O.Adam(nn.Linear(3, 4).parameters()), "of 4 parameters, the optimizer has 2"),
        (
            lambda: O.Adam(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)).parameters()),
            r"parameter 2 is that of shape \[2, 4\], the parameter has \[3, 4\]",
        ),
        (lambda: O.AdamW(model().parameters()), "that of 'Adam'; expected 'AdamW'"),
        (
            lambda: O.Adam([{"params": list(m.parameters())} for m in (model()[0], model()[2])]),
            r"\[\[0, 1, 2, 3\]\] in its groups, the optimizer has \[\[0, 1\], \[2, 3\]\]",
        ),
    ],
)
def test_state_that_does_not_fit_is_refused_and_nothing_changes(
    make: Callable[[], torch.optim.Optimizer], reason: str
) -> None:
    other = make()
    before = list(flat_state(other.state_dict()))
    with pytest.raises(CheckpointError, match=reason):
        load_optimizer_state(other, *saved(trained_adam(model())))
    assert list(flat_state(other.state_dict())) == before


@pytest.mark.parametrize("steps", [-1.0, math.nan, math.inf])
def test_a_count_of_steps_that_cannot_be_is_refused_and_nothing_changes(steps: float) -> None:
    optimizer, other = trained_adam(model()), trained_adam(model())
    for kept in optimizer.state.values():
        kept["step"].fill_(steps)
    before = list(flat_state(other.state_dict()))
    with pytest.raises(CheckpointError, match=r"state\.0\.step' is .* number of 0 or more"):
        load_optimizer_state(other, *saved(optimizer))
    assert list(flat_state(other.state_dict())) == before


def test_a_number_that_counts_no_steps_may_be_below_zero_but_not_infinite() -> None:
    one, two = (model() for _ in range(2))
    optimizer, other = O.NAdam(one.parameters()), O.NAdam(two.parameters())
    train(one, optimizer, 1, seed=0)
    for value in (-0.5, 0.0):
        for kept in optimizer.state.values():
            kept["mu_product"].fill_(value)
        load_optimizer_state(other, *saved(optimizer))
        assert {float(kept["mu_product"]) for kept in other.state.values()} == {value}
    for kept in optimizer.state.values():
        kept["mu_product"].fill_(-math.inf)
    with pytest.raises(CheckpointError, match=r"mu_product' is -inf, expected a finite number\."):
        load_optimizer_state(other, *saved(optimizer))


@pytest.mark.parametrize(
    "damage",
    [
        {"state": None},
        {"state": [3]},
        {"state": [[0, {"tensor": "none such"}]]},
        {"state": [[0, {"import": "os"}]]},
        {"state": [[0, {"scalar": "nn", "value": 1}]]},
        {"groups": "x"},
        {"groups": [[1, 2]]},
        {"groups": []},
        {"parameters": 4},
    ],
)
def test_a_damaged_document_is_refused_and_nothing_changes(damage: dict[str, Any]) -> None:
    optimizer = trained_adam(model())
    tensors, document = saved(optimizer)
    before = list(flat_state(optimizer.state_dict()))
    with pytest.raises(CheckpointError, match="optimizer Adam"):
        load_optimizer_state(optimizer, tensors, {**document, **damage})
    assert list(flat_state(optimizer.state_dict())) == before


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: schedules.StepLR(o, 2, 0.5),
    "milestones": lambda o: schedules.MultiStepLR(o, [2, 2, 4]),
    "exponential": lambda o: schedules.ExponentialLR(o, 0.9),
    "lambda": lambda o: schedules.LambdaLR(o, lambda n: np.float64(0.9) ** n),
    "cosine": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.5, total_steps=9, cycle_momentum=False),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "sequence": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, 1.0, 3), schedules.MultiStepLR(o, [2])], [3]
    ),
}


@pytest.mark.parametrize(
    ("name", "lr"),
    [
        *((name, 0.1) for name in SCHEDULES),
        *((name, torch.tensor(0.1)) for name in ("step", "exponential", "cosine", "sequence")),
    ],
)
def test_a_loaded_schedule_continues_with_the_same_rates(name: str, lr: Any) -> None:
    def pair() -> tuple[torch.optim.Optimizer, Any]:
        rate = lr.clone() if isinstance(lr, Tensor) else lr
        optimizer = O.Adam(model().parameters(), lr=rate)
        return optimizer, SCHEDULES[name](optimizer)

    def rates(optimizer: torch.optim.Optimizer, schedule: Any) -> list[float]:
        found = []
        for _ in range(4):
            optimizer.step()
            schedule.step()
            found.append(float(optimizer.param_groups[0]["lr"]))
        return found

    one, two = pair(), pair()
    rates(*one)
    state, document = saved(one[0]), through_json(scheduler_state_to_json(one[1]))
    load_optimizer_state(two[0], *state)
    load_scheduler_state(two[1], document)
    assert rates(*one) == rates(*two)


def test_a_schedule_that_has_not_begun_is_loaded_without_a_warning() -> None:
    one, two = (schedules.StepLR(O.SGD(model().parameters(), lr=0.1), 2) for _ in range(2))
    load_scheduler_state(two, through_json(scheduler_state_to_json(one)))
    assert two.last_epoch == 0


def test_reduce_on_plateau_remembers_its_best() -> None:
    def make() -> schedules.ReduceLROnPlateau:
        return schedules.ReduceLROnPlateau(O.SGD(model().parameters(), lr=0.1), patience=1)

    one, two, three = make(), make(), make()
    load_scheduler_state(two, through_json(scheduler_state_to_json(one)))
    assert two.best == math.inf
    for loss in (1.0, 2.0):
        one.step(loss)
    load_scheduler_state(three, through_json(scheduler_state_to_json(one)))
    assert (three.best, three.num_bad_epochs) == (1.0, 1)


def test_a_schedule_of_another_class_or_with_no_plain_state_is_refused_by_name() -> None:
    optimizer = O.SGD(model().parameters(), lr=0.1)
    step = schedules.StepLR(optimizer, 2)
    document = scheduler_state_to_json(schedules.ExponentialLR(optimizer, 0.9))
    with pytest.raises(CheckpointError, match="that of 'ExponentialLR'; expected 'StepLR'"):
        load_scheduler_state(step, document)
    with pytest.raises(CheckpointError, match="its state is a list; expected a dict"):
        load_scheduler_state(step, {"class": "StepLR", "state": []})
    step.curve = torch.ones(3)  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"scheduler StepLR: 'state\.curve' is a tensor"):
        scheduler_state_to_json(step)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda x: st.lists(x) | st.lists(x).map(tuple) | st.dictionaries(st.integers() | st.text(), x),
    max_leaves=10,
)


@settings(deadline=None, derandomize=True)
@given(value=plain)
def test_plain_values_come_back_with_their_types(value: Any) -> None:
    back = decode(through_json(encode(value, "v")), "v")
    assert repr(back) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        np.float32(0.1),
        np.int64(-3),
        np.bool_(True),
        np.arange(6, dtype=">u4").reshape(2, 3),
        np.zeros((0, 2)),
        Counter({2: 1, 5: 3}),
    ],
)
def test_numpy_values_and_counters_come_back_with_their_types(value: Any) -> None:
    back = decode(through_json(encode(value, "v")), "v")
    assert type(back) is type(value)
    assert np.array_equal(back, value) if isinstance(value, np.ndarray) else back == value
    assert getattr(back, "shape", ()) == getattr(value, "shape", ())


@pytest.mark.parametrize(
    "document",
    [
        {"dict": [[[1], 2]]},
        {"dict": ["ab"]},
        {"counter": 3},
        {"numpy": "O", "value": 1},
        {"numpy": "<f8", "value": "1"},
        {"array": "<f8", "shape": [2], "base64": "AAAA"},
        {"array": "O", "shape": [1], "base64": "AAAAAAAAAAA="},
        {"array": "|u1", "shape": [-3, -1], "base64": "AAAA"},
        {"scalar": "load", "value": 1},
        {"tuple": [], "more": 1},
        {"tensor": "w"},
        {},
    ],
)
def test_a_document_that_encode_cannot_have_made_is_refused(document: Any) -> None:
    with pytest.raises(CheckpointError, match=r"'v'.*cannot be decoded"):
        decode(document, "v")
