"""Scoring in workers: a bad answer costs its own reward, never its neighbours', the run or the console."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from specrl_jax.errors import InputError, RunFailed, Stopped
from specrl_jax.frames import receive, send
from specrl_jax.rewards import pool, worker
from specrl_jax.rewards import process as worker_process
from specrl_jax.rewards.function import Function
from specrl_jax.rewards.messages import Context, Outcome, RewardInput
from specrl_jax.rewards.pool import WorkerOptions, Workers
from specrl_jax.rewards.sandbox.limits import GIB
from specrl_jax.rewards.scorer import OwnAnswer, Scorer
from tests.rewards import random_answers

ROOT = pathlib.Path(__file__).parents[2]
OBEY = "tests.rewards.hostile:obey"
LIMIT = 2.0


@pytest.fixture(scope="module")
def obey():
    """A scorer of tests/rewards/hostile.py: 2 s and 0.5 GiB an answer."""
    with Scorer((OBEY,), workers=WorkerOptions(2, timeout=LIMIT, memory=0.5)) as scorer:
        yield scorer


@pytest.fixture(scope="module")
def scorer():
    with Scorer(("math",), workers=WorkerOptions(2, timeout=LIMIT)) as scorer:
        yield scorer


def score(scorer, responses):
    return scorer(responses, ["17"] * len(responses))


# ---- what comes back


def test_parts_total_and_correct():
    names = ("math", "boxed_format", "tests.rewards.hostile:length")
    with Scorer(names, (2.0, 0.5, -0.25), workers=WorkerOptions(1)) as scorer:
        scores = scorer(["\\boxed{17}", "\\boxed{18}", "17", "x"], ["17", "17", "17", "17"])
    assert list(scores.rewards) == list(names)
    np.testing.assert_array_equal(scores.rewards["math"], [1, 0, 1, 0])
    np.testing.assert_array_equal(scores.rewards["boxed_format"], [1, 1, 0, 0])
    np.testing.assert_array_equal(scores.rewards[names[2]], [10, 10, 2, 1])
    np.testing.assert_array_equal(scores.total, [0.0, -2.0, 1.5, -0.25])
    np.testing.assert_array_equal(scores.correct, [True, False, True, False])
    assert scores.total.dtype == scores.rewards["math"].dtype == np.float32 and scores.correct.dtype == bool
    assert scores.failures == {} and scores.extracted == ["17", "18", "17", None]


@pytest.mark.parametrize(
    ("name", "response", "stated"),
    [
        ("exact", "1 #2 # 3 \nx", "3"),
        ("exact", "#", None),
        ("exact", "3", None),
        ("answer_line", "Answer: $3$", "3"),
        ("answer_line", "3", None),
        ("countdown", "# 1 + 2", "1+2"),
        ("countdown", "1 + 2", None),
        ("math", "so 0.5", "1/2"),
        ("math", "so", None),
        ("boxed_format", "\\boxed{3}", None),
        ("answer_line_format", "Answer: 3", None),
        ("think_format", "<think>1</think>3", None),
        (OBEY, "\\boxed{3}", None),
    ],
)
def test_extracted_answers(name, response, stated):
    reader = worker.BUILT_IN[name].extract if name in worker.BUILT_IN else None
    one = worker.RewardWorker({name: Function(lambda *_: 1.0)}, reader, 4 * GIB, base=worker.address_space())
    assert worker.score_row(one, RewardInput(response, "")) == Outcome((1.0,), extracted=stated)


def test_a_thought_that_the_prompt_begins_is_the_responses():
    """Of math an answer within the open thought is none; a user's function reads what the policy wrote."""
    prompt = "<|im_start|>assistant\n<think>\n"
    with Scorer(("think_format", "math", "tests.rewards.hostile:length"), workers=WorkerOptions(1)) as scorer:
        responses = ["so</think>5", "\\boxed{5}", "<think>so</think>5"]
        for begins, formats, right in ((prompt, [1, 0, 0], [1, 0, 1]), ("", [0, 0, 1], [1, 1, 1])):
            scores = scorer(responses, ["5"] * 3, [Context(begins)] * 3)
            assert scores.rewards["think_format"].tolist() == formats
            assert scores.rewards["math"].tolist() == right
            assert scores.rewards["tests.rewards.hostile:length"].tolist() == [len(text) for text in responses]


