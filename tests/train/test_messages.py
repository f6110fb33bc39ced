"""What one reads where something else was meant: each names the thing and the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from tests.rigs.sessions import session_of


def data(n: int = 8) -> list[gt.Instance]:
    torch.manual_seed(0)
    return [
        gt.Instance({"x": torch.randn(2, 4)}, value={"label": k % 3}, key=f"line {k}")
        for k in range(n)
    ]


def fitted(build: Callable[[gt.Stream], gt.Stream], **rules: Any) -> None:
    graph = gt.Graph(value=("label",))
    build(graph.input("x", step=0)).loss(gt.cross_entropy, "label")
    rules = {"update_every": 4} | rules
    gt.Session(graph, rules=gt.Rules(**rules), runtime=gt.Simulated(1)).fit(data(), epochs=1)


def linear(x: gt.Stream) -> gt.Stream:
    return x.through(nn.Linear(4, 3), name="map")


ADAM = torch.optim.Adam([nn.Parameter(torch.zeros(1))])
SCHEDULER = torch.optim.lr_scheduler.StepLR(ADAM, 1)

MISUSES: dict[str, tuple[dict[str, Any], str]] = {
    "an optimiser": ({"optimizer": ADAM}, r"optimizer=Adam\(.*partial\(torch\.optim\.Adam, lr="),
    "its name": ({"optimizer": "adam"}, r"optimizer='adam': give what makes an optimiser"),
    "a scheduler": (
        {"scheduler": SCHEDULER},
        r"scheduler=StepLR\(.*partial\(torch\.optim\.lr_scheduler\.StepLR",
    ),
    "a number to clip at": ({"clip": 5.0}, r"clip=5\.0: give Clip\(norm=\.\.\.\)"),
    "a rate that is fixed": ({"schedule": 0.5}, r"schedule=0\.5: give a function"),
    "a class of views": ({"view": gt.Stashed}, r"view=.*give a view, such as Stashed\(\)"),
    "a class of delays": ({"delay": gt.GapAware}, r"delay=.*give a rule, such as GapAware\(\)"),
    "words for a trigger": ({"update_every": "epoch"}, r"update_every='epoch': give a number"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_rules_say_what_they_want(name: str) -> None:
    given, words = MISUSES[name]
    for make in (gt.Rules, partial(gt.Part, nn.Linear(2, 2))):
        with pytest.raises(TypeError, match=words):
            make(**given)


def test_an_optimiser_that_wants_a_closure_is_refused_when_the_session_is_made() -> None:
    with pytest.raises(ValueError, match=r"part 'map': LBFGS\.step\(\) wants a closure.*SGD"):
        fitted(linear, optimizer=torch.optim.LBFGS)


def not_yet_made() -> nn.Module:
    return nn.LazyLinear(3)


def without_numbers() -> nn.Module:
    return nn.Linear(4, 3, device="meta")


def with_a_hook_for_grad() -> nn.Module:
    module = nn.Linear(4, 3)
    module.bias.register_post_accumulate_grad_hook(lambda p: None)
    return module


def made_for_inference() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(4, 3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (made_for_inference, "part 'map': 'weight' was made under torch.inference_mode"),
        (not_yet_made, "part 'map': 'weight' of LazyLinear is made by the first call.*before the"),
        (without_numbers, "part 'map': 'weight' lies on the device meta.*to_empty"),
        (with_a_hook_for_grad, r"part 'map': 'bias' has a hook for its \.grad.*register_hook"),
    ],
)
def test_weights_that_cannot_be_trained_are_refused_when_the_session_is_made(make, words) -> None:
    graph = gt.Graph(value=("label",))
    graph.input("x").through(make(), name="map").loss(gt.cross_entropy, "label")
    with pytest.raises(gt.GraphError, match=words):
        gt.Session(graph, runtime=gt.Simulated(1))


def test_what_makes_no_optimiser_is_refused_when_the_session_is_made() -> None:
    with pytest.raises(TypeError, match="part 'map': optimizer= made nothing; it gets the param"):
        fitted(linear, optimizer=lambda parameters: None)


def test_an_optimiser_of_other_weights_is_refused_when_the_session_is_made() -> None:
    foreign = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"part 'map': optimizer= made a SGD of a param.*\(2,\)"):
        fitted(linear, optimizer=lambda own: torch.optim.SGD([*own, foreign], lr=0.1))


@pytest.mark.parametrize(
    ("metric", "came"),
    [
        (lambda y, t: (y.argmax(1) == t).float().mean(), "()"),
        (lambda y, t: 0.5, "float"),
        (lambda y, t: y, r"(\d+, 3)"),
    ],
)
def test_a_metric_that_is_no_number_a_row_is_refused_by_name(metric: Any, came: str) -> None:
    graph = gt.Graph(value=("label",))
    y = linear(graph.input("x"))
    y.loss(gt.cross_entropy, "label", metrics={"hits": metric}, name="judge")
    shape = came.replace("(", r"\(").replace(")", r"\)") if came[1:2] != "\\" else came
    shape = shape.replace(r"(\d", r"\(\d").replace("3)", r"3\)")
    with pytest.raises(gt.GraphError, match=rf"'judge': metric 'hits' returned {shape} for \d+ ro"):
        gt.Session(graph, runtime=gt.Simulated(1)).evaluate(data())


def test_a_run_that_stands_still_at_a_window_says_so() -> None:
    def loop(x: gt.Stream) -> gt.Stream:
        rounds = x.graph.loop(name="rounds", run="steps")
        rounds.join(x)
        more, done = rounds.through(nn.Linear(4, 4), name="cell").where(lambda m: m.step < 3)
        rounds.join(more.move(step=lambda m: m.step + 1))
        return done.through(nn.Linear(4, 3), name="last")

    fitted(loop)
    with pytest.raises(
        gt.StuckError, match=r"part 'cell' has window=2: 8 messages .* a loop, leav"
    ):
        fitted(loop, window=2)


class Fails(torch.autograd.Function):
    """The way back of some rows fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("boom")


