"""How much of a data file is read, at most: a file may promise more than a machine has.

    lines of text    trees, stories: each line becomes objects          64 MiB
    text             one string                                         1 GiB
    arrays           npz, idx; counted when they are decompressed       4 GiB

All that we know are far below. ``GEARTRAIN_DATA_BYTES``, such as ``16G``, takes the place of all
three.
"""

from __future__ import annotations

import os
import re
from typing import Final

VARIABLE: Final = "GEARTRAIN_DATA_BYTES"
LINES: Final = 64 << 20
TEXT: Final = 1 << 30
ARRAYS: Final = 4 << 30
REMEDY: Final = f"see whether it is the right file, or set ${VARIABLE} to read more, such as 16G"

_UNITS: Final = {"": 1, "k": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def most(usual: int) -> int:
    """Bytes that may be read where ``usual`` are, unless the environment says otherwise.

    Raises:
        ValueError: It says something that is no number of bytes.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return usual
    found = re.fullmatch(r"(\d{1,15})([kMGT]?)(?:i?B)?", text.strip())
    if found is None:
        raise ValueError(f"${VARIABLE}={text[:40]}: write a number of bytes, such as 16G")
    return int(found[1]) * _UNITS[found[2]]
