"""The command: its output, its files, and one line for every mistake."""

import csv
import pathlib
import re

import pytest

from experiments.simulator.__main__ import main
from experiments.simulator.modes import MODES
from specrl_jax.core import PHASES

ROOT = pathlib.Path(__file__).parents[3]
LARGE, DENSE = (str(ROOT / "configs" / f"{name}.py") for name in ("rlzero_235b_a22b", "rlzero_8b"))


@pytest.fixture
def call(capsys, monkeypatch):
    """call(*arguments) -> (exit status, stdout, stderr)."""
    monkeypatch.syspath_prepend(str(ROOT))

    def call(*arguments):
        try:
            status = main(["simulator", *arguments])
        except SystemExit as leave:
            status = leave.code
        return status, *capsys.readouterr()

    return call


def dense(*arguments):
    return "--config", DENSE, "--devices", "32", "--hardware", "gb200", *arguments


def speedup(out, what):
    """(value, low, high) of the line that begins with `what`."""
    return [float(x) for x in re.search(rf"{what} +([\d.]+)x \(([\d.]+) to ([\d.]+)\)", out).groups()]


def test_the_largest_case(call):
    """The command of the README: 2,048 GPUs, two versions of lag."""
    arguments = ("--config", LARGE, "--devices", "2048", "--hardware", "gb200", "--lag", "2")
    status, out, err = call(*arguments, "--draft_length", "5", "--acceptance", "4")
    assert (status, err) == (0, "")
    for word in (*PHASES, "exposed generation", "best k:", "what limits", "GB"):
        assert word in out
    for what in ("rollout", "end to end"):
        value, low, high = speedup(out, what)
        assert low <= high and 1 <= value <= 4
    for what in ("plain step", "with drafts"):
        assert re.search(rf"{what} +[\d.]+ s \([\d.]+ to [\d.]+\)", out)
    assert [line.split()[0] for line in out.splitlines() if line.endswith("x")] == [*"012357", "adaptive"]


@pytest.mark.slow
def test_ways_to_update_are_printed_where_a_disagreement_is_given(call):
    _, out, _ = call(*dense())
    assert "ways to update" not in out
    status, out, err = call(*dense("--disagreement", "1e-5"))
    assert (status, err) == (0, "") and "1e-05 disagreements" in out
    lines = out.split("ways to update")[1].splitlines()[2:]
    assert [re.match(r"  ([a-z, ]+?)  ", line)[1] for line in lines] == list(MODES)
    seconds, faster = zip(*(re.search(r"([\d.]+) +([\d.]+)x", line).groups() for line in lines))
    assert [float(x) for x in faster] == pytest.approx([float(seconds[0]) / float(x) for x in seconds], abs=0.01)
    assert all(line.split()[-1] == "32" for line in lines[:3])


@pytest.mark.parametrize("name", ["rlzero_0p6b", "rlzero_0p6b:1p7b", "rlzero_30b_a3b", "rlzero_235b_a22b"])
def test_hours_in_the_docstring_of_a_config_are_what_its_command_says(call, name):
    file, colon, variant = name.partition(":")
    said = (ROOT / "configs" / f"{file}.py").read_text()
    config = f"configs/{file}.py{colon}{variant}"
    command = re.search(rf"-m experiments\.simulator --config {re.escape(config)} (.*)", said)[1]
    _, out, _ = call("--config", str(ROOT / config), *command.split())
    step, low, high = (float(x) for x in re.search(r"plain step +([\d.]+) s \(([\d.]+) to ([\d.]+)\)", out).groups())
    steps = int(re.search(r"c\.steps = (\d+)", said)[1])
    expected = f"{step:.0f} s a step without drafts ({low:.0f} to {high:.0f}), "
    expected += f"{steps} steps in {step * steps / 3600:.1f} hours"
    assert expected in said, expected


def test_free_verification_is_faster_and_vllm_slower(call):
    given = dense("--draft_length", "5", "--acceptance", "4", "--hardware", "tpu_v6e")
    ours, free, vllm = (
        speedup(call(*given, *more)[1], "rollout")[0] for more in ((), ("--free_verification",), ("--engine", "vllm"))
    )
    assert vllm < ours < free <= 4


def test_a_twin_is_priced_by_its_bytes(call):
    """Drafts of a quarter of the bytes speed a rollout up; those of as many as a quantised policy's hardly do."""
    given = dense("--draft_length", "3", "--acceptance", "4", "--config.draft.kind=self")
    found = [speedup(call(*given, f"--config.draft.quantize={kind}")[1], "rollout")[0] for kind in ("int8", "int4")]
    assert 1 < found[0] < found[1]
    status, out, _ = call(*dense("--config.rollout.quantize=fp8"))
    assert status == 0 and "bfloat16 rollouts with fp8 matrices" in out


def test_overrides_reach_the_scenario(call):
    _, out, _ = call(*dense("--config.rollout.max_response_tokens=4096", "--config.grpo.group_size=8"))
    assert "512 responses of 1925 tokens on average, 4096 at most" in out


def test_the_learners_phases_are_those_of_the_config(call):
    """Twice the epochs are twice the updates; log-probs of the rollouts or of the update itself need no pass."""

    def seconds(*more):
        status, out, err = call(*dense("--config.draft.online=False", *more))
        assert (status, err) == (0, "")
        return [float(re.search(rf"^  {name} +([\d.]+)", out, re.M)[1]) for name in ("logprob", "train")]

    logprob, train = seconds()
    assert logprob > 1
    assert seconds("--config.grpo.epochs=2") == pytest.approx([logprob, 2 * train], abs=0.02)
    assert seconds("--config.grpo.old_logprobs=rollout") == [0, train]
    assert seconds("--config.grpo.kl_coef=0.1") == pytest.approx([2 * logprob, train], abs=0.02)


