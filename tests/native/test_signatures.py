"""Every function that C exports is declared to ctypes as C defines it: nothing else checks it."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from geartrain.native import as_torch, build, library, rows, steps

SOURCES = [build.KERNELS, *(extension.sources for extension in library._extensions)]
DEFINITION = re.compile(
    r"^(?P<result>int64_t|void) (?P<name>NAME\(\w+\)|\w+)\((?P<parameters>[^()]*)\) \{", re.M
)
POINTER, WORD, REAL, NOTHING = "pointer", "int64_t", "double", "void"
OF_CTYPES: dict[Any, str] = {
    ctypes.c_void_p: POINTER,
    ctypes.c_char_p: POINTER,
    ctypes.c_int64: WORD,
    ctypes.c_double: REAL,
    None: NOTHING,
}


def text_of(sources: build.Sources) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sources.files)


SOURCE = text_of(build.KERNELS)
POINTER_TYPES = set(re.findall(r"^typedef \w+ \(\*(\w+)\)", SOURCE, re.M))


def kind_of(parameter: str) -> str:
    """What C passes: a pointer, or a number of which kind."""
    parameter = re.sub(r"\b(const|restrict)\b", "", parameter)
    parameter = re.sub(r"NAME\((\w+)\)", r"\1", parameter).strip()
    if "*" in parameter:
        return POINTER
    kind = parameter.split()[0]
    return POINTER if kind in POINTER_TYPES else kind


def defined(sources: build.Sources) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name to result and parameters of all that C exports to ctypes."""
    text = re.sub(r"/\*.*?\*/", "", text_of(sources), flags=re.S)
    text = re.sub(r"NAME\((\w+)\)(?= ?\*)", r"\1", text)  # a type, not a function
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for match in DEFINITION.finditer(text):
        signature = match["result"], tuple(kind_of(p) for p in match["parameters"].split(","))
        typed = re.fullmatch(r"NAME\((\w+)\)", match["name"])
        names = [f"{typed[1]}_{kind}" for kind in ("float", "double")] if typed else [match["name"]]
        found |= dict.fromkeys(names, signature)
    return found


@pytest.fixture
def declared(
    native: library.Library, monkeypatch: pytest.MonkeyPatch
) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name to result and parameters of all that is declared when the kernels are loaded."""
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    declare = library._declared

    def watched(dll: ctypes.CDLL, name: str, arguments: tuple[type, ...]) -> library.Function:
        function: Any = declare(dll, name, arguments)
        signature = (
            OF_CTYPES[function.restype],
            tuple(OF_CTYPES[kind] for kind in function.argtypes),
        )
        assert found.setdefault(name, signature) == signature, f"{name} is declared in two ways"
        return declare(dll, name, arguments)

    monkeypatch.setattr(library, "_declared", watched)
    library.Library(native.paths)
    return found


def test_functions_are_declared_as_c_defines_them(
    declared: dict[str, tuple[str, tuple[str, ...]]],
) -> None:
    wanted = [defined(sources) for sources in SOURCES]
    assert len(SOURCES) > 1 and all(wanted)
    assert sum(map(len, wanted)) == len(declared), "no two libraries have functions of one name"
    assert declared == {name: of for each in wanted for name, of in each.items()}


def fields(struct: str) -> list[str]:
    """Names of a struct's fields, all of them pointers or int64: words of 8 bytes."""
    match = re.search(rf"^typedef struct \{{([^}}]*)\}} {re.escape(struct)};", SOURCE, re.M)
    assert match is not None, f"C defines no {struct}"
    body = re.sub(r"/\*.*?\*/", "", match[1], flags=re.S)
    names = []
    for line in filter(None, map(str.strip, body.split(";"))):
        kind, rest = line.removeprefix("const ").split(maxsplit=1)
        for field in rest.split(","):
            assert kind == "int64_t" or "*" in field, f"{struct}: {field} is no word of 8 bytes"
            names.append(field.strip(" *"))
    return names


def test_a_job_of_moving_rows_has_the_words_that_c_reads() -> None:
    assert rows._WORDS == len(fields("Job"))


def test_jobs_of_steps_have_the_words_that_c_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def one() -> list[torch.Tensor]:
        return [torch.ones(3, 2), torch.ones(3, 2)]

    given: dict[str, int] = {}

    def function(name: str, tensors: Sequence[torch.Tensor]) -> library.Function:
        def run(jobs: bytes, count: int, *rest: float | None) -> int:
            given[name] = len(jobs)
            assert count == 2
            return 0

        return run

    monkeypatch.setattr(steps, "_function", function)
    counts = [torch.zeros(()), torch.zeros(())]
    how: Any = {"rate": 0.1, "eps": 1e-8, "weight_decay": 0.0, "maximize": False}
    assert steps.scaled_(one(), 2.0)
    step = steps.AdamStep(steps.AdamTensors(one(), one(), one(), counts))
    step.take(one(), betas=(0.9, 0.99), **how)
    steps.AdagradStep((one(), one(), counts)).take(one(), rate_decay=0.0, **how)
    structs = {"scale_all": "Entries", "adam": "AdamEntries", "adagrad": "AdagradEntries"}
    assert given == {name: 2 * 8 * len(fields(of)) for name, of in structs.items()}
    assert as_torch.AdamOfTorch.words == len(fields("AdamEntries"))
    assert as_torch.SgdOfTorch.words == len(fields("MomentumEntries"))