def test_a_row_whose_own_answer_earns_nothing_is_refused(scorer):
    def own(response, answer):
        return OwnAnswer("data.jsonl:3", "math", RewardInput(response, answer))

    scorer.require_own([])
    scorer.require_own([own("\\boxed{1/2}", "0.5")])
    said = "^data.jsonl:3: the row's own answer, '.*', scored by reward.name=math: earns 0, so no response can earn 1"
    with pytest.raises(InputError, match=said):
        scorer.require_own([own("\\boxed{1/2}", "0.5"), own("\\boxed{17\\}", "17\\")])


@pytest.mark.parametrize("count", [0, 1, 33, 500])
def test_order_is_kept(count, scorer):
    scores = scorer([f"\\boxed{{{i}}}" for i in range(count)], [str(i - i % 3) for i in range(count)])
    np.testing.assert_array_equal(scores.correct, np.arange(count) % 3 == 0)
    assert scores.extracted == [str(i) for i in range(count)]
    assert scores.total.shape == scores.rewards["math"].shape == (count,)


def test_any_text_reaches_the_workers():
    responses = ["\x00", "\ud800", "\udfff" * 1000, "a" * 2**20, "", "🎉", "\x00" * 2**20]
    with Scorer(("tests.rewards.hostile:length",), workers=WorkerOptions(1)) as scorer:
        np.testing.assert_array_equal(score(scorer, responses).total, [len(response) for response in responses])


def test_as_many_answers_as_responses(obey):
    with pytest.raises(ValueError, match="zip"):
        obey(["a"], [])


# ---- what an answer may do


@pytest.mark.slow
def test_a_failure_scores_0_for_its_answer_only(obey):
    """All causes in one batch; each of their neighbours is rewarded."""
    bad = {
        "spin": "timeout",
        "compute": "timeout",
        "sleep 60": "timeout",
        "fail": "error",
        "quit": "error",
        "return nan": "error",
        "return inf": "error",
        "return -inf": "error",
        "return 1e31": "error",
        "text": "error",
        "nothing": "error",
        "complex": "error",
        "huge": "error",
        "exit 0": "died",
        "exit 1": "died",
        "kill": "died",
        "crash": "died",
        "borrow 600": "memory",
        "keep 600": "memory",
    }
    responses = [word for bad_word in bad for word in ("fine", bad_word, "borrow 100")]
    scores = score(obey, responses)
    np.testing.assert_array_equal(scores.total, [float(response not in bad) for response in responses])
    causes = list(bad.values())
    assert scores.failures == {cause: causes.count(cause) for cause in set(causes)}


def test_the_first_failure_is_reported():
    with Scorer((OBEY,), workers=WorkerOptions(1)) as scorer:
        well, ill = score(scorer, ["fine"]), score(scorer, ["fine", "fail", "exit 1", "nothing"])
    assert well.warning() == well.first_failure == ""
    assert ill.first_failure == "error: ValueError: bad news"
    assert ill.warning() == "rewards that failed count 0: 1 died, 2 error; the first: error: ValueError: bad news"


def test_a_failed_answer_scores_0_in_every_reward():
    with Scorer(("boxed_format", OBEY), workers=WorkerOptions(1)) as scorer:
        scores = score(scorer, ["fail", "\\boxed{17}", "return 3"])
    np.testing.assert_array_equal(scores.rewards["boxed_format"], [0, 1, 0])
    np.testing.assert_array_equal(scores.rewards[OBEY], [0, 1, 3])
    assert scores.extracted == [None] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("timeout", "chunk_seconds", "responses"),
    [(1.5, 2.0, ["sleep 0.9"] * 8), (3.0, 0.2, ["fine", "sleep 1", "fine", "fine"] * 2)],
    ids=["slower than half the limit", "slower than a chunk"],
)
def test_slow_answers_get_the_full_limit(monkeypatch, timeout, chunk_seconds, responses):
    monkeypatch.setattr(worker_process, "CHUNK_SECONDS", chunk_seconds)
    with Scorer((OBEY,), workers=WorkerOptions(2, timeout=timeout)) as scorer:
        scores = score(scorer, responses)
    assert scores.failures == {} and scores.total.sum() == 8


def test_a_worker_stops_when_the_time_of_its_chunk_is_over():
    """The slow answer is the second of five: the others go to whoever is free."""
    ours, theirs = socket.socketpair()
    with ours, ThreadPoolExecutor(1) as thread:
        served = thread.submit(worker.serve, theirs, [OBEY], GIB)
        assert receive(ours) == ["", []]
        rows = [[response, "", {}] for response in ("fine", "sleep 0.3", "fine", "fine", "fine")]
        for number, (seconds, count) in enumerate([(0.0, 1), (0.2, 2), (10.0, 5)]):
            send(ours, [number, seconds, rows])
            states = [receive(ours)[2] for _ in range(count)]
            assert states == ["more"] * (count - 1) + ["more" if count == 5 else "enough"]
        send(ours, [7])
        assert receive(ours) == [7]
        ours.shutdown(socket.SHUT_RDWR)
        assert served.result() is None
    theirs.close()