def test_what_a_draft_learns_with_is_that_of_the_config(call):
    """Seven steps of an EAGLE-3 head, and one."""
    kind = dense("--config.draft.kind=eagle3")
    whole, part = (
        float(re.search(r"^  train +([\d.]+)", call(*kind, f"--config.draft.ttt_steps={n}")[1], re.M)[1])
        for n in (7, 1)
    )
    assert part < 0.8 * whole


def test_a_reference_is_in_the_memory_of_a_device(call):
    """8.2 B parameters in float32 on 32 devices."""
    found = [
        float(re.search(r"GB a device: state ([\d.]+)", call(*dense(f"--config.grpo.kl_coef={c}"))[1])[1])
        for c in (0.0, 0.1)
    ]
    assert found[1] - found[0] == pytest.approx(8.19 * 4 / 32, abs=0.11)


@pytest.mark.slow
def test_a_grid_is_written(call, tmp_path):
    status, out, _ = call(*dense("--grid", str(tmp_path / "grid")))
    assert status == 0 and "configurations: " in out
    for name, count in (("scale", 16), ("draft", 50)):
        rows = list(csv.DictReader((tmp_path / "grid" / f"{name}.csv").open()))
        assert len(rows) == count and all(float(r["end_to_end_speedup"]) > 0 for r in rows)
        assert (tmp_path / "grid" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((), ["--config is needed"]),
        (("--config", DENSE), ["--devices is needed"]),
        (("--config", DENSE, "--devices", "32"), ["--hardware is needed", "gb200"]),
        (("--config", "configs/none.py", "--devices", "4", "--hardware", "h100"), ["no file", "configs/none.py"]),
        (("--config", DENSE + ":lagre", "--devices", "4", "--hardware", "h100"), ["lagre", "smoke"]),
        (dense("--config.grpo.groupsize=4"), ["groupsize", "group_size"]),
        (dense("--config.rollout.num_slots=many"), ["num_slots", "many"]),
        (dense("--devcies", "4"), ["devcies", "devices"]),
        (dense("--devices", "many"), ["devices", "many"]),
        (dense("32"), ["32", "--config.key=value"]),
        (dense("--hardware", "gb20"), ["gb20", "gb200", "tpu_v6e"]),
        (dense("--engine", "sglang"), ["sglang", "fused", "vllm"]),
        (dense("--devices", "0"), ["--devices=0", "mesh.tensor x mesh.expert = 4"]),
        (dense("--devices", "30"), ["--devices=30", "mesh.tensor x mesh.expert = 4"]),
        (dense("--lag", "-1"), ["--lag=-1"]),
        (dense("--devices", "4", "--lag", "1"), ["--lag=1", "--devices=4"]),
        (dense("--devices", "4", "--disagreement", "0"), ["--disagreement=0", "--devices=4"]),
        (dense("--disagreement", "1.5"), ["--disagreement=1.5", "0 to 1"]),
        (dense("--rollout_devices", "32"), ["--rollout_devices=32", "--devices=32"]),
        (dense("--rollout_devices", "6"), ["--rollout_devices=6", "multiple"]),
        (dense("--draft_length", "9"), ["--draft_length=9", "7"]),
        (dense("--draft_length", "-3"), ["--draft_length=-3"]),
        (dense("--acceptance", "4.5"), ["--acceptance=4.5", "1 to 4"]),
        (dense("--acceptance", "0.5"), ["--acceptance=0.5"]),
        (dense("--mean_tokens", "9000"), ["--mean_tokens=9000", "8192"]),
        (dense("--rollout_dtype", "int3"), ["int3", "bfloat16"]),
        (dense("--config.policy.preset=qwen4"), ["qwen4", "qwen3_8b"]),
        (dense("--config.mesh.tensor=-1"), ["mesh.tensor=-1", "divisor", "32 heads"]),
        (dense("--config.mesh.tensor=3", "--devices", "33"), ["mesh.tensor=3", "divisor", "32 heads"]),
        (dense("--config.mesh.expert=0"), ["mesh.expert=0", "at least 1"]),
        (("--config", LARGE, "--config.mesh.expert=6", *dense()[2:]), ["mesh.expert=6", "128 experts"]),
        (dense("--config.draft.kind=none"), ["draft.kind=none", "eagle3"]),
        (
            ("--config", LARGE, "--devices", "32", "--hardware", "tpu_v6e", "--config.mesh.expert=1"),
            ["mesh.tensor", "do not fit", "tpu_v6e"],
        ),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_grid(call, tmp_path, arguments, words):
    status, out, err = call(*arguments, "--grid", str(tmp_path / "grid"))
    assert (status, out) == (1, "") and not (tmp_path / "grid").exists(), err
    assert err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err
    for word in words:
        assert word in err, err


def test_a_grid_where_nothing_can_be_written_is_one_line(call, tmp_path):
    (tmp_path / "file").write_text("")
    status, _, err = call(*dense("--grid", str(tmp_path / "file" / "grid")))
    assert status == 1 and err.startswith("error: --grid=") and err.count("\n") == 1
