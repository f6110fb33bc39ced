"""Where data lies: an explicit folder, else ``$GEARTRAIN_DATA``.

    DATA/sst/train.txt, dev.txt      sentiment trees
    DATA/mnist/*-ubyte.gz            digits
    DATA/babi/en/qa*_train.txt       question tasks
    DATA/qm9/qm9_3d_dipole.npz       molecules
    DATA/cifar10/*.npz               photographs
    DATA/text/tinyshakespeare.txt    a text

Nothing is ever downloaded; a missing file is refused with what to put where.
"""

from __future__ import annotations

import os
from pathlib import Path

from geartrain.errors import DataError

VARIABLE = "GEARTRAIN_DATA"

WHAT_TO_PUT = {
    "sst": "Stanford Sentiment Treebank as PTB trees, one a line: train.txt, dev.txt and test.txt "
    "of trainDevTestTrees_PTB.zip, from https://nlp.stanford.edu/sentiment/",
    "mnist": "the four gzipped idx files of MNIST, names unchanged, "
    "from http://yann.lecun.com/exdb/mnist/ or a mirror of it",
    "babi": "the text files of bAbI tasks v1.2, folders en/ and en-10k/ of "
    "tasks_1-20_v1-2.tar.gz, from https://research.facebook.com/downloads/babi/",
    "qm9": "one npz of arrays id, n_atoms, Z, R (Angstrom) and mu (Debye), made from the files of "
    "Ramakrishnan et al. 2014, https://doi.org/10.6084/m9.figshare.c.978904; the arrays' shapes "
    "are in the docstring of geartrain.data.qm9",
    "cifar10": "one npz of arrays x_train, y_train, x_test, y_test and classes, from CIFAR-10, "
    "https://www.cs.toronto.edu/~kriz/cifar.html, or a part of it; the arrays' shapes are in the "
    "docstring of geartrain.data.cifar10",
    "text": "a million characters of Shakespeare as one UTF-8 file, input.txt of "
    "https://github.com/karpathy/char-rnn, data/tinyshakespeare",
}


def find_data(data: Path | None, *needed: str) -> Path:
    """Return the data folder after checking that the needed files are there and not empty.

    Args:
        data: The folder; None takes the environment variable ``GEARTRAIN_DATA``.
        needed: Files relative to the folder, with forward slashes, such as ``sst/train.txt``.

    Raises:
        DataError: No folder is given or it is not one; a needed file is missing, is no regular
            file, or is empty. The message says what to put where.
    """
    folder, origin = _choose(data, needed)
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise DataError(
            f"the data folder ({origin}) {what}; expected a folder{_contents(needed)}", path=folder
        )
    faults = [fault for name in needed if (fault := _fault(folder, name))]
    if faults:
        raise DataError(
            f"the data folder ({origin}) lacks {len(faults)} of {len(needed)} needed files: "
            f"{'; '.join(faults)}{_advice(needed)}",
            path=folder,
        )
    return folder


def _choose(data: Path | None, needed: tuple[str, ...]) -> tuple[Path, str]:
    if data is not None:
        return Path(data), "given explicitly"
    if value := os.environ.get(VARIABLE, ""):
        return Path(value), f"from ${VARIABLE}"
    state = "empty" if VARIABLE in os.environ else "not set"
    raise DataError(
        f"no data folder: none was given and ${VARIABLE} is {state}; pass a folder (--data on the "
        f"command line) or set the variable to a folder{_contents(needed)}"
    )


def _contents(needed: tuple[str, ...]) -> str:
    return f" that holds {', '.join(needed)}{_advice(needed)}" if needed else ""


def _fault(folder: Path, name: str) -> str | None:
    file = folder / name
    try:
        if not file.exists():
            return f"{name} is missing"
        if not file.is_file():
            return f"{name} is not a regular file"
        if file.stat().st_size == 0:
            return f"{name} is empty"
    except OSError as error:
        return f"{name} cannot be looked at ({error.strerror})"
    return None


def _advice(needed: tuple[str, ...]) -> str:
    sets = dict.fromkeys(name.split("/", 1)[0] for name in needed)
    return "".join(f". Put into {s}/: {WHAT_TO_PUT[s]}" for s in sets if s in WHAT_TO_PUT)
