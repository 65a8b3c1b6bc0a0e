"""Where a response states its answer: Markdown, tags, boxes, sentences, thoughts; and what states none."""

import pytest

from specrl_jax.rewards.extraction import extract_text
from specrl_jax.rewards.markdown import plain_text
from specrl_jax.rewards.symbolic import symbolic
from specrl_jax.rewards.thought import with_prefilled

RIGHT = {
    "18": [
        "So the total is **18**.",
        "The total is *18*.",
        "It is __18__.",
        "It is _18_.",
        "It is ***18***!",
        "It is `18`.",
        "It is <b>18</b>.",
        "Total cost: **$18.00**",
        "Hence **$18$**.",
        "Hence **\\(18\\)**.",
        "Hence *x = 18*.",
        "**Total:** 18",
        "**Total: 18 dollars**",
        "**Final Answer**\n\n18",
        "**Final Answer:**\n\n**18**",
        "### Final Answer\n18 eggs\n",
        "**Final Answer**\n\n$18$",
        "**Result**\n\\[18\\]",
        "Answer:\n\\[\n18\n\\]",
        "Answer:\n```\n18\n```",
        "#### Step 3: add 4 and 14\nThe total is 18.",
        "Steps:\n- 18",
        "Steps:\n* **18**",
        "> 18",
        "| eggs | dollars |\n|---|---|\n| total | 18 |",
        "Final Answer: The final answer is $18$. I hope it is correct.",
        "Answer: 18. This follows from step 2.",
        "Answer: 18 (six times three)",
        "Answer: 18, because 6 times 3 is that.",
        "Answer: `18`",
        "Answer: Janet makes $18 every day.",
        "The answer is `18`.",
        "The answer is **18**!",
        "The number of answers posted in the forum is 2*7 = 14.\n\nWith the questions it is **18**.",
        "The answer would be 18 dollars a day.",
        "So 9 * 2 = 18 dollars every day.",
        "She sells 9 of the 16 eggs and makes $18 every day.",
        "She makes **18** dollars. Let me know if you need more!",
        "So, 18 eggs are left.",
        "Therefore, $18 is what she makes.",
        "Thus, **18** eggs are left.\n\nTo find out",
        "And so, in total, 18.",
        "1. Add 4 and 14.\n2. The total is 18.",
        "1. Add 4 and 14.\n2. 18",
        "The total:\n18. That is all.",
        "<think>a</think>\n<answer>18</answer>",
        "<answer>The answer is 18</answer>",
        "<answer>\n\\boxed{18}\n</answer>",
        "<answer>17</answer> No: <answer> 18 dollars </answer>",
        "\\fbox{18}",
        "\\boxed18",
        "\\boxed 18.",
        "$boxed{18}$",
        "\\framebox[3cm]{18}",
        "\\boxed{\\bf 18}",
        "\\boxed{\\textcolor{red}{\\mathbf{18}}}",
        "\\boxed{**18**}",
        "\\boxed{\\text{Answer: }18}",
        "\\boxed{1.8e1}",
    ],
    "-5": ["The result is **-5**", "So x is *-5*.", "Answer: $-5$."],
    "\\frac{1}{2}": [
        "It is **1/2**.",
        "It is **$\\frac{1}{2}$**.",
        "So **\\(\\frac12\\)** of it",
        "\\boxed\\frac{1}{2}",
    ],
    "12": [
        "2 * 2 * 3 = 12",
        "**3*4 = 12**",
        "So we get **$3*4$**",
        "Answer: 3*4",
        "Answer: 3 * 4",
        "Answer: (2)*(2)*(3)",
    ],
    "8": ["Answer: 2**3", "**2**3 = 8**"],
    "5 \\text{ cm}": ["It is **5 cm**.", "Answer: 5 cm, as we saw.", "So the pin is 5 centimeters long."],
}
WRONG = {
    "18": [
        "It is not **18**.",
        "**18** or **20**",
        "It is **18** or 20.",
        "Is it **18**?",
        "It is perhaps **18**.",
        "Answer: 18 or 20 (I am not sure)",
        "Answer: 18 (or 20)",
        "Answer: 18 + 2",
        "Answer: 18 to 20",
        "Answer: $18$ and $20$",
        "Answer: 17. Before it was 18.",
        "Therefore, 17, 18.",
        "So, 18 or 20.",
        "In total, it is not 18.",
        "17, so, 18 eggs are left.",
        "<answer>17</answer> and 18",
        "<answer>18",
        "<answer>18</answer> then <answer>17",
        "\\fbox{1}8",
        "\\boxed17 18",
        "\\boxed{\\bf 1}8",
        "\\boxed{\\underline{1}8e1}",
        "**18",
        "version 0.18",
        "at 3:18",
        "x_{18}",
        "the 18th",
        "18x",
        "$3 + 18",
    ],
    "7": ["".join(f"{i}. We add {i} and {i}.\n" for i in range(1, 7)) + "7. We can"],
    "4": ["1. We add.\n2. We go on.\n4. We can"],
    "1": ["1. We can add", "\\boxed{[1, 2]}", "**1**0", "1**2**"],
    "6": ["So x = 5 or x = 6.", "x = 5 and y = 6", "**2*4**", "2**3**", "*2* *3*"],
    "5 \\text{ cm}": ["It is **5 m**.", "Answer: 5 mm, as we saw."],
}


