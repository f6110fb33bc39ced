"""Text: cut in two, encoded and decoded, merged pair by pair, windowed."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geartrain.data.text import FILE, Tokens, Windows, load_text
from geartrain.errors import DataError

VERSE = "the cat sat on the mat; the rat ate the cat's hat.\n\n" * 3


def write(folder, content):
    path = folder / FILE
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return folder


def test_nine_tenths_are_for_training_and_nothing_is_lost(tmp_path):
    text = load_text(write(tmp_path, VERSE.encode()))
    assert text.train + text.valid == VERSE
    assert len(text.train) == int(0.9 * len(VERSE))


@pytest.mark.parametrize(
    ("content", "place", "reason"),
    [
        (b"a\nb\n" * 50 + b"\xff", ":101: ", "byte 200 is 0xff, which is no UTF-8"),
        (b"a\nb\n" * 50 + b"\0", ":101: ", "character 200 (from 0) is NUL"),
        (b"short", ": ", "the text has 5 characters; expected 100 or more"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused_with_its_place(tmp_path, content, place, reason):
    with pytest.raises(DataError) as caught:
        load_text(write(tmp_path, content))
    assert str(caught.value).startswith(f"{tmp_path}/{FILE}{place}{reason}")


def test_a_missing_text_is_refused_with_what_to_put_where(tmp_path):
    with pytest.raises(DataError, match=r"tinyshakespeare\.txt is missing\. Put into text/"):
        load_text(tmp_path)


# --- tokens


def plain_pairs(text, size):
    """Byte-pair encoding one word and one symbol at a time."""
    words = Counter(re.findall(r" ?\w+| ?[^\w\s]+|\s", text))
    alphabet = sorted(set(text))
    spelled = {word: [alphabet.index(c) for c in word] for word in words}
    merges = []
    for number in range(len(alphabet), size):
        counts = Counter()
        for word, ids in spelled.items():
            for pair in itertools.pairwise(ids):
                counts[pair] += words[word]
        if not counts or max(counts.values()) < 2:
            break
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        for word, ids in spelled.items():
            out = []
            for each in ids:
                if out and (out[-1], each) == best:
                    out[-1] = number
                else:
                    out.append(each)
            spelled[word] = out
    return tuple(merges)


@given(st.text("ab ;\n", min_size=1, max_size=60), st.integers(0, 12))
def test_merges_are_those_of_counting_one_by_one_and_decoding_undoes_them(text, more):
    size = len(set(text)) + more
    tokens = Tokens.pairs(text, size)
    assert tokens.merges == plain_pairs(text, size)
    assert tokens.decode(tokens.encode(text)) == text
    assert len(tokens) <= size


def test_of_a_run_the_first_two_are_merged():
    tokens = Tokens("ab", ((0, 0),))
    assert tokens.encode("aaaaab").tolist() == [2, 2, 0, 1]
    assert tokens.encode("abaaa").tolist() == [0, 1, 2, 0]


def test_no_token_spans_two_words():
    tokens = Tokens.pairs(VERSE, 60)
    spelled = [tokens.decode([i]) for i in range(len(tokens))]
    assert " the" in spelled
    assert not any(" " in each[1:] for each in spelled)
    assert len(set(spelled)) == len(spelled)


def test_characters_are_numbered_by_their_codes():
    tokens = Tokens.characters("bca✓")
    assert (tokens.alphabet, len(tokens)) == ("abc✓", 4)
    assert tokens.encode("cab✓").tolist() == [2, 0, 1, 3]
    assert tokens.encode("").tolist() == []


@pytest.mark.parametrize("size", [26, 40])
def test_an_unknown_character_is_refused_with_its_line(size):
    tokens = Tokens.pairs(VERSE, size)
    with pytest.raises(DataError, match=r"'Z' \(line 2 of the text\) is not among"):
        tokens.encode("the\ncat Zat")


def test_tokens_come_back_from_json_and_nonsense_is_refused():
    tokens = Tokens.pairs(VERSE, 40)
    assert Tokens.from_json(tokens.to_json()) == tokens
    for wrong in ("", "[]", '{"alphabet": "ab"}', '{"alphabet": "ab", "merges": [1]}'):
        with pytest.raises(DataError, match="no object with alphabet and merges"):
            Tokens.from_json(wrong)
    with pytest.raises(DataError, match="id 2 is merged of"):
        Tokens.from_json(json.dumps({"alphabet": "ab", "merges": [[0, 2]]}))
    with pytest.raises(DataError, match="3 characters, of which 2 differ"):
        Tokens("aba")


def test_too_few_tokens_for_the_alphabet_are_refused():
    with pytest.raises(ValueError, match="tokens=3: the text has"):
        Tokens.pairs(VERSE, 3)


# --- windows


def rows(windows):
    """Inputs and targets of an epoch."""
    pairs = [(each.inputs["x"], each.inputs["y"]) for each in windows]
    return tuple(torch.cat(column) for column in zip(*pairs, strict=True))


def test_targets_are_the_tokens_that_follow():
    windows = Windows(np.arange(20), 6, batch=2)
    assert [tuple(each.inputs["x"].shape) for each in windows] == [(2, 6), (1, 6)]
    x, y = rows(windows)
    assert x.tolist() == [[*range(6)], [*range(6, 12)], [*range(12, 18)]]
    assert torch.equal(y, x + 1)
    assert Windows(np.arange(18), 6, batch=9).segments == 2, "the last token has none behind it"
    assert [len(each.inputs["y"]) for each in windows[1:]] == [1]


@given(st.integers(2, 9), st.integers(2, 40), st.integers(0, 5))
def test_every_epoch_takes_as_many_stretches_that_do_not_overlap(length, more, epoch):
    windows = Windows(np.arange(2 * length + more), length, batch=3, seed=1)
    windows.set_epoch(epoch)
    x, y = rows(windows)
    assert windows.segments == len(x) > 0
    assert len(x.unique()) == x.numel()
    assert torch.equal(x + 1, y)
    assert y.max() < 2 * length + more


def test_epochs_begin_elsewhere_and_can_be_had_again():
    windows = Windows(np.arange(1000), 10, batch=25, most=30, seed=3)
    found = []
    for epoch in (1, 2, 1):
        windows.set_epoch(epoch)
        found.append(rows(windows)[0])
    assert len(found[0]) == 30
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    assert len({int(x[0, 0]) % 10 for x in found}) == 2


def test_a_text_that_is_too_short_is_refused():
    with pytest.raises(DataError, match="a text of 19 tokens for segments of 10"):
        Windows(np.arange(19), 10, batch=1)
    with pytest.raises(ValueError, match="batch=0"):
        Windows(np.arange(30), 10, batch=0)


def test_the_real_text_is_half_as_long_in_512_tokens(real_data):
    text = load_text(real_data)
    assert len(Tokens.characters(text.train)) == 65
    tokens = Tokens.pairs(text.train[:200_000], 512)
    ids = tokens.encode(text.valid[:50_000])
    assert tokens.decode(ids) == text.valid[:50_000]
    assert 20_000 < len(ids) < 27_000
