"""``python -m geartrain`` is the command ``geartrain``."""

from geartrain.cli.main import app

app(prog_name="geartrain")
