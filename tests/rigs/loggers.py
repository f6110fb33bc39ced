"""Loggers of torch without ways of their own."""

from __future__ import annotations

import logging


def by_the_root() -> None:
    """What torch's loggers say comes by the root, as what others say.

    Else pytest hangs its two handlers on each of some forty of them, and takes them off, three
    times a test.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.partition(".")[0] == "torch":
            logger.propagate = True