class FailsBack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Fails.apply(self.linear(x))


def straight(x: gt.Stream, keep: Any) -> gt.Stream:
    return x.through(FailsBack(), name="fails", keep=keep)


def behind_a_loop(x: gt.Stream, keep: Any) -> gt.Stream:
    rounds = x.graph.loop(run="steps")
    rounds.join(x)
    more, done = rounds.through(nn.Linear(4, 4)).where(lambda m: m.step < 3)
    rounds.join(more.move(step=lambda m: m.step + 1))
    return straight(done, keep)


def behind_a_group(x: gt.Stream, keep: Any) -> gt.Stream:
    both = x.group("instance", 2).through(nn.Flatten(), name="flat")
    return straight(both.through(nn.Linear(8, 4), name="both"), keep)


def behind_pieces(x: gt.Stream, keep: Any) -> gt.Stream:
    a, b = x.through(nn.Linear(4, 4)).split(1, 3)
    return straight(x.graph.concat(a, b).detach(), keep)


def behind_copies(x: gt.Stream, keep: Any) -> gt.Stream:
    copies = x.through(nn.Linear(4, 4)).flatmap("copy", count=lambda m: 0 * m.vertex + 2)
    return straight(copies.group(("vertex", "copy"), 1, how="sum"), keep)


def behind_parts(x: gt.Stream, keep: Any) -> gt.Stream:
    parts = x.through(lambda x: x[:, None].expand(-1, 2, -1)).ungroup(index="part")
    return straight(parts.replay(times=1), keep)


