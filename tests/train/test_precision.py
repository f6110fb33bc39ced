"""Sessions in bfloat16: they learn, continue to the bit, and keep float32."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.train.checkpoint import read_checkpoint
from tests.rigs.sessions import session_of

RULES = gt.Rules(optimizer=partial(torch.optim.Adagrad, lr=0.1), update_every=8)


def session(graph: gt.Graph, **options) -> gt.Session:
    options.setdefault("precision", "bf16")
    return session_of(graph, rules=RULES, runtime=gt.Simulated(2), max_active=8, **options)


def test_training_converges_and_what_leaves_is_float32(make_line, make_rows):
    line = make_line()
    ours = session(line.graph)
    fit = ours.fit(make_rows(100), epochs=4, valid=make_rows(40, 1))
    assert fit.history[-1].valid["accuracy"] > 0.95
    assert {p.dtype for m in (line.first, line.second) for p in m.parameters()} == {torch.float32}
    rows = make_rows(5, 2)
    for instance, found in zip(rows, ours.predict(rows), strict=True):
        assert found.dtype == torch.float32
        want = line(instance.inputs["x"])
        torch.testing.assert_close(found, want, rtol=0.03, atol=0.05)


def test_trees_train_as_in_full_precision(make_forest, make_trees):
    ends = []
    for precision in ("full", "bf16"):
        fit = session(make_forest().graph, precision=precision).fit(make_trees(24), epochs=2)
        ends.append(fit.history[-1].loss)
    assert ends[1] == pytest.approx(ends[0], rel=0.02)
    assert ends[1] != ends[0]


def test_a_resumed_session_ends_at_the_same_weights_to_the_bit(
    make_forest, make_trees, weights_of, tmp_path
):
    data, path = make_trees(30), tmp_path / "half.safetensors"
    whole, first, second = make_forest(), make_forest(), make_forest(seed=5)
    ours = session(whole.graph)
    ours.fit(data, epochs=1)
    ours.save(path)
    ours.fit(data, epochs=2)
    session(first.graph).fit(data, epochs=1)
    tensors = read_checkpoint(path).tensors
    assert {t.dtype for t in tensors.values() if t.is_floating_point()} == {torch.float32}
    resumed = session(second.graph)
    resumed.load(path)
    resumed.fit(data, epochs=2)
    modules = [(f.word, f.branch, f.readout) for f in (whole, second)]
    for a, b in zip(*map(weights_of, modules), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(gt.CheckpointError, match=r"precision 'bf16'.*'full'.*weights_only=True"):
        session(first.graph, precision="full").load(path)
    session(first.graph, precision="full").load(path, weights_only=True)


class Seen(nn.Module):
    """A linear map that notes the dtype of its rows."""

    def __init__(self, seen: list[torch.dtype]) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 2), seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.dtype)
        return self.linear(x)


@pytest.mark.parametrize("keep", ["auto", "graph"])
def test_parts_without_a_kernel_work_in_float32_beside_others(make_rows, keep):
    torch.manual_seed(0)
    seen: list[torch.dtype] = []
    graph = gt.Graph(vertex=("label",))
    hidden = graph.input("x").through(nn.Linear(3, 4), name="first")
    hidden = hidden.through(gt.Part(nn.Linear(4, 4), full_precision=True), name="whole")
    logits = hidden.through(gt.Part(Seen(seen), keep=keep), name="seen")
    logits.loss(gt.cross_entropy, target="label", metrics={"accuracy": gt.accuracy})
    fit = session(graph).fit(make_rows(100), epochs=4, valid=make_rows(40, 1))
    assert fit.history[-1].valid["accuracy"] > 0.9
    assert set(seen) <= {torch.float32} and seen


class Rounds(gt.AbstractKernel):
    """A map of bundles that says in its results whether it was told to round."""

    def __init__(self, module: nn.Module, *, bf16: bool = False) -> None:
        self._module, self._bf16 = module, bf16

    def rounded(self) -> gt.AbstractKernel:
        return Rounds(self._module, bf16=True)

    def forward(self, inputs, inside=None, room=None):
        (x,) = inputs
        return (x + (1 if self._bf16 else 2),), (x,)

    def backward(self, gradients, kept, rows, into, inside=None, *, wanted=True):
        return gradients


class Bundled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, inside: gt.Inside) -> torch.Tensor:
        return x * self.weight

    def bundle_kernel(self) -> gt.AbstractKernel:
        return Rounds(self)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_products_over_bundles_are_not_rounded_where_full_precision_is_asked_for(full, fused):
    graph = gt.Graph(value=("label",))
    part = gt.Part(Bundled(), full_precision=full)
    y = graph.input("x", bundle=True).through(part, inside=True, name="node")
    if fused:
        y.loss(gt.cross_entropy, target="label")
    else:
        y.output()
    data = [gt.Instance({"x": torch.zeros(2, 3)}, value={"label": 0})]
    (found,) = session(graph).predict(data)
    assert (found == (2 if full else 1)).all()


def test_what_cannot_be_is_refused_when_the_session_is_made(make_line):
    line = make_line()
    with pytest.raises(ValueError, match=r"precision='half'\): give 'full' or 'bf16'"):
        session(line.graph, precision="half")
    line.second.double()
    with pytest.raises(gt.GraphError, match=r"part 'second': 'weight' is torch.float64"):
        session(line.graph)
