"""Rows that grow in derived programs: transposed convolutions, folds, images of another size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from tests.rigs.rowwise import assert_as_autograd, both, in_c

N, C = 5, 4
LINE, PLANE = (C, 5), (C, 3, 4)
One = Callable[[Tensor], Tensor]

pytestmark = pytest.mark.usefixtures("needs_kernels")


def resized(**how: object) -> One:
    return lambda x: functional.interpolate(x, **how)  # type: ignore[arg-type]


SPREAD: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "line": (lambda: nn.ConvTranspose1d(C, 3, 3), LINE),
    "line, without bias": (lambda: nn.ConvTranspose1d(C, 3, 2, bias=False), LINE),
    "line, apart": (lambda: nn.ConvTranspose1d(C, 3, 3, 2, 1, 1), LINE),
    "line, with gaps": (lambda: nn.ConvTranspose1d(C, 3, 3, 1, 2, dilation=2), LINE),
    "line, in groups": (lambda: nn.ConvTranspose1d(C, 6, 3, 2, groups=2), LINE),
    "line, channels apart": (lambda: nn.ConvTranspose1d(C, C, 3, groups=C), LINE),
    "plane": (lambda: nn.ConvTranspose2d(C, 3, (3, 2), (2, 1), (1, 0)), PLANE),
    "plane, doubled": (lambda: nn.ConvTranspose2d(C, 2, 2, 2), PLANE),
    "solid": (lambda: nn.ConvTranspose3d(C, 2, 2), (C, 2, 1, 2)),
}
OTHERS: Mapping[str, tuple[One, tuple[int, ...]]] = {
    "fold": (lambda x: functional.fold(x, (4, 4), 2, stride=2), (8, 4)),
    "fold that overlaps": (
        lambda x: functional.fold(x, (3, 4), (2, 3), padding=1, dilation=(2, 1)),
        (6, 12),
    ),
    "nearest": (resized(scale_factor=2), PLANE),
    "nearest of a line": (resized(scale_factor=2.5), LINE),
    "nearest, of a size": (resized(size=(2, 7)), PLANE),
    "nearest, as it says": (resized(scale_factor=1.7, recompute_scale_factor=True), PLANE),
    "nearest middle": (resized(size=(5, 3), mode="nearest-exact"), PLANE),
    "linear": (resized(scale_factor=2, mode="linear"), LINE),
    "linear, by corners": (resized(size=8, mode="linear", align_corners=True), LINE),
    "linear, of one": (resized(size=1, mode="linear", align_corners=True), LINE),
    "bilinear": (resized(scale_factor=(2, 1.5), mode="bilinear"), PLANE),
    "bilinear, less": (resized(size=2, mode="bilinear"), PLANE),
    "bilinear, by corners": (resized(size=(5, 7), mode="bilinear", align_corners=True), PLANE),
    "trilinear": (resized(scale_factor=2, mode="trilinear"), (1, 2, 2, 3)),
    "area": (resized(size=(2, 3), mode="area"), PLANE),
    "around": (lambda x: functional.pad(x, (2, 1), mode="circular"), LINE),
    "around a plane": (lambda x: functional.pad(x, (2, 0, 1, 3), mode="circular"), PLANE),
    "by neighbours": (lambda x: functional.local_response_norm(x, 2, 0.3), LINE),
    "by neighbours in a plane": (lambda x: functional.local_response_norm(x, 3, 0.3), PLANE),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SPREAD)
def test_transposed_convolutions_are_torchs(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make, shape = SPREAD[name]
    assert_as_autograd(make().to(dtype), (torch.randn(N, *shape, dtype=dtype),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OTHERS)
def test_what_grows_is_torchs(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    function, shape = OTHERS[name]
    assert_close(*both(function, [torch.randn(N, *shape, dtype=dtype)]))


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_convolutions_see_around_what_their_module_says(mode: str) -> None:
    module = nn.Conv1d(C, 3, 3, padding=2, padding_mode=mode)  # type: ignore[arg-type]
    assert_as_autograd(module.double(), (torch.randn(N, *LINE).double(),))


def test_what_is_no_number_is_nearest_where_torch_has_it() -> None:
    x = torch.randn(N, *LINE)
    x[0, 0, 2], x[1, 1, 3] = math.nan, math.inf
    assert_close(*both(OTHERS["nearest of a line"][0], [x]), equal_nan=True)


def test_what_is_not_told_is_left_to_torch() -> None:
    x = torch.randn(N, *PLANE)
    for module in (
        nn.Upsample(scale_factor=2, mode="bicubic"),
        nn.ConvTranspose2d(C, 200, 4),
        nn.Sequential(nn.Conv2d(C, 9, 1), nn.ConvTranspose2d(9, 9, 2, groups=9)),
    ):
        assert not in_c(module, (x,))
