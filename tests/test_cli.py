"""Bad input: exit status 1, one line that names the key or the file, before any work, and nothing half-written."""

import errno
import functools
import json
import re
import shutil
import socket
import sys

import jax
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from absl.testing import flagsaver

from specrl_jax import cli
from specrl_jax.config import TASKS, Config, schema
from specrl_jax.config.page import values
from specrl_jax.config.renamed import RENAMED
from specrl_jax.config.schema import keys
from specrl_jax.drafts import eagle3
from specrl_jax.errors import one_line_warnings
from specrl_jax.io import hf
from specrl_jax.models import decoder
from tests.helpers.head_folders import EAGLE3_FOLDERS
from tests.helpers.runs import ROOT, SMOKE, arguments, finished_run, make_call, run_process, snapshot


@pytest.fixture
def call(monkeypatch, capfd):
    """call(argv) -> (exit status, stdout, stderr) of the command in this process."""
    with make_call(monkeypatch, capfd) as call:
        yield call


@pytest.fixture
def no_work():
    """Fail a test in which programs are compiled: a mistake must be found before anything that takes long.

    Two are let through, of a few numbers each: the weights of the draft's unrolled steps (rl/draft_losses.py).
    """
    compiled = []

    def listen(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield
    jax.monitoring.unregister_event_duration_listener(listen)
    assert len(compiled) <= 2, "work began before the mistake was found"


def error_line(result):
    """The one line of a run that was refused."""
    status, out, err = result
    assert (status, out) == (1, ""), err
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1, err
    # A message that was built from a repr shows its line breaks as two characters.
    assert "Traceback" not in err and "\\n" not in err
    return err


def error_lines(result):
    """The lines of a run that was refused for several mistakes."""
    status, out, err = result
    assert (status, out) == (1, ""), err
    assert "Traceback" not in err and all(line.startswith("error: ") for line in err.splitlines())
    return err.splitlines()


def assert_refused(call, tmp_path, overrides, words, config=SMOKE):
    workdir = tmp_path / "run"
    line = error_line(call(arguments(*overrides, workdir=workdir, config=config)))
    for word in words:
        assert word in line, line
    assert not workdir.exists(), sorted(workdir.rglob("*"))


# ---- the command line itself


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["--config.grpo.minibatch=2"], ["minibatch", "minibatches"]),
        (["--config.rolout.top_k=2"], ["rolout", "rollout"]),
        (["--config.zzz=1"], ["--config: there is no key 'zzz'"]),
        (["--config.steps=many"], ["config.steps", "many"]),
        (["--config.steps=1.5"], ["config.steps", "1.5"]),
        (["--config.optimizer.learning_rate=fast"], ["config.optimizer.learning_rate", "fast"]),
        (["--config.draft.online=maybe"], ["config.draft.online", "maybe"]),
        (["--config.grpo=3"], ["grpo"]),
        (["--workdri=x"], ["workdri", "workdir"]),
        (["steps=3"], ["steps=3", "--config.key=value"]),
    ],
    ids=str,
)
def test_a_wrong_override_is_named(call, tmp_path, no_work, overrides, words):
    assert_refused(call, tmp_path, overrides, words)


@pytest.mark.parametrize("old", RENAMED)
def test_a_name_of_an_earlier_version_is_refused_in_a_line(call, tmp_path, no_work, old):
    said = f"error: --config: there is no key '{old}' any more: {RENAMED[old]}\n"
    assert call(arguments(f"--config.{old}=1", workdir=tmp_path / "run")) == (1, "", said)


def test_a_missing_config_file_is_named(call, tmp_path, no_work):
    assert_refused(call, tmp_path, [], ["configs/nothing.py"], config=ROOT / "configs/nothing.py")


def test_the_8b_config_without_weights_says_how_to_get_them(call, tmp_path, no_work):
    lines = error_lines(call(arguments(workdir=tmp_path / "run", config=ROOT / "configs/rlzero_8b.py")))
    said = ["mesh.fsdp=8", "policy.path", "eval.path: no file", "data.path: no file"]
    assert len(lines) == len(said) and all(word in line for word, line in zip(said, lines)), lines
    assert "'checkpoints/Qwen3-8B-Base'" in lines[1] and "hf download Qwen/Qwen3-8B-Base" in lines[1]


