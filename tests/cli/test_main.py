"""The command itself: version, help, recipes, graphs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from geartrain.cli.settings import told
from geartrain.cli.version import version
from geartrain.recipes import RECIPES
from tests.rigs.programs import Nursery, Program

COMMANDS = (
    *("train", "simulate", "compare", "evaluate", "recipes"),
    *("graph", "report", "demo", "native"),
)


def test_version_and_help_say_what_they_should(geartrain) -> None:
    assert geartrain("--version").out == f"geartrain {version()}\n"
    words = geartrain("--help").out
    for command in COMMANDS:
        assert command in words


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_a_value_for_no_option_that_takes_none(geartrain, command: str) -> None:
    words = geartrain(command, "--help").out
    assert "--help" in words
    assert [line for line in words.splitlines() if "<bool>" in line and "--help" not in line] == []


def test_recipes_are_listed_with_their_options_for_people_and_for_scripts(geartrain) -> None:
    shown = geartrain("recipes").out
    listed = json.loads(geartrain("recipes", "--json").out)["recipes"]
    assert [each["name"] for each in listed] == [recipe.name for recipe in RECIPES]
    for recipe in RECIPES:
        assert recipe.name in shown
        for option in recipe.options:
            assert told(option.name, option.default) in shown


@pytest.mark.parametrize(
    ("format", "said"), [("text", "loss"), ("mermaid", "flowchart"), ("dot", "digraph")]
)
def test_graphs_are_drawn_in_three_formats(geartrain, format: str, said: str) -> None:
    for recipe in RECIPES:
        drawn = geartrain("graph", recipe.name, "--format", format)
        assert (drawn.status, said in drawn.out) == (0, True)


def test_the_module_runs_as_the_command(nursery: Nursery, tmp_path: Path) -> None:
    module = "import runpy; runpy.run_module('geartrain', run_name='__main__', alter_sys=True)"
    program = Program(nursery, tmp_path / "p", module, "--version", whole=True)
    try:
        assert program.end() == (0, "")
    finally:
        program.close()
    assert program.lines == [f"geartrain {version()}"]
