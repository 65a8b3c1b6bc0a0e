"""The comparison of how answers are found: wrappings that state the answer, and lm-eval's patterns as published."""

from experiments.rewards.extraction import JUDGES, WRAPPINGS, check_answers, check_wrappings

SOLUTIONS = [
    "She has 16 - 3 = <<16-3=13>>13 eggs.\nThat is 1,080.\n#### 1,080",
    "It is 5 + 13 = <<5+13=18>>18.\n#### 18",
]


def test_every_wrapping_states_its_answer_and_no_other():
    found = check_wrappings(SOLUTIONS, ["1,080", "18"], {"ours": JUDGES["ours"]})
    assert len(WRAPPINGS) >= 12
    assert found["wrappings"] == {name: {"ours": {"missed": 0, "wrongly_paid": 0}} for name in WRAPPINGS}


def test_the_patterns_of_lm_eval():
    assert JUDGES["strict"]("#### 18", "18") and not JUDGES["strict"]("it is 18", "18")
    assert JUDGES["flexible"]("it is $1,080.", "1080") and JUDGES["flexible"]("18 or 20", "20")


def test_a_reader_decides_where_judges_differ():
    judges = {"ours": JUDGES["ours"], "flexible": JUDGES["flexible"]}
    rows = [{"id": "a", "gold": "20", "response": "18 or 20", "right": False}]
    found = check_answers(rows, judges)
    assert found["judges"]["flexible"] == {"paid": 1, "missed": 0, "wrongly_paid": 1} and not found["unread"]
    assert check_answers([rows[0] | {"right": None}], judges)["unread"][0]["id"] == "a"
