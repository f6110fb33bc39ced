"""A model's kernels are a library of their own, compiled with the others and linked with them."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from geartrain.native import build, library, operations
from geartrain.native.library import POINTER, WORD, Extension

SOURCE = """
#include "shared.inc"

#include "float.inc"
#include "model.inc"

#include "double.inc"
#include "model.inc"

int64_t thrice(int64_t n) { return 3 * n; }
"""
TYPED = """
/* y (n, width) = sigmoid of x (n, depth) times w (depth, width). */
int64_t NAME(model)(int64_t n, int64_t depth, int64_t width, const REAL *x, const REAL *w,
                    REAL *y) {
  REAL *const packed = malloc(sizeof(REAL) * (size_t)(depth * NAME(padded)(width)));
  NAME(pack)(depth, 0, depth, width, w, width, 1, packed);
  NAME(multiply)(n, depth, width, packed, (NAME(Product)){
      .a = x, .a_row = depth, .a_column = 1, .c = y, .c_row = width});
  NAME(squash)(y, y, n * width);
  free(packed);
  return 0;
}
"""


@pytest.fixture
def model(
    native: library.Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Extension]:
    """A model of a product and its squash, in a process that has settled on kernels without it."""
    (tmp_path / "model.c").write_text(SOURCE)
    (tmp_path / "model.inc").write_text(TYPED)
    monkeypatch.setenv("GEARTRAIN_NATIVE", "1")
    monkeypatch.setattr(library, "_extensions", [])
    monkeypatch.setattr(library, "_settled", True)
    monkeypatch.setattr(library, "_library", library.load())
    monkeypatch.setattr(library, "_status", "")
    yield Extension(
        build.Sources("model", tmp_path / "model.c"),
        typed={"model": (WORD, WORD, WORD, POINTER, POINTER, POINTER)},
        plain={"thrice": (WORD,)},
    )
    for made in build.cache_directory().glob("model-*"):
        made.unlink()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_its_functions_call_those_of_the_kernels(model: Extension, dtype: torch.dtype) -> None:
    assert model.functions(dtype) is None, "nobody has added it"
    library.add(model)
    functions, plain = model.functions(dtype), model.function("thrice")
    assert functions is not None and plain is not None
    assert plain(14) == 42
    x, w, y = torch.randn(40, 9, dtype=dtype), torch.randn(9, 5, dtype=dtype), torch.empty(40, 5)
    y = y.to(dtype)
    for run in functions["model"]:
        y.zero_()
        with operations.Counted() as counted:
            assert run(40, 9, 5, x.data_ptr(), w.data_ptr(), y.data_ptr()) == 0
        torch.testing.assert_close(y, (x @ w).sigmoid(), rtol=1e-5, atol=1e-6)
        assert counted.operations == 2 * 40 * 9 * 5, "counted where all products are"
    assert model.functions(torch.bfloat16) is None
    assert "model-" in library.status()


def test_without_kernels_it_has_none_either(
    model: Extension, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_library", None)
    library.add(model)
    assert model.functions(torch.float32) is None and model.function("thrice") is None


def test_it_is_made_again_for_other_kernels_and_for_what_lies_beside_it(model: Extension) -> None:
    def made() -> list[str]:
        return [path.name for path in build.shared_objects([model.sources])]

    first = made()
    assert made() == first
    beside = model.sources.main.with_name("model.inc")
    beside.write_text(beside.read_text() + "\n")
    second = made()
    assert second[0] == first[0] and second[1] != first[1]
    base = build.cache_directory() / second[0]
    identity = [build._identity(build.compiler(), model.sources, name) for name in (base.name, "x")]
    assert identity[0] in second[1] and identity[0] != identity[1]


def test_one_that_does_not_compile_leaves_all_to_torch(
    model: Extension, caplog: pytest.LogCaptureFixture
) -> None:
    model.sources.main.write_text("int64_t no(\n")
    library.add(model)
    with caplog.at_level(logging.WARNING, "geartrain.native"):
        assert library.kind() == "torch"
    assert "model.c" in caplog.text and "error" in caplog.text
    assert "none, torch does their work" in library.status()


def test_the_cache_may_be_moved(
    model: Extension, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    underway = shutil.ignore_patterns("making-*")  # by other processes, which end them
    shutil.copytree(build.cache_directory(), tmp_path / "before", ignore=underway)
    monkeypatch.setenv("GEARTRAIN_CACHE", str(tmp_path / "before"))
    build.shared_objects([model.sources])
    (tmp_path / "before").rename(tmp_path / "after")
    (path,) = (tmp_path / "after").glob("model-*.so")
    # In a process that has not loaded the kernels, or the loader would find those.
    asks = f"import ctypes; print(ctypes.CDLL({str(path)!r}).thrice(5))"
    found = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True)
    assert found.stdout == "15\n"
