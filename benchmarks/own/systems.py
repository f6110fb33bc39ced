"""What is compared: geartrain, batching by hand and one instance at a time, on the same program.

    ours 64/64      64 instances in flight, an update for every 64
    ours 256/64     256 in flight, an update for every 64
    hand 64         batches of 64, an update each
    plain 64        one instance at a time, an update for every 64

Each has a copy of the program with the same first weights, and trains on from round to round.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Final, Literal, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

import geartrain as gt
from benchmarks.firings import around_firings
from benchmarks.own.programs import PROGRAMS
from benchmarks.own.programs.program import AbstractProgram, Item
from geartrain.engine.firing import Firing

Way: TypeAlias = Literal["ours", "hand", "plain"]
RATE: Final = 1e-3
COUNTED: Final = 256
"""Instances whose rows are counted, where updates are."""


@final
@dataclass(frozen=True, slots=True)
class System:
    """One way to train a program.

    Args:
        way: Which.
        update: Instances of an update; of ``hand`` also the size of its batches.
        in_flight: Of ``ours``.
    """

    way: Way
    update: int
    in_flight: int = 0

    @property
    def name(self) -> str:
        flight = f"{self.in_flight}/" if self.way == "ours" else ""
        return f"{self.way} {flight}{self.update}"


@final
@dataclass(frozen=True, slots=True)
class Pass:
    """What a pass over some instances came to.

    Args:
        seconds: Of training: forward, backward, batches put together, steps.
        cpu_seconds: The processor's, of all that the process did meanwhile.
        instances: How many.
        updates: Steps that were taken: of ``ours`` by the part that took the most, and the fewest.
        loss: Mean over the instances, as they were trained on.
    """

    seconds: float
    cpu_seconds: float
    instances: int
    updates: tuple[int, int]
    loss: float


@final
class _Rows(gt.AbstractInstrument):
    """Gradient rows by part."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()

    def on_updated(self, event: gt.Updated) -> None:
        self.found[event.part] += event.rows


def rows_of_parts(program: AbstractProgram, n: int) -> dict[str, int]:
    """The gradient rows that n instances bring to each part; nothing is learnt."""
    rows = _Rows()
    session = gt.Session(
        program.graph(),
        rules=gt.Rules(
            optimizer=partial(torch.optim.SGD, lr=0.0), update_every=gt.Flush(), average="none"
        ),
        runtime=gt.Threads(1, kernel_threads=1),
        max_active=n,
        instruments=[rows],
    )
    session.fit([program.instance(item) for item in program.generate(n, seed=1)], epochs=1)
    return dict(rows.found)


@final
class Trained:
    """A program that one system trains.

    Args:
        name: Of the program.
        system: How.
        width: Of its rows; None: its own.
        keep: What nodes of ``ours`` keep; None: what the library chooses.
        by_rows: Whether updates of ``ours`` are counted in the rows that so many instances bring to
            a part, rather than in instances.
        device: Where the modules are.
    """

    def __init__(
        self,
        name: str,
        system: System,
        width: int | None = None,
        keep: str | None = None,
        *,
        by_rows: bool = False,
        device: str = "cpu",
    ) -> None:
        torch.manual_seed(0)
        self.program: AbstractProgram = PROGRAMS[name](width).to(device)
        self._device = torch.device(device)
        self.system = system
        self._order = count(1)
        if system.way == "ours":
            graph = self.program.graph()
            if keep is not None:
                for through in graph.throughs():
                    through.keep = keep  # type: ignore[assignment]
            trigger: gt.Instances | gt.Rows = gt.Instances(system.update)
            if by_rows:
                trigger = gt.Rows(system.update)
                rows = rows_of_parts(self.program, COUNTED)
                for through in graph.throughs():
                    if through.name in rows:
                        n = max(round(rows[through.name] / COUNTED * system.update), 1)
                        module = through.function
                        through.part = gt.Part(module, through.name, update_every=gt.Rows(n))
            self._session = gt.Session(
                graph,
                rules=gt.Rules(
                    optimizer=partial(gt.FusedAdam, lr=RATE),
                    update_every=trigger,
                    average="rows" if by_rows else "instances",
                ),
                runtime=gt.Threads(1, kernel_threads=1),
                max_active=system.in_flight,
                schedule=gt.Schedule(ramp=gt.Ramp(over=0)),
                compute=gt.Compute(device=device),
            )
        else:
            self._optimizer = torch.optim.Adam(self.program.parameters(), lr=RATE, fused=True)

    def prepare(self, items: Sequence[Item]) -> Sequence[Item] | list[gt.Instance]:
        """What a pass is given."""
        if self.system.way == "ours":
            return [self.program.instance(item) for item in items]
        return items

    def __call__(self, prepared: Sequence[Item] | list[gt.Instance]) -> Pass:
        """Train on all of them once."""
        number = next(self._order)
        cpu = time.process_time()
        if self.system.way == "ours":
            fit = self._session.fit(prepared, epochs=number)
            last = fit.history[-1]
            updates = last.updates.values()
            loss = last.loss * self._per_instance(prepared)
            cpu = time.process_time() - cpu
            made = max(updates), min(updates)
            return Pass(fit.train_seconds, cpu, len(prepared), made, loss)
        order = np.random.default_rng(number).permutation(len(prepared)).tolist()
        began, updates = time.perf_counter(), 0
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for start in range(0, len(order), self.system.update):
            batch = [prepared[i] for i in order[start : start + self.system.update]]
            with self._device:
                total += self._batch(batch) if self.system.way == "hand" else self._each(batch)
            self._optimizer.step()
            self._optimizer.zero_grad()
            updates += 1
        loss = total.item()
        seconds = time.perf_counter() - began
        cpu = time.process_time() - cpu
        return Pass(seconds, cpu, len(order), (updates, updates), loss / len(order))

    def _batch(self, batch: Sequence[Item]) -> Tensor:
        loss = self.program.hand(batch)
        (loss / self.system.update).backward()
        return loss.detach()

    def _each(self, batch: Sequence[Item]) -> Tensor:
        losses = []
        for item in batch:
            loss = self.program.plain(item)
            (loss / self.system.update).backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _per_instance(self, prepared: Sequence[Item] | list[gt.Instance]) -> float:
        """Rows with a loss, for each instance: what is reported is their mean."""
        return self.rows_with_loss / len(prepared)

    rows_with_loss: float = 0.0

    def firings(self, prepared: list[gt.Instance]) -> dict[str, list[int]]:
        """Of one more pass: node and direction to firings and messages."""
        fired: Counter[str] = Counter()
        rows: Counter[str] = Counter()

        def note(firing: Firing) -> None:
            name = f"{firing.node} {'forward' if firing.forward else 'backward'}"
            fired[name] += 1
            rows[name] += firing.rows

        with around_firings(after=note):
            self(prepared)
        return {name: [fired[name], rows[name]] for name in fired}
