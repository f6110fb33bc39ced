import numpy as np
import pytest

from geartrain.data.babi import TASKS, generate_deduction, load_babi
from geartrain.errors import DataError

OPPOSITE = (1, 0, 3, 2)  # of north, south, east, west

STORIES = {
    4: "1 The office is north of the kitchen.\n2 The garden is south of the kitchen.\n"
    "3 What is north of the kitchen?\toffice\t1\n4 What is the kitchen north of?\tgarden\t2\n",
    15: "1 Mice are afraid of wolves.\n2 Gertrude is a mouse.\n3 Wolves are afraid of sheep.\n"
    "4 What is gertrude afraid of?\twolf\t2 1\n",
    16: "1 Lily is a frog.\n2 Lily is green.\n3 Greg is a frog.\n"
    "4 What color is Greg?\tgreen\t3 1 2\n",
    18: "1 The box of chocolates fits inside the chest.\n2 The box is bigger than the chest.\n"
    "3 Does the box fit in the box of chocolates?\tno\t1 2\n"
    "4 Is the box bigger than the box of chocolates?\tyes\t2 1\n",
    19: "1 The office is east of the hallway.\n2 The kitchen is north of the office.\n"
    "3 How do you go from the kitchen to the hallway?\ts,w\t2 1\n",
}


def write(folder, task, text, size="en"):
    path = folder / "babi" / size / f"{TASKS[task].file}_train.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def edges(question):
    return set(
        zip(
            question.source.tolist(),
            question.type.tolist(),
            question.target.tolist(),
            strict=True,
        )
    )


def reach(known, vertices, kind):
    return {t for s, k, t in known for v in vertices if (s, k) == (v, kind)}


def solve(question, task):
    """Every answer that the graph allows, from its arrays alone."""
    known, query = edges(question), question.query.tolist()
    if task == 4:
        # The reverse of "north" leads from a place to what lies north of it.
        return {
            (v,)
            for v in reach(known, query, question.kind + 4)
            | reach(known, query, OPPOSITE[question.kind])
        }
    if task == 15:
        return {(v,) for v in reach(known, reach(known, query, 0), 1)}
    if task == 16:
        same_kind = reach(known, reach(known, query, 0), 2)
        return {(v,) for v in reach(known, same_kind, 1)}
    if task == 18:
        a, b = query if question.kind == 1 else query[::-1]
        return {(1,)} if is_bigger(known, a, b) else {(0,)} if is_bigger(known, b, a) else set()
    return {
        (first, second)
        for first in range(4)
        for second in range(4)
        if query[1] in walk(known, walk(known, {query[0]}, first), second)
    }


def is_bigger(known, a, b):
    seen, new = set(), {a}
    while new:
        seen |= new
        new = (reach(known, new, 1) | reach(known, new, 2)) - seen
    return b in seen


def walk(known, places, move):
    return reach(known, places, move + 4) | reach(known, places, OPPOSITE[move])


@pytest.mark.parametrize("task", TASKS)
def test_a_story_becomes_graphs_that_can_be_solved(tmp_path, task):
    write(tmp_path, task, STORIES[task] * 2)
    got = load_babi(tmp_path, task)
    assert got.task is TASKS[task]
    assert len(got.questions) == 2 * STORIES[task].count("?")
    for question in got.questions:
        assert solve(question, task) == {tuple(question.answer.tolist())}
        columns = (question.source, question.target, question.type, question.query, question.answer)
        assert all(column.dtype == np.int64 for column in columns)


def test_vertices_are_numbered_by_first_mention_and_edges_follow_the_facts(tmp_path):
    write(tmp_path, 15, STORIES[15])
    (question,) = load_babi(tmp_path, 15, reverse=False).questions
    assert question.names == ("mouse", "wolf", "gertrude", "sheep")
    assert question.source.tolist() == [0, 2, 1]
    assert question.target.tolist() == [1, 0, 3]
    assert question.type.tolist() == [1, 0, 1]
    assert question.query.tolist() == [2]
    assert question.answer.tolist() == [1]


def test_reversed_edges_follow_with_types_of_their_own(tmp_path):
    write(tmp_path, 15, STORIES[15])
    (question,) = load_babi(tmp_path, 15).questions
    assert question.source.tolist() == [0, 2, 1, 1, 0, 3]
    assert question.target.tolist() == [1, 0, 3, 0, 2, 1]
    assert question.type.tolist() == [1, 0, 1, 3, 2, 3]


def test_only_the_facts_before_a_question_are_in_its_graph(tmp_path):
    first = "1 Lily is a frog.\n2 Lily is green.\n3 What color is Lily?\tgreen\t2\n"
    write(tmp_path, 16, first + "4 Greg is a frog.\n5 What color is Greg?\tgreen\t4 1 2\n")
    before, after = load_babi(tmp_path, 16).questions
    assert before.names == ("lily", "frog", "green")
    assert after.names == ("lily", "frog", "green", "greg")
    assert (len(before.source), len(after.source)) == (4, 6)