@pytest.mark.parametrize(("variant", "folder"), [("", "rlzero_tiny"), (":smoke", "rlzero_tiny_smoke")])
def test_a_variant_is_another_run_by_default(monkeypatch, variant, folder):
    argv = ["main.py", "--config", f"{ROOT / 'configs/rlzero_tiny.py'}{variant}"]
    monkeypatch.setattr(sys, "argv", argv)
    with flagsaver.flagsaver():
        assert cli.parse(argv)[1] == f"runs/{folder}"


def test_an_unknown_variant_is_named_with_the_known_ones(call, tmp_path, no_work):
    line_words = ["smok'", "there are small, rooms, smoke"]
    assert_refused(call, tmp_path, [], line_words, config=SMOKE.replace(":smoke", ":smok"))


@pytest.mark.parametrize("flag", ["--help", "-h", "--helpfull"])
def test_help_lists_every_task_and_key_and_nothing_else(call, flag, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, err = call(["main.py", flag])
    assert (status, err) == (0, "")
    shown = " ".join(out.split())
    assert all(f"{name} {what}" in shown for name, what in TASKS.items())
    listed = re.findall(r"^  --config\.(.*)", out, re.M)
    assert listed == [f"{key.name}={schema.shown(key.default)}" for key in keys(Config)]
    assert all(f"{key.help} ({values(key)})" in shown for key in keys(Config))
    assert "absl" not in out and "grain" not in out


def test_a_port_in_use_is_named_before_any_work(call, tmp_path, no_work):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = [f"logging.prometheus_port={port}: Address already in use", "0 for no page"]
        assert_refused(call, tmp_path, [f"--config.logging.prometheus_port={port}"], words)


def test_ctrl_c_before_a_task_begins_leaves_in_one_line(call, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run", interrupted)
    assert call(arguments(workdir=tmp_path)) == (130, "", "stopped at once; nothing more was saved\n")


CONFIGS = {  # the content of a config file, and what its error line says after the file's name
    "x = 1": ": it defines no get_config(arg='')",
    "def get_config(arg=''): return {'task': 'train'}": ": get_config returned dict, not the ConfigDict",
    "def get_config(arg=''): return None": ": get_config returned NoneType",
    "def get_config(arg=''):\n    import nothing_here": ":2: ModuleNotFoundError: No module named 'nothing_here'",
    "import nothing_here": ":1: ModuleNotFoundError",
    "def get_config(arg='':": ":1: ",
    "def get_config(arg=''): return undefined": ":1: NameError: name 'undefined' is not defined",
    "def get_config(): return 3": ": get_config",
    "from specrl_jax import base\ndef get_config(arg=''):\n    c = base()\n    c.policy.pth = ''": (
        ":3: there is no key 'pth'; did you mean 'path'?"
    ),
}


@pytest.mark.parametrize(("number", "content"), enumerate(CONFIGS), ids=str)
def test_a_mistake_in_a_config_file_is_named_by_the_file(call, tmp_path, monkeypatch, no_work, number, content):
    monkeypatch.delitem(sys.modules, "config_config", raising=False)  # of an earlier call of this process
    path = tmp_path / f"config_{number}.py"
    path.write_text(content.replace("c = base()\n    c", "c = base(); c"))
    line = error_line(call(["main.py", "--config", str(path)]))
    assert line.startswith(f"error: --config {path}{CONFIGS[content]}"), line


@pytest.mark.parametrize(
    ("platform", "error", "said"),
    [
        ("cuda", AssertionError(), "JAX_PLATFORMS=cuda: no driver, device or jax plugin of cuda is here; unset it"),
        (
            "tpu",
            RuntimeError("Unable to\nopen libtpu.so (set JAX_PLATFORMS='' to"),
            "JAX_PLATFORMS=tpu: Unable to open",
        ),
    ],
)
def test_a_platform_that_is_not_here_is_named(call, tmp_path, monkeypatch, no_work, platform, error, said):
    def devices():
        raise error

    monkeypatch.setenv("JAX_PLATFORMS", platform)
    monkeypatch.setattr(jax, "devices", devices)
    assert_refused(call, tmp_path, [], [said])


def test_a_full_disk_of_any_task_is_one_line(call, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", f"{tmp_path}/file")

    monkeypatch.setattr(cli, "run", full)
    assert error_line(call(arguments(workdir=tmp_path))) == f"error: {tmp_path}/file: No space left on device\n"


def test_output_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, capfd):
    with open("/dev/full", "w") as full:
        full.write("the last line of a run")
        monkeypatch.setattr(cli, "_run", lambda argv: 0)
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["main.py"]) == 1
    assert capfd.readouterr().err == "error: standard output: No space left on device\n"


def test_warnings_are_a_line_each_and_once_a_kind(capsys):
    show = one_line_warnings()
    for program in ("jit_f", "jit_g"):
        show(UserWarning(f"Error writing persistent compilation cache entry for '{program}': OSError:\n full"), None)
    assert capsys.readouterr().err == "warning: Error writing persistent compilation cache entry: OSError: full\n"


def test_what_takes_no_time_is_found_before_the_data_is_read(call, tmp_path, monkeypatch, no_work, files):
    """Of the data only the first rows are read then, for mistakes in them."""
    data, read = tmp_path / "long.jsonl", []
    data.write_text("".join(f'{{"prompt": "{i}+1", "answer": "2"}}\n' for i in range(3000)))
    monkeypatch.setattr(
        json, "loads", functools.partial(lambda real, *a, **k: (read.append(1), real(*a, **k))[1], json.loads)
    )
    shared = [f"data.path={data}", f"eval.path={files}/good.jsonl"]
    for wrong, said in {
        "policy.path=checkpoints/nowhere": "policy.path",
        "draft.path=checkpoints/nowhere": "draft.path",
        "logging.wandb_project=p": "logging.wandb_project=p",
    }.items():
        monkeypatch.setitem(sys.modules, "wandb", None)
        read.clear()
        assert_named(call, tmp_path / "run", [*shared, wrong], said)
        assert len(read) < 2500, wrong  # json.loads twice a row
    read.clear()
    assert_named(call, files / "a_file/run", shared, "Not a directory")
    assert len(read) < 2500


def assert_named(call, workdir, overrides, said):
    lines = error_lines(call(arguments(*(f"--config.{o}" for o in overrides), workdir=workdir)))
    assert len(lines) == 1 and said in lines[0], lines


@pytest.mark.parametrize("task", ["evaluate", "dry_run", "generate"])
def test_files_may_change_only_where_a_run_is_resumed(call, tmp_path, no_work, task):
    overrides = ["--changed_files", f"--config.task={task}", "--config.dry_run.devices=8"]
    assert_refused(call, tmp_path, overrides, ["--changed_files is for a run of task=train", f"task={task}"])


def test_a_config_is_needed(call):
    assert "--config" in error_line(call(["main.py"]))


# ---- values: tests/config/test_validate.py has all of them


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["draft.kind=foo"], ["draft.kind", "foo", "none", "eagle3"]),
        (["rollout.top_p=nan"], ["rollout.top_p=nan"]),
        (["steps=1.5"], ["error: --config.steps=1.5: needs a whole number, 0 to 2147483647"]),
        (["optimizer.clip=x"], ["error: --config.optimizer.clip=x: needs a number, above 0"]),
        (["draft.adaptive=maybe"], ["error: --config.draft.adaptive=maybe: needs True or False"]),
        (["draft=none"], ["error: --config.draft=none: draft is a section", "draft.kind"]),
        (["reward.name=exact,no_such_module:score"], ["reward.name", "no_such_module"]),
        (["data.tokenizer=nowhere"], ["data.tokenizer", "nowhere"]),
        (["policy.path=checkpoints/nowhere"], ["policy.path", "checkpoints/nowhere"]),
        (["draft.path=checkpoints/nowhere"], ["draft.path", "checkpoints/nowhere"]),
        # Devices and the mesh over them.
        (["mesh.fsdp=3"], ["mesh.fsdp=3", "8 devices"]),
        (["mesh.tensor=4"], ["mesh.tensor=4", "kv_heads", "2"]),
        (["rollout.num_slots=12"], ["rollout.num_slots", "12", "mesh.fsdp=8"]),
        # The policy's sizes.
        (["rollout.max_response_tokens=5000"], ["rollout.max_response_tokens", "5010", "4096"]),
        (["policy.preset=nano_moe", "draft.kind=mtp"], ["draft.kind=mtp", "mixture-of-experts", "eagle3"]),
        (["draft.vocab_size=129"], ["draft.vocab_size=129", "1..128"]),
        (["draft.vocab_size=32", "draft.online=False"], ["draft.vocab_size=32", "draft.online", "draft.path"]),
        (
            ["task=evaluate", "draft.vocab_size=32"],
            ["draft.vocab_size=32", "task=draft_pretrain", "draft.path", "draft.kind=none"],
        ),
        (["draft.kind=model", "draft.preset=qwen3_0p6b"], ["draft.kind=model", "151936", "128"]),
        # The prompts: built-in ones have up to 10 tokens.
        (["rollout.max_prompt_tokens=5"], ["rollout.max_prompt_tokens=5"]),
        (
            ["task=generate", "generate.prompts=('1+1',' 12345678901 ')"],
            ["prompt 1 has 13 tokens", "max_prompt_tokens=10"],
        ),
    ],
    ids=str,
)
def test_a_wrong_value_ends_the_command(call, tmp_path, no_work, overrides, words):
    assert_refused(call, tmp_path, [f"--config.{override}" for override in overrides], words)


