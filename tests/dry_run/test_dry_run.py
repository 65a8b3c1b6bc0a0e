"""task=dry_run: bytes against arithmetic by hand, and the whole command on a config without files."""

import dataclasses
import importlib
import json
import math
import os
import re

import jax
import pytest

from specrl_jax.config import from_config_dict
from specrl_jax.config.automatic import with_values
from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.dry_run import run
from specrl_jax.dry_run.measure import CompiledPhase, PhaseMemory, measure
from specrl_jax.dry_run.phases import KINDS, find_phases
from specrl_jax.dry_run.targets import TARGETS
from specrl_jax.models import decoder
from specrl_jax.planning.plan import make_plan
from specrl_jax.rollout.build import make_rollout
from specrl_jax.sharding import make_mesh
from tests.helpers.runs import SMOKE, arguments, make_call

CONFIG = "rlzero_8b"
PHASES = [
    "prepare",
    "generate: empty slots",
    "generate: refill",
    "generate: plain chunk",
    "generate: speculative chunk, k=1",
    "generate: compact to 4",
    "generate: row to the host",
    "generate: pages to the host",
    "generate: end of a row",
    "generate: row from the host",
    "generate: pages from the host",
    "logprob",
    "tables for the draft",
    "train policy",
    "update policy",
    "train draft",
    "update draft",
    "predict acceptance",
]
WITHOUT_DRAFT = [name for name in PHASES if not re.search("draft|predict|speculative", name)]
MESH = {"data": 1, "fsdp": 4, "expert": 1, "tensor": 2}
# By hand, beside specrl_jax/sharding.py: into how many parts each logical axis is split there.
LEARNER = {"embed": 4, "heads": 2, "kv_heads": 2, "head_dim": 1, "mlp": 2, "vocab": 2, "layers": 1, None: 1}


@pytest.fixture
def call(monkeypatch, capfd):
    platforms = jax.config.jax_platforms
    changed = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "XLA_CLIENT_MEM_FRACTION")
    for name in (*changed, "JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "TPU_SKIP_MDS_QUERY"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # put back as it is
    with make_call(monkeypatch, capfd) as call:
        yield call
    jax.config.update("jax_platforms", platforms)


@pytest.fixture(scope="module")
def plan():
    config = importlib.import_module(f"configs.{CONFIG}").get_config("smoke")
    return make_plan(run.without_files(from_config_dict(config)), make_mesh(MESH))


@pytest.fixture(scope="module")
def phases(plan):
    return {phase.name: phase for phase in find_phases(plan)}


def memory_of(phase):
    return measure([phase], exact=False)[0].memory


def split_bytes(specs, ways, itemsize):
    """Of one device."""
    return sum(
        itemsize * math.prod(spec.shape) // math.prod(ways[axis] for axis in spec.axes)
        for spec in jax.tree.leaves(specs)
    )


def by_hand(plan):
    """Bytes of one device on fsdp 4 x tensor 2: (learner parameters, microbatch of rows, loss inputs)."""
    params = split_bytes(decoder.param_specs(plan.model), LEARNER, 4)
    # smoke: 4 prompts x 4 answers in two minibatches, 16 + 12 tokens: two rows of 128 hold one, every shard has one.
    T = 128
    return params, T * (4 + 4 + 4 + 1 + 4), 4 * T + 4 * T + T  # old log-probs, advantages, loss mask


def resident_by_hand(plan):
    """While the policy learns: the draft with its moments, and copies of the policy's embedding and of the rows of its
    lm_head that the draft has, whose vocabulary is not split. The rollout weights have been let go.
    """
    draft, m = split_bytes(plan.draft.specs, LEARNER, 4), plan.model
    tables = 4 * m.embed // LEARNER["embed"] * (m.vocab // LEARNER["vocab"] + plan.draft.vocab)
    return {"parameters": draft + tables, "optimizer": 2 * draft + 3 * 4, "cache": 0, "batch": 0}


def test_the_phases_are_those_of_a_step(phases):
    assert list(phases) == PHASES


EARLIER, ANSWERS, AGAIN = "generate: chunk of earlier tokens", "generate: extension", "features for the draft"
EXACT = {"pipeline.schedule": "exact", "pipeline.lag": 1, "rollout.rule": "coupled"}
CARRY = {"grpo.oversample": 1, "pipeline.schedule": "partial", "grpo.correction": "token_truncate"}
ENVIRONMENT = {"environment.name": "calculator", "draft.compare_rounds": 0}


def phases_with(values):
    config = with_values(from_config_dict(importlib.import_module(f"configs.{CONFIG}").get_config("smoke")), values)
    plan = make_plan(run.without_files(config), make_mesh(MESH))
    return plan, {phase.name: phase for phase in find_phases(plan)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "name", "after"),
    [
        (EXACT, EARLIER, "generate: speculative chunk, k=1"),
        (CARRY, EARLIER, "generate: speculative chunk, k=1"),
        (ENVIRONMENT, ANSWERS, "generate: speculative chunk, k=1"),
        ({"draft.replay_updates": 2}, AGAIN, "predict acceptance"),
    ],
    ids=["exact", "carry", "environment", "replay"],
)
def test_programs_that_only_some_runs_have(values, name, after):
    plan, found = phases_with(values)
    place = PHASES.index(after) + 1
    assert list(found) == [*PHASES[:place], name, *PHASES[place:]]
    # The engine's own list, but for smaller batches, and the five programs of parking.
    programs = make_rollout(plan, tokenizer=CharTokenizer()).engine.compiled.all()
    full = [p for p in programs if p.size == plan.limits.num_slots or p.kind == "compact"]
    assert len(full) == sum(phase.startswith("generate") for phase in found) - 5


