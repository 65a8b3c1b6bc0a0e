"""The tests of a row, in the forms in which public data sets write them."""

import ast
import base64
import builtins
import contextlib
import io
import json
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from specrl_jax.rewards.code.compare import same_output, same_value
from specrl_jax.rewards.code.extract import parsed
from specrl_jax.rewards.sandbox.judging import defines_check, fault_of
from specrl_jax.rewards.sandbox.limits import Ran, Run
from specrl_jax.rewards.sandbox.programs import METHOD
from specrl_jax.rewards.sandbox.values import decode, encode

_FORMS = (
    "known are {inputs, outputs} (APPS, TACO), a list of {input, output} (LiveCodeBench), a list of assertions (MBPP), "
    "and Python: a `check` beside an `entry_point` (HumanEval) or a unit-test file"
)


class Test(NamedTuple):
    """One test: what runs in the sandbox, and how much of it has passed, which is decided outside."""

    make: Callable[[str], Run]  # from the program
    share: Callable[[Ran], float]  # of what it should do, 0 to 1


class Tests(NamedTuple):
    tests: Sequence[Test]
    function: str = ""  # that a program must define, where they say so


def parse_tests(answer: str, row: Mapping[str, object]) -> Tests:
    """Return the tests that a row's answer and its other columns hold. Raises ValueError where they hold none."""
    try:
        content = json.loads(answer)
    except (ValueError, RecursionError):
        return _source(answer, row)
    match content:
        case {"inputs": list(inputs), "outputs": list(outputs)}:
            return _pairs(inputs, outputs, content.get("fn_name") or "")
        case {"test": str(test), "entry_point": str(name)} | {"test_code": str(test), "entry_point": str(name)}:
            return _source(test, {"entry_point": name})
        case [{"input": _, "output": _}, *_]:
            return _cases([*content, *_private_cases(row)], row)
        case [str(), *_]:
            return _assertions(content, row)
        case str() if content != answer:
            return parse_tests(content, row)
    raise ValueError(f"holds no tests: {_FORMS}")


# ---- standard input and output, or one call


def _pairs(inputs: Sequence[object], outputs: Sequence[object], function: object) -> Tests:
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"holds {len(inputs)} inputs and {len(outputs)} outputs")
    if not isinstance(function, str):
        raise ValueError("holds a fn_name that is no text")
    if function:
        return Tests([_call(function, _arguments(i), _wrapped(o)) for i, o in zip(inputs, outputs)], function)
    return Tests([_printed(_text(i), _text(o)) for i, o in zip(inputs, outputs)])


def _cases(cases: Sequence[object], row: Mapping[str, object]) -> Tests:
    """Return LiveCodeBench's: `testtype` functional, the function in `metadata`, or standard input."""
    function, tests = _func_name(row), list[Test]()
    for case in cases:
        match case:
            case {"input": given, "output": wanted, "testtype": "functional"}:
                if not function:
                    raise ValueError("holds functional tests, and 'metadata' no func_name")
                tests.append(_call(function, _arguments(given), [_json(wanted)]))
            case {"input": given, "output": wanted}:
                tests.append(_printed(_text(given), _text(wanted)))
            case _:
                raise ValueError("holds a test without input and output")
    return Tests(tests, function)


def _func_name(row: Mapping[str, object]) -> str:
    metadata = row.get("metadata")
    content = _json(metadata) if isinstance(metadata, str) else metadata
    name = content.get("func_name") if isinstance(content, dict) else None
    return name if isinstance(name, str) else ""


def _private_cases(row: Mapping[str, object]) -> list[object]:
    """Return LiveCodeBench's private tests: JSON, or that as base64 of zlib of a pickled text."""
    written = row.get("private_test_cases")
    if not isinstance(written, str) or not written:
        return []
    try:
        cases = json.loads(written)
    except ValueError:
        try:
            cases = json.loads(_Text(io.BytesIO(zlib.decompress(base64.b64decode(written)))).load())
        except Exception:
            raise ValueError("holds 'private_test_cases' that cannot be read") from None
    if not isinstance(cases, list):
        raise ValueError("holds 'private_test_cases' that are no list")
    return cases


