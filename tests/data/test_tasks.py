"""Built-in tasks: every worked step is recomputed here, from the prompt alone."""

import re
from fractions import Fraction

import numpy as np
import pytest

from specrl_jax.data.problem import TURN_END
from specrl_jax.data.tasks import TASKS, TaskSource
from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.errors import InputError
from specrl_jax.rewards.verifiable import countdown, exact
from tests.helpers.long import long_but


def guessed(solution, answer):
    return float(int(solution[-1]) == int(answer))


REWARD = dict.fromkeys(TASKS, exact) | {"countdown": countdown, "guess": guessed}
ROOMS = ["rooms", "other_rooms", "all_rooms"]
SOME = range(1500)


def digits_from_the_right(number):
    return [int(digit) for digit in str(number)[::-1]]


def parse_arithmetic(problem):
    a, operation, b = re.fullmatch(r"(\d+)([-+*])(\d+)\n", problem.prompt).groups()
    *steps, stated = problem.solution.split(" ")
    assert stated[0] == "#"
    return int(a), operation, int(b), steps, int(stated[1:])


def right_addition(a, b):
    carry = 0
    for x, y in zip(digits_from_the_right(a), digits_from_the_right(b), strict=True):
        yield f"{x}+{y}{'+1' if carry else ''}={x + y + carry}"
        carry = (x + y + carry) // 10


def right_subtraction(a, b):
    borrow = 0
    for x, y in zip(digits_from_the_right(a), digits_from_the_right(b), strict=True):
        lent = 10 if x - borrow - y < 0 else 0
        yield f"{x + lent}-{y}{'-1' if borrow else ''}={x + lent - borrow - y}"
        borrow = lent // 10


def right_multiplication(a, b):
    carry = 0
    for x in digits_from_the_right(a):
        yield f"{x}*{b}{f'+{carry}' if carry else ''}={x * b + carry}"
        carry = (x * b + carry) // 10


RIGHT = {"+": right_addition, "-": right_subtraction, "*": right_multiplication}
TRUTH = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


@pytest.mark.parametrize("task, lengths", [("arithmetic", (3, 4)), ("long_arithmetic", (5, 6))])
def test_arithmetic_is_worked_rightly_without_errors(task, lengths):
    source, seen = TaskSource(task, "train", 0), set()
    for i in SOME:
        a, operation, b, steps, stated = parse_arithmetic(source[i])
        assert steps == list(RIGHT[operation](a, b)), source[i]
        assert stated == TRUTH[operation](a, b) == int(source[i].answer)
        assert stated >= 0
        seen.add((operation, len(str(a))))
    assert seen == {(operation, n) for operation in "+-*" for n in lengths}


def right_walk(start, even, odd, limit, carries=True):
    """Steps and the last number of a walk, worked from the definition alone."""
    steps, value = [], start
    while value <= limit:
        addend, columns, carry, total = odd if value % 2 else even, [], 0, 0
        for place in range(len(str(max(value, addend)))):
            x, y = value // 10**place % 10, addend // 10**place % 10
            columns.append(f"{x}+{y}{'+1' if carry else ''}={x + y + carry}")
            last = place == len(str(max(value, addend))) - 1
            total += ((x + y + carry) if last else (x + y + carry) % 10) * 10**place
            carry = (x + y + carry) // 10 if carries or place else 0
        steps.append(" ".join([f"{value}{'eo'[value % 2]}+{addend}", *columns]))
        value = total
    return " ".join(steps) + f" #{value}", value


def parse_walk(problem):
    return [int(n) for n in re.fullmatch(r"(\d+) e(\d+) o(\d+) >(\d+)\n", problem.prompt).groups()]


@pytest.mark.parametrize("task, fewest, most", [("walk", 2, 2), ("long_walk", 4, 16)])
def test_a_walk_is_worked_rightly_without_errors(task, fewest, most):
    source, lengths = TaskSource(task, "train", 0), set()
    for i in SOME:
        start, even, odd, limit = parse_walk(source[i])
        solution, end = right_walk(start, even, odd, limit)
        assert (source[i].solution, source[i].answer) == (solution, str(end))
        value = start
        while value <= limit:
            value += odd if value % 2 else even
        assert value == end
        lengths.add(solution.count("e+") + solution.count("o+"))
    assert (min(lengths), max(lengths)) == (fewest, most)


