"""Small tokenizers with the structure of published ones, trained on a few lines, and their folders with templates."""

import json
from typing import NamedTuple

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.helpers.tokenizers import write

CORPUS = [
    "What is 12 + 30? The answer is 42, and 1234567 is more.",
    "def add(a, b):\n    return a + b\n\n\n# user system assistant",
    "naïve café → ünïcode; it's, we'll, THEY'RE   here",
    "你好，世界。今天是星期五。こんにちは 안녕하세요",
    "The answer is the sum; the answer is the answer.",
] * 4
# GPT-4's, as Llama 3 writes it; Qwen2.5 splits digits one by one.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

LLAMA = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN = """\
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant") %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("After the optional system message, roles must alternate user/assistant/...") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- endif %}
{%- endfor %}
"""


class Family(NamedTuple):
    """What a folder holds, but for the vocabulary."""

    special: tuple[str, ...]
    ends: tuple[str, ...]  # of generation_config.json
    settings: dict  # of tokenizer_config.json
    template: str
    start: str = ""  # what the post-processor puts before a text


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>")
INST = Family(
    ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
    ("</s>",),
    {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True, "add_eos_token": False},
    MISTRAL,
    "<s>",
)
FAMILIES = {
    "llama3": Family(
        ("<|begin_of_text|>", "<|end_of_text|>", *HEADERS),
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        LLAMA,
        "<|begin_of_text|>",
    ),
    "qwen2.5": Family(
        CHATML,
        ("<|im_end|>", "<|endoftext|>"),
        {"bos_token": None, "add_bos_token": False, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        QWEN,
    ),
    "smollm2": Family(
        CHATML,
        ("<|im_end|>",),
        {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"},
        SMOLLM,
    ),
    "mistral": INST,
    "mistral-legacy": INST,  # 0.1 and 0.2: a normalizer writes spaces; since 0.3 the pre-tokenizer does
}


def trained(name):
    """Return the tokenizer of a family."""
    family = FAMILIES[name]
    tokenizer = _metaspace(family, name) if name.startswith("mistral") else _byte_level(family, name)
    if family.start:
        start, i = family.start, tokenizer.token_to_id(family.start)
        pair = f"{start} $A {start}:1 $B:1"
        adds = processors.TemplateProcessing(single=f"{start} $A", pair=pair, special_tokens=[(start, i)])
        bytes_too = processors.Sequence([processors.ByteLevel(trim_offsets=False), adds])
        tokenizer.post_processor = bytes_too if name == "llama3" else adds
    return tokenizer


def _byte_level(family, name):
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=name == "llama3"))
    if name == "smollm2":
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        split = Regex(SPLIT % ("{1,3}" if name == "llama3" else ""))
        parts = [
            pre_tokenizers.Split(split, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence(parts), decoders.ByteLevel()
    if name == "qwen2.5":
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(list(family.special))
    return tokenizer


def _metaspace(family, name):
    """Return a BPE of characters with 256 bytes for those that it lacks: special tokens first, then bytes."""
    legacy = name == "mistral-legacy"
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    learner.train_from_iterator(CORPUS[:3], trainers.BpeTrainer(vocab_size=200, show_progress=False))
    learned = json.loads(learner.to_str())["model"]
    pieces = [piece for piece in learned["vocab"] if piece != "\n"]
    names = [*family.special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [tuple(pair) for pair in learned["merges"] if "\n" not in "".join(pair)]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            {text: i for i, text in enumerate(names)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(list(family.special))
    return tokenizer


def save_family(name, folder):
    """Write a family's tokenizer with the files beside it; return the tokenizer."""
    family, tokenizer = FAMILIES[name], trained(name)
    tokenizer.save(str(folder / "tokenizer.json"))
    write(folder, "tokenizer_config.json", family.settings | {"tokenizer_class": "PreTrainedTokenizerFast"})
    write(folder, "generation_config.json", {"eos_token_id": [tokenizer.token_to_id(end) for end in family.ends]})
    (folder / "chat_template.jinja").write_text(family.template)
    return tokenizer
