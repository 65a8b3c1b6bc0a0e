"""The policies of the rooms and their heads, by seed of the base, as experiments/reproduce.py makes them."""

from ml_collections import ConfigDict

from configs import rlthink_tiny, rlzero_tiny

WORKLOADS = {"rooms": rlzero_tiny.get_config, "cells": rlthink_tiny.get_config}
# The paper's workload that each stands for.
NAMES = {"rooms": "Zero", "cells": "Think"}
# Head -> the middle of its folder's name. A generic head learned from the base's answers in the other dialect.
HEADS = {"in-domain": "head", "generic": "generic"}


def config_of(workload: str, seed: int, head: str = "in-domain") -> ConfigDict:
    """Return the config of a workload with base, head, prompts and sampling of one seed."""
    config = WORKLOADS[workload](workload)
    config.policy.path = f"runs/{workload}_base_{seed}"
    config.draft.path = f"runs/{workload}_{HEADS[head]}_{seed}"
    config.seed = config.rollout.seed = seed
    return config
