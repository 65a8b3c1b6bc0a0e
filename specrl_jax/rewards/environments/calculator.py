"""A calculator as a tool: the policy asks for the value of an expression, and answers once it has asked enough."""

import json
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from specrl_jax.rewards.environments.protocol import Step
from specrl_jax.rewards.verifiable import evaluate_expression

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_TINY_CALL = re.compile(r"\?([^\n]*)\Z")
_TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute an expression of whole numbers with + - * / and brackets.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
# What Qwen3's chat template writes for tools.
_SYSTEM = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    + json.dumps(_TOOL)
    + "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


class Calculator:
    """Calls in the form of Qwen3's chat template; a turn without one is the answer, which `reward.name` scores."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[dict[str, str]]:
        asked, system = row["prompt"], _SYSTEM
        if isinstance(asked, str):
            asked = [{"role": "user", "content": asked}]
        if asked[0]["role"] == "system":  # the template writes its text before the tools
            system, asked = f"{asked[0]['content']}\n\n{system}", asked[1:]
        return [{"role": "system", "content": system}, *asked]

    def step(self, text: str) -> Step:
        calls = _CALL.findall(text)
        if not calls:
            return Step(None)
        values, wrong = [computed(_expression(call)) for call in calls], "error: not an expression of whole numbers"
        messages = [{"role": "tool", "content": value or wrong} for value in values]
        return Step(messages, info=_counted(values) | {"call": text[text.index("<tool_call>") :]})


class TinyCalculator:
    """Calls for tokenizers of single characters: a turn that ends in `?12+30` asks for the value of 12+30."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[dict[str, str]]:
        return []

    def step(self, text: str) -> Step:
        call = _TINY_CALL.search(text)
        if call is None:
            return Step(None)
        value = computed(call[1])
        return Step([{"role": "tool", "content": value or "!"}], info=_counted([value]) | {"call": call[0]})


def computed(expression: str) -> str:
    """Return the value of an expression of whole numbers, exactly; "" for anything else."""
    try:
        value: Fraction = evaluate_expression(expression)[0]
        return str(value)
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return ""


def _expression(call: str) -> str:
    """Return the expression of a call; "" where it is none of the calculator."""
    try:
        request = json.loads(call)
        expression = request["arguments"]["expression"] if request["name"] == "calculator" else ""
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return expression if isinstance(expression, str) else ""


def _counted(values: Sequence[str]) -> dict[str, float | str]:
    return {"tool_calls": len(values), "tool_errors": sum(not value for value in values)}