# ---- files


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with good and bad data, checkpoints and a tokenizer, by name."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "good.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    (folder / "bad.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": "1+1"}\n')
    (folder / "long.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": "12345678901", "answer": "2"}\n')
    (folder / "empty.jsonl").write_text("")
    save_checkpoints(folder)
    words = {f"word{i}": i for i in range(200)} | {"<eos>": 200}
    (folder / "tokenizer").mkdir()
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words)).save(str(folder / "tokenizer/tokenizer.json"))
    (folder / "tokenizer/tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    (folder / "a_file").write_text("")
    return folder


def save_checkpoints(folder):
    model = decoder.preset("nano_deep")
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda spec: rng.normal(size=spec.shape).astype(np.float32), decoder.param_specs(model))
    hf.save_params(str(folder / "checkpoint"), params, model, dtype="float32")
    for name in ("shape", "missing", "corrupt", "no_config", "gemma"):
        shutil.copytree(folder / "checkpoint", folder / name)
    tensors = safetensors.numpy.load_file(folder / "checkpoint/model.safetensors")
    norm = "model.layers.1.input_layernorm.weight"
    safetensors.numpy.save_file(tensors | {norm: np.ones(63, np.float32)}, folder / "shape/model.safetensors")
    safetensors.numpy.save_file({k: v for k, v in tensors.items() if k != norm}, folder / "missing/model.safetensors")
    (folder / "corrupt/model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0 not a header")
    (folder / "no_config/config.json").unlink()
    (folder / "gemma/config.json").write_text('{"model_type": "gemma"}')
    head = eagle3.eagle3_config(model, 16)
    params = jax.tree.map(lambda spec: np.zeros(spec.shape, np.float32), eagle3.Eagle3Draft(head).specs)
    for name, ids in (("head", np.arange(16)), ("head_of_strangers", np.arange(120, 136))):
        EAGLE3_FOLDERS.save(str(folder / name), params, ids, config=head, target=model, dtype="float32")
    shutil.copytree(folder / "head", folder / "head_without_d2t")
    tensors = safetensors.numpy.load_file(folder / "head/model.safetensors")
    tensors.pop("d2t")
    safetensors.numpy.save_file(tensors, folder / "head_without_d2t/model.safetensors")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["policy.path={}/shape"], ["model.layers.1.input_layernorm.weight", "63", "64"]),
        (["policy.path={}/missing"], ["policy.path", "model.layers.1.input_layernorm.weight"]),
        (["policy.path={}/corrupt"], ["policy.path", "corrupt/model.safetensors"]),
        (["policy.path={}/no_config"], ["policy.path", "config.json"]),
        (["policy.path={}/gemma"], ["policy.path", "gemma", "qwen3"]),
        (["policy.path={}/a_file"], ["policy.path", "a_file"]),
        (["policy.path={}/checkpoint", "policy.preset=tiny"], ["policy.preset=tiny", "192", "64"]),
        (["policy.path={}/checkpoint", "data.tokenizer="], ["data.tokenizer", "tokenizer.json"]),
        (["data.tokenizer={}/tokenizer"], ["data.tokenizer", "200", "128"]),
        (["data.path={}/nothing.jsonl", "eval.path={}/good.jsonl"], ["data.path", "nothing.jsonl"]),
        (["data.path={}/good.jsonl", "eval.path={}/nothing.jsonl"], ["eval.path", "nothing.jsonl"]),
        (["data.path={}/empty.jsonl", "eval.path={}/good.jsonl"], ["data.path", "empty.jsonl"]),
        (["data.path={}/a_file.parquet", "eval.path={}/good.jsonl"], ["data.path", "a_file.parquet"]),
        (["task=export"], ["--workdir", "no run"]),
        (["data.path={}/bad.jsonl", "eval.path={}/good.jsonl"], ["bad.jsonl:2", "answer"]),
        (["data.path={}/good.jsonl", "eval.path={}/bad.jsonl"], ["bad.jsonl:2", "answer"]),
        (["data.path={}/long.jsonl", "eval.path={}/good.jsonl"], ["long.jsonl:2", "11", "max_prompt_tokens=10"]),
        (["data.path={}/good.jsonl", "eval.path={}/long.jsonl"], ["long.jsonl:2", "11", "max_prompt_tokens=10"]),
        (["task=pretrain", "draft.kind=none", "export.output={}/a_file/base"], ["export.output", "a_file"]),
        (["task=draft_pretrain", "export.output={}/a_file/head"], ["export.output", "a_file"]),
        (["draft.kind=mtp", "draft.path={}/nothing"], ["draft.path", "nothing"]),
        (["draft.kind=model", "draft.path={}/gemma"], ["draft.path", "gemma", "qwen3"]),
        (["draft.kind=model", "draft.path={}/shape"], ["model.layers.1.input_layernorm.weight", "63", "64"]),
        (["task=generate", "policy.path={}/shape"], ["model.layers.1.input_layernorm.weight", "63", "64"]),
        (["task=generate", "eval.path={}/long.jsonl"], ["long.jsonl:2", "11", "max_prompt_tokens=10"]),
        (["draft.path={}/gemma"], ["draft.path", "gemma", "LlamaForCausalLMEagle3"]),
        (["draft.path={}/head", "policy.preset=tiny"], ["draft.path", "hidden_size=64", "192"]),
        (["draft.path={}/a_file"], ["draft.path", "a_file"]),
        (["task=evaluate", "policy.path={}/shape"], ["model.layers.1.input_layernorm.weight", "63", "64"]),
        (["task=evaluate", "eval.path={}/bad.jsonl"], ["bad.jsonl:2", "answer"]),
    ],
    ids=str,
)
def test_a_bad_file_is_named(call, tmp_path, no_work, files, overrides, words):
    assert_refused(call, tmp_path, [f"--config.{override.format(files)}" for override in overrides], words)


