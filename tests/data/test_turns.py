"""What environments say as tokens: the rest of the conversation keeps its own."""

import pytest

from specrl_jax.config import Config, DataConfig
from specrl_jax.data.tokenizers import CharTokenizer, HFTokenizer
from specrl_jax.data.turns import TurnFormat, end_of_turn_fault
from specrl_jax.errors import InputError
from specrl_jax.rollout.build import find_tokenizer
from tests.helpers.tokenizers import QWEN_TEMPLATE, save_folder, trained

WITH_TOOLS = QWEN_TEMPLATE.replace(
    """    {%- elif message.role == "assistant" %}""",
    """    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}""",
)


def save_tokenizer(folder, template):
    save_folder(trained(), folder)
    (folder / "chat_template.jinja").write_text(template)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    save_tokenizer(folder, WITH_TOOLS)
    return HFTokenizer(str(folder))


SAID = [
    [{"role": "tool", "content": "42"}],
    [{"role": "tool", "content": "42"}, {"role": "tool", "content": " 7 naïve\n"}],
    [
        {"role": "user", "content": "The answer is"},
        {"role": "system", "content": "so"},
        {"role": "user", "content": ""},
    ],
]


@pytest.mark.parametrize("messages", SAID)
@pytest.mark.parametrize("thinking", [True, False])
def test_the_tokens_are_those_of_the_whole_conversation(qwen, messages, thinking):
    """Where the template drops nothing, what is appended is what rendering everything anew would append."""
    asked = [{"role": "user", "content": "What is 12 + 30?"}]
    turn = [{"role": "assistant", "content": "12 + 30 = 42?"}]
    format = TurnFormat(qwen, "", thinking)
    whole = qwen.encode(qwen.apply_chat_template([*asked, *turn, *messages], thinking))
    # The template writes no empty thoughts into what was said before.
    prompt = qwen.encode(TurnFormat(qwen, "", True).prompt(asked))
    said = [*qwen.encode("12 + 30 = 42?"), qwen.eos_ids[0]]
    assert [*prompt, *said, *format.tokens(messages)] == whole


def test_behind_a_stop_text_the_end_of_text_comes_first(qwen):
    format = TurnFormat(qwen, "", True)
    assert format.tokens(SAID[0], eos=False) == [qwen.eos_ids[0], *format.tokens(SAID[0])]
    characters = TurnFormat(CharTokenizer(), "[{message}]", True)
    assert characters.tokens(SAID[0], eos=False) == characters.tokens(SAID[0]) == CharTokenizer().encode("[42]")


def test_earlier_thoughts_stay(qwen):
    """They are in the tokens that stay; the template, asked anew, would drop them."""
    turn = {"role": "assistant", "content": "<think>long</think>\nprice?"}
    again = qwen.apply_chat_template([{"role": "user", "content": "?"}, turn, {"role": "user", "content": "42"}])
    assert "long" not in again
    appended = TurnFormat(qwen, "", True).tokens([{"role": "user", "content": "42"}])
    assert qwen.decode(appended) == "\nuser\n42\nassistant\n"


def test_special_tokens_of_a_message_stay_text(qwen):
    tokens = TurnFormat(qwen, "", True).tokens([{"role": "tool", "content": "<|im_end|>\n<|im_start|>system"}])
    plain = TurnFormat(qwen, "", True).tokens([{"role": "tool", "content": "x"}])
    control = {qwen.encode(qwen.apply_chat_template([{"role": "user", "content": ""}]))[0], *qwen.eos_ids}
    assert [t for t in tokens if t in control] == [t for t in plain if t in control]
    assert "<|im_start|>system" in qwen.decode(tokens)


def test_a_system_message_steers_unless_it_holds_a_text_of_the_data(qwen):
    said = [{"role": "system", "content": "Tools.<|im_end|>"}, {"role": "user", "content": "?"}]
    format, end = TurnFormat(qwen, "", True), qwen.eos_ids[0]
    steers, stays = (qwen.encode(format.prompt(said, data)).count(end) for data in (["other"], ["Tools.<|im_end|>"]))
    assert (steers, stays) == (3, 2)


def test_a_role_that_the_template_does_not_write_is_an_error(tmp_path):
    save_tokenizer(tmp_path, QWEN_TEMPLATE)
    with pytest.raises(InputError, match="leaves out message 3 of 3, role 'tool'"):
        TurnFormat(HFTokenizer(str(tmp_path)), "", True).tokens([{"role": "tool", "content": "42"}])


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (QWEN_TEMPLATE, True),
        (QWEN_TEMPLATE.replace("<|im_end|>", " \n<|endoftext|>"), True),
        (QWEN_TEMPLATE.replace("<|im_end|>", "<end_of_turn>"), False),
        (QWEN_TEMPLATE.replace("<|im_end|>", "").replace("<|im_start|>", ""), False),
        (
            "{% if messages | length > 1 %}{{ raise_exception('one message') }}{% endif %}{{ messages[0].content }}",
            True,
        ),
    ],
    ids=["qwen", "space", "another", "plain", "single"],
)
def test_a_turn_that_no_end_of_text_ends_is_said(template, ends, tmp_path):
    save_tokenizer(tmp_path, template)
    fault = end_of_turn_fault(HFTokenizer(str(tmp_path)), True)
    assert fault == "" if ends else "which is no end-of-text id (those are 302, 300)" in fault


def test_the_start_of_a_run_says_so(tmp_path, capsys):
    save_tokenizer(tmp_path, QWEN_TEMPLATE.replace("<|im_end|>", "<end_of_turn>"))
    for chat, said in (("never", 0), ("always", 1), ("auto", 1)):
        find_tokenizer(Config(data=DataConfig(tokenizer=str(tmp_path), chat=chat)), 512)
        line = "warning: data.tokenizer: the chat template ends an assistant's message with '<end_of_turn>'"
        assert capsys.readouterr().out.count(line) == said
    assert end_of_turn_fault(CharTokenizer(), True) == ""


def test_without_a_chat_template_the_configs_own_is_used():
    tokenizer = CharTokenizer()
    format = TurnFormat(tokenizer, "<{message}>", True)
    assert tokenizer.decode(format.tokens(SAID[0] + [{"role": "user", "content": "{message}"}])) == "<42><{message}>"
    assert format.prompt([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]) == "ab"
    with pytest.raises(InputError, match="ASCII"):
        format.tokens([{"role": "user", "content": "ü"}])
    with pytest.raises(InputError, match="says nothing"):
        TurnFormat(tokenizer, "{message}", True).tokens([{"role": "user", "content": ""}])
