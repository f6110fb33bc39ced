"""What every test may rely on: reproducible examples, one kernel thread, a place for real data."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.rigs import bounds, cases, loggers
from tests.rigs.programs import Nursery

# torch is imported where it is needed: the process that hands out tests to others runs none.
if TYPE_CHECKING:
    from geartrain.native import library

pytest_plugins = ["pytester"]

# Same examples on every run and machine; a shared, busy core must not fail a test by its clock.
settings.register_profile("geartrain", deadline=None, derandomize=True)
settings.load_profile("geartrain")


# Nothing that is imported or collected becomes garbage, and to look through all of it, whenever as
# much again has been made, would take a tenth of the time of the tests. So it is left out for good.
gc.disable()


FROZEN = SimpleNamespace(get_freeze_count=lambda: 1)
"""What a collector says that has frozen what there was when tests began."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--first-cases",
        action="store_true",
        help="with --cov: count branches in the first case of each test of a room, and run all",
    )


def pytest_configure(config: pytest.Config) -> None:
    """One thread keeps the bounds of tests. Branches are counted in few cases, if they are: a
    tracer makes them half as long again and more."""
    config.pluginmanager.register(bounds.Watch(config))
    if config.getoption("--first-cases"):
        config.pluginmanager.register(cases.Untraced())


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """All is collected: from now on garbage is looked for among what tests make."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """What works otherwise without native kernels is run without them, too."""
    from tests.rigs import kernels

    if not kernels.goes_both_ways(item):
        return None
    kernels.run(item, nextitem)
    return True


@pytest.fixture(autouse=True)
def one_kernel_thread() -> Iterator[None]:
    """Sums come out in the same order every time, also after a test that asked for more threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def same_draws(seeds_of_the_host: None) -> None:
    """Weights that a test makes without a seed are the same whatever ran before it."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def few_rows_are_shared() -> Iterator[None]:
    """Modules of loops are called in two for the few rows of a test, too."""
    from geartrain.nodes.loop import hoisting

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hoisting, "FEWER", 1)
        patch.setattr(hoisting, "SPARED", 0)
        yield


@pytest.fixture(scope="session", autouse=True)
def loggers_with_a_root() -> None:
    """To hang handlers on each of torch's would take longer than many a test."""
    importlib.import_module("geartrain")  # and what of torch has loggers
    loggers.by_the_root()


@pytest.fixture(scope="session", autouse=True)
def seeds_of_the_host() -> Iterator[None]:
    """Where there is no device torch writes down how each kind of them is to be seeded once there
    is one, with the stack of who asked: a millisecond, some ten thousand times."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        if not torch.accelerator.is_available():
            patch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)
        yield


@pytest.fixture(scope="session", autouse=True)
def frozen_objects_uncounted() -> Iterator[None]:
    """Every fit asks whether objects are frozen, and is told by counting them: 30 ms, for all that
    is frozen here, some thousand times."""
    from geartrain import garbage

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(garbage, "gc", FROZEN)
        yield


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Forks programs; it has imported what they need, which takes longer than most of them."""
    made = Nursery()
    yield made
    made.close()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of the real data sets (``sst/``, ``mnist/``, ...); skips when there is none."""
    value = os.environ.get("GEARTRAIN_DATA")
    if not value:
        pytest.skip(
            "needs real data: set GEARTRAIN_DATA to the folder that holds sst/, mnist/, ..."
        )
    folder = Path(value)
    if not folder.is_dir():
        pytest.fail(
            f"GEARTRAIN_DATA={value!r} is not a folder: set it to the one that holds sst/, mnist/, "
            "... or unset it to skip the tests that need real data"
        )
    return folder


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of ``cifar`` and ``charlm``: photographs of class k have its colour; a few words."""
    import numpy as np

    from geartrain.data.cifar10 import FILE as PHOTOGRAPHS
    from geartrain.data.text import FILE as TEXT

    folder = tmp_path_factory.mktemp("data")
    arrays: dict[str, np.ndarray] = {"classes": np.array([f"class {k}" for k in range(10)])}
    draw = np.random.default_rng(0)
    for name, n in (("train", 23), ("test", 10)):
        labels = np.arange(n) % 10
        images = draw.integers(0, 60, (n, 32, 32, 3)).astype(np.uint8)
        images += (90 * np.stack([labels // 3**c % 3 for c in range(3)], 1)).astype(np.uint8)[
            :, None, None
        ]
        arrays |= {f"x_{name}": images, f"y_{name}": labels}
    for name in (PHOTOGRAPHS, TEXT):
        (folder / name).parent.mkdir()
    np.savez(folder / PHOTOGRAPHS, **arrays)
    (folder / TEXT).write_text("the cat sat on the mat; the rat ate the hat.\n" * 12)
    return folder


@pytest.fixture(scope="session")
def native() -> library.Library:
    """The kernels of this machine, whatever GEARTRAIN_NATIVE says."""
    from geartrain.native import library

    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("needs a C compiler: cc, gcc or clang")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEARTRAIN_NATIVE", "1")
        return library.load()


@pytest.fixture
def needs_kernels() -> None:
    """For tests of what C does: skips where the package has no kernels, or is to do without."""
    from geartrain.native import library

    if library.current() is None:
        pytest.skip("needs native kernels: a C compiler, and GEARTRAIN_NATIVE not 0")


@pytest.fixture
def in_float64() -> Iterator[None]:
    """What is made without a dtype is float64."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def use(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[library.Library | None], None]:
    """Switches between kernels and torch: ``use(library)``, ``use(None)``."""
    from geartrain.native import library

    def switch(kernels: library.Library | None) -> None:
        monkeypatch.setattr(library, "_settled", True)
        monkeypatch.setattr(library, "_library", kernels)

    return switch
