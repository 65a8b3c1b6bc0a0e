"""Training on rollouts of several turns, with a small model: what is learned, and that no timing changes it."""

import itertools
import json
import shutil
import types

import jax
import numpy as np
import pytest

from configs import rlzero_tiny
from specrl_jax.config import EnvironmentConfig, from_config_dict
from specrl_jax.data.files import DataRow
from specrl_jax.data.problem import Problem
from specrl_jax.data.prompts import PromptFormat, parse_problem
from specrl_jax.data.schemas import Schema
from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.data.turns import TurnFormat
from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.decoding.turns import Turn
from specrl_jax.errors import InputError, Stopped
from specrl_jax.learner.build import make_learner
from specrl_jax.planning.plan import make_plan
from specrl_jax.planning.problems import load_problems
from specrl_jax.rewards.environments.workers import Conversation, EnvironmentWorkers
from specrl_jax.rewards.messages import Context, Outcome
from specrl_jax.rewards.pool import Reply, WorkerOptions
from specrl_jax.rewards.scorer import Scorer, Scores
from specrl_jax.rollout import groups
from specrl_jax.rollout.build import make_rollout
from specrl_jax.rollout.conversations import Conversations, Opening, begin_conversations, row_of
from specrl_jax.rollout.scoring import make_scorer
from specrl_jax.sharding import make_mesh
from specrl_jax.tasks.evaluate import evaluate_policy
from tests.helpers.engine_sizes import engine_sizes
from tests.helpers.training import NEVER, Run, StopAfter, changed, samples, saved, train

STRANGE = "tests.rewards.environments.strange:"
STEPS = 3


class ManyEnds(CharTokenizer):
    """A random policy ends a turn after a few tokens."""

    eos_ids = tuple(range(1, 21))


def config_of(name, **changes):
    changes = {
        "steps": STEPS,
        "environment__name": STRANGE + name,
        "environment__turn_tokens": 12,
        "reward__timeout": 2.0,
        "reward__name": "",
        "rollout__max_response_tokens": 48,
        "rollout__rule": "coupled",
        "rollout__parity": True,
        "rollout__num_slots": 8,
        "draft__compare_rounds": 0,
        "eval__every": 0,
        "eval__problems": 4,
    } | changes
    return from_config_dict(changed(rlzero_tiny.get_config("smoke"), **changes))


def make(name="Chatty", **changes):
    config = config_of(name, **changes)
    with engine_sizes(turn=8, page=16):
        plan = make_plan(config, make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1]))
    rollout = make_rollout(plan, tokenizer=ManyEnds())
    return Run(make_learner(plan), rollout, load_problems(config, rollout.tokenizer), make_scorer(config, []))


class TwoRoles(ManyEnds):
    """Its chat template has no tools."""

    has_chat_template = True

    def apply_chat_template(self, messages, thinking=True):
        if any(message["role"] == "tool" for message in messages):
            raise InputError("data.tokenizer: the chat template fails: unknown role")
        return super().apply_chat_template(messages, thinking)


class Asked:
    """A scorer that notes what it is asked."""

    def __init__(self, environment):
        self.environment, self.names, self.correct_from, self.rows = environment, ("exact",), 1.0, []

    def __call__(self, responses, answers, contexts, waiting):
        self.rows += zip(responses, contexts)
        zero = np.zeros(len(responses), np.float32)
        return Scores(zero, {}, zero > 0, failures={}, extracted=[None] * len(responses))


@pytest.fixture
def opens():
    workers = EnvironmentWorkers(STRANGE + "Opens", "opens", WorkerOptions(1, 5.0, 1.0))
    yield Asked(workers)
    workers.close()


def begin(scorer, tokenizer, problems, samples=2):
    config = config_of("Opens", rollout__max_prompt_tokens=20)
    return begin_conversations(
        scorer, config, tokenizer, problems=problems, samples=samples, step=0, waiting=lambda: None
    )


