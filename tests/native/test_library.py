"""Kernels are tried before they are used, and it is told which do the work."""

from __future__ import annotations

import logging

import pytest
import torch

from geartrain import native as package
from geartrain.native import library
from geartrain.native.compilers import Unavailable


def test_kernels_with_wrong_numbers_are_not_used(
    native: library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = native.typed[torch.float32]["tanh"]

    def wrong(n: int, x: int, y: int) -> int:
        return right[0](n - 1, x + 4, y)  # of the next number

    with monkeypatch.context() as patch:
        patch.setitem(native.typed[torch.float32], "tanh", (wrong, wrong))
        with pytest.raises(Unavailable, match=r"tanh of torch\.float32 is wrong"):
            native.check()
    native.check()


@pytest.fixture
def unsettled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not asked for kernels yet."""
    monkeypatch.setattr(library, "_settled", False)
    monkeypatch.setattr(library, "_library", None)
    monkeypatch.setattr(library, "_status", "")


@pytest.mark.parametrize(
    ("value", "said", "kind"), [("0", "none, torch does", "torch"), ("1", "kernels-", "native")]
)
def test_the_status_says_what_is_used(
    native: library.Library,
    unsettled: None,
    value: str,
    said: str,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("GEARTRAIN_NATIVE", value)
    assert said in package.status()
    assert package.kind() == kind
    assert (library.current() is not None) == (value == "1")
    assert not caplog.records, "what was asked for needs no warning"


def test_who_does_without_them_unasked_is_warned_once(
    unsettled: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GEARTRAIN_NATIVE", "1")
    monkeypatch.setenv("CC", "nosuchcc")
    for _ in range(2):
        assert library.current() is None
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("geartrain.native", logging.WARNING)
    assert "torch does their work, with the same results but slower" in record.getMessage()
    assert "CC=nosuchcc is not there" in record.getMessage()