@pytest.mark.slow
def test_earlier_tokens_are_verified_with_16_logits_a_row():
    plan, found = phases_with(EXACT)
    logits = f"tensor<{plan.limits.num_slots}x16x{plan.model.vocab}xf32>"
    assert logits in found[EARLIER].lower().as_text()
    assert logits not in found["generate: speculative chunk, k=1"].lower().as_text()


@pytest.mark.slow
def test_features_of_further_updates_by_hand(plan):
    """One device: of a microbatch, a row of 128 tokens; all that learns stays beside it."""
    _, found = phases_with({"draft.replay_updates": 2})
    memory = memory_of(found[AGAIN])
    params, rows, _ = by_hand(plan)
    # A dense policy does not read the mask.
    assert memory.arguments == {"parameters": params, "optimizer": 0, "cache": 0, "batch": rows - 128}
    beside = resident_by_hand(plan)
    assert memory.resident == beside | {"optimizer": beside["optimizer"] + 2 * params + 3 * 4}


@pytest.mark.slow
def test_experts_are_compared_in_the_rows_that_a_run_takes():
    """A microbatch has a row of 128 tokens for each of 4 shards."""
    _, found = phases_with({"policy.preset": "nano_moe_deep", "policy.router_replay": True})
    shapes = [found[name].lower().args_info[0][1].tokens.shape for name in ("logprob", "comparison of experts")]
    assert shapes == [(4, 128), (4, 128)]


