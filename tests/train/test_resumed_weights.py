"""One instance in flight, and no branches: a resumed run has the uninterrupted one's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import geartrain as gt

RUNTIMES: dict[str, Callable[[], gt.Threads | gt.Processes]] = {
    "threads 1": lambda: gt.Threads(1, kernel_threads=1),
    "processes 1": lambda: gt.Processes(1),
    "processes 2": lambda: gt.Processes(2),
}


def grouped(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW whose biases do not decay."""
    both: list[list[nn.Parameter]] = [[], []]
    for p in parameters:
        both[p.ndim > 1].append(p)
    groups = [{"params": ps, "weight_decay": 0.1 * k} for k, ps in enumerate(both)]
    return torch.optim.AdamW(groups, lr=0.02)


RULES = gt.Rules(
    optimizer=grouped,
    update_every=gt.Instances(7),  # sums are half full where the run is saved
    average="instances",
    clip=gt.Clip(norm=0.3, over="all"),
    scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.7),
)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_resumed_weights_are_those_of_an_uninterrupted_run(
    runtime: str, make_line, make_rows, tmp_path: Path
) -> None:
    data, valid, path = make_rows(16), make_rows(4, 1), tmp_path / "saved.safetensors"
    made = RUNTIMES[runtime]()

    def session(seed: int) -> tuple[gt.Session, Callable[[], list[Tensor]]]:
        line = make_line(seed)
        ours = gt.Session(line.graph, rules=RULES, runtime=made, max_active=1, seed=3)
        both = nn.ModuleList([line.first, line.second])
        return ours, lambda: [p.detach().clone() for p in both.parameters()]

    try:
        whole, weights = session(0)
        whole.fit(data, epochs=1, valid=valid)
        whole.save(path)
        saved = weights()
        whole.fit(data, epochs=3, valid=valid)
        resumed, found = session(5)
        resumed.load(path)
        assert all(map(torch.equal, found(), saved))
        resumed.fit(data, epochs=3, valid=valid)
        assert not any(map(torch.equal, found(), saved))
        assert all(map(torch.equal, found(), weights()))
    finally:
        if isinstance(made, gt.Processes):
            made.close()
