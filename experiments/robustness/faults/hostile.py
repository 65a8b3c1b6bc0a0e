"""Files of strangers, each with one fault: what `files` tries. A mutation changes a whole folder in place."""

import functools
import json
import os
import pathlib
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
DEEP = "{% if 1 %}" * 5000
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}" + "{% endfor %}" * 3


class Mutation(NamedTuple):
    """One fault of a folder."""

    tried: str
    apply: Callable[[pathlib.Path], object]
    named: str | None  # what the refusal must name; None: harmless, the folder must load as before


def edit(name: str, change: Callable[[dict], object]) -> Callable[[pathlib.Path], None]:
    """Return a function that changes the JSON object in a folder's file."""

    def apply(folder: pathlib.Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        replace(folder / name, json.dumps(content).encode())

    return apply


def replace(path: pathlib.Path, content: bytes) -> None:
    """Write a file anew: the old one may be a link to a shared one."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def _write(name: str, content: bytes, folder: pathlib.Path) -> None:
    replace(folder / name, content)


def entry(name: str, key: str, value: object, named: str | None) -> Mutation:
    """Return the mutation that sets a key; a value of ... takes it away."""
    if value is ...:
        return Mutation(f"{name} without {key}", edit(name, lambda content: content.pop(key)), named)
    shown = json.dumps(value)
    return Mutation(f"{name}: {key}={shown[:40]}", edit(name, lambda content: content.update({key: value})), named)


def unreadable(name: str) -> Iterator[Mutation]:
    """Yield what may stand in the place of any JSON file."""
    contents = {
        "empty": b"",
        "a list": b"[]",
        "text": b'"a"',
        "NaN": b"NaN",
        "zeros": b"\0" * 4096,
        "cut off": b'{"a": 1',
        "100,000 objects within each other": b'{"a": ' * 100_000,
        "100,000 lists within each other": b"[" * 100_000 + b"]" * 100_000,
        "5,000 digits": b'{"a": ' + b"9" * 5000 + b"}",
        "not UTF-8": b'{"a": "\xff"}',
        "UTF-16": '{"a": 1}'.encode("utf-16"),
    }
    for what, content in contents.items():
        yield Mutation(f"{name}: {what}", functools.partial(_write, name, content), name)
    for what, make in {"a pipe": os.mkfifo, "a folder": os.mkdir}.items():

        def apply(folder: pathlib.Path, make: Callable[[pathlib.Path], None] = make) -> None:
            (folder / name).unlink()
            make(folder / name)

        yield Mutation(f"{name}: {what}", apply, f"{name}: not a regular file")


CONFIG_VALUES: dict[str, list[object]] = {
    "model_type": ["llama", 3, None],
    "vocab_size": [-128, 0, 127, 2**60, "128", 128.0, True],
    "hidden_size": [-192, 0, 96, 10**12, "192", 191.5, [192]],
    "num_hidden_layers": [-8, 0, 7, 9, 10**9, "8", {}],
    "num_attention_heads": [-6, 4, 5, "6", False],
    "num_key_value_heads": [0, 4, 6, "2"],
    "head_dim": [-32, 16, 31, 64, "32"],
    "intermediate_size": [-576, 1, "576"],
    "tie_word_embeddings": ["no", "false", 0, False, []],
    "max_position_embeddings": [-1, 0, "4096", 2**40],
    "rope_theta": [-1.0, 0, "1e6", [1e6], float("inf"), float("nan")],
    "rms_norm_eps": [-1, 0, 1, "1e-6", 1e999, float("nan"), True],
    "hidden_act": ["gelu", 1],
    "attention_bias": [True, "false", 1],
    "rope_scaling": ["yarn", 4, {"rope_type": "llama3", "factor": 2.0}, {"rope_type": "yarn", "factor": -4.0}],
}
CONFIG_KEYS: tuple[str, ...] = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
CONFIG_KEYS += ("intermediate_size", "tie_word_embeddings", "max_position_embeddings", "rope_theta", "rms_norm_eps")
# Where the fault shows as a tensor of another shape or none, the refusal names that.
SHOWN_BY_WEIGHTS = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"}
SHOWN_BY_WEIGHTS |= {"head_dim", "intermediate_size", "tie_word_embeddings"}
CONFIG_HARMLESS: dict[str, list[object]] = {
    "torch_dtype": [5],
    "architectures": [None, ...],
    "rope_scaling": [None, {}],
    "attention_bias": [None, ...],
    "use_cache": ["maybe"],
    "quite_unknown": [{"a": [1, {"b": None}]}],
}


def of_config() -> Iterator[Mutation]:
    """Yield mutations of a policy's config.json."""
    for key, values in CONFIG_VALUES.items():
        for value in values:
            by_weights = key in SHOWN_BY_WEIGHTS and type(value) in (int, bool)
            yield entry("config.json", key, value, "" if by_weights else key.removesuffix("_type"))
    for key in CONFIG_KEYS:
        yield entry("config.json", key, ..., f"config.json lacks '{key}'")
    for key, values in CONFIG_HARMLESS.items():
        for value in values:
            if value is not ... or key in ("architectures", "attention_bias"):
                yield entry("config.json", key, value, None)
    yield from unreadable("config.json")


TOKENS: dict[str, list[object]] = {
    "eos_token": [5, ["<|im_end|>"], {"special": True}, {"content": 7}, True],
    "pad_token": [5, {"content": None}],
    "bos_token": [[], 1.5],
    "chat_template": [
        3,
        {"default": "a"},
        ["a"],
        [{"name": "default"}],
        "{% for %}",
        "{{ " * 10_000,
        DEEP,
    ],
}
ENDS: list[object] = [-1, 10**9, 1.5, "302", True, [302, "x"], [[302]], {"id": 302}, float("nan")]


def of_tokenizer() -> Iterator[Mutation]:
    """Yield mutations of a tokenizer's files."""
    for key, values in TOKENS.items():
        for value in values:
            yield entry("tokenizer_config.json", key, value, "template" if key == "chat_template" else key)
    for end in ENDS:
        yield entry("generation_config.json", "eos_token_id", end, "eos_token_id")
    yield entry("tokenizer.json", "model", ..., "tokenizer.json")
    yield entry("tokenizer.json", "model", 3, "tokenizer.json")
    yield entry("tokenizer.json", "added_tokens", [{"id": -1, "content": "a"}], "tokenizer.json")
    yield entry("tokenizer.json", "truncation", {"max_length": "x"}, "tokenizer.json")
    yield entry("tokenizer.json", "truncation", CUT, None)
    yield Mutation("tokenizer.json: drawn merges", edit("tokenizer.json", _drop), "model.dropout=0.5")
    yield Mutation("tokenizer.json: no tokens", edit("tokenizer.json", _empty), "has no tokens")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        yield from unreadable(name)
    yield _template("fills the memory", "{{ 'a' * 10 ** 12 }}", "needs more than")
    yield _template("looks at Python's classes", "{{ ''.__class__.__mro__ }}", "chat template fails")
    yield _template("reads a file", "{% include 'tokenizer.json' %}", "chat template fails")


CUT = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}


