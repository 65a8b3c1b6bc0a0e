"""Sandboxes: what programs cannot do in them, what becomes of those that fail, and how one is chosen."""

import json
import os
import pathlib
import subprocess
import sys
import time

import psutil
import pytest

from experiments.robustness import sandbox as hostile
from specrl_jax.errors import InputError
from specrl_jax.rewards.sandbox import choose as choosing
from specrl_jax.rewards.sandbox import mechanisms
from specrl_jax.rewards.sandbox.choose import Chosen, choose, find_python
from specrl_jax.rewards.sandbox.http import HttpSandbox, is_url
from specrl_jax.rewards.sandbox.limits import Run, SandboxError
from specrl_jax.rewards.sandbox.mechanisms import Interpreter
from specrl_jax.rewards.sandbox.seccomp import MACHINES, seccomp_filter
from specrl_jax.rewards.sandbox.values import decode, encode
from tests.helpers import sandboxes
from tests.helpers.sandboxes import LIMITS, LOCAL


@pytest.fixture(params=LOCAL)
def sandbox(request):
    found = sandboxes.chosen(request.param).sandbox()
    yield found
    found.close()


# ---- what a run returns


def test_a_program_to_its_end(sandbox):
    ran = sandbox.run(Run("import sys\nprint(input()[::-1])\nprint('oh', file=sys.stderr)\nsys.exit(3)", "abc\n"), 5.0)
    assert (ran.status, ran.stdout, ran.stderr, ran.result, ran.cause) == (3, "cba\n", "oh\n", None, "")


def test_the_value_of_a_call(sandbox):
    task = Run("def f(a, b):\n    print('talks')\n    return {a: (b, None)}", call="f", arguments=encode([1, [2.5]]))
    ran = sandbox.run(task, 5.0)
    assert decode(ran.result["value"]) == {1: ([2.5], None)} and ran.stdout == "talks\n"


def test_a_method_of_solution(sandbox):
    program = "class Solution:\n    def f(self, a: List[int]):\n        return max(a)"
    assert sandbox.run(Run(program, call="f", arguments=encode([[1, 5]])), 5.0).result == {"value": 5}


@pytest.mark.parametrize("call", ["merge", "Solution().merge"])
def test_a_method_of_solution_comes_before_what_is_provided(sandbox, call):
    program = "from heapq import merge\nclass Solution:\n    def merge(self, a):\n        return [*merge(a, [3])]"
    ran = sandbox.run(Run(program, call=call, arguments=encode([[1, 5]])), 5.0)
    assert ran.result == {"value": {"list": [1, 3, 5]}}
    tests = "def check(candidate):\n    assert candidate([1, 5]) == [1, 3, 5]"
    assert sandbox.run(Run(program, tests=tests, check=call), 5.0).result == {"passed": 1, "total": 1}


def test_names_of_the_program_come_before_methods_and_what_is_provided_last(sandbox):
    own = "class Solution:\n    def merge(self, a): return 1\ndef merge(a): return 2"
    assert sandbox.run(Run(own, call="merge", arguments=encode([0])), 5.0).result == {"value": 2}
    assert sandbox.run(Run(own, call="Solution().merge", arguments=encode([0])), 5.0).result == {"value": 1}
    other = "class Solution:\n    def __init__(self, a): pass"
    assert sandbox.run(Run(other, call="gcd", arguments=encode([4, 6])), 5.0).status == 1
    assert sandbox.run(Run(other, call="bisect_left", arguments=encode([[1, 2], 1])), 5.0).result == {"value": 0}


def test_how_many_tests_pass(sandbox):
    tests = "def test_a():\n    assert f(1) == 1\ndef test_b():\n    assert f(2) == 1\ndef test_c():\n    f(1, 2)\n"
    assert sandbox.run(Run("def f(x): return x", tests=tests), 5.0).result == {"passed": 1, "total": 3}


