from fractions import Fraction

import numpy as np
import pytest

from geartrain.data.listreduce import PADDING, generate, reduce_lists
from geartrain.errors import DataError


def mean(values):
    return Fraction(sum(values), len(values)) if values else Fraction(0)


ORACLE = {
    10: mean,
    11: lambda digits: mean(digits[0::2]) - mean(digits[1::2]),
    12: lambda digits: Fraction(max(digits) - min(digits)),
    13: lambda digits: Fraction(len(digits)),
}


def label_of(tokens):
    # Fractions round halves to even too, and exactly.
    return round(ORACLE[tokens[0]](list(tokens[1:]))) % 10


def test_labels_are_those_of_exact_arithmetic():
    lists = generate(3000, 1)
    for tokens, length, label in zip(
        lists.tokens.tolist(), lists.length.tolist(), lists.label.tolist(), strict=True
    ):
        assert label == label_of(tokens[:length]), tokens


@pytest.mark.parametrize(
    ("tokens", "label"),
    [
        ([10, 2, 3], 2),  # 2.5 to the even neighbour
        ([10, 3, 4], 4),  # 3.5 too
        ([11, 7], 7),  # the mean of nothing is 0
        ([11, 1, 4], 7),  # -3 modulo 10
        ([11, 0, 1, 1], 0),  # -0.5 to 0
        ([12, 5], 0),
        ([12, 9, 0, 4], 9),
        ([13, 0, 0, 0, 0, 0, 0, 0, 0, 0], 9),
    ],
)
def test_the_cases_that_had_to_be_decided(tokens, label):
    assert label == label_of(tokens)
    got = reduce_lists(np.array([tokens]), np.array([len(tokens)]))
    assert got.tolist() == [label]


def test_lists_are_well_formed():
    lists = generate(5000, 0)
    assert lists.tokens.shape == (5000, 10)
    assert lists.tokens.dtype == lists.length.dtype == lists.label.dtype == np.int64
    place = np.arange(10)
    assert ((lists.tokens == PADDING) == (place >= lists.length[:, None])).all()
    assert set(lists.tokens[:, 0].tolist()) == {10, 11, 12, 13}
    digits = lists.tokens[:, 1:][place[1:] < lists.length[:, None]]
    assert set(digits.tolist()) == set(range(10))
    assert (reduce_lists(lists.tokens, lists.length) == lists.label).all()


def test_lengths_operations_and_digits_are_uniform():
    lists = generate(90_000, 0)
    # 10,000 expected in each cell of lengths: six standard deviations are about 570.
    assert abs(np.bincount(lists.length)[2:] - 10_000).max() < 570
    assert abs(np.bincount(lists.tokens[:, 0])[10:] - 22_500).max() < 780
    assert abs(np.bincount(lists.tokens[:, 1]) - 9_000).max() < 540


def test_equal_seeds_give_equal_lists_and_others_do_not():
    same = generate(100, 3).tokens
    assert (generate(100, 3).tokens == same).all()
    assert (generate(100, 4).tokens != same).any()
    assert (generate(100, 3, "validation").tokens != same).any()


def test_validation_without_train_holds_only_unseen_lists():
    train, validation = generate(20_000, 0), generate(2000, 0, "validation")
    unseen = validation.without(train)
    known = {tuple(row) for row in train.tokens.tolist()}
    rows = [tuple(row) for row in validation.tokens.tolist()]
    assert [tuple(row) for row in unseen.tokens.tolist()] == [r for r in rows if r not in known]
    assert 0 < len(unseen) < len(validation)
    assert (reduce_lists(unseen.tokens, unseen.length) == unseen.label).all()


def test_no_list_is_a_set_too():
    assert len(generate(0, 0)) == 0


@pytest.mark.parametrize(
    ("tokens", "length", "reason"),
    [
        ([[10, 1], [9, 1]], [2, 2], "operation 9 in list 1"),
        ([[10, 1], [10, 10]], [2, 2], "digit 10 in list 1"),
        ([[10, 1], [10, -1]], [2, 2], "digit -1 in list 1"),
        ([[10, 1], [10, 1]], [2, 1], "length 1 in list 1"),
        ([[10, 1], [10, 1]], [3, 2], "length 3 in list 0"),
        ([[10, 1], [10, 1]], [2], r"tokens have shape \(2, 2\)"),
        ([[10], [10]], [1, 1], "W >= 2"),
    ],
)
def test_bad_lists_are_refused(tokens, length, reason):
    with pytest.raises(DataError, match=reason):
        reduce_lists(np.array(tokens), np.array(length))


def test_what_stands_past_the_length_is_not_looked_at():
    assert reduce_lists(np.array([[12, 3, 8, 99]]), np.array([3])).tolist() == [5]


def test_numbers_out_of_range_are_refused():
    for arguments in ((-1, 0), (1, -1), (1, 0, "test")):
        with pytest.raises(ValueError, match=r"n is|split is"):
            generate(*arguments)
