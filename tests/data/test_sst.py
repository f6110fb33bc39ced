import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.data.sst import Vocabulary, load_sst, parse_tree, read_trees
from geartrain.errors import DataError

PICTURE = "(3 (2 It) (4 (2 's) (3 good)))"


def lists(tree):
    return [column.tolist() if isinstance(column, np.ndarray) else column for column in tuple(tree)]


def test_the_tree_of_the_picture_comes_out_as_drawn():
    words, leaf, parent, slot, label = lists(parse_tree(PICTURE))
    assert words == ["It", "'s", "good"]
    assert leaf == [0, 1, 2]
    assert parent == [4, 3, 3, 4, -1]
    assert slot == [0, 0, 1, 1, 0]
    assert label == [2, 2, 3, 4, 3]
    assert all(column.dtype == np.int64 for column in parse_tree(PICTURE)[1:])


def test_a_single_leaf_is_a_tree():
    assert lists(parse_tree("(4 yes)")) == [["yes"], [0], [-1], [0], [4]]


def test_only_the_ascii_space_separates():
    words = parse_tree("(2  (2 2\u00a01/2)  (1 a\u0085b) )").words
    assert words == ["2\u00a01/2", "a\u0085b"]


trees = st.recursive(
    st.tuples(st.integers(0, 4), st.text("ab.'\u00a0é", min_size=1, max_size=3)),
    lambda child: st.tuples(st.integers(0, 4), child, child),
    max_leaves=20,
)


def written(tree):
    return f"({tree[0]} {' '.join(x if isinstance(x, str) else written(x) for x in tree[1:])})"


def rebuilt(words, leaf, parent, slot, label):
    content = {vertex: [word] for vertex, word in zip(leaf, words, strict=True)}
    for vertex, (up, side) in enumerate(zip(parent, slot, strict=True)):
        assert up == -1 or up > vertex
        here = (label[vertex], *content[vertex])
        if up == -1:
            assert vertex == len(parent) - 1
            return here
        assert len(content.setdefault(up, [])) == side
        content[up].append(here)
    raise AssertionError("no root")


@settings(deadline=None, derandomize=True)
@given(trees)
def test_a_written_tree_is_read_back_whole(tree):
    assert rebuilt(*lists(parse_tree(written(tree)))) == tree


def test_a_tree_deeper_than_the_recursion_limit_is_read():
    depth = 20_000
    text = "(1 " * depth + "(2 a)" + " (3 b))" * depth
    tree = parse_tree(text)
    assert len(tree.words) == depth + 1
    assert len(tree.parent) == 2 * depth + 1
    assert tree.parent[0] == 2


BAD = [
    ("(3 (2 a) (2 b)", 15, "1 open parenthesis"),
    ("(3 (2 a", 8, "2 open parentheses"),
    ("(3 (2 a) (2 b)))", 16, "after the tree"),
    ("(3 (2 a) (2 b)) (3 c)", 17, "after the tree"),
    ("(3 a) x", 7, "after the tree"),
    ("x (3 a)", 1, "before the tree"),
    (")", 1, "before the tree"),
    ("(3 (2 a))", 9, "1 child, too few"),
    ("(3 (2 a) (2 b) (2 c))", 21, "3 children, too many"),
    ("(5 a)", 1, "expected '(' and one of 0..4"),
    ("(-1 a)", 1, "expected '(' and one of 0..4"),
    ("(22 a)", 1, "expected '(' and one of 0..4"),
    ("(3 (a) (2 b))", 4, "'(a' does not open"),
    ("()", 1, "does not open a vertex with a label"),
    ("(3 )", 4, "empty word"),
    ("(3 (2) (2 b))", 6, "empty word"),
    ("(3 a b)", 6, "second word"),
    ("(3 (2 a) b)", 10, "stands beside"),
    ("(3 a (2 b))", 6, "stands beside"),
    ("   ", 1, "only spaces"),
]


@pytest.mark.parametrize(("text", "column", "reason"), BAD)
def test_a_bad_tree_is_refused_with_its_column(text, column, reason):
    with pytest.raises(DataError) as caught:
        parse_tree(text)
    assert str(caught.value).startswith(f"column {column}: ")
    assert reason in str(caught.value)


def write(path, *lines):
    path.write_bytes(
        b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
    )
    return path


def test_a_bad_line_is_refused_with_file_line_and_column(tmp_path):
    path = write(tmp_path / "t.txt", PICTURE, "", "(2 (2 a) (9 b))")
    with pytest.raises(DataError) as caught:
        read_trees(path)
    assert str(caught.value).startswith(f"{path}:3: column 10: '(9'")
    assert (caught.value.path, caught.value.line) == (path, 3)


def test_bytes_that_are_not_utf_8_are_refused_with_their_place(tmp_path):
    path = write(tmp_path / "t.txt", PICTURE, b"(2 caf\xe9)")
    with pytest.raises(DataError, match=r"t.txt:2: byte 7 of the line is 0xe9"):
        read_trees(path)


