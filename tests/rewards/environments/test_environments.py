"""The environments that ship, one of the documentation, and workers that outlive environments that do not."""

import importlib.util
import queue
import random
import re
import time

import pytest

from specrl_jax.rewards.environments.calculator import Calculator, TinyCalculator
from specrl_jax.rewards.environments.guessing import Guessing
from specrl_jax.rewards.environments.session import Sessions, load, read_step
from specrl_jax.rewards.environments.workers import EnvironmentWorkers
from specrl_jax.rewards.messages import NotScored, Outcome
from specrl_jax.rewards.pool import WorkerOptions
from specrl_jax.rewards.scorer import Scorer, make_environment
from specrl_jax.rewards.verifiable import exact
from tests.helpers.runs import ROOT
from tests.rewards.environments.strange import GARBAGE, Strange

STRANGE = "tests.rewards.environments.strange:Strange"
CALL = '<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{}"}}}}\n</tool_call>'


def workers_of(name, count=2, seconds=3.0):
    return EnvironmentWorkers(name, name, WorkerOptions(count, seconds, 1.0))


@pytest.fixture
def strange():
    workers = workers_of(STRANGE)
    yield workers
    workers.close()


def talk(workers, *texts, seed=7, conversation=None):
    """Say `texts` one after the other; return the outcomes."""
    conversation, replies = conversation or workers.open({"answer": "x"}, seed), queue.SimpleQueue()
    found = []
    for i, text in enumerate(texts):
        workers.submit(conversation, text, list(texts[:i]), replies=replies)
        reply = replies.get(timeout=100)
        assert reply.number == conversation.session
        found.append(reply.outcome)
    return found


@pytest.mark.parametrize(
    "expression, value",
    [("12+30", "42"), ("(2+3)*4", "20"), ("7/2", "7/2"), ("1/0", None), ("2**9", None), ("abs(3)", None), ("", None)],
)
def test_the_calculators_compute_whole_numbers_exactly(expression, value):
    step = Calculator().step("thinking\n" + CALL.format(expression))
    assert [m["content"] for m in step.messages] == [value or "error: not an expression of whole numbers"]
    assert step.info["tool_calls"] == 1 and step.info["tool_errors"] == (value is None)
    assert step.info["call"] == CALL.format(expression)
    tiny = TinyCalculator().step(f"so ?{expression}")
    assert [m["content"] for m in tiny.messages] == [value or "!"] and tiny.info["call"] == f"?{expression}"


@pytest.mark.parametrize("call", ["{}", "[1]", "x", '{"name": "other", "arguments": {"expression": "1"}}', "3", '""'])
def test_what_is_no_call_of_the_calculator_is_told_so(call):
    step = Calculator().step(f"<tool_call>{call}</tool_call>" + CALL.format("1+1"))
    assert [m["content"][:5] for m in step.messages] == ["error", "2"]
    assert (step.info["tool_calls"], step.info["tool_errors"]) == (2, 1)


def test_a_turn_without_a_call_ends_the_calculators():
    assert Calculator().step("it is 42").messages is None
    assert TinyCalculator().step("?1+1 no\n#2").messages is None


def test_the_calculator_begins_with_the_rows_messages():
    asked = {"role": "user", "content": "1+1?"}
    tools, user = Calculator().reset({"prompt": "1+1?"}, 0)
    assert (tools["role"], user) == ("system", asked)
    assert Calculator().reset({"prompt": [asked]}, 0) == [tools, asked]
    system, *rest = Calculator().reset({"prompt": [{"role": "system", "content": "Be short."}, asked]}, 0)
    assert (system["content"], rest) == (f"Be short.\n\n{tools['content']}", [asked])


def test_the_guessing_game():
    game = Guessing()
    game.reset({"answer": "12"}, 0)
    assert [game.step(text).messages[0]["content"] for text in ("20", "3", "hm", "11 or 13")] == ["<", ">", "!", "<"]
    assert game.step("12") == (None, 1.0, True, {})


def test_a_reward_is_an_environment_of_one_turn():
    call = load("specrl_jax.rewards.verifiable:exact").call
    row = {"session": 0, "seed": 0, "row": {"answer": "7"}}
    assert call("", "", row=row | {"turns": None}).messages == []
    for text in ("#7", "#8"):
        found = call(text, "", row=row | {"turns": []})
        assert (found.reward, found.messages) == (exact(text, "7"), None)


@pytest.mark.parametrize("value", GARBAGE.values(), ids=GARBAGE)
def test_what_is_no_step_is_refused(value):
    if value == GARBAGE["long"]:
        return  # the workers refuse it
    with pytest.raises((TypeError, ValueError)):
        read_step(value)


def test_a_conversation_goes_on_and_is_repeated_where_it_is_not_known():
    row = {"session": 3, "seed": 5, "row": {}}
    sessions = Sessions(Strange)
    texts, said = ["a", "b", "c"], []
    for i, text in enumerate(texts):
        said.append(sessions(text, "", row=row | {"turns": texts[:i]}).messages[0]["content"])
    assert [one.split()[1] for one in said] == ["1", "2", "3"]
    assert Sessions(Strange)("c", "", row=row | {"turns": texts[:2]}).messages[0]["content"] == said[2]


def test_conversations_that_have_ended_are_forgotten(strange):
    """Where their environment ends them; one that only begins is held by nobody."""
    first, second = strange.open({}, 0), strange.open({}, 1)
    replies = queue.SimpleQueue()
    strange.submit(strange.open({}, 2), "", None, replies=replies)
    assert replies.get(timeout=100).outcome.messages == []
    talk(strange, "a", "b", conversation=first)
    talk(strange, "a", "end", conversation=second)
    assert [session for held in strange._open for session in held] == [first.session]
    # Where a limit was not one after all, it goes on.
    replies = queue.SimpleQueue()
    strange.submit(first, "c", ["a", "b"], replies=replies)
    assert replies.get(timeout=100).outcome.messages[0]["content"].split()[:2] == ["0", "3"]


