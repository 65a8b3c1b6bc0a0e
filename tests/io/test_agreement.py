"""What the processes of a run compare before they begin, and that each difference has its name."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from configs import rlzero_tiny
from specrl_jax import coordinator
from specrl_jax.config import from_config_dict
from specrl_jax.errors import InputError
from specrl_jax.io import agreement
from specrl_jax.io.agreement import digest, facts

BLOCK, SAMPLED = 64, 1 << 14


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Large files are 16 KiB here."""
    monkeypatch.setattr(agreement, "BLOCK", BLOCK)
    monkeypatch.setattr(agreement, "SAMPLED", SAMPLED)


@pytest.fixture
def files(tmp_path):
    """A config that names one file of each kind, and the files."""
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    for name in ("policy", "head", "words"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    with open(tmp_path / "policy/model.safetensors", "wb") as file:
        file.write(np.random.default_rng(0).bytes(2 * SAMPLED))
    config = rlzero_tiny.get_config("smoke")
    (tmp_path / "shop.py").write_text("Shop = None\n")
    config.environment.name, config.reward.name = f"{tmp_path}/shop.py:Shop", f"exact, {tmp_path}/score.py:score"
    (tmp_path / "score.py").write_text("score = None\n")
    config.data.path = config.eval.path = f"{tmp_path}/train.jsonl, {tmp_path}/test.jsonl"
    config.policy.path, config.draft.path, config.data.tokenizer = (
        f"{tmp_path}/{x}" for x in ("policy", "head", "words")
    )
    return config, tmp_path


def found(files, workdir="runs/one"):
    return facts(dataclasses.asdict(from_config_dict(files[0])), workdir)


def refuse(monkeypatch, *processes):
    """Return what `agree` raises in each of several processes that have these facts."""
    messages = []
    for i, own in enumerate(processes):
        # What all of them send, in both exchanges, as this one's would.
        digests = []

        def exchange(value, i=i, digests=digests):
            if not digests:
                digests += [hashed(one) for one in processes]
                assert value == digests[i]
                return digests
            sent = [text(one) if digests.index(d) == j else "" for j, (one, d) in enumerate(zip(processes, digests))]
            assert value == sent[i]
            return sent

        monkeypatch.setattr(coordinator, "exchange", exchange)
        monkeypatch.setattr(coordinator.global_state, "process_id", i)
        with pytest.raises(InputError) as refused:
            coordinator.agree(own)
        messages.append(str(refused.value))
    return messages


def text(one):
    return json.dumps(one)


def hashed(one):
    return coordinator.hashlib.blake2b(text(one).encode()).hexdigest()


def changed_name(before, after, monkeypatch):
    one, other = refuse(monkeypatch, before, after)
    assert one == other
    return one.removeprefix("the processes of this run differ in ").partition(": ")[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.learning_rate", 0.5),
        ("seed", 7),
        ("steps", 99),
        ("data.weights", (1.0, 2.0)),
        ("logging.rollouts", 1),
    ],
)
def test_each_key_of_the_config_is_compared(files, key, value, monkeypatch):
    before = found(files)
    config = files[0].copy_and_resolve_references()
    config.update_from_flattened_dict({key: value})
    assert changed_name(before, found((config, files[1])), monkeypatch) == key


def test_every_key_is_among_the_facts(files):
    names = found(files)
    assert names.keys() >= {"seed", "optimizer.learning_rate", "mesh.fsdp", "data.skip", "reward.timeout"}


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("train.jsonl", "data.path"),
        ("test.jsonl", "data.path"),
        ("policy/config.json", "policy.path"),
        ("policy/model.safetensors", "policy.path"),
        ("head/config.json", "draft.path"),
        ("words/config.json", "data.tokenizer"),
        ("score.py", "reward.name"),
        ("shop.py", "environment.name"),
    ],
)
@pytest.mark.parametrize("damage", ["longer", "changed", "missing"])
def test_each_file_is_compared(files, file, key, damage, monkeypatch):
    before, path = found(files), files[1] / file
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes() + b"\n" if damage == "longer" else content)
    name = changed_name(before, found(files), monkeypatch)
    assert name == f"the content of {key}={path}"


@pytest.mark.parametrize("module", [agreement.jax, agreement.specrl_jax, agreement.np, agreement.jaxlib])
def test_versions_are_compared_first(files, module, monkeypatch):
    before = found(files)
    monkeypatch.setattr(module, "__version__", "0.0.1")
    assert changed_name(before, found(files, "elsewhere"), monkeypatch) == f"the version of {module.__name__}"


def test_another_checkout_of_one_version_is_another_project(files, monkeypatch, tmp_path):
    before, package = found(files), tmp_path / "checkout/specrl_jax"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(agreement.specrl_jax, "__file__", str(package / "__init__.py"))
    assert changed_name(before, found(files), monkeypatch) == "the source of specrl_jax"


def test_the_workdir_is_compared_by_its_absolute_path(files, monkeypatch, tmp_path):
    before = found(files)
    assert changed_name(before, found(files, "runs/other"), monkeypatch) == "--workdir"
    monkeypatch.chdir(tmp_path)
    assert changed_name(before, found(files), monkeypatch) == "--workdir"


def test_one_of_many_is_named(monkeypatch):
    alike, other = {"steps": 3, "seed": 0}, {"steps": 3, "seed": 1}
    messages = refuse(monkeypatch, *[alike] * 10, other, alike)
    assert set(messages) == {
        "the processes of this run differ in seed: 0 in processes 0, 1, 2, 3, 4, 5, 6, 7, ...; 1 in process 10"
    }


def test_other_weights_of_equal_size_have_another_digest(tmp_path):
    """Other training changes nearly every number. A file beyond the limit is read in blocks."""
    rng, path = np.random.default_rng(0), tmp_path / "model.safetensors"
    seen = set()
    for _ in range(3):
        path.write_bytes(rng.bytes(SAMPLED + 3 * BLOCK + 5))
        seen.add(digest(str(path), SAMPLED))
    assert len(seen) == 3 and digest(str(path)) not in seen


def test_a_single_process_reads_nothing(monkeypatch):
    monkeypatch.setattr(agreement, "facts", lambda *_: pytest.fail("read"))
    agreement.check_agreement({}, "runs/one")
    assert coordinator.exchange("x") == ["x"] and jax.process_count() == 1
