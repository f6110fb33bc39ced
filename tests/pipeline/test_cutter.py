"""Cuts: contiguous, balanced, never an empty part; what is no row of blocks is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from geartrain.errors import GraphError
from geartrain.pipeline.cutter import (
    balanced_cuts,
    check_cuts,
    parameter_costs,
    quiet,
    row_of,
    run,
    time_costs,
)


class Stack(nn.Module):
    """Stem, blocks, head: each assigned in the order in which it runs."""

    def __init__(self, *, backwards: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.norm = nn.LayerNorm(4)
        self.out = nn.Linear(4, 2)
        self._backwards = backwards

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in reversed(self.blocks) if self._backwards else self.blocks:
            h = block(h)
        return self.out(self.norm(h))


def cheapest(costs: list[float], parts: int) -> float:
    """The least cost of the costliest part, by trying all cuts."""
    n = len(costs)
    return min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *cuts, n]))
        for cuts in itertools.combinations(range(1, n), parts - 1)
    )


@given(st.lists(st.integers(0, 20).map(float), min_size=1, max_size=9), st.integers(1, 9))
def test_balanced_parts_are_contiguous_and_not_empty_and_the_costliest_is_as_cheap_as_can_be(
    costs: list[float], parts: int
) -> None:
    if parts > len(costs):
        with pytest.raises(ValueError, match=f"parts={parts} of {len(costs)} blocks"):
            balanced_cuts(costs, parts)
        return
    cuts = balanced_cuts(costs, parts)
    ends = [0, *cuts, len(costs)]
    assert len(cuts) == parts - 1
    assert all(a < b for a, b in itertools.pairwise(ends))
    assert max(sum(costs[a:b]) for a, b in itertools.pairwise(ends)) == cheapest(costs, parts)


def test_among_equally_good_cuts_the_other_parts_are_equal() -> None:
    assert balanced_cuts([9, 1, 1, 1, 1], 3) == (1, 3)


@pytest.mark.parametrize("cuts", [[0], [4], [2, 2], [3, 1], [-1]])
def test_cuts_by_hand_that_leave_a_part_empty_are_refused(cuts: list[int]) -> None:
    with pytest.raises(ValueError, match="of 4 blocks leave a part empty"):
        check_cuts(cuts, 4)


def test_costs_count_parameters_once_and_stem_and_head_with_their_neighbours() -> None:
    linear = nn.Linear(4, 4)
    assert parameter_costs(row_of(nn.Sequential(nn.Sequential(linear, linear), nn.ReLU()))) == [
        20.0,
        0.0,
    ]
    assert parameter_costs(row_of(Stack(), sample=torch.randn(2, 3))) == [36, 20, 20, 38]


def test_measured_time_finds_the_slow_block_and_changes_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        nn.Dropout(0.5),
        nn.Linear(64, 4096),
        nn.Linear(4096, 8),
    )
    before = {name: x.clone() for name, x in model.state_dict().items()}
    state = torch.get_rng_state()
    costs = time_costs(row_of(model), torch.randn(256, 64, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert min(costs) > 0
    assert costs[3] > costs[1]


def test_the_children_before_the_list_of_blocks_are_the_stem_and_those_behind_it_the_head() -> None:
    model = Stack().train()
    x = torch.randn(5, 3)
    row = row_of(model, sample=x)
    assert row.stem == (model.embed,)
    assert row.head == (model.norm, model.out)
    assert model.training
    assert all(inner.training for inner in model.modules())
    with quiet([model]):
        assert torch.equal(run(itertools.chain(*row.units()), x), model(x))


def test_pieces_may_be_named_and_lists_may_follow_each_other() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 2)
            self.upper = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
            self.lower = nn.Sequential(nn.Linear(3, 4), nn.ReLU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.upper(self.lower(x)).flatten(1))

    model = Two()
    row = row_of(
        model,
        blocks=["lower", "upper"],
        stem=[],
        head=[nn.Flatten(), "out"],
        sample=torch.randn(2, 3),
    )
    assert row.blocks == (*model.lower, *model.upper)
    with pytest.raises(GraphError, match="lists \\['upper', 'lower'\\] of blocks"):
        row_of(model)
    with pytest.raises(GraphError, match="has no submodule 'middle'"):
        row_of(model, blocks="middle", stem=[], head=[])
    with pytest.raises(GraphError, match="'out' is a Linear"):
        row_of(model, blocks="out", stem=[], head=[])


def test_a_guess_wants_a_sample_and_a_module_that_runs_otherwise_is_refused() -> None:
    with pytest.raises(GraphError, match="give sample="):
        row_of(Stack())
    with pytest.raises(GraphError, match="is not stem, blocks and head one after the other"):
        row_of(Stack(backwards=True), sample=torch.randn(2, 3))
    wrong = Stack()
    with pytest.raises(GraphError, match="do not run one after the other"):
        row_of(wrong, stem=["norm", "embed"], head=["out"], sample=torch.randn(2, 3))


def test_a_parameter_that_belongs_to_no_piece_is_refused() -> None:
    model = Stack()
    model.scale = nn.Parameter(torch.ones(4))
    with pytest.raises(GraphError, match=r"parameters \['scale'\] belong to no stem"):
        row_of(model, sample=torch.randn(2, 3))


def test_modules_without_blocks_are_refused() -> None:
    with pytest.raises(GraphError, match="has no block"):
        row_of(nn.Sequential())
    with pytest.raises(GraphError, match="has no list of blocks"):
        row_of(nn.Linear(2, 2))