@pytest.mark.parametrize(
    ("name", "words"),
    [("head_of_strangers", ["draft.path", "d2t", "128"]), ("head_without_d2t", ["draft.path", "d2t"])],
)
def test_a_head_of_unknown_ids_is_refused_before_any_work(call, tmp_path, no_work, files, name, words):
    """Its sizes fit; which ids it drafts does not."""
    assert_refused(call, tmp_path, [f"--config.draft.path={files / name}"], words)


@pytest.mark.parametrize(
    "overrides",
    [["task=pretrain", "draft.kind=none", "grpo.minibatches=3"], ["task=draft_pretrain", "grpo.minibatches=3"]],
    ids=str,
)
def test_a_refused_run_makes_no_output_folder(call, tmp_path, no_work, overrides):
    output = tmp_path / "output"
    overrides = [f"--config.{override}" for override in (*overrides, f"export.output={output}")]
    assert_refused(call, tmp_path, overrides, ["grpo.minibatches=3"])
    assert not output.exists()


def test_mistakes_in_config_policy_data_and_reward_are_named_together(call, tmp_path, no_work, files):
    overrides = ["grpo.minibatches=3", "draft.decay_steps=1", "draft.warmup=2", f"policy.path={files}/shape"]
    overrides += [f"data.path={files}/bad.jsonl", f"eval.path={files}/nothing.jsonl", "reward.name=nothing.py:score"]
    lines = error_lines(call(arguments(*(f"--config.{o}" for o in overrides), workdir=tmp_path / "run")))
    said = [
        "grpo.minibatches=3",
        "draft.decay_steps=1",
        "input_layernorm",
        "nothing.jsonl",
        "bad.jsonl:2",
        "nothing.py",
    ]
    assert len(lines) == len(said) and all(word in line for word, line in zip(said, lines)), lines
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing.jsonl", "no file"),
        ("empty.jsonl", "is empty"),
        ("a_file.csv", "are read"),
        ("odd.jsonl", "which columns"),
    ],
)
def test_data_whose_schema_is_to_be_found_has_one_line(call, tmp_path, no_work, files, name, said):
    (files / "a_file.csv").write_text("prompt,answer\n")
    (files / "odd.jsonl").write_text('{"input": "1+1", "output": "2"}\n')
    overrides = [f"data.path={files / name}", f"eval.path={files}/good.jsonl", "data.schema=auto"]
    status, _, err = call(arguments(*(f"--config.{o}" for o in overrides), workdir=tmp_path / "run"))
    (line,) = err.splitlines()
    assert status == 1 and str(files / name) in line and said in line and "schema=auto" not in line


