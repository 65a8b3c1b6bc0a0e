"""SmolLM2 from a GGUF file: names, order of rows, tokenizer; a second run; what a command lacks; and parity."""

import importlib.util
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import commands
from experiments.smollm import prepare, word_problems
from specrl_jax.data.tokenizers import load_tokenizer
from specrl_jax.errors import InputError
from specrl_jax.io import hf
from specrl_jax.sharding import LEARNER, make_mesh, partitioner
from tests.helpers.runs import ROOT, process_environment


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy") / "smollm2"
    assert prepare.prepare("", str(path))
    return path


def permute(weight, heads):
    """The rows of q or k as llama.cpp's converter (`LlamaModel.permute`) orders them."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def test_rows_of_queries_go_back_to_halves():
    rows = np.arange(16.0)[:, None]  # two heads of 8
    # Neighbours in the file are turned together: 0 and 4 of transformers' order.
    assert permute(rows, 2)[:8, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    np.testing.assert_array_equal(prepare.unpermute(permute(rows, 2), 2), rows)


def test_the_folder_is_a_policy_with_its_tokenizer(folder):
    config = hf.load_config(str(folder))
    hf.check_params(str(folder), config)
    partition = partitioner(make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1]), LEARNER)
    hf.load_params(str(folder), config, partition, dtype=jnp.float32)
    assert (config.family, config.tied, config.rope.theta, config.norm_epsilon) == ("llama", True, 1e5, 1e-5)
    tokenizer = load_tokenizer(str(folder), config.vocab)
    assert (tokenizer.pad_id, tokenizer.eos_ids) == (2, (2,))
    for text in ("It has 384 cards.\n", "ä  tt 12", "    47"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "2"}])
    assert prompt == "<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(prompt)[0] == 1


def test_digits_are_tokens_of_their_own_and_merges_stay_within_words():
    fields = dict(prepare.random_gguf().fields)
    texts = [*fields["tokenizer.ggml.tokens"], "12", "Ġ1", "ĠĠ"]
    fields |= {
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(texts) - 3),
        "tokenizer.ggml.merges": ["Ġ t", "1 2", "Ġ 1", "Ġ Ġ"],
    }
    tokenizer = prepare.make_tokenizer(fields)
    assert tokenizer.encode("t  12 t").tokens == ["t", "ĠĠ", "1", "2", "Ġt"]
    with pytest.raises(InputError, match="a tokenizer 'gpt2' of type 'llama-bpe', expected gpt2 and smollm"):
        prepare.make_tokenizer(fields | {"tokenizer.ggml.pre": "llama-bpe"})


def test_another_model_is_refused(folder):
    source = prepare.random_gguf()
    with pytest.raises(InputError, match="holds a 'qwen3' model, expected llama"):
        prepare.llama_config({**source.fields, "general.architecture": "qwen3"}, tied=True)
    with pytest.raises(InputError, match=r"has a tensor blk\.0\.attn_q\.bias"):
        prepare.hf_tensors(source._replace(tensors={"blk.0.attn_q.bias": np.zeros(4, np.float32)}))


def test_a_second_run_changes_nothing_and_a_damaged_file_is_written_again(folder, tmp_path):
    again = tmp_path / "again"
    assert prepare.prepare("", str(again)) and not prepare.prepare("", str(again))
    for name in prepare.FILES:
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    (again / "config.json").write_text("{}")
    assert prepare.prepare("", str(again))
    assert (again / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    (again / prepare.DIGESTS).unlink()  # as a run leaves it that was killed
    assert prepare.prepare("", str(again)) and not prepare.prepare("", str(again))


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["prepare", *arguments])
    return commands.run(prepare.main)


def test_what_is_missing_is_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(prepare, "PACKAGE", "no_such_package")
    assert run(monkeypatch, "--output", str(tmp_path / "out")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: SmolLM2-135M-Instruct.Q4_1.gguf: ") and line.endswith(prepare.INSTALL)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert run(monkeypatch, "--gguf", str(file), "--output", str(tmp_path / "out")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: gguf: not installed") and line.endswith(prepare.INSTALL)
    assert not (tmp_path / "out").exists()


def test_a_small_run_leaves_the_policy_alone(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, "PACKAGE", "no_such_package")
    assert run(monkeypatch, "--small") == 0 and run(monkeypatch, "--small") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if ":" in line] == [f"runs/small/smollm2: {how}" for how in ("written", "unchanged")]
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def write_gguf(source, path):
    """Write a GGUF file: weights in 8 bits where their rows allow it, queries and keys as llama.cpp orders them."""
    import gguf

    writer = gguf.GGUFWriter(str(path), source.fields["general.architecture"])
    for name, value in source.fields.items():
        if name != "general.architecture":
            add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
            add[type(value)](name, value)
    for name, weight in source.tensors.items():
        if weight.ndim == 1:
            writer.add_tensor(name, weight)
        else:
            eight = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(weight, eight), raw_dtype=eight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_read_and_dequantised(tmp_path):
    pytest.importorskip("gguf", reason=f"reads no GGUF; {prepare.INSTALL}")
    source, path = prepare.random_gguf(), tmp_path / "model.gguf"
    write_gguf(source, path)
    content = prepare.read_gguf(str(path))
    for name, value in source.fields.items():
        assert content.fields[name] == (pytest.approx(value) if isinstance(value, float) else value)
    for name, weight in source.tensors.items():
        assert content.tensors[name].dtype == np.float32
        np.testing.assert_allclose(content.tensors[name], weight, atol=np.abs(weight).max() / 127)
    assert prepare.prepare(str(path), str(tmp_path / "out")) and not prepare.prepare(str(path), str(tmp_path / "out"))
    noted = json.loads((tmp_path / "out" / prepare.DIGESTS).read_text())
    assert noted["source"] == prepare.digest(str(path)) and noted["files"].keys() == set(prepare.FILES)


@pytest.mark.slow
def test_logits_and_answers_are_those_of_transformers(tmp_path):
    for module in ("torch", "transformers"):
        pytest.importorskip(module, reason="compares with transformers; pip install -r requirements-parity.txt")
    command = [sys.executable, "-m", "experiments.smollm.parity", "--small", "--output", str(tmp_path / "parity.json")]
    environment = process_environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "parity.json").read_text())["logits"]["largest"] <= 1e-4


def test_the_package_is_not_imported_to_find_its_file(monkeypatch, tmp_path):
    package = tmp_path / "one_with_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('needs llm')")
    (package / prepare.FILE).write_bytes(b"")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(prepare, "PACKAGE", package.name)
    importlib.invalidate_caches()
    assert prepare.find_file() == str(package / prepare.FILE)


def test_problem_files_are_those_of_the_script_and_share_no_question():
    questions = []
    for split, count in word_problems.ROWS.items():
        rows = [json.loads(line) for line in (word_problems.FOLDER / f"{split}.jsonl").read_text().splitlines()]
        assert rows == word_problems.make_rows(split, count)
        questions += [row["question"] for row in rows]
    assert len(set(questions)) == sum(word_problems.ROWS.values())