def test_a_conversation_that_a_worker_dropped_has_the_time_of_its_repetition(monkeypatch):
    """Each step that a worker takes has `seconds`, in whatever order conversations go on."""
    taken, given = [], []

    class Counted(Strange):
        def step(self, text):
            taken[-1] += 1
            return super().step(text)

    class InThisProcess:
        def __init__(self, names, memory, code=None):
            self.sessions = Sessions(Counted)

        def check(self, seconds):
            pass

        def end(self):
            return ""

        def score(self, rows, seconds):
            given.append(seconds)
            taken.append(0)
            said = self.sessions(rows[0].response, "", row=rows[0].context.row)
            yield Outcome((said.reward,), messages=said.messages), False

    monkeypatch.setattr("specrl_jax.rewards.pool.WorkerProcess", InThisProcess)
    for module in ("workers", "session"):
        monkeypatch.setattr(f"specrl_jax.rewards.environments.{module}.MOST_OPEN", 3)
    workers, replies, rng = workers_of(STRANGE, count=1, seconds=1.0), queue.SimpleQueue(), random.Random(0)
    open_ones = [(workers.open({}, seed), []) for seed in range(6)]
    for _ in range(200):
        conversation, texts = rng.choice(open_ones[:3] if rng.random() < 0.5 else open_ones)
        workers.submit(conversation, "a", list(texts), replies=replies)
        assert replies.get(timeout=100).outcome.failure == ""
        texts.append("a")
    workers.close()
    assert all(steps <= seconds for steps, seconds in zip(taken, given, strict=True))
    assert taken.count(1) > 50 and given.count(1.0) > 50 and max(taken) > 5


CAUSES = {"hang": "timeout", "die": "died", "raise": "error", "memory": "memory", "long": "died"}


@pytest.mark.slow
@pytest.mark.parametrize("text", [*CAUSES, *(name for name in GARBAGE if name != "long")])
def test_a_failure_costs_its_own_conversation(strange, text):
    """Others, of the same worker too, get what they would have got."""
    others = [strange.open({}, seed) for seed in range(4)]
    replies = queue.SimpleQueue()
    for other in others:
        strange.submit(other, "a", [], replies=replies)
    assert {replies.get(timeout=100).outcome.failure for _ in others} == {""}
    bad = strange.open({}, 9)
    strange.submit(bad, text, [], replies=replies)
    for other in others:
        strange.submit(other, "b", ["a"], replies=replies)
    found = {reply.number: reply.outcome for reply in (replies.get(timeout=100) for _ in range(5))}
    assert found[bad.session].failure == CAUSES.get(text, "error")
    for seed, other in enumerate(others):
        assert found[other.session].messages[0]["content"].split()[:2] == [str(seed), "2"]


def test_a_worker_that_dies_once_is_replaced_and_the_conversation_repeated(strange, tmp_path, monkeypatch):
    monkeypatch.setenv("STRANGE_FILE", str(tmp_path / "file"))
    *_, once, last = talk(strange, "a", "once", "end")
    assert once.failure == "" and once.messages[0]["content"].split()[:2] == ["7", "2"]
    assert last.rewards == (1.0,) and last.parts == {"steps": 3.0} and last.messages is None


def test_workers_closed_during_a_turn_answer_with_an_error(strange):
    replies = queue.SimpleQueue()
    strange.submit(strange.open({}, 0), "hang", [], replies=replies)
    time.sleep(0.5)
    strange.close()
    assert isinstance(replies.get(timeout=100), RuntimeError)
    assert talk(strange, "end")[0].rewards == (1.0,)  # new ones start


def test_environments_that_cannot_be_loaded_are_refused():
    assert "no reset" in workers_of("tests.rewards.environments.strange:GARBAGE").problem()
    assert "No module" in workers_of("no_such_module:Class").problem()
    with pytest.raises(Exception, match=r"environment\.name: .*no_such"):
        Scorer((), environment=make_environment("no_such_module:Class", WorkerOptions(1, 1.0, 1.0)))


def test_workers_that_never_start_end_the_run(monkeypatch):
    workers = workers_of(STRANGE, count=1)
    monkeypatch.setattr("specrl_jax.child_process._BOOT", "{0}; import sys; sys.exit(1)")
    replies = queue.SimpleQueue()
    workers.submit(workers.open({}, 0), "a", [], replies=replies)
    assert isinstance(replies.get(timeout=100), NotScored)
    workers.close()


def test_the_environment_of_the_documentation(tmp_path):
    page = (ROOT / "docs/environments.md").read_text()
    name, code = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.S)[0]
    assert len(code.splitlines()) <= 40
    (tmp_path / name).write_text(code)
    spec = importlib.util.spec_from_file_location("shop", tmp_path / name)
    shop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shop)
    here = shop.Shop()
    (task,) = here.reset({}, 7)
    total = sum(shop.PRICES[name] for name in here.wanted)
    workers = workers_of(f"{tmp_path / name}:Shop", count=1)
    try:
        apple, moon, end = talk(workers, "price apple", "I ask: price moon", f" {total}\n", seed=7)
    finally:
        workers.close()
    assert all(name in task["content"] for name in here.wanted)
    assert apple.messages == [{"role": "tool", "content": "3"}] and apple.extracted == "price apple"
    assert moon.parts == {"tool_calls": 1.0, "tool_errors": 1.0}
    assert (end.messages, end.rewards, end.correct) == (None, (1.0,), True)
