"""Sentiment trees: the Stanford Sentiment Treebank, one bracketed tree a line.

    (3 (2 It) (4 (2 's) (3 good)))         label, then a word or two children

            4 root, label 3                vertices in post-order: children before parents,
           / \\                             the left subtree before the right, the root last
      0 It    3                            leaf   [0, 1, 2]        vertex of each word
             / \\                           parent [4, 3, 3, 4, -1]
        1 's    2 good                     slot   [0, 0, 1, 1, 0]   0 left, 1 right child

The separator is the ASCII space alone: some tokens hold a no-break space, so a split on Unicode
white space would break them. Blank lines are ignored. Source: Socher et al., EMNLP 2013.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from geartrain.data import limits
from geartrain.data.folder import find_data
from geartrain.data.policy import Policy, Refusals
from geartrain.errors import DataError
from geartrain.files import read_bytes
from geartrain.schema import Mismatch, parsed

UNKNOWN = "<unk>"
CLASSES = 5

Split = Literal["train", "dev", "test"]


@final
@dataclass(frozen=True, slots=True, eq=False)
class SentimentTree:
    """One binary tree of L leaves and V = 2 L - 1 vertices, in post-order.

    Args:
        word: int64 ``(L,)``, word ids of the leaves, left to right.
        leaf: int64 ``(L,)``, vertex of each leaf.
        parent: int64 ``(V,)``, vertex of the parent; -1 at the root, which is vertex V - 1.
        slot: int64 ``(V,)``, 0 for a left and 1 for a right child; 0 at the root.
        label: int64 ``(V,)``, 0 (very negative) to 4 (very positive).
    """

    word: NDArray[np.int64]
    leaf: NDArray[np.int64]
    parent: NDArray[np.int64]
    slot: NDArray[np.int64]
    label: NDArray[np.int64]

    @property
    def vertices(self) -> int:
        """Number of vertices V."""
        return len(self.parent)


@final
class ParsedTree(NamedTuple):
    """A tree whose words are still text; the arrays are those of ``SentimentTree``."""

    words: list[str]
    leaf: NDArray[np.int64]
    parent: NDArray[np.int64]
    slot: NDArray[np.int64]
    label: NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Words and their ids; id 0 stands for every unknown word.

    Args:
        words: The word of each id; the first is ``"<unk>"``, all differ.

    Raises:
        DataError: The first word is another, or a word comes twice.
    """

    words: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.words or self.words[0] != UNKNOWN:
            first = repr(self.words[0]) if self.words else "nothing"
            raise DataError(
                f"vocabulary: word 0 is {first}; expected {UNKNOWN!r}, the unknown word. "
                "Build it with Vocabulary.build, or put the unknown word first"
            )
        if len(set(self.words)) != len(self.words):
            word, count = Counter(self.words).most_common(1)[0]
            raise DataError(
                f"vocabulary: {word!r} stands {count} times among {len(self.words)} words; "
                "expected each once. Remove the repeats"
            )

    def __len__(self) -> int:
        return len(self.words)

    @classmethod
    def build(cls, words: Iterable[str], min_count: int = 1) -> Vocabulary:
        """Number the words by falling count, then by spelling, so that the order is fixed.

        Args:
            words: Words of the training set, with repeats.
            min_count: Rarer words stay unknown; with 2, training sees the unknown word too.
        """
        if min_count < 1:
            raise ValueError(f"min_count is {min_count}; it must be at least 1")
        counts = Counter(words)
        counts.pop(UNKNOWN, None)
        kept = sorted((-n, word) for word, n in counts.items() if n >= min_count)
        return cls((UNKNOWN, *(word for _, word in kept)))

    def table(self) -> dict[str, int]:
        """Return the id of each word; ``table().get(word, 0)`` covers the unknown ones."""
        return {word: i for i, word in enumerate(self.words)}

    def encode(self, words: Sequence[str]) -> NDArray[np.int64]:
        """Return int64 ``(len(words),)`` ids, 0 for words that are not in the vocabulary."""
        table = self.table()
        return np.array([table.get(word, 0) for word in words], dtype=np.int64)

    def to_json(self) -> str:
        """Return ``{"words": [...]}``; ``from_json`` reads it back unchanged."""
        return json.dumps({"words": self.words}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Vocabulary:
        """Read what ``to_json`` wrote.

        Raises:
            DataError: Not JSON, or not of that form.
        """
        try:
            value = parsed(text, "it")
        except Mismatch as error:
            raise DataError(
                f'vocabulary: {error}; expected {{"words": [...]}}. Write it with '
                "Vocabulary.to_json"
            ) from None
        words = value.get("words") if isinstance(value, dict) else None
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise DataError(
                f'vocabulary: got {text[:60]!r}; expected {{"words": [...]}} with strings alone. '
                "Write it with Vocabulary.to_json"
            )
        return cls(tuple(words))


@final
@dataclass(frozen=True, slots=True, eq=False)
class Trees:
    """The trees of one file, the vocabulary of their ids, and how many lines were skipped."""

    trees: tuple[SentimentTree, ...]
    vocabulary: Vocabulary
    skipped: int


@final
@dataclass(frozen=True, slots=True, eq=False)
class Sst:
    """The treebank: splits that were not asked for are empty.

    Args:
        train: 8,544 trees in the original.
        dev: 1,101 trees.
        test: 2,210 trees.
        vocabulary: Built from the words of ``train``, unless one was given.
        skipped: Refused lines over all splits; 0 under the policy ``"raise"``.
    """

    train: tuple[SentimentTree, ...]
    dev: tuple[SentimentTree, ...]
    test: tuple[SentimentTree, ...]
    vocabulary: Vocabulary
    skipped: int


def load_sst(
    folder: Path | None = None,
    splits: Sequence[Split] = ("train", "dev"),
    *,
    vocabulary: Vocabulary | None = None,
    min_count: int = 1,
    policy: Policy = "raise",
) -> Sst:
    """Read ``sst/<split>.txt`` of the data folder.

    Args:
        folder: The data folder, which holds ``sst/``; None takes ``$GEARTRAIN_DATA``.
        splits: Which of train, dev and test to read.
        vocabulary: Word ids to use, for instance those of a checkpoint; None builds them from
            the training words, so ``splits`` must then name ``"train"``.
        min_count: Training words rarer than this stay unknown.
        policy: ``"raise"`` on the first bad line, or ``"skip"`` and count.

    Raises:
        DataError: A file is missing or empty, or a line is refused.
        ValueError: An unknown split, or none to build the vocabulary from.
    """
    if wrong := [split for split in splits if split not in ("train", "dev", "test")]:
        raise ValueError(f"splits names {wrong}; expected some of 'train', 'dev', 'test'")
    if vocabulary is None and "train" not in splits:
        raise ValueError(
            f"splits is {tuple(splits)} and no vocabulary is given; add 'train', whose words make "
            "the vocabulary, or pass vocabulary="
        )
    root = find_data(folder, *(f"sst/{split}.txt" for split in splits))
    read: dict[Split, tuple[SentimentTree, ...]] = {"train": (), "dev": (), "test": ()}
    skipped = 0
    # Training first: the others are numbered with its words.
    for split in sorted(set(splits), key=lambda name: name != "train"):
        got = read_trees(root / "sst" / f"{split}.txt", vocabulary, policy, min_count=min_count)
        read[split], vocabulary, skipped = got.trees, got.vocabulary, skipped + got.skipped
    assert vocabulary is not None, "either given, or built from train, which is read first"
    return Sst(read["train"], read["dev"], read["test"], vocabulary, skipped)


def read_trees(
    path: Path,
    vocabulary: Vocabulary | None = None,
    policy: Policy = "raise",
    *,
    min_count: int = 1,
) -> Trees:
    """Read a file of one tree a line; 8,544 trees take about half a second.

    Args:
        path: UTF-8 text.
        vocabulary: Word ids to use; None builds them from the words of this file.
        policy: ``"raise"`` on the first bad line, or ``"skip"`` and count.
        min_count: For a vocabulary that is built here.

    Raises:
        DataError: The file is missing or has no tree, or a line is refused; with path and line.
    """
    parsed, skipped = _parse_lines(path, policy)
    if vocabulary is None:
        every = (word for tree in parsed for word in tree.words)
        vocabulary = Vocabulary.build(every, min_count)
    table = vocabulary.table()
    trees = tuple(_number(tree, table) for tree in parsed)
    return Trees(trees, vocabulary, skipped)


def parse_tree(text: str) -> ParsedTree:
    """Parse one bracketed tree, however deep.

    Args:
        text: As in the picture above; repeated spaces between tokens are allowed.

    Raises:
        DataError: Nothing but spaces; parentheses that do not balance; a label that is not 0..4;
            an empty or a second word; a vertex without exactly two children; text before or after
            the tree. The message gives the column, counted from 1.
    """
    tokens = _TOKEN.findall(text)
    words: list[str] = []
    leaf: list[int] = []
    parent: list[int] = []
    slot: list[int] = []
    label: list[int] = []
    opened: list[int] = []  # labels of the vertices whose parenthesis is open
    begins: list[int] = []  # for each of them, len(roots) when it opened
    roots: list[int] = []  # finished vertices without a parent yet
    last = _CLOSED
    for place, token in enumerate(tokens):
        if not opened and (place or token[0] != "("):
            raise _fault(text, place, _OUTSIDE if place else _BEFORE)
        if token == ")":
            vertex = len(parent)
            begin = begins.pop()
            if last == _WORD:
                leaf.append(vertex)
            elif last == _CLOSED and len(roots) - begin == 2:
                right, left = roots.pop(), roots.pop()
                parent[left] = parent[right] = vertex
                slot[right] = 1
            else:
                raise _fault(text, place, _childless(last, len(roots) - begin))
            roots.append(vertex)
            parent.append(-1)
            slot.append(0)
            label.append(opened.pop())
            last = _CLOSED
        elif token[0] == "(":
            if last == _WORD:
                raise _fault(text, place, _MIXED)
            if (value := _LABELS.get(token, -1)) < 0:
                raise _fault(text, place, _UNLABELLED)
            opened.append(value)
            begins.append(len(roots))
            last = _OPEN
        else:
            if last != _OPEN:
                raise _fault(text, place, _SECOND if last == _WORD else _MIXED)
            words.append(token)
            last = _WORD
    if opened or not tokens:
        raise _unfinished(text, len(opened))
    return ParsedTree(
        words, *(np.array(column, np.int64) for column in (leaf, parent, slot, label))
    )


_TOKEN = re.compile(r"\( *[^() ]*|\)|[^() ]+")
_LABELS = {f"({value}": value for value in range(CLASSES)}
_OPEN, _WORD, _CLOSED = 0, 1, 2  # what the last token was

_OUTSIDE = (
    "comes after the tree; expected the end of the line. Put one tree on a line, and look for a "
    "')' too many before it"
)
_BEFORE = "stands before the tree; expected '(' and a label. Remove it"
_MIXED = (
    "stands beside a word or a child that it cannot go with; expected a label and then either one "
    "word or two children. Write a parenthesis inside a word as -LRB- or -RRB-"
)
_SECOND = (
    "is a second word in one leaf; expected one word a leaf. Join the two, or split the leaf into "
    "two children"
)
_UNLABELLED = (
    f"does not open a vertex with a label; expected '(' and one of 0..{CLASSES - 1}. Map other "
    "label sets to these before reading"
)


def _childless(last: int, children: int) -> str:
    if last == _OPEN:
        return (
            "closes a vertex with an empty word; expected a word or two children after the label. "
            "Remove the vertex, or give it its word"
        )
    more = "too many" if children > 2 else "too few"
    return (
        f"closes a vertex with {children} child{'ren' if children != 1 else ''}, {more}; expected "
        "exactly two. Binarise the tree before reading"
    )


def _fault(text: str, place: int, reason: str) -> DataError:
    # Columns are found again, on the way out, to keep them off the path that every tree takes.
    match = list(_TOKEN.finditer(text))[place]
    return DataError(f"column {match.start() + 1}: {match.group()[:40]!r} {reason}")


def _unfinished(text: str, depth: int) -> DataError:
    if not depth:
        return DataError("column 1: no tree, only spaces; expected '(label ...)'. Remove the line")
    return DataError(
        f"column {len(text) + 1}: the line ends with {depth} open parenthes"
        f"{'es' if depth != 1 else 'is'}; expected {depth} more ')'. See whether the line was cut"
    )


def _parse_lines(path: Path, policy: Policy) -> tuple[list[ParsedTree], int]:
    refusals = Refusals(policy, path)
    parsed: list[ParsedTree] = []
    for number, line in enumerate(_lines(path), 1):
        # Only these end a line: splitlines() would also cut at U+0085 and its like.
        if not line.strip(b" \r"):
            continue
        try:
            parsed.append(parse_tree(line.rstrip(b"\r").decode()))
        except UnicodeDecodeError as error:
            refusals.refuse(_undecodable(error, path, number))
        except DataError as error:
            refusals.refuse(DataError(error.reason, path=path, line=number))
    skipped = refusals.close(len(parsed))
    if not parsed:
        raise DataError("the file has no tree; expected one tree a line. Fetch it anew", path=path)
    return parsed, skipped


def _lines(path: Path) -> list[bytes]:
    try:
        return read_bytes(path, limits.most(limits.LINES), limits.REMEDY).split(b"\n")
    except OSError as error:
        raise DataError(
            f"cannot be read: {error.strerror}; expected a text file of trees, one a line. "
            "Check name and permissions",
            path=path,
        ) from error


def _undecodable(error: UnicodeDecodeError, path: Path, number: int) -> DataError:
    return DataError(
        f"byte {error.start + 1} of the line is 0x{error.object[error.start]:02x}, which is not "
        f"UTF-8 ({error.reason}); expected UTF-8. Convert the file, from Latin-1 perhaps",
        path=path,
        line=number,
    )


def _number(tree: ParsedTree, table: dict[str, int]) -> SentimentTree:
    word = np.array([table.get(word, 0) for word in tree.words], dtype=np.int64)
    return SentimentTree(word, tree.leaf, tree.parent, tree.slot, tree.label)