def _drop(content: dict) -> None:
    content["model"]["dropout"] = 0.5


def _empty(content: dict) -> None:
    content["model"] |= {"vocab": {}, "merges": []}
    content["added_tokens"] = []


def _template(what: str, template: str, named: str) -> Mutation:
    return Mutation(
        f"a template that {what}", lambda folder: (folder / "chat_template.jinja").write_text(template), named
    )


def of_index() -> Iterator[Mutation]:
    """Yield mutations of a folder of several weight files; `part-1` holds the table of embeddings."""
    for file in (
        "../{folder}/part-1.safetensors",
        "{path}/part-1.safetensors",
        "..",
        "",
        "config.json",
        "a\0",
        3,
        None,
    ):

        def apply(folder: pathlib.Path, file: object = file) -> None:
            name = file.format(folder=folder.name, path=folder) if isinstance(file, str) else file
            edit(INDEX, lambda content: content["weight_map"].update({EMBEDDING: name}))(folder)

        yield Mutation(f"{INDEX}: a file {json.dumps(file)}", apply, "weight_map")
    yield entry(INDEX, "weight_map", ..., "lacks 'weight_map'")
    yield entry(INDEX, "weight_map", [], "weight_map")
    yield Mutation(
        f"{INDEX}: a file that is not there",
        edit(INDEX, lambda content: content["weight_map"].update({EMBEDDING: "part-9.safetensors"})),
        "part-9.safetensors",
    )
    yield Mutation("weights as I32", lambda folder: as_integers(folder / "part-1.safetensors"), "is I32")
    yield from unreadable(INDEX)


EMBEDDING = "model.embed_tokens.weight"


def as_integers(path: pathlib.Path) -> None:
    """Say in the header that float32 tensors are int32."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + size].replace(b'"F32"', b'"I32"')
    replace(path, content[:8] + header + content[8 + size :])


ROWS = '{"step": 0, "reward/mean": 0.5}\n{"step": 1, "reward/mean": null}\n'
LINES = {
    "zeros": b"\0" * 64,
    "no JSON": b"step 2",
    "a list": b"[2]",
    "no step": b'{"reward/mean": 1}',
    "a step of text": b'{"step": "2"}',
    "a negative step": b'{"step": -2}',
    "a number as text": b'{"step": 2, "reward/mean": "1"}',
    "NaN": b'{"step": 2, "reward/mean": NaN}',
    "nested": b'{"step": 2, "a": ' + b"[" * 100_000,
    "not UTF-8": b'{"step": 2, "\xff": 1}',
    "2 MiB": b'{"step": 2, "a": "' + b"a" * 2**21 + b'"}',
}


def of_metrics() -> Iterator[Mutation]:
    """Yield mutations of a workdir's metrics.jsonl."""
    for what, line in LINES.items():
        content = ROWS.encode() + line + b"\n" + ROWS.encode()
        applied = functools.partial(_write, "metrics.jsonl", content)
        yield Mutation(f"metrics.jsonl: {what}", applied, "metrics.jsonl:3")
    yield Mutation(
        "metrics.jsonl: an incomplete last line",
        lambda folder: replace(folder / "metrics.jsonl", ROWS.encode() + b'{"st'),
        None,
    )


def of_workdir() -> Iterator[Mutation]:
    """Yield mutations of a workdir's config.json."""
    for value in (..., None, [1], "x", 3):
        yield entry("config.json", "config", value, "config")
    yield from unreadable("config.json")
