"""Checkpoints from strangers: whatever stands in them, they are refused whole or they train on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import geartrain as gt
from geartrain.train.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from tests.rigs import forged
from tests.rigs.programs import Nursery, Program

SCRIPT = Path(forged.__file__).read_text()


@pytest.fixture
def refused(nursery: Nursery, tmp_path: Path) -> Callable[..., int]:
    """How many of so many forged files of each kind were refused, in a process of its own."""

    def run(kinds: str, seed: int, count: int) -> int:
        program = Program(
            nursery, tmp_path / "forged", Path(forged.__file__).read_text(), kinds, seed, count
        )
        try:
            status, errors = program.end()
        finally:
            program.close()
        assert status == 0, f"it ended with {status}: {errors[-3000:]}"
        return int(program.lines[-1])

    return run


def test_a_forged_checkpoint_is_refused_whole_or_trains_on(refused: Callable[..., int]) -> None:
    assert 12 < refused("adam,scheduled,views", 0, 8) < 24


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", forged.KINDS)
def test_a_hundred_forged_checkpoints_are_refused_whole_or_train_on(
    refused: Callable[..., int], kind: str, seed: int
) -> None:
    assert 50 < refused(kind, 100 + seed, 100) < 100


Change = Callable[[dict[str, torch.Tensor], Any], object]


def trained(kind: str, folder: Path) -> Checkpoint:
    """The checkpoint of the middle of an epoch."""
    data = forged.rows(words=kind not in forged.WITHOUT_WORDS)
    forged.KINDS[kind]().fit(data, epochs=1, folder=folder, checkpoint_every=30, keep_last=3)
    return read_checkpoint(sorted(folder.glob("checkpoint-*"))[0])


def change_state(name: str, value: torch.Tensor) -> Change:
    def change(tensors: dict[str, torch.Tensor], document: Any) -> None:
        assert name in tensors
        tensors[name] = value

    return change


def change_entry(value: Any, *place: Any) -> Change:
    def change(tensors: dict[str, torch.Tensor], document: Any) -> None:
        *way, last = place
        for key in way:
            document = document[key]
        document[last] = value

    return change


CHANGES: dict[str, tuple[Change, str]] = {
    "a moment larger than its weights": (
        change_state("one/optimizer/state.0.exp_avg", torch.zeros(400, 3)),
        r"part 'one': .*state.0.exp_avg' has shape \(400, 3\).*expected \(4, 3\)",
    ),
    "a moment smaller than its weights": (
        change_state("two/optimizer/state.0.exp_avg_sq", torch.zeros(0)),
        r"part 'two': .*exp_avg_sq' has shape \(0,\)",
    ),
    "a moment of another dtype": (
        change_state("one/optimizer/state.1.exp_avg", torch.zeros(4, dtype=torch.float64)),
        r"part 'one': .*float64, expected \(4,\) and torch.float32",
    ),
    "a count of no elements": (
        change_state("two/optimizer/state.0.step", torch.zeros(0)),
        r"part 'two': .*step' has shape \(0,\)",
    ),
    "a count that is none": (
        change_state("two/optimizer/state.0.step", torch.tensor(float("nan"))),
        r"part 'two': .*step' is nan, expected a finite number of 0 or more",
    ),
    "a table's count of no elements": (
        change_state("table/optimizer/state.0.step", torch.zeros(0)),
        r"part 'table': .*step' has shape \(0,\)",
    ),
    "a waiting gradient of rows that are not there": (
        change_state("table/gradient/weight/indices", torch.full((4,), 10**6)),
        r"part 'table'.*rows 1000000 to 1000000, the parameter has 5",
    ),
    "a waiting gradient of another shape": (
        change_state("one/gradient/weight", torch.zeros(7, 4, 3)),
        r"part 'one': 'gradient/weight' has shape \(7, 4, 3\)",
    ),
    "weight decay of a sparse table": (
        change_entry(0.1, "parts", "table", "optimizer", "groups", 0, "dict", 3, 1),
        r"part 'table': optimizer Adagrad: weight_decay .* sparse gradients; its options",
    ),
    "no state of a parameter that has an entry": (
        change_entry(None, "parts", "one", "optimizer", "state", 0, 1),
        r"part 'one': 'optimizer \w+, state.0' is a NoneType, expected a dict",
    ),
    "a rate beyond float32": (
        change_entry(1e300, "parts", "one", "optimizer", "groups", 0, "dict", 0, 1),
        r"part 'one': .*groups.0.lr' is 1e.300, expected a number of at most 3.4e.38",
    ),
    "no parts": (change_entry(None, "parts"), "holds parts None, the graph has"),
    "parts that are a list": (change_entry(["one"], "parts"), "holds parts"),
    "an optimiser that is a number": (
        change_entry(3, "parts", "one", "optimizer"),
        "part 'one': its entry is damaged .it.optimizer is 3, expected an object",
    ),
    "a random state that is a word": (change_entry("x", "random"), "its random state is a str"),
    "a place that is no number": (
        change_entry([1], "position", "taken"),
        "position.taken is .1., expected a whole number",
    ),
    "a history of other epochs": (
        change_entry(7, "position", "epoch"),
        "the history ends with epoch 0, the epoch is 7",
    ),
    "sums of something": (
        change_entry({"loss": [1.0, {}]}, "position", "sums"),
        "position.sums.loss.1. is .., expected a number",
    ),
    "versions that no counter has": (
        change_entry(2**63, "parts", "one", "version"),
        "it.version is 9223372036854775808, expected a whole number from 0",
    ),
    "choices that are a list": (
        change_entry([], "auto"),
        "what keep='auto' has chosen is a list",
    ),
    "a choice of a module that is not there": (
        change_entry({"firings": 1, "rows": 1, "chosen": None}, "auto", "nobody"),
        "has chosen for .'nobody'., the graph runs modules at",
    ),
    "a choice that there is not": (
        change_entry({"firings": 1, "rows": 1, "chosen": "both"}, "auto", "one"),
        "of 'one' keep='auto' has done and chosen .*'both'",
    ),
    "firings below zero": (
        change_entry({"firings": -1, "rows": 1, "chosen": None}, "auto", "one"),
        "of 'one' keep='auto' has done and chosen .*-1",
    ),
    "a key that nobody writes": (change_entry(1, "besides"), "has besides besides"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return trained("adam", tmp_path_factory.mktemp("good"))


@pytest.mark.parametrize("name", CHANGES)
def test_what_no_session_writes_is_refused_by_name_and_changes_nothing(
    name: str, good: Checkpoint, tmp_path: Path
) -> None:
    kept = good
    change, message = CHANGES[name]
    tensors, document = dict(kept.tensors), copy.deepcopy(dict(kept.document))
    change(tensors, document)
    write_checkpoint(tmp_path / "forged", tensors, document)
    session = forged.KINDS["adam"]()
    session.fit(forged.rows(10), epochs=1)
    forged.state(session)  # what waits to be added up is added up
    before = forged.state(session)
    with pytest.raises(gt.CheckpointError, match=message):
        session.load(tmp_path / "forged")
    assert forged.same(before, forged.state(session))


def test_a_place_beyond_the_data_does_not_end_the_epoch_as_if_it_were_done(
    good: Checkpoint, tmp_path: Path
) -> None:
    kept = good
    document: Any = copy.deepcopy(dict(kept.document))
    document["position"]["taken"] = 10**6
    write_checkpoint(tmp_path / "forged", kept.tensors, document)
    session = forged.KINDS["adam"]()
    session.load(tmp_path / "forged")
    with pytest.raises(gt.DataError, match=r"1000000 instances of this epoch .* the data have 40"):
        session.fit(forged.rows(), epochs=1)


def test_weights_of_long_ago_are_refused_before_ages_are_counted_one_by_one(tmp_path: Path) -> None:
    kept = trained("views", tmp_path)
    document: Any = copy.deepcopy(dict(kept.document))
    entry = document["parts"]["one"]["view"]
    while "age" not in entry:
        (entry,) = [e for e in entry.values() if isinstance(e, dict)]
    entry["age"] = 2**31
    write_checkpoint(tmp_path / "forged", kept.tensors, document)
    with pytest.raises(gt.CheckpointError, match=r"age.* 2147483648"):
        forged.KINDS["views"]().load(tmp_path / "forged")


def test_a_schedule_from_a_stranger_sets_no_attribute_that_is_no_state(tmp_path: Path) -> None:
    kept = trained("scheduled", tmp_path)
    for key, value in (("optimizer", 3), ("get_lr", None), ("step_size", 0), ("gamma", "x")):
        document: Any = copy.deepcopy(dict(kept.document))
        entries = document["parts"]["one"]["scheduler"]["state"]["dict"]
        entries[:] = [*([k, v] for k, v in entries if k != key), [key, value]]
        write_checkpoint(tmp_path / "forged", kept.tensors, document)
        with pytest.raises(gt.CheckpointError, match=r"part 'one': .*scheduler StepLR"):
            forged.KINDS["scheduled"]().load(tmp_path / "forged")


def test_buffers_of_other_rows_are_refused_when_rows_come(tmp_path: Path) -> None:
    kept = trained("buffers", tmp_path)
    tensors = {
        k: v.double() if "/memory/" in k else v for k, v in kept.tensors.items()
    }  # the graph alone knows what comes there
    write_checkpoint(tmp_path / "forged", tensors, kept.document)
    session = forged.KINDS["buffers"]()
    session.load(tmp_path / "forged")
    with pytest.raises(gt.GeartrainError, match=r"the buffer of 'replay' holds .*float64"):
        session.fit(forged.rows(words=False), epochs=1)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
def test_weight_decay_is_loaded_where_rows_can_be_stepped_with_it(
    optimizer: Callable[..., torch.optim.Optimizer], tmp_path: Path
) -> None:
    """Adam gets dense gradients; SGD has its decay for the other parameters of the part."""

    class Words(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.map = torch.nn.Embedding(5, 4, sparse=True), torch.nn.Linear(4, 2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.map(self.table(ids))
            return found

    def session(decay: float) -> gt.Session:
        def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
            table, *others = parameters
            of_table = decay if optimizer is torch.optim.Adam else 0.0
            groups: list[dict[str, Any]] = [
                {"params": [table], "weight_decay": of_table},
                {"params": others, "weight_decay": decay},
            ]
            return optimizer(groups, lr=0.1)

        graph = gt.Graph()
        graph.input("id").through(Words(), name="words").loss(lambda y: y.square().sum(1))
        rules = gt.Rules(optimizer=make, update_every=2)
        return gt.Session(graph, rules=rules, runtime=gt.Simulated())

    data = [gt.Instance({"id": torch.tensor([i % 5])}, key=i) for i in range(8)]
    before, after = session(0.1), session(0.0)
    before.fit(data, epochs=1)
    before.save(tmp_path / "saved.safetensors")
    after.load(tmp_path / "saved.safetensors")
    fit = after.fit(data, epochs=2)
    assert fit.instances == 8
    made = after.parts["words"].optimizer
    assert made is not None and made.param_groups[1]["weight_decay"] == 0.1
