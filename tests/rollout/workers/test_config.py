"""Which keys do not go with rollout workers."""

import re

import pytest

from configs import rlzero_tiny
from specrl_jax import from_config_dict, validate
from specrl_jax.errors import InputError
from specrl_jax.planning.plan import make_plan, open_mesh


def config_of(**settings):
    config = rlzero_tiny.get_config("smoke")
    config.pipeline.update({"schedule": "async", "workers": 2})
    config.grpo.correction = "token_truncate"
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in settings.items()})
    return from_config_dict(config)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pipeline__schedule": "sync"}, r"pipeline\.schedule=sync beside pipeline\.workers=2: .*set async"),
        ({"pipeline__rollout_devices": 1}, r"pipeline\.schedule=async: either pipeline\.rollout_devices"),
        ({"mesh__tensor": -1, "mesh__fsdp": 1}, r"mesh\.tensor=-1 beside .*: the learner does not know their devices"),
        (
            {"pipeline__schedule": "inflight"},
            r"pipeline\.schedule=inflight beside .* take weights between",
        ),
        ({"grpo__oversample": 4}, r"grpo\.oversample=4"),
        (
            {"environment__name": "calculator"},
            r"pipeline\.workers=2 beside environment\.name=calculator: .*single turns",
        ),
        ({"task": "rollout", "pipeline__workers": 0, "pipeline__schedule": "sync"}, "task=rollout: pipeline.workers=0"),
    ],
)
def test_what_does_not_go_together_is_said_in_one_line(settings, said):
    with pytest.raises(InputError) as caught:
        validate(config_of(**settings))
    assert any(re.search(said, line) for line in caught.value.args), caught.value.args


def test_nothing_is_copied_from_earlier_rollouts():
    """They are not sent to workers: only siblings of a step are searched."""
    plans = [config_of(draft__kind="suffix", draft__path="", draft__history=n) for n in (8, 0)]
    ours, none = (make_plan(config, open_mesh(config)) for config in plans)
    assert ours.limits == none.limits and ours.config.draft.history == 0
