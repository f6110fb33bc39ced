"""``drain=True`` is minibatch training, however the data come and wherever blocks of them end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import geartrain as gt
from geartrain.engine.instrument import AbstractInstrument, Updated
from geartrain.frames.instance import Instance
from geartrain.runtime import base
from geartrain.runtime.base import AbstractRuntime
from tests.rigs.products import halved
from tests.rigs.sessions import session_of

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.5)
FORMS = ("list", "iterable", "columns", "dataset")


def squares(y: Tensor) -> Tensor:
    return (y - 1).square().flatten(1).sum(1)


def modules() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    return nn.Linear(2, 3).double(), nn.Linear(3, 2).double()


def graph_of(lower: nn.Module, upper: nn.Module, **given: bool) -> gt.Graph:
    graph = gt.Graph()
    x = graph.input("x", **given).through(lower, name="lower").through(torch.tanh, name="curve")
    x.through(upper, name="upper").loss(squares)
    return graph


def rows_of(sizes: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in sizes]


class Again:
    """Starts anew for every epoch, and has no length."""

    def __init__(self, items: Sequence[Instance]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Instance]:
        return iter(self.items)


class Map(Again):
    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Instance:
        return self.items[i]


def data_of(rows: Sequence[Tensor], form: str) -> object:
    if form == "columns":
        return gt.Columns([len(x) for x in rows], {"x": torch.cat(list(rows))})
    items = [Instance({"x": x}) for x in rows]
    return {"list": items, "iterable": Again(items), "dataset": Map(items)}[form]


class Steps(AbstractInstrument):
    def __init__(self) -> None:
        self.rows: dict[str, list[int]] = {}

    def on_updated(self, event: Updated) -> None:
        self.rows.setdefault(event.part, []).append(event.rows)


def drained(
    graph: gt.Graph, batch: int, runtime: AbstractRuntime | None = None, **more: object
) -> tuple[gt.Session, Steps]:
    steps = Steps()
    session = session_of(
        graph,
        rules=gt.Rules(optimizer=SGD, update_every=gt.Instances(batch)),
        runtime=runtime or gt.Simulated(1),
        max_active=batch,
        drain=True,
        ramp=gt.Ramp(over=0),
        shuffle=False,
        instruments=[steps],
        **more,
    )
    return session, steps


def plain(rows: Sequence[Tensor], batch: int, epochs: int = 1) -> tuple[nn.Linear, nn.Linear]:
    """Minibatches; the last of an epoch counts for the share of one that it is."""
    lower, upper = modules()
    optimizer = SGD([*lower.parameters(), *upper.parameters()])
    for _ in range(epochs):
        for at in range(0, len(rows), batch):
            some = rows[at : at + batch]
            optimizer.zero_grad()
            loss = squares(upper(torch.tanh(lower(torch.cat(list(some)))))).sum()
            (loss / sum(map(len, some)) * len(some) / batch).backward()
            optimizer.step()
    return lower, upper


def assert_same(got: Sequence[nn.Module], want: Sequence[nn.Module]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def batches(sizes: Sequence[int], n: int) -> list[int]:
    return [sum(sizes[i : i + n]) for i in range(0, len(sizes), n)]


BLOCKS = given(
    n=st.integers(25, 50),
    batch=st.integers(3, 12),
    block=st.integers(1, 40),
    block_bytes=st.sampled_from([1 << 20, 700]),
    runtime=st.sampled_from([gt.Simulated(3, jitter=0.5), gt.Simulated(1), gt.Threads(2, 1)]),
    bundle=st.booleans(),
)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=7)
@BLOCKS
def test_whatever_the_blocks_drained_updates_are_plain_minibatches(form, **drawn):
    train_drained(form, **drawn)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=150)
@BLOCKS
def test_whatever_the_many_blocks_drained_updates_are_plain_minibatches(form, **drawn):
    train_drained(form, **drawn)


def train_drained(form, n, batch, block, block_bytes, runtime, bundle):
    sizes = np.random.default_rng(n).integers(1, 5, n).tolist()
    rows, (lower, upper) = rows_of(sizes), modules()
    session, steps = drained(graph_of(lower, upper, bundle=bundle), batch, runtime)
    with mock.patch.multiple(base, _BLOCK=block, _BLOCK_BYTES=block_bytes):
        fit = session.fit(data_of(rows, form), epochs=1)
    assert steps.rows == dict.fromkeys(("lower", "upper"), batches(sizes, batch))
    assert all(len(s.histogram) == 1 for s in fit.staleness.values())
    assert_same((lower, upper), plain(rows, batch))


def test_minibatches_that_are_admitted_one_at_a_time_go_in_together():
    """``alone``: each is a batch by itself, and so many of them make an update."""
    rows, (lower, upper) = rows_of([3] * 11), modules()
    session, steps = drained(graph_of(lower, upper, bundle=True, alone=True), 4)
    session.fit(data_of(rows, "list"), epochs=1)
    assert steps.rows["lower"] == batches([3] * 11, 4)
    assert_same((lower, upper), plain(rows, 4))


@halved(form=FORMS, bad={"none": (), "one": (3,), "several": (0, 1, 2, 10)})
def test_stretches_and_refused_instances_cut_no_minibatch(form, bad, tmp_path):
    rows, (lower, upper) = rows_of([2] * 33), modules()
    good = [x for i, x in enumerate(rows) if i not in bad]
    for i in bad:
        rows[i] = torch.full((2, 2), torch.nan, dtype=torch.float64)
    session, steps = drained(graph_of(lower, upper), 5, on_bad="skip")
    fit = session.fit(
        data_of(rows, form),
        epochs=1,
        folder=tmp_path,
        checkpoint_every=7,
        keep_last=20,
        **(
            {}
            if form == "iterable"
            else {"valid": data_of(good[:1], "list"), "evaluate_every": 0.3}
        ),
    )
    assert fit.skipped == len(bad) and fit.instances == len(good)
    assert steps.rows["lower"] == batches([2] * len(good), 5)
    assert_same((lower, upper), plain(good, 5))
    assert len(list(tmp_path.glob("*-*.safetensors"))) >= 3
    assert form == "iterable" or len(fit.history) >= 3


def test_a_run_that_goes_on_from_a_checkpoint_has_the_same_minibatches(tmp_path):
    rows = rows_of([1, 3, 2] * 11)
    for at in ("first", "second"):
        lower, upper = modules()
        session, steps = drained(graph_of(lower, upper), 5)
        if at == "second":
            session.load(sorted((tmp_path / "first").glob("*-*.safetensors"))[1])
        session.fit(
            data_of(rows, "list"),
            epochs=2,
            folder=tmp_path / at,
            checkpoint_every=7,
            keep_last=20,
        )
        assert steps.rows["lower"][-7:] == batches([1, 3, 2] * 11, 5)
        assert_same((lower, upper), plain(rows, 5, epochs=2))


@pytest.mark.parametrize("shards", ["static", "pull"])
def test_a_copy_of_the_model_fills_its_minibatch_where_its_shard_begins_anew(shards):
    rows = rows_of([1] * 23)
    copies = gt.Neighbours(copies=2, shards=shards, exchange="weights", when=1000)
    runtime = gt.Simulated(2, speeds=[1.0, 0.2])
    session, steps = drained(graph_of(*modules()), 4, runtime, sharing=copies)
    session.fit(data_of(rows, "list"), epochs=3)
    for part in ("lower#0", "lower#1"):
        cut = [n for n in steps.rows[part] if n != 4]
        assert len(cut) <= 3  # what the end of each epoch leaves
    assert sum(map(sum, steps.rows.values())) == 2 * 3 * 23


def test_meetings_of_copies_cut_no_minibatch():
    met: list[int] = []

    class Counted(gt.AbstractMixer):
        def mix(self, copies):
            met.append(1)

    lower, upper = modules()
    copies = gt.PartCopies({"lower": 2}, Counted(7))
    session, steps = drained(graph_of(lower, upper), 5, gt.Simulated(2), sharing=copies)
    session.fit(data_of(rows_of([1] * 60), "list"), epochs=1)
    assert steps.rows["upper"] == [5] * 12
    assert len(met) == 60 // 7 + 1  # and at the end of the epoch
    assert np.sum(steps.rows["lower"]) + np.sum(steps.rows["lower#1"]) == 60