@pytest.mark.slow
def test_leaked_memory_does_not_count_for_later_answers():
    """Each keeps 0.6 of the limit for good: a worker must end after it."""
    with Scorer((OBEY,), workers=WorkerOptions(1, memory=0.25)) as scorer:
        scores = score(scorer, ["keep 160", "borrow 100"] * 4)
    assert scores.failures == {} and scores.total.sum() == 8


@pytest.mark.slow
def test_the_time_limit_is_enforced(obey):
    for response in ("spin", "compute"):
        score(obey, ["fine"])
        start = time.monotonic()
        assert score(obey, [response]).failures == {"timeout": 1}
        assert time.monotonic() - start < LIMIT + 2.0


def test_a_stop_ends_slow_scoring(obey):
    """Twenty answers of 2 s each would take two workers 20 s."""

    def stop():
        raise Stopped

    begun = time.monotonic()
    with pytest.raises(Stopped):
        obey(["spin"] * 20, ["17"] * 20, None, stop)
    assert time.monotonic() - begun < 8.0
    assert score(obey, ["fine"]).failures == {}


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_workers_killed_while_idle_are_replaced(seconds):
    """Whether their pools have noticed by then or not."""
    with Scorer(("tests.rewards.hostile:pid",), workers=WorkerOptions(2)) as scorer:
        first = set(score(scorer, ["a"] * 20).total)
        for pid in first:
            os.kill(int(pid), signal.SIGKILL)
        time.sleep(seconds)
        again = score(scorer, ["a"] * 20)
    assert again.failures == {} and not first & set(again.total)


@pytest.mark.slow
def test_workers_that_cannot_start_end_the_run(tmp_path, monkeypatch):
    (tmp_path / "aborts.py").write_text("import os; os.abort()")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(pool, "LOSSES", 2)
    workers = Workers(("aborts:f",), WorkerOptions(2, 1.0, 1.0))
    with pytest.raises(RunFailed, match=r"^reward workers die: 4 times in a row; the last was ended by SIGABRT$"):
        workers.score([RewardInput("#1", "1")] * 3)


def test_workers_outlive_the_thread_that_first_used_them():
    workers, rows = Workers(("tests.rewards.hostile:pid",), WorkerOptions(1, 5.0, 1.0)), [RewardInput("a", "")]
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(workers.score, rows).result()
    time.sleep(0.3)
    assert workers.score(rows) == first and not first[0].failure
    workers.close()


def test_closed_workers_start_again():
    scorer = Scorer(("exact",), workers=WorkerOptions(1))
    for _ in range(2):
        scorer.start()
        assert score(scorer, ["#17"]).correct.all()
        scorer.close()
        scorer.close()


# ---- hostile text, for `math`

HOSTILE = {
    "deep": "\\boxed{" + "\\sqrt{" * 10_000 + "2" + "}" * 10_001,
    "brackets": "\\boxed{" + "(" * 480 + "2" + ")" * 480 + "}",
    "fractions": "\\boxed{" + "\\frac{1}{" * 100 + "2" + "}" * 101,
    "tower": "\\boxed{9^{9^{9^9}}}",
    "tower in text": "so 9**9**9**9",
    "factorial": "\\boxed{(10^{9})!}",
    "power": "\\boxed{(a+b+c+d+e+f)^{1000}}",
    "megabyte": "a" * 1_000_000,
    "megabyte of digits": "\\boxed{" + "1" * 1_000_000 + "}",
    "megabyte of boxes": "\\boxed{" * 150_000,
    "megabyte of dollars": "$" * 1_000_000,
    "megabyte of marks": "####" * 250_000,
    "megabyte of lines": "Answer:\n" * 125_000,
    "megabyte of braces": "\\boxed{" + "{}" * 500_000 + "}",
    "megabyte of spaces": "Answer:" + " " * 1_000_000,
    "nan": "\\boxed{nan}",
    "infinity": "\\boxed{\\infty}",
    "division": "\\boxed{\\frac{17}{0}}",
    "null": "\\boxed{\x00}",
    "null within": "\\boxed{1\x007}",
    "surrogate": "\\boxed{1\ud8007}",
    "surrogates": "\udfff" * 1_000,
    "unclosed": "\\boxed{17",
    "too many": "Answer: 17}",
    "wrong way": "Answer: }17{",
    "escaped": "\\boxed{17\\}",
    "full width": "\\boxed{１７}",
    "bidi": "\\boxed{\u202e17}",
    "answers": "answer: " * 120 + "$",
    "formulas": "$1$ and " * 120,
    "texts": "\\boxed{" + "\\text{" * 100 + "1" + "}" * 101,
}