@pytest.mark.parametrize("content", [b"", b"\n  \n\r\n"])
def test_a_file_without_a_tree_is_refused(tmp_path, content):
    path = tmp_path / "t.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match="the file has no tree"):
        read_trees(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"none.txt: cannot be read: No such file"):
        read_trees(tmp_path / "none.txt")


def test_bad_lines_are_skipped_counted_and_leave_no_word_behind(tmp_path):
    path = write(tmp_path / "t.txt", PICTURE, "(2 (2 lost)", b"(2 \xff)", "(1 fine)")
    got = read_trees(path, policy="skip")
    assert got.skipped == 2
    assert len(got.trees) == 2
    assert set(got.vocabulary.words) == {"<unk>", "It", "'s", "good", "fine"}


def test_a_file_of_nothing_but_bad_lines_is_refused_even_when_skipping(tmp_path):
    with pytest.raises(DataError, match="all 1 records were refused"):
        read_trees(write(tmp_path / "t.txt", "(7 a)"), policy="skip")


def test_windows_line_ends_are_no_part_of_a_tree(tmp_path):
    path = write(tmp_path / "t.txt", PICTURE + "\r", "(1 a)\r", "")
    assert len(read_trees(path).trees) == 2


def test_words_are_numbered_by_count_then_spelling_after_the_unknown():
    vocabulary = Vocabulary.build("b a c a c d".split())
    assert vocabulary.words == ("<unk>", "a", "c", "b", "d")
    assert vocabulary.encode(["d", "a", "never seen"]).tolist() == [4, 1, 0]
    assert Vocabulary.build("b a c a c d".split(), min_count=2).words == ("<unk>", "a", "c")


def test_a_vocabulary_survives_json():
    vocabulary = Vocabulary.build(["é", 'a"b', "2\u00a01/2"])
    assert Vocabulary.from_json(vocabulary.to_json()) == vocabulary


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "no JSON at column 2"),
        ("[]", 'expected {"words"'),
        (json.dumps({"words": ["<unk>", 3]}), "strings alone"),
        (json.dumps({"words": ["a"]}), "word 0 is 'a'"),
        (json.dumps({"words": []}), "word 0 is nothing"),
        (json.dumps({"words": ["<unk>", "a", "a"]}), "'a' stands 2 times"),
    ],
)
def test_a_vocabulary_that_is_none_is_refused(text, reason):
    with pytest.raises(DataError) as caught:
        Vocabulary.from_json(text)
    assert reason in str(caught.value)


@pytest.fixture
def bank(tmp_path):
    (tmp_path / "sst").mkdir()
    write(tmp_path / "sst" / "train.txt", PICTURE, "(0 bad")
    write(tmp_path / "sst" / "dev.txt", "(2 (2 It) (2 new))")
    return tmp_path


def test_dev_is_numbered_with_the_words_of_train(bank):
    sst = load_sst(bank, ("dev", "train"), policy="skip")
    assert (len(sst.train), len(sst.dev), len(sst.test), sst.skipped) == (1, 1, 0, 1)
    it, new = sst.dev[0].word.tolist()
    assert sst.vocabulary.words[it] == "It"
    assert new == 0


def test_a_given_vocabulary_is_kept_and_train_is_not_needed(bank):
    vocabulary = Vocabulary(("<unk>", "new"))
    sst = load_sst(bank, ("dev",), vocabulary=vocabulary)
    assert sst.vocabulary is vocabulary
    assert sst.dev[0].word.tolist() == [0, 1]
    assert sst.train == ()


def test_splits_without_train_or_of_another_name_are_refused(bank):
    with pytest.raises(ValueError, match="add 'train'"):
        load_sst(bank, ("dev",))
    with pytest.raises(ValueError, match=r"\['valid'\]"):
        load_sst(bank, ("train", "valid"))
    with pytest.raises(DataError, match=r"sst/test\.txt is missing"):
        load_sst(bank, ("train", "test"))


def test_the_real_treebank_has_the_known_counts(real_data):
    sst = load_sst(real_data)
    assert (len(sst.train), len(sst.dev), sst.skipped) == (8544, 1101, 0)
    assert sum(tree.vertices for tree in sst.train) == 318_582
    assert sum(len(tree.word) for tree in sst.train) == 163_563
    assert max(len(tree.word) for tree in sst.train) == 52
    assert sum(tree.vertices for tree in sst.dev) == 41_447
    roots = np.bincount([tree.label[-1] for tree in sst.train])
    assert roots.tolist() == [1092, 2218, 1624, 2322, 1288]
    for tree in (*sst.train, *sst.dev):
        inner = np.bincount(tree.parent[:-1], minlength=tree.vertices)
        inner[tree.leaf] += 2
        assert (inner == 2).all()
    assert all((tree.word > 0).all() for tree in sst.train)
