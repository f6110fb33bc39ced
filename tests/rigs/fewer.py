"""What processes of tests do not tell the one that hands tests out: that setups have passed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest

SHOW_ALL: Final = ("durations", "xmlpath")
"""Options of pytest that ask for every report; so does ``-v``."""


def tell_what_is_shown(config: pytest.Config) -> None:
    """A process of xdist sends what is shown: half of what it would send for a test that passes.

    To send, to read and to pass on what nobody sees takes as long as many a test.
    """
    asked = any(getattr(config.option, name, None) for name in SHOW_ALL)
    if asked or config.option.verbose > 0 or not hasattr(config, "workerinput"):
        return
    for worker in config.pluginmanager.get_plugins():
        if hasattr(worker, "sendevent"):
            worker.sendevent = partial(_tell, worker.sendevent)


def _tell(send: Callable[..., None], name: str, **what: Any) -> None:
    if shown(name, what.get("data", {})):
        send(name, **what)


def shown(name: str, report: dict[str, Any]) -> bool:
    """Whether a message of a process is shown, or counted.

    Args:
        name: Of the message.
        report: What it says of a test, if it does.
    """
    if name == "testreport":
        return bool(report["when"] == "call" or report["outcome"] != "passed")
    return name != "logstart"