def test_values_that_cannot_be_are_named_together(call, tmp_path, no_work):
    lines = error_lines(call(arguments("--config.steps=-1", "--config.grpo.clip_low=2.0", workdir=tmp_path)))
    assert [line.split(": ")[1] for line in lines] == ["steps=-1", "grpo.clip_low=2.0"]


def test_what_a_config_has_for_another_policy_gives_way_to_policy_path(call, files, tmp_path, no_work):
    """Its preset and its draft; the mistake in the data ends the run after that."""
    overrides = [f"policy.path={files}/checkpoint", "rollout.max_prompt_tokens=5"]
    argv = arguments(
        *(f"--config.{o}" for o in overrides), workdir=tmp_path / "run", config=ROOT / "configs/rlzero_tiny.py"
    )
    status, out, err = call(argv)
    assert status == 1 and "rollout.max_prompt_tokens=5" in err
    preset, draft = out.splitlines()
    assert preset == "policy.preset = '': tiny does not fit policy.path"
    assert draft.startswith(
        "draft.path = '': what the config has does not fit this policy (draft.path: experiments/tiny"
    )


def test_what_the_bad_ones_were_made_from_is_good(files):
    model = decoder.preset("nano_deep")
    assert hf.load_config(str(files / "checkpoint")) == model
    head = EAGLE3_FOLDERS.load_config(str(files / "head"), model)
    np.testing.assert_array_equal(EAGLE3_FOLDERS.load_vocab_map(str(files / "head"), head, model), np.arange(16))