@pytest.mark.slow
def test_hostile_text_scores_0():
    # Three answers have no end. A megabyte takes about a second here, and longer on a slow machine.
    with Scorer(("math",), workers=WorkerOptions(2, timeout=4.0, memory=1.0)) as scorer:
        start = time.monotonic()
        scores = score(scorer, list(HOSTILE.values()))
        seconds = time.monotonic() - start
        again = score(scorer, ["\\boxed{17}"] * 50)
    assert not scores.total.any()
    assert set(scores.failures) <= {"timeout", "memory"} and scores.failures["timeout"] <= 8, scores.failures
    assert seconds < 120
    assert again.correct.all()


@pytest.mark.parametrize(
    ("count", "seed"),
    [pytest.param(300, 1, marks=pytest.mark.slow), pytest.param(10_000, 0, marks=pytest.mark.long)],
)
def test_random_answers_earn_what_they_deserve_within_the_limit(count, seed):
    """No more fail than there are bombs; an idle worker ends each of these a second after the limit at the latest."""
    cases = random_answers.cases(count, seed)
    kinds, rows = Counter(case.kind for case in cases), [RewardInput(case.response, case.answer) for case in cases]
    workers = Workers(("math",), WorkerOptions(2, LIMIT, 1.0))
    outcomes = workers.score(rows)
    wrong = [c for c, o in zip(cases, outcomes) if bool(o.rewards and o.rewards[0] > 0) != c.right]
    failed = [row for row, outcome in zip(rows, outcomes) if outcome.failure]
    assert not wrong and len(failed) <= kinds["bomb"], (wrong[:5], len(failed))
    assert min(kinds[kind] for kind in ("right", "wrong", "pair", "soup", "unclosed")) > 5
    for row in failed:
        workers.score([RewardInput("\\boxed{1}", "1")])
        start = time.monotonic()
        workers.score([row])
        assert time.monotonic() - start < LIMIT + 1.0, row.response[:100]
    workers.close()


# ---- the processes


def test_workers_import_no_jax():
    with Scorer(("tests.rewards.hostile:leave_jax_out",), workers=WorkerOptions(1)) as scorer:
        assert "jax" in sys.modules and score(scorer, ["a"]).correct.all()


@pytest.mark.slow
def test_workers_import_no_jax_with_the_parents_main_module(tmp_path):
    program = """
        import jax
        from specrl_jax.rewards.scorer import Scorer
        from specrl_jax.rewards.pool import WorkerOptions
        with Scorer(("tests.rewards.hostile:leave_jax_out",), workers=WorkerOptions(1)) as scorer:
            print(scorer(["a"], ["b"]).total)
    """
    done = run_program(tmp_path, program).communicate(timeout=120)
    assert done == ("[1.]\n", "")


def run_program(tmp_path, program, **options):
    """A Python process whose main module is a file that asks for no `if __name__`."""
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(program))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, path], env=environment, stdout=pipe, stderr=pipe, text=True, **options)


BUSY = f"""
    import contextlib, psutil, threading, time
    from specrl_jax.rewards.scorer import Scorer
    from specrl_jax.rewards.pool import WorkerOptions
    scorer = Scorer(("{OBEY}",), workers=WorkerOptions(3, timeout=1000))
    scorer(["fine"] * 100, [""] * 100)
    def work():
        with contextlib.suppress(RuntimeError):  # it is closed
            scorer(["compute", "spin"], ["", ""])
    threading.Thread(target=work, daemon=True).start()
    time.sleep(1)
    print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
"""