def say(talks, tokenizer, text, *requests):
    """Hand over a turn of each request, with its end-of-text; return the answers."""
    for request in requests:
        talks.ask(Turn(request, np.array([*tokenizer.encode(text), tokenizer.eos_ids[0]]), True, eos=True))
    found = []
    while len(found) < len(requests):
        found += talks.answers(1.0)
    return {request: tokens for request, tokens, _ in found}


def rollouts_of(problems, samples=2):
    count = problems * samples
    empty = np.zeros((count, 0), np.int32)
    index = np.repeat(np.arange(problems), samples)
    part = {"prompt_index": index, "response_part": lambda row: slice(0, 0), "ended": np.arange(count) > 1}
    return types.SimpleNamespace(**part, tokens=empty, environment=empty.astype(bool), draft_positions=empty)


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ([{"role": "user", "content": "a" * 21}], "21 tokens; rollout.max_prompt_tokens=20"),
        ([{"role": "user", "content": ""}], "0 tokens; rollout.max_prompt_tokens=20"),
        ([{"role": "user", "content": "\u00fc"}], "printable ASCII"),
        ([{"role": "tool", "content": "a"}], "unknown role"),
        (None, "TypeError"),
    ],
    ids=["long", "empty", "a character", "a role", "no messages"],
)
def test_first_messages_that_cannot_be_a_prompt_cost_the_rollouts_of_their_row(opens, first, said):
    tokenizer = TwoRoles()
    well = Problem("well", "1", "", row={"first": [{"role": "user", "content": "a" * 20}]})
    problems = [Problem("bad", "1", "", row={"first": first}), well]
    opened, talks = begin(opens, tokenizer, problems)
    assert [problem.prompt for problem in opened] == ["bad", "a" * 20]
    assert set(say(talks, tokenizer, "end", *range(4)).values()) == {None}
    scores = talks.scores(rollouts_of(2), np.arange(4), opens, waiting=lambda: None)
    assert scores.environment["failed"].tolist() == [1, 1, 0, 0]
    assert scores.environment["cut"].tolist() == [1, 1, 0, 0]  # as the engine says
    assert scores.total.tolist() == [0, 0, 1, 1] and scores.failures == {"error": 2}
    assert said in scores.first_failure and ("'bad'" in scores.first_failure) == (first is not None)


def test_rewards_get_the_last_turn_and_what_the_conversation_began_with(opens):
    """Two rollouts: the environment ends one of them, the engine the other, for which nothing has room."""
    tokenizer, row = ManyEnds(), {"first": [{"role": "user", "content": "begin"}]}
    _, talks = begin(opens, tokenizer, [Problem("row", "1", "", row=row)])
    answers = say(talks, tokenizer, "one", 0, 1)
    assert {tokenizer.decode(list(tokens)) for tokens in answers.values()} == {"[go on]"}
    assert say(talks, tokenizer, "end", 0) == {0: None}
    say(talks, tokenizer, "last", 1)
    talks.scores(rollouts_of(1), np.arange(2), opens, waiting=lambda: None)
    assert opens.rows == [(text, Context("begin", row, tokenizer.encode(text))) for text in ("end", "last")]


def test_an_environment_gets_the_prompt_before_the_chat_template():
    asked, first = {"role": "user", "content": "1+1"}, {"role": "system", "content": "S"}

    def prompt_of(prompt, **format):
        row = DataRow("a.jsonl:1", {"prompt": prompt, "answer": "2", "level": 1}, "")
        problem = parse_problem(row, Schema("prompt", "answer"), PromptFormat(**format), tokenizer=CharTokenizer())
        found = row_of(problem)
        assert found["answer"] == "2" and found["level"] == 1
        return found["prompt"]

    assert prompt_of("1+1", template="Q{prompt}") == "Q1+1"
    assert prompt_of([asked], template="Q{prompt}") == [asked]
    assert prompt_of([asked | {"name": "x"}], system="S") == [first, asked]
    assert prompt_of([first, asked], system="T") == [first, asked]