# ---- the workdir


def test_an_unwritable_workdir_is_named(call, files, no_work):
    assert "a_file/run" in error_line(call(arguments(workdir=files / "a_file/run")))
    assert (files / "a_file").read_text() == ""


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "{}", '{"config": 3}'])
def test_a_workdir_with_a_foreign_config_is_refused(call, tmp_path, no_work, content):
    (tmp_path / "config.json").write_text(content)
    assert "config.json" in error_line(call(arguments(workdir=tmp_path)))
    assert snapshot(tmp_path) == {(tmp_path / "config.json").relative_to(tmp_path): content.encode()}


@pytest.fixture
def run_of_three_steps(tmp_path, tmp_path_factory):
    workdir, _, _ = finished_run(tmp_path_factory)
    shutil.copytree(workdir, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("override", "key", "before", "now"),
    [
        ("optimizer.learning_rate=0.5", "optimizer.learning_rate", "0.0001", "0.5"),
        ("seed=7", "seed", "0", "7"),
        ("rollout.temperature=0.7", "rollout.temperature", "1.0", "0.7"),
        ("policy.dtype=bfloat16", "policy.dtype", "float32", "bfloat16"),
        ("rollout.num_slots=8", "rollout.num_slots", "16", "8"),
        ("task=evaluate", "task", "train", "evaluate"),
    ],
)
def test_a_workdir_of_another_config_is_left_alone(
    call,
    run_of_three_steps,
    no_work,
    override,
    key,
    before,
    now,
):
    files = snapshot(run_of_three_steps)
    line = error_line(call(arguments(f"--config.{override}", workdir=run_of_three_steps)))
    assert str(run_of_three_steps) in line and f"{key}=" in line and before in line and now in line
    assert snapshot(run_of_three_steps) == files


