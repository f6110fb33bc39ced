"""Text for language models: one file, cut in two, and turned into numbers.

    text/tinyshakespeare.txt ─► first nine tenths: training, the rest: validation
    "First Citizen:\\n"      ─► Tokens.characters: one number a character
                             ─► Tokens.pairs: frequent neighbours become one number, again and again

    merges     t h ─► th,   th e ─► the,   " " the ─► " the", ...     most frequent first

Byte-pair encoding merges within words alone, a word being letters with the space before them, so
each distinct word is encoded once, all of them together. Source: Sennrich, Haddow, Birch 2016,
arXiv:1508.07909. Its symbols here are characters, not bytes: the two are the same for plain ASCII.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final, overload

import numpy as np
import torch
from numpy.typing import NDArray

from geartrain.data import limits
from geartrain.data.folder import find_data
from geartrain.data.minibatches import minibatch
from geartrain.errors import DataError
from geartrain.files import read_bytes
from geartrain.frames.instance import Instance
from geartrain.schema import parsed

FILE: Final = "text/tinyshakespeare.txt"
TRAINING: Final = 0.9  # share of the characters
LEAST: Final = 100  # characters of a text that can be cut in two

LONGEST: Final = 10_000  # characters of a token

_WORD: Final = re.compile(r" ?\w+| ?[^\w\s]+|\s")  # leaves nothing out
_GAP: Final = -1  # between words

Ids = NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True)
class Text:
    """A text in two pieces.

    Args:
        train: To learn from.
        valid: What follows it, to be judged by.
    """

    train: str
    valid: str


def load_text(folder: Path | None = None) -> Text:
    """Read ``text/tinyshakespeare.txt`` of the data folder.

    Args:
        folder: The data folder, which holds ``text/``; None takes ``$GEARTRAIN_DATA``.

    Raises:
        DataError: The file is missing, too large (``geartrain.data.limits``), no UTF-8, holds a NUL
            character, or is too short.
    """
    path = find_data(folder, FILE) / FILE
    try:
        content = read_bytes(path, limits.most(limits.TEXT), limits.REMEDY)
    except OSError as error:
        raise DataError(
            f"cannot be read: {error.strerror}; expected a text in UTF-8. Check name and "
            "permissions",
            path=path,
        ) from error
    text = _decoded(content, path)
    if len(text) < LEAST:
        raise DataError(
            f"the text has {len(text)} characters; expected {LEAST} or more, to cut it in two. "
            "Fetch the file anew",
            path=path,
        )
    end = int(TRAINING * len(text))
    return Text(text[:end], text[end:])


def _decoded(content: bytes, path: Path) -> str:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"byte {error.start} is 0x{content[error.start]:02x}, which is no UTF-8 "
            f"({error.reason}); expected a text in UTF-8. Convert it, or fetch it anew",
            path=path,
            line=content.count(b"\n", 0, error.start) + 1,
        ) from error
    if (at := text.find("\0")) >= 0:
        raise DataError(
            f"character {at} (from 0) is NUL; expected text. Fetch the file anew",
            path=path,
            line=text.count("\n", 0, at) + 1,
        )
    return text


@final
@dataclass(frozen=True, slots=True)
class Tokens:
    """What the numbers of an encoded text mean.

    Args:
        alphabet: Character of the ids from 0 on, all different.
        merges: Pairs of ids, each of which becomes the next id.

    Raises:
        DataError: A character comes twice, a pair names an id that is not there yet, or a token
            stands for more than ``LONGEST`` characters.
    """

    alphabet: str
    merges: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.alphabet or len(set(self.alphabet)) != len(self.alphabet):
            raise DataError(
                f"tokens: an alphabet of {len(self.alphabet)} characters, of which "
                f"{len(set(self.alphabet))} differ; expected one or more, each once. Build it with "
                "Tokens.characters or Tokens.pairs"
            )
        lengths = [1] * len(self.alphabet)
        for number, pair in enumerate(self.merges, len(self.alphabet)):
            if len(pair) != 2 or not all(0 <= each < number for each in pair):
                raise DataError(
                    f"tokens: id {number} is merged of {pair}; expected two ids below {number}. "
                    "Build it with Tokens.pairs"
                )
            lengths.append(lengths[pair[0]] + lengths[pair[1]])
            if lengths[-1] > LONGEST:  # each merge may double it
                raise DataError(
                    f"tokens: id {number} stands for {lengths[-1]} characters; expected {LONGEST} "
                    "at most. Build it with Tokens.pairs"
                )

    def __len__(self) -> int:
        return len(self.alphabet) + len(self.merges)

    @classmethod
    def characters(cls, text: str) -> Tokens:
        """One token a character of the text, in the order of their codes."""
        return cls("".join(sorted(set(text))))

    @classmethod
    def pairs(cls, text: str, size: int) -> Tokens:
        """Merge the most frequent pair of neighbours until there are so many tokens.

        Among equally frequent pairs the one of the lowest ids is merged. Ends early when no pair
        comes twice.

        Args:
            text: To count in; a million characters take about a second for 512 tokens.
            size: Of the vocabulary.

        Raises:
            ValueError: Fewer than the text has characters.
        """
        plain = cls.characters(text)
        if size < len(plain):
            raise ValueError(
                f"tokens={size}: the text has {len(plain)} different characters; give {len(plain)} "
                "or more"
            )
        words, count = _words(text)
        ids, owner = _laid_out([plain._numbers(word) for word in words])
        counts = np.asarray(count, np.int64)
        merges: list[tuple[int, int]] = []
        for number in range(len(plain), size):
            pair = _most_frequent(ids, counts[owner], number)
            if pair is None:
                break
            merges.append(pair)
            ids, owner = _merged(ids, owner, pair, number)
        return cls(plain.alphabet, tuple(merges))

    def encode(self, text: str) -> Ids:
        """Ids int64 of a text, which ``decode`` makes into it again.

        Raises:
            DataError: It has a character that is not in the alphabet; gives its line.
        """
        if not self.merges:
            return self._numbers(text)
        pieces = _WORD.findall(text)
        place: dict[str, int] = {}
        order = np.array([place.setdefault(piece, len(place)) for piece in pieces], np.int64)
        try:
            ids, owner = _laid_out([self._numbers(word) for word in place])
        except DataError:
            self._numbers(text)  # fails too, and knows the line
            raise
        for number, pair in enumerate(self.merges, len(self.alphabet)):
            ids, owner = _merged(ids, owner, pair, number)
        return _repeated(ids, owner, order, len(place))

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """The text of ids."""
        spelled = list(self.alphabet)
        for left, right in self.merges:
            spelled.append(spelled[left] + spelled[right])
        return "".join(spelled[number] for number in ids)

    def to_json(self) -> str:
        """Text for ``from_json``."""
        return json.dumps({"alphabet": self.alphabet, "merges": self.merges})

    @classmethod
    def from_json(cls, text: str) -> Tokens:
        """What ``to_json`` made.

        Raises:
            DataError: It is something else.
        """
        try:
            found = parsed(text, "it")
            alphabet, merges = found["alphabet"], found["merges"]
            pairs = tuple((int(left), int(right)) for left, right in merges)
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"tokens: {text[:40]!r} is no object with alphabet and merges ({error}); expected "
                "what Tokens.to_json wrote. Restore the file, or train anew"
            ) from error
        return cls(str(alphabet), pairs)

    def _numbers(self, text: str) -> Ids:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        known = np.array([ord(each) for each in self.alphabet], np.uint32)
        order = np.argsort(known)
        at = np.minimum(np.searchsorted(known, codes, sorter=order), len(known) - 1)
        ids: Ids = order[at].astype(np.int64)
        if len(bad := np.flatnonzero(known[ids] != codes)):
            first = int(bad[0])
            raise DataError(
                f"character {text[first]!r} (line {text.count(chr(10), 0, first) + 1} of the text) "
                f"is not among the {len(known)} of the alphabet; expected those of the text that "
                "the tokens were built from. Build them from a text that has it"
            )
        return ids


def _words(text: str) -> tuple[list[str], list[int]]:
    """Distinct words in the order of their first use, and how often each comes."""
    counts: dict[str, int] = {}
    for word in _WORD.findall(text):
        counts[word] = counts.get(word, 0) + 1
    return list(counts), list(counts.values())


def _laid_out(words: Sequence[Ids]) -> tuple[Ids, Ids]:
    """All words in one row with a gap behind each, and the number of the word at every place."""
    lengths = np.array([len(word) + 1 for word in words], np.int64)
    ids = np.full(int(lengths.sum()), _GAP, np.int64)
    owner = np.repeat(np.arange(len(words)), lengths)
    ids[np.arange(len(ids)) != (np.cumsum(lengths) - 1)[owner]] = np.concatenate(words or [ids])
    return ids, owner


def _most_frequent(ids: Ids, weight: Ids, known: int) -> tuple[int, int] | None:
    """The pair of neighbours that comes most often, at least twice."""
    left, right = ids[:-1], ids[1:]
    inside = (left != _GAP) & (right != _GAP)
    # Weights are counts below 2**53, so their sums are exact in float64.
    counts = np.bincount(left[inside] * known + right[inside], weight[:-1][inside])
    if not len(counts) or counts.max() < 2:
        return None
    best = int(counts.argmax())
    return best // known, best % known


def _merged(ids: Ids, owner: Ids, pair: tuple[int, int], number: int) -> tuple[Ids, Ids]:
    """The pair as one id wherever it stands, from the left: of a a a the first two."""
    found = np.flatnonzero((ids[:-1] == pair[0]) & (ids[1:] == pair[1]))
    if not len(found):
        return ids, owner
    if pair[0] == pair[1]:
        runs = np.flatnonzero(np.diff(found, prepend=-2) != 1)
        begin = found[np.repeat(runs, np.diff(runs, append=len(found)))]
        found = found[(found - begin) % 2 == 0]
    ids = ids.copy()
    ids[found] = number
    kept = np.ones(len(ids), np.bool_)
    kept[found + 1] = False
    return ids[kept], owner[kept]


def _repeated(ids: Ids, owner: Ids, order: Ids, words: int) -> Ids:
    """The words, encoded, in the order in which they stand in the text."""
    real = ids != _GAP
    ids, owner = ids[real], owner[real]
    lengths = np.bincount(owner, minlength=words)
    starts = np.cumsum(lengths) - lengths
    long = lengths[order]
    begin = np.cumsum(long) - long
    within = np.arange(int(long.sum())) - np.repeat(begin, long)
    return ids[np.repeat(starts[order], long) + within]


@final
class Windows(Sequence[Instance]):
    """Segments of equal length of an encoded text, in minibatches; targets follow one behind.

    Args:
        ids: int64, the text.
        length: Tokens of a segment.
        batch: Segments of a minibatch, which is one instance: ``x`` and ``y`` int64
            ``(batch, length)``; the last one may have fewer.
        most: Take so many segments an epoch; None takes all.
        seed: Begins the first segment at another token in every epoch, below ``length``, and deals
            the segments out anew, by (seed, epoch); None: both stay as they are.

    Raises:
        DataError: The text has fewer than ``2 * length`` tokens.
    """

    def __init__(
        self, ids: Ids, length: int, *, batch: int, most: int | None = None, seed: int | None = None
    ) -> None:
        if length < 1 or len(ids) < 2 * length:
            raise DataError(
                f"a text of {len(ids)} tokens for segments of {length}; expected {2 * length} "
                "tokens or more, and segments of 1 or more. Take shorter segments, or more text"
            )
        if batch < 1:
            raise ValueError(f"batch={batch}: give 1 segment or more")
        self._ids, self._length, self._batch, self._seed = ids, length, batch, seed
        # As many at every beginning below length; the last token is only ever a target.
        self._all = (len(ids) - 1 - (0 if seed is None else length - 1)) // length
        self.segments = min(self._all, most or self._all)
        self.set_epoch(0)

    def set_epoch(self, number: int) -> None:
        """Move the beginning and deal out for an epoch."""
        self._starts = np.arange(self._all) * self._length
        if self._seed is not None:
            draw = np.random.default_rng((self._seed, number))
            self._starts += draw.integers(self._length)
            self._starts = draw.permutation(self._starts)

    def __len__(self) -> int:
        return -(-self.segments // self._batch)

    @overload
    def __getitem__(self, at: int) -> Instance: ...
    @overload
    def __getitem__(self, at: slice) -> list[Instance]: ...
    def __getitem__(self, at: int | slice) -> Instance | list[Instance]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        first = range(len(self))[at] * self._batch
        starts = self._starts[first : min(first + self._batch, self.segments)]
        both = torch.from_numpy(self._ids[starts[:, None] + np.arange(self._length + 1)])
        return minibatch(both[:, :-1].contiguous(), both[:, 1:].contiguous(), f"segments {first}")