class Told:
    """The workers of an environment that replies to each conversation what it is told to."""

    label = "own"

    def __init__(self, *outcomes):
        self.left, self.opened = list(map(list, outcomes)), itertools.count()

    def problem(self):
        return ""

    def open(self, row, seed):
        return Conversation(next(self.opened), row, seed)

    def submit(self, conversation, text, turns, replies):
        replies.put(Reply(conversation.session, self.left[conversation.session].pop(0), 0.0))


def test_where_the_environment_alone_rewards_its_sum_says_what_is_correct():
    """Unless it says so itself, or failed."""
    more, failed = [{"role": "user", "content": "1"}], Outcome((), failure="error", detail="no")
    half = Outcome((0.5,), messages=more)
    told = [[half, Outcome((0.5,))], [Outcome((0.5,))], [Outcome((0.0,), True)], [Outcome((9.0,), False)]]
    told += [[Outcome((9.0,), messages=more), failed]]
    workers, tokenizer = Told(*told), ManyEnds()
    format = TurnFormat(tokenizer, "[{message}]", False)
    turns = Conversations(
        workers,
        EnvironmentConfig(),
        tokenizer,
        format=format,
        openings=[Opening(Problem("1", "2", ""), 0, "1")],
        samples=len(told),
    )
    for request, outcomes in enumerate(told):
        for _ in outcomes:
            turns.ask(Turn(request, np.array(tokenizer.encode("2")), True, eos=False))
            turns.answers(1.0)
    scorer = Scorer((), environment=workers, correct_from=0.75)
    scores = turns.scores(rollouts_of(1, len(told)), np.arange(len(told)), scorer, waiting=lambda: None)
    np.testing.assert_array_equal(scores.total, [1.0, 0.5, 0.0, 9.0, 0.0])
    np.testing.assert_array_equal(scores.correct, [True, False, True, False, False])