@pytest.mark.parametrize(
    ("tests", "passed"),
    [
        ("class TestF:\n    def test_a(self): assert f(1) == 1\n    def test_b(self): assert f(1) == 2", [1, 2]),
        (
            "class TestF:\n    cases = test_cases = [1, 2]\n    def setup_class(cls): cls.one = 1\n"
            "    def setup_method(self, method): self.name = method.__name__\n"
            "    def test_a(self): assert f(self.one) == 1 and self.name == 'test_a'\n"
            "    def test_b(self): assert f(self.name) == 'test_b'",
            [2, 2],
        ),
        ("async def test_a(): assert f(1) == 2", [0, 1]),
        ("def test_a():\n    yield f(1)\n    assert f(1) == 2", [0, 1]),
        ("class TestF:\n    async def test_a(self): assert f(1) == 2", [0, 1]),
        (
            "import unittest\nclass F(unittest.TestCase):\n    async def test_a(self): assert f(1) == 2\n"
            "    def test_b(self): yield f(1)",
            [0, 2],
        ),
        ("def right(): assert f(1) == 2", [0, 1]),
        ("assert f(1) == 1", [1, 1]),
        (
            "import unittest\ndef setUpModule():\n    global two\n    two = f(2)\nclass F(unittest.TestCase):\n"
            "    @classmethod\n    def setUpClass(cls): cls.one = f(1)\n"
            "    def test_a(self): self.assertEqual((self.one, two), (1, 2))\n"
            "    def test_b(self): self.assertEqual(self.one, 2)",
            [1, 2],
        ),
        (
            "import unittest\nclass F(unittest.TestCase):\n    @classmethod\n"
            "    def setUpClass(cls): assert f(1) == 2\n"
            "    def test_a(self): self.assertEqual(f(1), 1)",
            [0, 1],
        ),
    ],
)
def test_what_of_tests_is_run(sandbox, tests, passed):
    """What is not run has not passed."""
    ran = sandbox.run(Run("def f(x): return x", tests=tests), 5.0)
    assert ran.result == dict(zip(("passed", "total"), passed)), ran.stderr


def test_a_check_that_a_call_does_not_run_has_not_passed(sandbox):
    tests = "def check(candidate):\n    assert candidate(1) == 2\n    yield"
    ran = sandbox.run(Run("def f(x): return x", tests=tests, check="f"), 5.0)
    assert ran.result == {"passed": 0, "total": 1}


def test_an_error_is_a_traceback(sandbox):
    ran = sandbox.run(Run("1 / 0"), 5.0)
    assert ran.status == 1 and "ZeroDivisionError" in ran.stderr


def test_threads_and_exit_functions_end_first(sandbox):
    program = "import atexit, threading, time\natexit.register(print, 'last')\n"
    program += "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\nprint('main')"
    assert sandbox.run(Run(program), 5.0).stdout == "main\nthread\nlast\n"


def test_equal_programs_print_the_same(sandbox):
    task = Run("import random\nprint(random.random(), hash('a'), sorted({'a', 'b', 'c'}, key=hash))")
    first = sandbox.run(task, 5.0)
    sandbox.close()  # the next one is a new process
    assert sandbox.run(task, 5.0) == sandbox.run(task, 5.0) == first


# ---- limits


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        ("while True: pass", "time"),
        ("import time\ntime.sleep(99)", "time"),
        ("while True: print('x' * 1000)", "output"),
        ("import sys\nwhile True: print('x' * 1000, file=sys.stderr)", "output"),
    ],
)
def test_time_and_output(sandbox, program, cause):
    sandbox.run(Run(""), 5.0)
    start = time.monotonic()
    assert sandbox.run(Run(program), 0.5).cause == cause
    assert time.monotonic() - start < 1.5


def test_memory(sandbox):
    ran = sandbox.run(Run(f"x = bytearray({LIMITS.memory})"), 5.0)
    assert ran.status == 1 and "MemoryError" in ran.stderr
    assert sandbox.run(Run(f"x = bytearray({LIMITS.memory // 2})"), 5.0).status == 0