@pytest.mark.parametrize("keep", ["inputs", "graph"])
@pytest.mark.parametrize(
    "way", [straight, behind_a_loop, behind_a_group, behind_pieces, behind_copies, behind_parts]
)
def test_an_error_of_the_way_back_names_the_instances(
    way: Callable[[gt.Stream, Any], gt.Stream], keep: Any
) -> None:
    graph = gt.Graph()
    way(graph.input("x", step=0), keep).loss(lambda y: y.square().sum(1))
    session = gt.Session(
        graph,
        runtime=gt.Simulated(2),
        max_active=2,
        schedule=gt.Schedule(ramp=gt.Ramp(over=0)),
        reading=gt.Reading(shuffle=False),
    )
    with pytest.raises(gt.WorkerError) as caught:
        session.fit(data(), epochs=1)
    assert re.search(r"'fails' of part 'fails', backward, .*, instance \d", str(caught.value))
    assert set(re.findall(r"line \d", str(caught.value))) <= {"line 0", "line 1"}
    assert "instance 0 (line 0)" in str(caught.value) or "instance 1 (line 1)" in str(caught.value)


def test_an_error_of_an_overlapping_part_names_the_instance() -> None:
    graph = gt.Graph(value=("label",))
    x = graph.input("x", bundle=True, alone=True)
    up, own = x.overlap(FailsBack(), name="fails")
    own.loss(lambda y: y.square().sum(1))
    up.through(nn.Linear(4, 3), keep="graph").loss(gt.cross_entropy, "label")
    with pytest.raises(gt.WorkerError, match=r"'fails' of part 'fails', backward.*\(line 0\)"):
        gt.Session(
            graph, runtime=gt.Simulated(1), max_active=1, reading=gt.Reading(shuffle=False)
        ).fit(data(), epochs=1)


def test_weights_on_both_sides_of_a_cut_are_called_as_in_the_users_module() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    with pytest.raises(gt.GraphError) as caught:
        gt.Pipeline(Tied(), parts=2, sample=torch.zeros(3, dtype=torch.int64))
    assert "'embed.weight' of part 0 is also 'head.weight' of part 1" in str(caught.value)


def test_the_promise_of_the_readme_is_kept(tmp_path: Path) -> None:
    """Graphs, data and runs: GeartrainError. Arguments: ValueError or TypeError, at the call."""
    graph = gt.Graph(value=("label",))
    linear(graph.input("x")).loss(gt.cross_entropy, "label")

    def session(**options: Any) -> gt.Session:
        return session_of(graph, runtime=gt.Simulated(1), **options)

    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

        def row_kernel(self) -> object:
            return 3

        bundle_kernel = row_kernel

    def odd(inside: bool) -> gt.Session:
        found = gt.Graph()
        x = found.input("x", bundle=inside)
        x.through(Odd(), inside=inside).output()
        return gt.Session(found)

    at_fault = [
        lambda: session().fit([gt.Instance({"y": torch.zeros(1, 4)})], epochs=1),
        lambda: session().fit([3], epochs=1),
        lambda: session().predict([gt.Instance({"x": [1.0]})]),  # type: ignore[dict-item]
        lambda: session().load(tmp_path / "no file"),
        lambda: odd(False).predict(data()),
        lambda: odd(True).predict(data()),
    ]
    for act in at_fault:
        with pytest.raises(gt.GeartrainError):
            act()
    misused = [
        lambda: session(max_active=0),
        lambda: session(precision="half"),
        lambda: session().fit(data(), epochs=-1),
        lambda: session().fit(data(), epochs=1, until=gt.Target("nothing", 1.0)),
        lambda: session().fit(iter(data()), epochs=1),
        lambda: session(placement={"nobody": 0}).fit(data(), epochs=1),
        lambda: gt.Rules(update_every=0),
        lambda: gt.Threads(0),
        lambda: graph.input("z").through(3),  # type: ignore[arg-type]
    ]
    for act in misused:
        with pytest.raises((ValueError, TypeError)):
            act()


def test_a_session_says_what_it_is_and_how_far_it_has_come() -> None:
    graph = gt.Graph(value=("label",))
    linear(graph.input("x", step=0)).loss(gt.cross_entropy, "label")
    session = gt.Session(graph, rules=gt.Rules(update_every=4), runtime=gt.Threads(2))
    told = "Session(parts=1, weights=15, runtime=Threads(2), epoch={}, trained={})"
    assert repr(session) == told.format(1, 0)
    session.fit(data(), epochs=2)
    assert repr(session) == told.format(3, 16)
