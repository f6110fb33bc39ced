"""What a program in C does, step by step."""

from __future__ import annotations

from geartrain.native.fused import Op, Steps


def ops_of(steps: Steps) -> list[Op]:
    """What each of its steps does."""
    size = len(steps._steps) // steps._count
    return [
        Op(int.from_bytes(steps._steps[k : k + 8], "little"))
        for k in range(0, len(steps._steps), size)
    ]