def test_fewer_steps_than_the_run_has_done_are_refused(call, run_of_three_steps, no_work):
    files = snapshot(run_of_three_steps)
    line = error_line(call(arguments("--config.steps=2", workdir=run_of_three_steps)))
    assert "steps=2" in line and "3" in line
    assert snapshot(run_of_three_steps) == files


def test_without_a_whole_checkpoint_the_run_is_refused(call, run_of_three_steps):
    files = snapshot(run_of_three_steps)
    damaged = sorted((run_of_three_steps / "checkpoints").glob("[0-9]*"))
    for path in (path for folder in damaged for path in (folder / "state").rglob("*") if path.is_file()):
        path.unlink()
    status, _, err = call(arguments(workdir=run_of_three_steps))
    assert status == 1 and err.count("\n") == 1 and "no checkpoint is whole" in err
    # What is left of them is kept.
    left = {name: content for name, content in files.items() if "state" not in name.parts}
    assert snapshot(run_of_three_steps) == left


def test_a_damaged_metrics_file_is_named(call, run_of_three_steps, no_work):
    (run_of_three_steps / "metrics.jsonl").write_text('{"step": 0}\nnot json\n{"step": 2}\n')
    files = snapshot(run_of_three_steps)
    assert "metrics.jsonl:2" in error_line(call(arguments(workdir=run_of_three_steps)))
    assert snapshot(run_of_three_steps) == files


@pytest.mark.slow
def test_a_finished_run_prints_its_table_and_does_nothing(call, run_of_three_steps):
    """On eight devices here, one when it was made: the checkpoint does not belong to a mesh, only mesh.fsdp=-1 does."""
    files = snapshot(run_of_three_steps)
    overrides = ["eval.every=1", "checkpoint.every=2", "checkpoint.keep=3", "logging.rollouts=2"]
    argv = arguments(*[f"--config.{override}" for override in overrides], workdir=run_of_three_steps)
    status, out, err = call(argv)
    assert (status, err) == (0, "")
    assert "3 RL steps" in out and "run.png" in out
    after = snapshot(run_of_three_steps)
    kept = [path for path in files if path.parts[0] in ("checkpoints", "rollouts", "metrics.jsonl")]
    assert {path: after[path] for path in kept} == {path: files[path] for path in kept}
    written = json.loads((run_of_three_steps / "config.json").read_text())["config"]
    assert (written["eval"]["every"], written["checkpoint"]["keep"]) == (1, 3)


# ---- the real process


def test_a_refused_run_as_a_process(tmp_path):
    argv = arguments("--config.policy.preset=huge", workdir=tmp_path / "run")
    assert "policy.preset" in error_line(run_process(argv))
    assert not (tmp_path / "run").exists()


OTHER_TASKS = {
    "evaluate": ["eval.samples=2"],
    "generate": [],
    "benchmark": ["benchmark.rounds=2", "draft.length=1"],
    "draft_pretrain": ["steps=2", "pretrain.rollouts=16", "pretrain.batch_size=8"],
}


@pytest.mark.slow
@pytest.mark.parametrize("task", OTHER_TASKS)
def test_tasks_print_nothing_on_stderr(task, tmp_path):
    overrides = [f"task={task}", f"export.output={tmp_path / 'output'}", *OTHER_TASKS[task]]
    argv = arguments(*(f"--config.{override}" for override in overrides), workdir=tmp_path / "run")
    status, out, err = run_process(argv)
    assert (status, err) == (0, "") and out


def test_a_good_run_as_a_process_prints_a_line_a_step_and_a_table_and_nothing_on_stderr(tmp_path_factory):
    _, out, err = finished_run(tmp_path_factory)
    assert err == "" and "\r" not in out
    programs = ("compiling", "engine program", "learner program", "evaluating")
    lines = [line for line in out.splitlines() if not line.startswith(programs)]
    assert [line.split("  ")[0] for line in lines[:4]] == [f"step {i}/3" for i in range(4)]
    title, *table, plot = lines[4:]
    labels = [line.split("  ")[0] for line in table]
    assert title == "3 RL steps" and plot.endswith("run.png") and max(map(len, table)) <= 100
    assert labels == [
        "accuracy, sampled",
        "accuracy, greedy",
        "mean reward",
        "rollouts",
        "accepted tokens",
        "time of a step",
        "a plain step",
    ]