@pytest.mark.parametrize("ended", [True, False])
def test_an_answer_says_whether_a_limit_ended_the_conversation(ended):
    """The last turn that there may be, and one that was cut, where the environment would go on."""
    more, failed = Outcome((0.0,), messages=[{"role": "user", "content": "1"}]), Outcome((), failure="error")
    told = [[more, more], [more, Outcome((1.0,))], [more, failed], [Outcome((0.0,), messages=[])]]
    workers, tokenizer = Told(*told), ManyEnds()
    format = TurnFormat(tokenizer, "{message}", False)
    turns = Conversations(
        workers,
        EnvironmentConfig(turns=2),
        tokenizer,
        format=format,
        openings=[Opening(Problem("1", "2", ""), 0, "1")],
        samples=4,
    )
    last = []
    for request, outcomes in enumerate(told):
        for left in reversed(range(len(outcomes))):
            turns.ask(Turn(request, np.array(tokenizer.encode("2")), ended or left > 0, eos=True))
            (answer,) = turns.answers(1.0)
        last.append(answer)
    assert last == [(0, None, True), (1, None, False), (2, None, False), (3, None, not ended)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A whole run, its rows, and its scored rollouts."""
    workdir, seen = tmp_path_factory.mktemp("whole") / "run", []
    inner = groups.select_groups

    def spy(generated, grpo):
        seen.append(generated)
        return inner(generated, grpo)

    run = make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specrl_jax.training.step.select_groups", spy)
        rows = train(run, workdir)
    run.scorer.close()
    return run, workdir, rows, seen


def assert_same(run, workdir, whole):
    _, expected, _, _ = whole
    ours, theirs = (saved(run, folder, STEPS)[0] for folder in (workdir, expected))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    for step in range(1, STEPS + 1):
        assert samples(workdir, step) == samples(expected, step)


@pytest.mark.slow
def test_logprobs_of_all_turns_are_the_learners(whole):
    _, workdir, rows, seen = whole
    for row in rows[1:]:
        assert row["rollout_vs_learner/logprob_abs_max"] < 1e-5
        assert row["environment/turns"] > 1.5 and row["environment/computed_share"] == 1.0
        assert row["environment/failed"] == 0 and row["policy/grad_norm"] > 0
        assert 0 < row["environment/call_tokens"] <= 2 * row["environment/turns"]
    assert any(any(sample.get("environment", [])) for sample in samples(workdir, 1))
    written = seen[0].rollouts.environment
    assert written.any() and not seen[0].rollouts.logprobs[written].any()


@pytest.mark.slow
def test_rewards_are_summed_over_turns_and_whole_rollouts_compared(whole):
    for generated in whole[3]:
        rollouts: Rollouts = generated.rollouts
        tokenizer = ManyEnds()
        for row in range(len(rollouts.length)):
            part = rollouts.response_part(row)
            own, texts = ~rollouts.environment[row, part], []
            ids = rollouts.tokens[row, part]
            edges = np.flatnonzero(np.diff(np.concatenate([[0], own.astype(int), [0]])))
            for begin, end in edges.reshape(-1, 2):
                turn = ids[begin:end].tolist()
                texts.append(tokenizer.decode(turn[:-1] if turn[-1] in tokenizer.eos_ids else turn))
            assert generated.rewards[row] == pytest.approx(sum(len(text) % 3 / 2 for text in texts))


@pytest.mark.slow
def test_the_order_of_answers_changes_no_bit(whole, tmp_path):
    """Answers that take up to 0.1 s, of four processes, while other rollouts take the slots."""
    run = make("Slow", reward__workers=4)
    rows = train(run, tmp_path / "run")
    run.scorer.close()
    assert_same(run, tmp_path / "run", whole)
    assert rows[1]["rollout/parked"] > 0


@pytest.mark.slow
def test_a_run_killed_amid_conversations_ends_like_the_whole_one(whole, tmp_path):
    run, workdir = whole[0], tmp_path / "run"
    shutil.copytree(whole[1], workdir)
    for step in (2, 3):
        shutil.rmtree(workdir / f"checkpoints/{step}", ignore_errors=True)
    with pytest.raises(Stopped):
        train(run, workdir, StopAfter(8, by="on_progress"))
    train(run, workdir)
    run.scorer.close()
    assert_same(run, workdir, whole)


@pytest.mark.slow
def test_environments_that_fail_cost_their_own_rollouts_their_reward(whole, tmp_path):
    run, seen = make("SeldomWell", reward__workers=2, steps=1), []
    inner = groups.select_groups

    def spy(generated, grpo):
        seen.append(generated)
        return inner(generated, grpo)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specrl_jax.training.step.select_groups", spy)
        rows = train(run, tmp_path / "run")
    run.scorer.close()
    scores, well = seen[0].scores, whole[3][0]
    failed = scores.environment["failed"].astype(bool)
    assert 0 < failed.sum() < len(failed)
    assert sum(scores.failures.values()) == failed.sum() == rows[1]["reward/unscored"]
    assert not scores.total[failed].any() and not scores.correct[failed].any()
    np.testing.assert_array_equal(scores.total[~failed], well.scores.total[~failed])
    for row in np.flatnonzero(~failed):
        np.testing.assert_array_equal(seen[0].rollouts.sequence(row), well.rollouts.sequence(row))


@pytest.mark.slow
def test_an_evaluation_says_what_its_environments_did(tmp_path):
    run = make()
    evaluate_policy(run.learner, run.rollout, run.problems, scorer=run.scorer, workdir=str(tmp_path), stop=NEVER)
    run.scorer.close()
    summary = json.loads((tmp_path / "evaluation.json").read_text())
    assert 1 < summary["eval/environment/turns"] <= 4 and summary["eval/environment/computed_share"] == 1