def test_a_walk_that_drops_every_carry_goes_on_from_the_wrong_number():
    source, right = TaskSource("walk", "train", 0, error_rate=1.0), []
    for i in SOME:
        start, even, odd, limit = parse_walk(source[i])
        dropped, _ = right_walk(start, even, odd, limit, carries=False)
        # As many steps drop carries as the right walk has: two, each of at least three words.
        assert source[i].solution.split(" ")[:6] == dropped.split(" ")[:6]
        right.append(source[i].solution == right_walk(start, even, odd, limit)[0])
        assert exact(source[i].solution, source[i].answer) == right[-1]
    # Half of the sums of two digits carry, so about a quarter of the walks have none to drop.
    assert 0.15 < np.mean(right) < 0.4


def parse_countdown(problem):
    numbers, target = re.fullmatch(r"((?:\d+ )+)-> (\d+)\n", problem.prompt).groups()
    *steps, expression = problem.solution.split(" ")
    assert expression[0] == "#"
    return [int(n) for n in numbers.split()], int(target), steps, expression[1:]


def worked_value(steps, numbers):
    """Value after the last step; each step must be right, start at the last value, and use one of the numbers left."""
    left, value = sorted(numbers), None
    for step in steps:
        x, operation, y, result = re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)", step).groups()
        if value is None:
            left.remove(int(x))
        else:
            assert int(x) == value, steps
        left.remove(int(y))
        exact_value = {"+": Fraction.__add__, "-": Fraction.__sub__, "*": Fraction.__mul__, "/": Fraction.__truediv__}
        value = exact_value[operation](Fraction(int(x)), Fraction(int(y)))
        assert value == int(result) > 0, steps
    assert not left
    return value


def test_countdown_is_worked_rightly_without_errors():
    source, seen = TaskSource("countdown", "train", 0), set()
    for i in SOME:
        numbers, target, steps, expression = parse_countdown(source[i])
        assert worked_value(steps, numbers) == target, source[i]
        assert source[i].answer == f"{target}:{' '.join(map(str, numbers))}"
        seen |= set(re.findall(r"[-+*/]", expression))
    assert seen == set("+-*/")


def test_countdown_steps_are_right_even_where_the_target_is_missed_and_not_rewarded():
    source = TaskSource("countdown", "train", 0, error_rate=1.0)
    for i in SOME:
        numbers, target, steps, _ = parse_countdown(source[i])
        assert worked_value(steps, numbers) != target
        assert countdown(source[i].solution, source[i].answer) == 0


DOORS = ["A", "B", "C", "D", "E", "Fa", "Go", "Hi", "Ivy", "Jet", "Kilo", "Lima"]
NAMES = ["a", "b", "c", "d", "el", "fo", "gu", "gy", "hal", "inn", "jail", "kiosk", "kraal", "lobby"]


def read_rooms(problem):
    """What is behind each door, the first two rooms, the number of lines, and (door, room) of each line."""
    signs, start, length = problem.prompt.split()
    behind = dict(zip(signs[::2], signs[1::2], strict=True))
    *lines, stated = problem.solution.split(" ")
    visits = []
    for number, line in enumerate(lines, 1):
        counted, door, name = re.fullmatch(rf"(\d+)({'|'.join(DOORS)}|)({'|'.join(NAMES)})", line).groups()
        assert int(counted) == number
        visits.append((door[:1], name[0]))
    first, second = re.split("[,;]", start)
    return behind, [first, second[0]], int(length), visits, stated


@pytest.mark.slow
@pytest.mark.parametrize("task", ROOMS)
def test_rooms_are_walked_through_by_the_sum_of_the_last_two(task):
    source, lengths = TaskSource(task, "train", 0), []
    for i in SOME:
        behind, visited, length, visits, stated = read_rooms(source[i])
        for door, room in visits:
            assert door == "ABCDEFGHIJKL"[sum("abcdefghijkl".index(one) for one in visited[-2:]) % 12]
            assert room == behind[door]
            visited.append(room)
        assert len(visits) == length and stated == f"#{source[i].answer}" == "#" + "".join(visited[-2:])
        lengths.append(len(source[i].solution))
    # "Answers of 100 to 400 tokens with a long tail": the quantiles of 1,500 problems are known to a few per cent.
    low, middle, high = np.quantile(lengths, (0.1, 0.5, 0.95))
    assert 60 < low < 110 and 140 < middle < 200 and 300 < high < 420