@pytest.mark.slow
def test_the_policys_update_by_hand(plan, phases):
    memory = memory_of(phases["train policy"])
    params, rows, inputs = by_hand(plan)
    assert memory.arguments == {"parameters": params, "optimizer": 0, "cache": 0, "batch": rows + inputs}
    assert memory.padding == 0 and memory.temporaries is None
    # Sums of the gradient, and sums and counts of five terms. The features of a row of 128 tokens: three aux layers and
    # the hidden state in bfloat16, and the normaliser; and its log-probs. A pointer for the sum of each of 13 weights,
    # ten numbers, three features and the log-probs.
    sums, D, tokens = params + 10 * 4, plan.model.embed, 128
    assert memory.results == sums + tokens * ((3 + 1) * D * 2 + 4 + 4) + 8 * (13 + 10 + 4)
    # Two moments; adamw's count, the schedule's count and the step are int32. The sums over earlier microbatches.
    moments, beside = 2 * params + 3 * 4, resident_by_hand(plan)
    assert memory.resident == beside | {
        "optimizer": beside["optimizer"] + moments,
        "parameters": beside["parameters"] + sums,
    }
    memory = memory_of(phases["update policy"])
    assert memory.arguments == {"parameters": params, "optimizer": moments + sums, "cache": 0, "batch": 0}
    # The state is donated. New are sums and counts, the norms of gradient and weights, whether it was skipped; a
    # pointer for each of 13 weights with two moments, three counters and thirteen metrics.
    assert memory.padding == 0 and memory.results == 12 * 4 + 1 + 8 * (3 * 13 + 3 + 13)
    assert memory.resident == beside


@pytest.mark.slow
def test_the_logprobs_by_hand(plan, phases):
    memory = memory_of(phases["logprob"])
    params, _, _ = by_hand(plan)
    assert memory.arguments == {
        "parameters": params,
        "optimizer": 0,
        "cache": 0,
        "batch": 128 * (4 + 4 + 4 + 4),
    }
    # A dense policy does not read the mask. Log-probs and entropies of a row, and the tuple's two pointers.
    assert memory.results == 2 * 128 * 4 + 2 * 8
    assert memory.padding == 0


