"""``geartrain recipes``: what there is to train."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from geartrain.cli.settings import told
from geartrain.recipes import RECIPES, Choice, Option, Recipe


def recipes(as_json: bool) -> None:
    """Print a table, or one JSON object with a list of them."""
    if as_json:
        print(json.dumps({"recipes": [described(recipe) for recipe in RECIPES]}))
        return
    console = Console()
    for recipe in RECIPES:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        table.add_row("  paper", recipe.paper)
        table.add_row("  data", ", ".join(recipe.needs) or "generated")
        table.add_row("  metrics", f"{', '.join(recipe.metrics)}; aims at {recipe.target}")
        table.add_row(
            "  defaults",
            f"{recipe.epochs} epochs, {recipe.in_flight({})} in flight, an update every "
            f"{recipe.update_size({})} {recipe.unit}",
        )
        table.add_row("  workers", recipe.why)
        table.add_row("  bottleneck", recipe.bottleneck or "none")
        for option in recipe.options:
            table.add_row("  option", f"{told(option.name, option.default)}: {_explained(option)}")
        head = Text.assemble((recipe.name, "bold"), f"  {recipe.summary}")
        lines = head.wrap(console, console.width - 2)
        console.print(Text("\n  ").join(lines))
        console.print(table)


def _explained(option: Option | Choice) -> str:
    if isinstance(option, Option):
        return option.what
    return f"{option.what}; one of {', '.join(option.words)}"


def described(recipe: Recipe) -> dict[str, object]:
    """A recipe as JSON."""
    return {
        "name": recipe.name,
        "summary": recipe.summary,
        "paper": recipe.paper,
        "metrics": recipe.metrics,
        "target": recipe.target,
        "max_active": recipe.in_flight({}),
        "update_every": recipe.update_size({}),
        "unit": recipe.unit,
        "epochs": recipe.epochs,
        "needs": recipe.needs,
        "runtime": recipe.runtime,
        "workers": recipe.workers or 2,
        "why": recipe.why,
        "bottleneck": recipe.bottleneck,
        "options": [asdict(option) for option in recipe.options],
    }