class _Text(pickle.Unpickler):
    """Reads a pickle of plain values; one that would import anything is an error."""

    def find_class(self, module: str, name: str) -> object:
        raise pickle.UnpicklingError(f"{module}.{name}")


def _printed(given: str, expected: str) -> Test:
    def share(ran: Ran) -> float:
        return float(ran.status == 0 and not ran.cause and same_output(ran.stdout, expected))

    return Test(lambda program: Run(program, given), share)


def _call(function: str, arguments: Sequence[object], accepted: Sequence[object]) -> Test:
    def share(ran: Ran) -> float:
        if ran.status != 0 or ran.cause or not isinstance(ran.result, dict):
            return 0.0
        try:
            value = decode(ran.result.get("value"))
        except (TypeError, ValueError, RecursionError, OverflowError):
            return 0.0
        return float(any(same_value(value, one) for one in accepted))

    encoded = encode(list(arguments))
    return Test(lambda program: Run(program, call=function, arguments=encoded), share)


def _arguments(given: object) -> list[object]:
    """Return a call's arguments: a list, or text with one JSON value a line."""
    if isinstance(given, str):
        return [_json(line) for line in given.split("\n") if line.strip()]
    if not isinstance(given, list):
        raise ValueError("holds an input that is no list of arguments")
    return given


def _wrapped(value: object) -> list[object]:
    """Return the values that a call may return: APPS writes [value] for value."""
    with contextlib.suppress(ValueError):  # other text is the value itself
        value = _json(value)
    return [value, value[0]] if isinstance(value, list) and len(value) == 1 else [value]


def _json(text: object) -> object:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        raise ValueError(f"holds {text!r:.50}, which is not JSON") from None


def _text(value: object) -> str:
    """Return an input or output as text: some sets hold it as a list of lines."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(map(str, value))
    raise ValueError("holds an input or output that is neither text nor lines")


# ---- assertions


def _assertions(lines: Sequence[object], row: Mapping[str, object]) -> Tests:
    """Return MBPP's: a test for each assertion, after the row's setup and imports."""
    setup = row.get("test_setup_code") or ""
    imports = row.get("test_imports") or []
    if not isinstance(setup, str) or not isinstance(imports, list):
        raise ValueError("holds 'test_setup_code' that is no text or 'test_imports' that are no list")
    before = "\n".join([*map(str, imports), setup, ""])
    trees = [_python(line) for line in lines]
    sources = [f"{before}{line}" for line in lines]
    for source in sources:
        if fault := fault_of(_python(source), ""):
            raise ValueError(f"holds {fault}")
    return Tests(list(map(_judged, sources)), _first_called(trees[0]))


def _source(source: str, row: Mapping[str, object]) -> Tests:
    """Return HumanEval's `check` or a unit-test file: one test, of which a share may pass."""
    tests, entry = _python(source), row.get("entry_point")
    check = entry if isinstance(entry, str) and defines_check(tests) else ""
    if not (function := check.removeprefix(METHOD)).isidentifier():
        check = function = ""
    if "assert" not in source and not (check and "raise" in source):
        raise ValueError(f"holds no tests: {_FORMS}")
    if fault := fault_of(tests, check):
        needs = f"; `check` needs an 'entry_point' NAME or {METHOD}NAME, not {entry!r:.50}"
        raise ValueError(f"holds {fault}{needs if defines_check(tests) and not check else ''}")
    return Tests([_judged(source, check)], function)


def _python(source: object) -> ast.Module:
    if not isinstance(source, str) or not (tree := parsed(source)):
        raise ValueError(f"holds no tests: {_FORMS}")
    return tree


def _first_called(assertion: ast.Module) -> str:
    """Return the function of an assertion that Python does not have; "" where there is none."""
    calls = [node.func for node in ast.walk(assertion) if isinstance(node, ast.Call)]
    names = [call.id for call in calls if isinstance(call, ast.Name)]
    return next((name for name in names if not hasattr(builtins, name)), "")


def _judged(source: str, check: str = "") -> Test:
    def share(ran: Ran) -> float:
        match ran.result:
            case {"passed": int(passed), "total": int(total)} if ran.status == 0 and not ran.cause and total > 0:
                return passed / total
        return 0.0

    return Test(lambda program: Run(program, tests=source, check=check), share)