@pytest.mark.slow
def test_the_cache_of_a_chunk_by_hand(plan, phases):
    memory = memory_of(phases["generate: plain chunk"])
    m, rows, S = plan.model, 16 // 4, 12 + 16
    # bfloat16 keys and values of the target's layers and the head's one, split over heads; its hidden state whole.
    token = 2 * (2 * (m.layers + 1) * m.kv_heads // 2 * m.head_dim + m.embed)
    # Of a token its id, log-prob and draft position; of a row seven numbers, a flag, its temperature, top-k and top-p,
    # and two counts for each of k = 1 drafts.
    slots = rows * (S * (4 + 4 + 1) + 7 * 4 + 1 + 3 * 4 + 2 * 4)
    # The pages of one shard, who holds each and which are free; of a row its pages, and how many it holds and shares.
    C, P = plan.limits.shard_pages, plan.limits.columns
    pages = C * (plan.limits.page_tokens * token + 4 + 4) + 4 + rows * (P * 4 + 4 + 4)
    assert memory.arguments["cache"] == pages + slots
    assert memory.padding == 0
    # The slots are donated. New is the tally, whole on each device: a flag and a length of all 16 rows, four numbers,
    # the free pages of four shards, whether they were short; and a pointer for each of what comes back.
    assert memory.results == 16 * 5 + 4 * 4 + 4 * 4 + 1 + 8 * (13 + 3 + 6 + m.layers + 2 + 8)


@pytest.mark.slow
def test_quantised_weights_are_counted(plan, phases):
    """A byte for each number of the layers' matrices and a scale for each output channel, where two were."""
    rollout = dataclasses.replace(plan.config.rollout, quantize="fp8")
    quantised = dataclasses.replace(plan, config=dataclasses.replace(plan.config, rollout=rollout))
    name = "generate: plain chunk"
    found = {phase.name: phase for phase in find_phases(quantised)}[name]
    m, both = plan.model, [memory_of(phase) for phase in (phases[name], found)]
    qkv = (m.heads + 2 * m.kv_heads) * m.head_dim
    weights = m.embed * (qkv + m.heads * m.head_dim) + 3 * m.embed * m.mlp
    # Split over tensor 2, but for the scales of o and down, whose sums are.
    scales = 2 * ((qkv + 2 * m.mlp) // 2 + 2 * m.embed)
    saved = m.layers * (weights // 2 - scales)
    assert both[0].arguments["parameters"] - both[1].arguments["parameters"] == saved


@pytest.mark.slow
def test_few_layers_extend_to_all(plan, monkeypatch):
    """nano_deep with 10 layers, from 7 and 8: everything but temporaries is equal."""
    whole = run.with_layers(plan, 10)
    names = ("prepare", "generate: plain chunk")
    monkeypatch.setattr(run, "find_phases", lambda s: [p for p in find_phases(s) if p.name in names])
    compiled = run.measure_all(whole, exact=True)
    monkeypatch.setattr(run, "DEEP", 9)
    monkeypatch.setattr(run, "COMPILED", 7)
    extended = run.measure_all(whole, exact=True)
    assert [m.name for m in compiled] == list(names)
    for found, expected in zip(extended, compiled):
        assert found.extended and not expected.extended
        assert found.memory._replace(temporaries=0) == expected.memory._replace(temporaries=0)
        assert found.memory.temporaries == pytest.approx(expected.memory.temporaries, rel=0.3)


# ---- the command


def test_suggested_tokens_are_a_row_for_each_shard_of_the_learner(tmp_path, monkeypatch):
    """Rows of 28 tokens are not split over the two devices of `sequence`, which are shards of the rollouts' rows."""
    values = {f"mesh.{axis}": n for axis, n in {"fsdp": 4, "tensor": 1, "sequence": 2}.items()}
    values |= {"dry_run.devices": 8, "dry_run.target": "h100", "grpo.microbatch_tokens": 0, "policy.remat": "full"}
    config = with_values(from_config_dict(importlib.import_module(f"configs.{CONFIG}").get_config("smoke")), values)
    too_much = PhaseMemory(dict.fromkeys(KINDS, 0), 0, 0, temporaries=10**12, resident=dict.fromkeys(KINDS, 0))
    monkeypatch.setattr(run, "compiler_of", lambda target: TARGETS["cpu"])
    monkeypatch.setattr(run, "measure_all", lambda *_: [CompiledPhase("train policy", 0.0, too_much)])
    report = run.dry_run(config, str(tmp_path))
    assert report.fit.suggestion == f"grpo.microbatch_tokens={4 * 28}: one row for each of the 4 parts of a batch"


def dry(call, workdir, *overrides):
    argv = arguments("--config.task=dry_run", *overrides, workdir=workdir, config=SMOKE)
    return call(argv)


@pytest.mark.slow
def test_the_command_reports_and_leaves_the_workdir_free(call, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "compiler_of", lambda target: TARGETS["cpu"])
    status, out, err = dry(call, tmp_path / "run", "--config.dry_run.devices=8", "--config.draft.kind=none")
    assert status == 0, err
    assert out.startswith("dry run for 8 gb200 (fsdp 8)\ncompiled for fake CPU devices: argument bytes only")
    assert "fits as far as arguments and results go gb200" in out
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["dry_run.json"]
    found = json.loads((tmp_path / "run/dry_run.json").read_text())
    assert [phase["name"] for phase in found["phases"]] == [name for name in WITHOUT_DRAFT if "compact" not in name]
    assert found["target"] == "gb200" and found["compiled_for"] == "cpu" and not found["exact"]
    for phase in found["phases"]:
        assert phase["memory"]["temporaries"] is None and phase["memory"]["padding"] == 0


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], ["dry_run.devices=0", "1 or 8"]),
        (["--config.dry_run.devices=64", "--config.dry_run.target=cpu"], ["dry_run.devices=64", "8 fake CPU devices"]),
        (["--config.dry_run.devices=8", "--config.dry_run.target=cpu", "--config.mesh.fsdp=3"], ["mesh.fsdp=3", "8"]),
        (["--config.dry_run.devices=-1"], ["dry_run.devices=-1"]),
    ],
)
def test_what_cannot_be_is_refused(call, tmp_path, overrides, words):
    status, out, err = dry(call, tmp_path / "run", *overrides)
    assert (status, out) == (1, ""), err
    assert err.startswith("error: ") and err.count("\n") == 1
    for word in words:
        assert word in err
    assert not (tmp_path / "run").exists()