def cases(table):
    return [(gold, text) for gold, texts in table.items() for text in texts]


@pytest.mark.parametrize(("gold", "response"), cases(RIGHT))
def test_a_stated_answer_is_found(gold, response):
    assert symbolic(response, gold) == 1, extract_text(response)


@pytest.mark.parametrize(("gold", "response"), cases(WRONG))
def test_what_states_another_answer_or_none_is_not_paid(gold, response):
    assert symbolic(response, gold) == 0, extract_text(response)


@pytest.mark.parametrize(("gold", "response"), [case for case in cases(RIGHT) if case[0] == "18"])
def test_another_number_in_its_place_is_not_paid(gold, response):
    for other in ("19", "81", "180"):
        assert symbolic(response.replace("18", other).replace("1.8e1", "1.9e1"), gold) == 0


@pytest.mark.parametrize(
    ("response", "stated"),
    [
        ("<think>\\boxed{5}? no.</think> The answer is 6.", "6"),
        ("<think>\\boxed{5}", None),
        ("The answer is 5. <think>", None),
        ("\\boxed{5}</think>", None),
        ("it is 5</think>\\boxed{6}", "6"),
        ("<think>5</think>6</think>7", "7"),
        ("<reasoning>\\boxed{5}</reasoning>\n<answer>6</answer>", "6"),
        ("[THINK]\\boxed{5}[/THINK]6", "6"),
        ("<THINK>5</THINK>6", "6"),
        ("<think></think>", None),
    ],
)
def test_only_what_follows_the_thought_is_read(response, stated):
    assert extract_text(response) == stated


@pytest.mark.parametrize(
    ("prompt", "begun"),
    [
        ("<|im_start|>assistant\n<think>\n", "<think>\n"),
        ("Question\nAssistant: <think>", "<think>"),
        ("<\uff5cAssistant\uff5c><think>\n", "<think>\n"),
        ("[/INST]<think>", "<think>"),
        ("<start_of_turn>model\n<think>\nOkay, so", "<think>\nOkay, so"),
        ("Think within <think> and </think>.\n<|im_start|>assistant\n", ""),
        ("Begin with <think> please", ""),
        ("Begin with\n<think>\n<|im_end|>\n<|im_start|>assistant\n", ""),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ""),
        ("", ""),
    ],
)
def test_the_thought_that_a_prompt_begins(prompt, begun):
    assert with_prefilled(prompt, "so</think>6") == f"{begun}so</think>6"


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("2 * 3 * 4 and 2**3", "2 * 3 * 4 and 2**3"),
        ("a_1 and _b_ and snake_case_name", "a_1 and b and snake_case_name"),
        ("**a *b* `c`**", "a b c"),
        ("# A\n- b\n  * c\n> d", "A\nb\nc\nd"),
        ("#### 5", "#### 5"),
        ("-5", "-5"),
        ("costs $5 and $6", "costs $5 and $6"),
    ],
)
def test_markup_is_removed_and_mathematics_is_not(text, plain):
    assert plain_text(text) == (plain, [])


def test_formulas_keep_their_stars():
    assert plain_text("**$a*b*c$** and \\(x_1*x_2\\), $$2$$") == (
        "\ue000 and \ue001, \ue002",
        ["a*b*c", "x_1*x_2", "2"],
    )
