"""The keys, the ConfigDicts made from them and the shipped configs."""

import ast
import importlib
import operator
import pathlib
import re

import pytest
from ml_collections import ConfigDict

from specrl_jax.config import Config, RewardConfig, base, from_config_dict, recipes
from specrl_jax.config.page import page
from specrl_jax.config.renamed import RENAMED
from specrl_jax.config.schema import build, keys
from specrl_jax.config.validate import validate
from specrl_jax.data.schemas import SCHEMAS
from specrl_jax.data.tasks import TASKS
from specrl_jax.decoding.sampling import RULES
from specrl_jax.drafts.base import DraftOptions
from specrl_jax.drafts.kinds import KINDS, MAX_MATCH
from specrl_jax.dry_run.targets import TARGETS
from specrl_jax.errors import InputError
from specrl_jax.learner.optimizer import OPTIMIZERS
from specrl_jax.models.attention import ATTENTION
from specrl_jax.models.decoder import PRESETS
from specrl_jax.rewards.worker import NAMES
from specrl_jax.rl.advantages import ADVANTAGES
from specrl_jax.rl.aggregation import AGGREGATIONS
from specrl_jax.rl.draft_losses import LOSSES
from specrl_jax.rl.importance_sampling import CORRECTIONS
from specrl_jax.rl.objectives import OLD_LOGPROBS, SURROGATES

ROOT = pathlib.Path(__file__).parents[2]
KEYS = {key.name: key for key in keys(Config)}
CONFIGS = recipes.names()
SECTIONS = "|".join(sorted({key.partition(".")[0] for key in KEYS if "." in key}))
FILES = {"config.json"}  # which look like keys


@pytest.mark.parametrize(
    ("key", "table"),
    [
        ("policy.preset", ["", *PRESETS]),
        ("draft.preset", ["", *PRESETS]),
        ("policy.attention", ["auto", *ATTENTION]),
        ("draft.kind", [*KINDS, "auto"]),
        ("draft.dialect", ["", *dict.fromkeys(name for kind in KINDS.values() for name in kind.formats)]),
        ("draft.loss", LOSSES),
        ("optimizer.name", OPTIMIZERS),
        ("rollout.rule", RULES),
        ("grpo.advantage", ADVANTAGES),
        ("grpo.loss", SURROGATES),
        ("grpo.aggregation", AGGREGATIONS),
        ("grpo.old_logprobs", OLD_LOGPROBS),
        ("grpo.correction", CORRECTIONS),
        ("data.task", TASKS),
        ("eval.task", ["", *TASKS]),
        ("dry_run.target", TARGETS),
    ],
)
def test_the_choices_of_a_key_are_the_librarys(key, table):
    assert sorted(KEYS[key].choices) == sorted(table)


def test_the_longest_match_is_the_librarys():
    assert KEYS["draft.cascade"].high == MAX_MATCH == DraftOptions("ngram").match_max


def test_help_texts_name_every_built_in_reward_and_schema():
    assert all(name in KEYS["reward.name"].help for name in NAMES)
    assert all(name in KEYS["data.schema"].help for name in SCHEMAS)


def test_there_are_few_keys():
    """A new one takes the place of another, or is a table's constant until somebody sets it."""
    assert len(KEYS) <= 140


def test_every_number_has_a_lower_and_an_upper_bound():
    numbers = [key for key in KEYS.values() if key.type in (int, float)]
    assert len(numbers) > 80
    assert not [key.name for key in numbers if (key.low is None) == (key.above is None)]
    assert not [key.name for key in numbers if (key.high is None) == (key.below is None)]


def test_every_key_says_what_it_is_and_has_a_good_default():
    assert [key.name for key in KEYS.values() if len(key.help.split()) < 3 or key.help.endswith(".")] == []
    assert from_config_dict(base()) == Config()


def test_the_committed_page_is_current():
    """`python -m specrl_jax.config` writes it."""
    assert (ROOT / "docs/config.md").read_text() == page()


def test_no_key_has_the_name_of_what_a_config_dict_does():
    """The command line would find the method in its place."""
    names = {name for key in KEYS for name in key.split(".")}
    assert "schedule" in names and not [name for name in names if hasattr(ConfigDict, name)]


def test_a_missing_or_unknown_key_is_refused():
    c = base()
    with pytest.raises(AttributeError, match="minibatches"):
        c.grpo.minibatch = 2
    with c.unlocked():
        c.grpo.minibatch = 2
    with pytest.raises(InputError, match=r"grpo\.minibatch"):
        from_config_dict(c)
    c = base()
    with c.unlocked():
        del c.grpo.minibatches
    with pytest.raises(InputError, match=r"grpo\.minibatches"):
        from_config_dict(c)


