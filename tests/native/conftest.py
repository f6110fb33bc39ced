"""With and without kernels: tests that ask for ``native`` skip where no C compiler is at hand."""

from __future__ import annotations

import shutil

import pytest

from geartrain.native import library


@pytest.fixture(scope="session")
def native() -> library.Library:
    """The kernels of this machine, whatever GEARTRAIN_NATIVE says."""
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("needs a C compiler: cc, gcc or clang")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEARTRAIN_NATIVE", "1")
        return library.load()


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch):
    """Switches between kernels and torch: ``use(library)``, ``use(None)``."""

    def switch(kernels: library.Library | None) -> None:
        monkeypatch.setattr(library, "_settled", True)
        monkeypatch.setattr(library, "_library", kernels)

    return switch