def test_the_two_ways_to_ask_for_a_direction_are_one_kind(tmp_path):
    write(tmp_path, 4, STORIES[4])
    north_of, north_of_what = load_babi(tmp_path, 4).questions
    assert TASKS[4].questions[north_of.kind] == "north"
    assert TASKS[4].questions[north_of_what.kind] == "south"


def test_names_of_several_words_are_one_vertex(tmp_path):
    write(tmp_path, 18, STORIES[18])
    assert load_babi(tmp_path, 18).questions[0].names == ("box of chocolates", "chest", "box")


BAD = [
    (15, "1 Cats chase mice.\n", 1, "'Cats chase mice.' is no fact of task 15; expected 'A are"),
    (15, "1 Gertrude is a mouse.\n2 Where is she?\tx\t1\n", 2, "is no question of task 15"),
    (15, "1 Gertrude is a mouse.\n", 1, "the story of 1 facts has no question"),
    (15, "2 Gertrude is a mouse.\n", 1, "begins with '2'; expected 1"),
    (15, STORIES[15].replace("\n3", "\n4"), 3, "begins with '4'; expected 3"),
    (15, STORIES[15].replace("is gertrude", "is emily"), 4, "asks about 'emily', which no fact"),
    (15, STORIES[15].replace("\twolf", "\tcat"), 4, "answer is 'cat', which no fact"),
    (15, "1 What is gertrude afraid of?\twolf\t2\n", 1, "as there is no fact"),
    (18, STORIES[18].replace("\tno", "\tmaybe"), 3, "'maybe'; task 18 expects one of no, yes"),
    (19, STORIES[19].replace("s,w", "s,up"), 3, "'up'; task 19 expects one of north, south"),
    (19, STORIES[19].replace("s,w", "s,w,n"), 3, "has 3 parts"),
]


@pytest.mark.parametrize(("task", "text", "line", "reason"), BAD)
def test_a_bad_story_is_refused_with_file_and_line(tmp_path, task, text, line, reason):
    path = write(tmp_path, task, STORIES[task] + text)
    line += STORIES[task].count("\n") if text.startswith("1 ") else 0
    if not text.startswith("1 "):
        path = write(tmp_path, task, text)
    with pytest.raises(DataError) as caught:
        load_babi(tmp_path, task)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert reason in str(caught.value)


def test_a_bad_story_is_skipped_whole(tmp_path):
    spoilt = STORIES[4].replace("north of?\tgarden", "north of?\tattic")
    write(tmp_path, 4, STORIES[4] + spoilt + STORIES[4])
    got = load_babi(tmp_path, 4, policy="skip")
    assert (len(got.questions), got.skipped) == (4, 1)


def test_bytes_that_are_not_utf_8_are_refused_with_their_line(tmp_path):
    write(tmp_path, 15, STORIES[15].encode() + b"1 Z\xe9 is a cat.\n")
    with pytest.raises(DataError, match=r"_train\.txt:5: byte 0xe9 is not UTF-8"):
        load_babi(tmp_path, 15)


def test_a_file_of_blank_lines_is_refused(tmp_path):
    write(tmp_path, 15, "\n\n")
    with pytest.raises(DataError, match="the file has no question"):
        load_babi(tmp_path, 15)


def test_other_tasks_sizes_and_splits_are_refused(tmp_path):
    for arguments in ({"task": 1}, {"size": "fr"}, {"split": "dev"}):
        with pytest.raises(ValueError, match="expected"):
            load_babi(tmp_path, **arguments)


def test_generated_deductions_are_solved_by_two_steps():
    graphs = generate_deduction(50, 0)
    for graph in graphs:
        assert len(graph.names) == len(set(graph.names)) == 54
        assert len(graph.source) == 2 * 54
        assert solve(graph, 15) == {tuple(graph.answer.tolist())}
        (kind,) = reach(edges(graph), graph.query.tolist(), 0)
        assert kind != graph.answer[0], "a kind fears another one"


def test_a_vertex_number_of_a_generated_graph_tells_nothing():
    graphs = generate_deduction(2000, 0, kinds=2, individuals=2)
    # 500 expected for each vertex: six standard deviations are about 116.
    for column in ("query", "answer"):
        counts = np.bincount([getattr(graph, column)[0] for graph in graphs], minlength=4)
        assert abs(counts - 500).max() < 116


def test_equal_seeds_give_equal_deductions():
    a, b, c = (generate_deduction(1, seed)[0] for seed in (5, 5, 6))
    assert (a.target == b.target).all()
    assert (a.target != c.target).any()
    with pytest.raises(ValueError, match="expected at least"):
        generate_deduction(1, 0, kinds=1)


@pytest.mark.parametrize("task", TASKS)
def test_every_real_question_has_a_graph_that_allows_its_answer(real_data, task):
    got = load_babi(real_data, task)
    assert (len(got.questions), got.skipped) == (1000, 0)
    solutions = [solve(question, task) for question in got.questions]
    answers = [tuple(question.answer.tolist()) for question in got.questions]
    assert all(answer in found for answer, found in zip(answers, solutions, strict=True))
    unique = sum(len(found) == 1 for found in solutions)
    # Of a kind with animals of two colours, induction has two candidates.
    assert unique == (914 if task == 16 else 1000)