def test_the_changelog_and_the_page_have_every_old_name():
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^\| ([a-z_]+\.[a-z_]+) \| (.*) \|$", changes, re.M) == list(RENAMED.items())
    assert all(f"- {old}: {now}\n" in page() for old, now in RENAMED.items())


def keys_written(tree):
    """Yield the keys of a parsed file: config.SECTION.KEY, and what config.SECTION.update(...) sets."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=section), attr="update")):
                named = [keyword.arg for keyword in node.keywords]
                dicts = [part for given in node.args for part in ast.walk(given) if isinstance(part, ast.Dict)]
                listed = [key.value for each in dicts for key in each.keys if isinstance(key, ast.Constant)]
                yield from (f"{section}.{key}" for key in [*named, *listed])
            case ast.Attribute(value=ast.Attribute(attr=section), attr=name):
                yield f"{section}.{name}"
            case ast.Constant(value=str(text)):
                yield from re.findall(rf"(?:{SECTIONS})\.[a-z_]+(?==)", text)


def test_no_program_writes_a_key_of_an_earlier_version():
    """Of what only a slow test or a person with a peer's library runs."""
    written = set(keys_written(ast.parse("c.rollout.update({'a': 1} | x, b=2)\nc.grpo.c\n'draft.d=1'")))
    assert written >= {"rollout.a", "rollout.b", "grpo.c", "draft.d"}
    files = [*ROOT.glob("experiments/**/*.py"), *ROOT.glob("configs/*.py"), *ROOT.glob("tests/**/*.py")]
    old = {(str(path.relative_to(ROOT)), key) for path in files for key in keys_written(ast.parse(path.read_text()))}
    assert not [(path, key) for path, key in sorted(old) if key in RENAMED]


@pytest.mark.parametrize("old", RENAMED)
def test_a_name_of_an_earlier_version_is_refused_with_what_to_write_now(old):
    section, _, name = old.rpartition(".")
    assert old not in KEYS and set(re.findall(rf"\b(?:{SECTIONS})\.[a-z_]+", RENAMED[old])) <= {*KEYS, *FILES}
    said = re.escape(f"there is no key '{old}' any more: {RENAMED[old]}")
    keys = base()[section] if section else base()
    for use in (lambda: setattr(keys, name, 1), lambda: getattr(keys, name)):
        with pytest.raises(AttributeError, match=said):
            use()
    with keys.unlocked():
        keys[name] = 1
    with pytest.raises(InputError, match=said):
        build(Config, {**base().to_dict(), section: keys.to_dict()})


def variants():
    """Yield (config, variant) of all of them; a config raises for a variant that it does not have."""
    for name in CONFIGS:
        for variant in ("", "smoke", "small", "zero", "think"):
            try:
                importlib.import_module(f"configs.{name}").get_config(variant)
            except ValueError:
                continue
            yield name, variant


@pytest.mark.parametrize(("name", "variant"), list(variants()))
def test_every_shipped_config_is_valid(name, variant):
    c = importlib.import_module(f"configs.{name}").get_config(variant)
    assert isinstance(c, ConfigDict)
    validate(from_config_dict(c))


@pytest.mark.parametrize("name", CONFIGS)
def test_an_unknown_variant_is_refused(name):
    with pytest.raises(ValueError, match=f"configs/{name}.py: no variant 'smokes'"):
        importlib.import_module(f"configs.{name}").get_config("smokes")


@pytest.mark.parametrize(
    ("config", "key", "follows"),
    [
        ("pretrain_tiny", "optimizer.decay_steps", "steps"),
        ("draft_tiny", "draft.decay_steps", "steps"),
        ("generate", "grpo.group_size", "eval.samples"),
    ],
)
def test_a_reference_goes_one_way(config, key, follows):
    """Overriding a value that follows another leaves the other alone; overriding the other changes both."""
    c = importlib.import_module(f"configs.{config}").get_config()
    value = {follows: operator.attrgetter(follows), key: operator.attrgetter(key)}
    c.update_from_flattened_dict({follows: 17})
    assert value[key](c) == value[follows](c) == 17
    c.update_from_flattened_dict({key: 100})
    assert (value[key](c), value[follows](c)) == (100, 17)


def test_a_file_whose_name_has_code_share_in_it_pays_no_share():
    own = RewardConfig(name="my_code_share.py:reward, code")
    assert not own.pays_share and own.names == ("my_code_share.py:reward", "code")
    assert RewardConfig(name="exact, code_share").pays_share