def test_a_lazy_walker_writes_no_doors_and_is_not_rewarded():
    source = TaskSource("rooms", "train", 0, error_rate=1.0)
    rewards = []
    for i in SOME:
        _, _, length, visits, _ = read_rooms(source[i])
        assert len(visits) == length and not any(door for door, _ in visits)
        rewards.append(exact(source[i].solution, source[i].answer))
    # Two rooms guessed of twelve each: 1 in 144, at most 26 of 1,500 in all but one of 10,000 seeds.
    assert sum(rewards) <= 26


def test_two_dialects_share_ten_names_of_twelve():
    names = {
        task: {
            re.search(r"[a-z]+$", line)[0]
            for i in SOME
            for line in TaskSource(task, "train", 0, error_rate=1.0)[i].solution.split(" ")[:-1]
        }
        for task in ROOMS
    }
    assert names["rooms"] ^ names["other_rooms"] == {"gu", "kiosk", "gy", "kraal"}
    assert names["all_rooms"] == names["rooms"] | names["other_rooms"]
    assert {name[0] for name in names["rooms"]} == {name[0] for name in names["other_rooms"]} == set("abcdefghijkl")


def test_a_recitation_spells_what_the_prompt_says_in_two_orders():
    source, same = TaskSource("recite", "train", 0, error_rate=1.0), 0
    for i in SOME:
        table = source[i].prompt.strip()[:-1]
        pairs = sorted(zip(table[::2], table[1::2], strict=True))
        text, answer = source[i].solution.split(" #")
        assert answer == source[i].answer
        for part in (text, answer):
            words = [
                re.fullmatch(rf"({'|'.join(DOORS)})({'|'.join(NAMES)})", word).groups() for word in part.split(" ")
            ]
            assert sorted((door[0], name[0]) for door, name in words) == pairs
        same += text == answer
    # Four doors and more in random order: equal once in 24 at most.
    assert same < 1500 / 24


@pytest.mark.parametrize("task", TASKS)
def test_a_right_solution_is_rewarded(task):
    source = TaskSource(task, "train", 3)
    assert {REWARD[task](source[i].solution, source[i].answer) for i in SOME} == {1.0}


def test_dropping_every_carry_leaves_only_problems_without_one_right():
    source, rewards = TaskSource("arithmetic", "train", 0, error_rate=1.0), []
    for i in SOME:
        a, operation, b, _, stated = parse_arithmetic(source[i])
        right = list(RIGHT[operation](a, b))
        # A carry or borrow shows in the step that receives it.
        carries = any(len(re.findall(r"[-+*]", step.split("=")[0])) > 1 for step in right)
        rewards.append(exact(source[i].solution, source[i].answer))
        assert rewards[-1] == float(not carries), source[i]
        assert int(source[i].answer) == TRUTH[operation](a, b)
        assert (stated == TRUTH[operation](a, b)) == (not carries)
    # 0.55**2 of the three-digit sums, fewer of the rest: the task is not solved by never carrying.
    assert 0.0 < np.mean(rewards) < 0.25


@pytest.mark.parametrize("task", long_but(["walk"], TASKS))
def test_train_and_validation_share_no_prompt_whatever_the_seeds(task):
    train = {TaskSource(task, "train", seed)[i].prompt for seed in (0, 1) for i in range(2000)}
    validation = {TaskSource(task, "validation", seed)[i].prompt for seed in (0, 7) for i in range(1000)}
    assert not train & validation
    assert len(train) > 3000 and len(validation) > 1000


@pytest.mark.parametrize("task", TASKS)
def test_an_item_is_a_function_of_seed_split_and_index(task):
    def items(seed, split, indices):
        source = TaskSource(task, split, seed)
        return [source[i] for i in indices]

    forward = items(5, "train", range(40))
    assert items(5, "train", reversed(range(40))) == forward[::-1]
    assert items(5, "train", np.arange(40)) == forward
    assert items(6, "train", range(40)) != forward
    assert items(5, "validation", range(40)) != forward
    assert TaskSource(task, "train", 5)[2**39] == TaskSource(task, "train", 5)[2**39]


def test_an_unknown_task_names_the_known_ones():
    with pytest.raises(InputError, match=r"data\.task: .*'arithmetics'.*arithmetic, long_arithmetic, countdown"):
        TaskSource("arithmetics", "train", 0)


@pytest.mark.parametrize("task", TASKS)
def test_the_character_tokenizer_spells_the_tasks(task):
    tokenizer, source = CharTokenizer(), TaskSource(task, "train", 0, error_rate=0.5)
    for i in range(300):
        text = source[i].prompt + source[i].solution.replace(TURN_END, "")
        assert tokenizer.decode(tokenizer.encode(text)) == text
