"""Residual network for small images, as a list of blocks that can be cut anywhere.

    image (B, 3, H, W)
      stem    convolution, perhaps with stride 2              (B, w, H, W)
      stage 1 block, block, ...                               (B, w, H, W)
      stage 2 block with stride 2, block, ...                 (B, 2w, H/2, W/2)
      stage 3 block with stride 2, block, ...                 (B, 4w, H/4, W/4)
      head    norm, ReLU, mean over the places, linear map    (B, classes)

    block   x ─► norm, ReLU ─► convolution ─► norm, ReLU ─► convolution ─► + shortcut of x

Every block costs about the same number of operations: half the places, twice the channels.
Source: He, Zhang, Ren, Sun 2016, arXiv:1603.05027 (order within a block), and section 4.2 of
arXiv:1512.03385 (stages for images of 32 x 32). Shortcuts that change shape take the mean over 2 x
2 places and add empty channels: no weights.
"""

from __future__ import annotations

from typing import Final, final

from torch import Tensor, nn
from torch.nn import functional as F

STAGES: Final = 3


@final
class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut.

    Args:
        channels: Of what comes, ``(B, channels, H, W)``.
        out: Of what leaves, ``(B, out, H / stride, W / stride)``; not fewer.
        stride: Of the first convolution, 1 or 2.

    Raises:
        ValueError: Fewer channels out than in, or another stride.
    """

    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        if out < channels or stride not in (1, 2):
            raise ValueError(
                f"ResidualBlock({channels}, {out}, stride={stride}): its shortcut adds empty "
                "channels and halves the sides; give out of channels or more, and stride 1 or 2"
            )
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.stride, self.added = stride, out - channels

    def forward(self, x: Tensor) -> Tensor:
        """``(B, channels, H, W)`` to ``(B, out, H / stride, W / stride)``."""
        y = self.conv1(F.relu(self.norm1(x)))
        y = self.conv2(F.relu(self.norm2(y)))
        if self.stride > 1:
            x = F.avg_pool2d(x, self.stride)
        if self.added:
            x = F.pad(x, (0, 0, 0, 0, 0, self.added))
        added: Tensor = x + y
        return added


@final
class PooledHead(nn.Module):
    """Scores of classes from the mean over all places.

    Args:
        channels: Of what comes, ``(B, channels, H, W)``.
        classes: How many.
    """

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.linear = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, channels, H, W)`` to ``(B, classes)``."""
        scores: Tensor = self.linear(F.relu(self.norm(x)).mean((2, 3)))
        return scores


def residual_network(
    classes: int, *, width: int = 16, blocks: int = 3, channels: int = 3, stride: int = 1
) -> nn.Sequential:
    """Stem, three stages of residual blocks, head, in a row: ``3 * blocks + 2`` modules.

    Args:
        classes: How many.
        width: Channels of the first stage; the second and third have twice and four times as many.
        blocks: Of each stage.
        channels: Of the images, whose sides are multiples of ``4 * stride``.
        stride: Of the stem. With 2 all stages have a quarter of the places.

    Raises:
        ValueError: A number below 1.
    """
    if min(classes, width, blocks, channels, stride) < 1:
        raise ValueError(
            f"residual_network({classes}, width={width}, blocks={blocks}, channels={channels}, "
            f"stride={stride}): give 1 or more for each"
        )
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)]
    now = width
    for stage in range(STAGES):
        for block in range(blocks):
            out = width << stage
            layers.append(ResidualBlock(now, out, 2 if stage and not block else 1))
            now = out
    return nn.Sequential(*layers, PooledHead(now, classes))