def is_running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_end(pids, seconds=5.0):
    end = time.monotonic() + seconds
    while any(is_running(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    return [pid for pid in pids if is_running(pid)]


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_workers_end_with_their_parent(tmp_path, number):
    """One idle, one busy in Python, one busy in C."""
    process = run_program(tmp_path, BUSY + "    time.sleep(1000)\n")
    workers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(workers) == 3 * 3 and all(map(is_running, workers))
    process.send_signal(number)
    process.wait()
    assert wait_for_end(workers) == []
    assert "Traceback" not in process.communicate()[1]


@pytest.mark.slow
def test_workers_end_with_the_program(tmp_path):
    process = run_program(tmp_path, BUSY)
    out, err = process.communicate(timeout=60)
    assert wait_for_end([int(pid) for pid in out.split()]) == [] and err == "" and process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("when", ["starting", "busy"])
def test_only_the_parent_receives_an_interrupt(tmp_path, when):
    """Ctrl-C goes to the whole group of processes; nothing of it is seen but what the parent prints."""
    program = f"""
        import signal, time
        from specrl_jax.rewards.scorer import Scorer
        from specrl_jax.rewards.pool import WorkerOptions
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
        scorer = Scorer(("{OBEY}" if "{when}" == "busy" else "math",), workers=WorkerOptions(2, timeout=1000))
        try:
            scorer.start()
            print("started", flush=True)
            if "{when}" == "busy":
                scorer(["compute", "spin"] * 4, [""] * 8)
            time.sleep(1000)
        except KeyboardInterrupt:
            time.sleep(1)
            scorer.close()
            print("interrupted")
    """
    process = run_program(tmp_path, program, start_new_session=True)
    assert process.stdout.readline() == "started\n"
    time.sleep(0.1 if when == "starting" else 1.5)
    os.killpg(process.pid, signal.SIGINT)
    try:
        assert process.communicate(timeout=60) == ("interrupted\n", "")
    finally:  # what did not end would spin for ever
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_workers_print_nothing(tmp_path):
    program = f"""
        from specrl_jax.rewards.scorer import Scorer
        from specrl_jax.rewards.pool import WorkerOptions
        hostile = ["noise", "crash", "fail", "exit 1"] * 3
        for names in [("{OBEY}",), ("math",)]:
            with Scorer(names, workers=WorkerOptions(2)) as scorer:
                scorer(hostile + ["\\\\boxed{{\\\\frac{{x]}}"], [""] * 13)
    """
    assert run_program(tmp_path, program).communicate(timeout=120) == ("", "")


def test_starting_does_not_wait():
    with Scorer(("math",), workers=WorkerOptions(2)) as scorer:
        start = time.monotonic()
        scorer.start()
        assert time.monotonic() - start < 1.0


# ---- mistakes


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), r"reward\.name: name at least one"),
        (("exakt",), r"reward\.name: no reward 'exakt'; there are exact, .*math.*package\.module:function"),
        (("a b:c",), r"reward\.name: no reward 'a b:c'"),
        (("a:",), r"reward\.name: no reward 'a:'"),
        (("no.such:f",), r"reward\.name: cannot load 'no\.such:f': ModuleNotFoundError: No module named 'no'"),
        (("exact", "tests.rewards.hostile:none"), r"reward\.name: cannot load '.*:none': AttributeError: "),
        (("tests.rewards.hostile:MIB",), r"reward\.name: .*TypeError: MIB is no function"),
        (("tests.rewards.hostile:one_argument",), r"one_argument\(.*\).* does not take \("),
    ],
)
def test_a_mistake_is_one_line(names, message):
    with pytest.raises(InputError, match=message) as mistake:
        Scorer(names, workers=WorkerOptions(1))
    assert "\n" not in str(mistake.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import os; os._exit(0)", "the worker ended with status 0"),
        ("import os; os.abort()", "the worker was ended by SIGABRT"),
        pytest.param("while True: pass", "the worker takes more than 3 s to start", marks=pytest.mark.long),
        ("raise ValueError('two\\nlines')", "ValueError: two lines"),
        ("def f(response, answer) 1", "SyntaxError"),
        ("import sys; sys.exit(0)", "SystemExit"),
    ],
)
def test_a_module_that_does_not_import(tmp_path, monkeypatch, source, message):
    (tmp_path / "module_of_a_user.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(worker_process, "START_SECONDS", 3.0)
    with pytest.raises(InputError, match=rf"reward\.name: .*module_of_a_user:f.*{message}"):
        Scorer(("module_of_a_user:f",), workers=WorkerOptions(1))


@pytest.mark.slow
def test_a_method_may_be_a_reward(tmp_path, monkeypatch):
    (tmp_path / "other_module_of_a_user.py").write_text(
        "class Judge:\n    @staticmethod\n    def score(response, answer):\n        return response == answer\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with Scorer(("other_module_of_a_user:Judge.score",), workers=WorkerOptions(1)) as scorer:
        np.testing.assert_array_equal(score(scorer, ["17", "18"]).total, [1, 0])
