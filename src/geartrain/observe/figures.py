"""How numbers read: the same wording on the terminal, in the report and in summaries.

0.8123   12.35   8.1e-05   80.7%   1,712/s   3 min 05 s   epoch 2.25   -  (not a number)
"""

from __future__ import annotations

import math
import re

_DISTANCES = frozenset(
    ("loss", "mae", "mse", "rmse", "nll", "perplexity", "ppl", "entropy", "bits", "distance")
)
_UNITS = ("KiB", "MiB", "GiB", "TiB")
_FAILURES = frozenset(("error", "errors", "wer", "cer"))  # shares, yet the lower the better


def is_lower_better(name: str) -> bool:
    """Whether a metric of this name improves as it falls: a loss, a distance, an error."""
    return bool(_words(name) & (_DISTANCES | _FAILURES))


def measure(name: str, value: float) -> str:
    """A metric's value: per cent if it lies in 0..1, unless the name says loss or distance."""
    is_share = 0.0 <= value <= 1.0 and not _words(name) & _DISTANCES
    return f"{100 * value:.1f}%" if is_share else number(value)


def number(value: float) -> str:
    """About four significant digits in at most eight characters; ``-`` for NaN."""
    if math.isnan(value):
        return "-"
    size = abs(value)
    if math.isinf(value) or size >= 1e6 or 0 < size < 1e-3:
        return f"{value:.1e}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4f}" if size < 10 else f"{value:.2f}"


def count(value: int) -> str:
    """Whole numbers with thousands set apart by commas."""
    return f"{value:,}"


def size(nbytes: float) -> str:
    """Bytes, in units of 1024."""
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    power = 1
    while nbytes / 1024**power >= 1000 and power < len(_UNITS):
        power += 1
    found = nbytes / 1024**power
    digits = 0 if found >= 100 else 1 if found >= 10 else 2
    return f"{found:,.{digits}f} {_UNITS[power - 1]}"


def epochs(done: float) -> str:
    """How far training has come: whole epochs as such, a fraction to two digits."""
    return f"{done:.0f}" if done == round(done) else f"{done:.2f}"


def rate(per_second: float) -> str:
    """Instances per second."""
    if not math.isfinite(per_second):
        return "-/s"
    if per_second >= 100:
        return f"{per_second:,.0f}/s"
    return f"{per_second:.1f}/s" if per_second >= 1 else f"{per_second:.2g}/s"


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if not math.isfinite(seconds):
        return "- s"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, left = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {left:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _words(name: str) -> frozenset[str]:
    return frozenset(re.split(r"[^a-z]+", name.lower()))