def test_processes(sandbox):
    program = """if True:
        import os, time
        count = 1
        try:
            while os.fork():
                count += 1
            time.sleep(99)
        except OSError:
            print(count)
    """
    ran = sandbox.run(Run(program), 5.0)
    assert (ran.status, ran.stdout) == (0, f"{LIMITS.processes}\n")


def test_disk():
    sandbox = sandboxes.chosen("bubblewrap").sandbox()
    write = "with open('/tmp/f{}', 'wb') as f: f.write(bytes({}))\n"
    assert sandbox.run(Run(write.format(1, LIMITS.disk // 2)), 5.0).status == 0
    assert "OSError" in sandbox.run(Run("".join(write.format(i, LIMITS.disk // 2) for i in range(3))), 5.0).stderr
    sandbox.close()


def test_landlock_has_no_files_to_write():
    sandbox = sandboxes.chosen("landlock").sandbox()
    assert "PermissionError" in sandbox.run(Run("open('/tmp/f', 'w')"), 5.0).stderr
    sandbox.close()


# ---- what is left of one


def test_nothing_is_left_for_the_next_program():
    sandbox = sandboxes.chosen("bubblewrap").sandbox()
    assert sandbox.run(Run("open('/tmp/f', 'w')"), 5.0).status == 0
    assert sandbox.run(Run("import os\nprint(os.listdir('/tmp'))"), 5.0).stdout == "[]\n"
    sandbox.close()


def test_a_tmp_that_somebody_has_written_to_is_another_one():
    """Even where nothing is left: its times would tell. One that nobody touched stays."""
    sandbox = sandboxes.chosen("bubblewrap").sandbox()

    def looks(before=""):
        return sandbox.run(Run(before + "import os\nprint(os.stat('/tmp').st_ctime_ns)"), 5.0).stdout

    first = looks()
    assert looks() == first
    touched = looks("import os\nopen('/tmp/a', 'w').close()\nos.remove('/tmp/a')\n")
    assert touched != first and looks() not in (first, touched)
    sandbox.close()


def test_a_sandbox_that_dies_is_named_and_replaced(sandbox):
    sandbox.run(Run(""), 5.0)
    for process in [*psutil.Process(sandbox._server.pid).children(), psutil.Process(sandbox._server.pid)]:
        process.kill()
    with pytest.raises(SandboxError, match="the sandbox ended"):
        sandbox.run(Run("print(1)"), 5.0)
    assert sandbox.run(Run("print(1)"), 5.0).stdout == "1\n"


def test_nothing_is_left_of_a_closed_one(sandbox):
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    sandbox.run(Run("import os\nos.fork()"), 5.0)
    assert {p.pid for p in psutil.Process().children(recursive=True)} - before
    sandbox.close()
    assert not {p.pid for p in psutil.Process().children(recursive=True)} - before


@pytest.mark.parametrize("mechanism", LOCAL)
def test_nothing_is_left_where_its_owner_is_killed(mechanism):
    """The program is a bomb that runs on for as long as anybody lets it."""
    chosen = sandboxes.chosen(mechanism)
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    owner = f"""if True:
        from specrl_jax.rewards.sandbox.choose import Chosen
        from specrl_jax.rewards.sandbox.limits import Limits, Run
        from specrl_jax.rewards.sandbox.mechanisms import Interpreter
        sandbox = Chosen({chosen.mechanism!r}, Limits{tuple(LIMITS)!r}, Interpreter{tuple(chosen.python)!r}).sandbox()
        print(sandbox.run(Run("print(1)"), 9.0).stdout, sandbox._server.pid, flush=True)
        sandbox.run(Run({bomb!r}), 99.0)
    """
    with subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "1\n"
        process.stdout.readline()
        time.sleep(0.5)
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) > 5
        process.kill()
    _, alive = psutil.wait_procs(started, timeout=5)
    assert not alive


# ---- values and names


@pytest.mark.parametrize(
    "value", [None, True, 1, 1.5, "a", b"\xff", 1j, [1, (2, {3})], {1: [2], (1, 2): None}, frozenset({1}), 10**40]
)
def test_values_survive(value):
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value and type(back) is type(value)


@pytest.mark.parametrize(
    "value", [{"ref": 1}, {"list": 3}, {"open": ["x"]}, {"a": 1, "b": 2}, [1], {"dict": [[{"list": []}, 2]]}]
)
def test_what_is_no_value_is_refused(value):
    with pytest.raises((ValueError, TypeError)):
        decode(value)


def test_objects_have_no_value():
    with pytest.raises(TypeError, match="type object"):
        encode([object()])


def test_names_are_asked_of_the_program_unless_the_tests_or_python_have_them(sandbox):
    program = "def f(x): return x\ndef string(x): return x\nclass g: h = 1.0\nisclose = abs = random = None"
    tests = "from math import isclose\ndef test(x=-1.0):\n    assert isclose(abs(f(x)), g.h)\n"
    tests += "    assert random.random() < 1 and string(2) == 2\n"
    assert sandbox.run(Run(program, tests=tests), 5.0).result == {"passed": 1, "total": 1}


def test_a_star_brings_no_name_of_the_tests_own(sandbox):
    program = "isclose = abs = lambda *a: True\nclass math: tau = 7\ndef f(x): return x + 1"
    tests = "from math import isclose\nfrom solution import *\nassert f(1) == 2 and abs(1.0 - isclose(1, 2))\n"
    tests += "assert 6 < math.tau < 7\n"
    ran = sandbox.run(Run(program, tests=tests + "assert isclose(f(1), 7)"), 5.0)
    assert ran.result == {"passed": 0, "total": 1}
    assert sandbox.run(Run(program, tests=tests), 5.0).result == {"passed": 1, "total": 1}


def test_errors_of_the_program_are_those_of_the_tests(sandbox):
    program = "def f(x):\n    assert x > 0, 'small'\n    return {}[x]"
    tests = "import unittest\nfrom solution import f\nclass T(unittest.TestCase):\n    def test(self):\n"
    tests += "        with self.assertRaisesRegex(AssertionError, 'small'): f(0)\n"
    tests += "        self.assertRaises(KeyError, f, 1)\n"
    assert sandbox.run(Run(program, tests=tests), 5.0).result == {"passed": 1, "total": 1}


def test_an_error_is_of_the_class_that_it_derives_from(sandbox):
    program = "import json\nclass Bad(ValueError): pass\nclass End(StopIteration): pass\n"
    program += "def bad(x): raise Bad(x)\ndef end(x): raise End\n"
    program += "def read(x): return json.loads(x)\ndef text(x): return b'\\xff'.decode()"
    tests = "import unittest\nfrom solution import bad, end, read, text\n"
    tests += "class T(unittest.TestCase):\n    def test(self):\n"
    tests += "        with self.assertRaisesRegex(ValueError, 'so'): bad('so')\n"
    tests += "        self.assertRaises(ValueError, read, '{')\n"
    tests += "        self.assertRaises(UnicodeError, text, 1)\n"
    tests += "        self.assertRaises(RuntimeError, lambda: list(map(end, [1])))\n"
    assert sandbox.run(Run(program, tests=tests), 5.0).result == {"passed": 1, "total": 1}


# ---- how one is chosen


def test_without_any_the_alternative_is_named(monkeypatch):
    monkeypatch.setattr(mechanisms.shutil, "which", lambda _: None)
    monkeypatch.setattr(mechanisms, "landlock_abi", lambda: 0)
    with pytest.raises(InputError) as refused:
        choose("auto", "", limits=LIMITS)
    (line,) = str(refused.value).splitlines()
    assert line.startswith("reward.sandbox=auto: none works here. bubblewrap: there is no bwrap")
    assert "landlock: " in line and line.endswith("runs programs on a SandboxFusion server")


def test_a_python_in_the_tmp_that_programs_do_not_see_is_named(monkeypatch):
    monkeypatch.setattr(choosing, "missing", lambda _: "")
    monkeypatch.setattr(choosing, "find_python", lambda _: Interpreter("/tmp/v/bin/python", "3.11.2", ["/tmp/v"]))
    with pytest.raises(InputError, match=r"bubblewrap: /tmp/v/bin/python reads /tmp/v, .* set reward\.sandbox_python"):
        choose("bubblewrap", "/tmp/v/bin/python", limits=LIMITS)
    assert not mechanisms.hidden("landlock", Interpreter("/tmp/v/bin/python", "3.11.2", ["/tmp/v"]))
    assert not mechanisms.hidden("bubblewrap", Interpreter("/tmpfs/bin/python", "3.11.2", ["/tmpfs"]))


def test_landlock_needs_root(monkeypatch):
    monkeypatch.setattr(mechanisms.os, "geteuid", lambda: 1000)
    assert mechanisms.missing("landlock") == "it needs root, for an account of its own"


def test_an_old_landlock_is_named(monkeypatch):
    monkeypatch.setattr(mechanisms, "own_uid", lambda: 7)
    monkeypatch.setattr(mechanisms.os, "geteuid", lambda: 0)
    monkeypatch.setattr(mechanisms, "landlock_abi", lambda: 2)
    assert "Landlock 2, and version 3" in mechanisms.missing("landlock")


def test_another_machine_is_named(monkeypatch):
    monkeypatch.setattr(mechanisms.platform, "machine", lambda: "riscv64")
    assert mechanisms.missing("bubblewrap") == "no list of system calls for riscv64"


def test_a_sandbox_with_a_hole_is_refused(monkeypatch):
    """The whole disk can be read."""
    sandboxes.chosen("landlock")
    monkeypatch.setattr(mechanisms, "SYSTEM", ("/",))
    with pytest.raises(InputError, match=r"landlock: a program in it reaches \['files'"):
        choose("landlock", "", limits=LIMITS)


def test_a_sandbox_without_its_filter_is_refused(monkeypatch):
    sandboxes.chosen("landlock")
    allow = seccomp_filter(True)[-8:]
    monkeypatch.setattr(mechanisms, "seccomp_filter", lambda _: allow)
    with pytest.raises(InputError, match=r"landlock: a program in it reaches \['the network'\]"):
        choose("landlock", "", limits=LIMITS)


def test_the_interpreter():
    assert "no-python" in _refused(lambda: find_python("/no-python"))
    assert "/bin/true" in _refused(lambda: find_python("/bin/true"))
    assert find_python("").version


def _refused(action):
    with pytest.raises(InputError, match=r"reward\.sandbox_python=.*a Python of 3\.9 or later") as refused:
        action()
    return str(refused.value)


def test_accounts_of_their_own(monkeypatch, tmp_path):
    """One that no other has, also where a container knows some ids only; none unless the trainer is root."""
    monkeypatch.setattr(mechanisms.os, "geteuid", lambda: 1000)
    assert mechanisms.own_uid() == 0
    monkeypatch.setattr(mechanisms.os, "geteuid", lambda: 0)
    for ids, fits in (
        ("0 0 4294967295", lambda uid: uid == 1_900_000_000 + 2 * os.getpid()),
        ("0 100000 65536", lambda uid: 32_000 < uid < 65_533),
        ("0 1000 1", lambda uid: uid == 0),
    ):
        path = tmp_path / "uid_map"
        path.write_text(f"         {ids}\n")
        monkeypatch.setattr(mechanisms, "open", lambda _, path=path: path.open(), raising=False)
        assert fits(mechanisms.own_uid())


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("has_files", [True, False])
def test_every_jump_of_the_filter_stays_inside(machine, has_files):
    code = seccomp_filter(has_files, machine)
    count = len(code) // 8
    assert len(code) % 8 == 0 and count < 4096
    for i in range(count):
        kind, yes, no = code[8 * i], code[8 * i + 2], code[8 * i + 3]
        if kind & 7 == 5:  # a jump
            assert i + 1 + max(yes, no) < count
    assert code[-8:-4] == b"\x06\0\0\0"  # the last one returns


# ---- a server


@pytest.fixture
def server():
    with sandboxes.run_code_server() as found:
        yield found


def test_what_a_server_is_asked(server):
    ran = HttpSandbox(server.url + "/run_code", LIMITS).run(Run("print(input())", "hi\n"), 1.5)
    assert (ran.status, ran.stdout, ran.cause) == (0, "hi\n", "")
    (asked,) = server.asked
    assert asked == {
        "code": "print(input())",
        "stdin": "hi\n",
        "language": "python",
        "compile_timeout": 1.5,
        "run_timeout": 1.5,
        "memory_limit_MB": 256,
        "files": {},
        "fetch_files": [],
    }


def test_what_a_server_answers(server):
    sandbox = HttpSandbox(server.url, LIMITS)
    assert sandbox.run(Run("import sys\nsys.exit(3)"), 5.0).status == 3
    assert sandbox.run(Run("while True: pass"), 0.3).cause == "time"
    assert sandbox.run(Run("print('x' * 2_000_000)"), 5.0).cause == "output"
    assert sandbox.run(Run("def f(x): return [x]", call="f", arguments=encode([1])), 5.0).result == {
        "value": {"list": [1]}
    }
    ran = sandbox.run(Run("def f(x): return x", tests="assert f(1) == 1"), 5.0)
    assert ran.result == {"passed": 1, "total": 1} and ran.status == 0
    assert sandbox.run(Run("import os\nos._exit(0)", tests="assert f(1) == 1"), 5.0).result == {"passed": 0, "total": 1}


def test_a_busy_server_is_asked_again(server, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: None)
    server.broken = ["503", "504"]
    assert HttpSandbox(server.url, LIMITS).run(Run("print(1)"), 5.0).stdout == "1\n"
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("broken", "said"),
    [("500", "HTTP status 500"), ("nonsense", "Expecting value"), ("SandboxError", "no pod is free")],
)
def test_a_server_that_fails_is_named(server, broken, said):
    server.broken = [broken]
    with pytest.raises(SandboxError, match=f"{server.url}/run_code: .*{said}"):
        HttpSandbox(server.url, LIMITS).run(Run("print(1)"), 5.0)


def test_a_server_is_tried_at_the_start(server):
    assert choose(server.url, "", limits=LIMITS) == Chosen("http", LIMITS, None, url=server.url)
    with pytest.raises(InputError, match=r"reward\.sandbox: http://127\.0\.0\.1:9/run_code: .*refused"):
        choose("http://127.0.0.1:9", "", limits=LIMITS)


def test_urls():
    assert is_url("http://host:8080") and is_url("https://host/run_code")
    assert not any(map(is_url, ("", "host:8080", "auto", "http://")))


# ---- hostile programs


def test_ninety_hostile_programs_and_more():
    programs = hostile.hostile_programs()
    assert len(programs) == len({one.name for one in programs}) >= 90
    assert {one.form for one in programs} == set(hostile.ROWS)


@pytest.mark.parametrize(
    "only",
    [
        ["reads", "network", "forges", "remembers"],
        pytest.param(["writes", "processes", "limits"], marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("mechanism", LOCAL)
def test_hostile_programs_get_nothing(mechanism, only):
    """In a process of its own, since they attack the one that runs them."""
    sandboxes.chosen(mechanism)
    command = [sys.executable, "-m", "experiments.robustness.sandbox", "--mechanisms", mechanism, "--programs", "0"]
    root = pathlib.Path(__file__).parents[2]
    ran = subprocess.run([*command, "--only", *only], cwd=root, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
