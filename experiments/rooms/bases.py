"""The policies of the rooms and their heads, by seed of the base, as experiments/reproduce.py makes them."""

from ml_collections import ConfigDict

from configs import rlthink_tiny, rlzero_tiny

SEEDS = range(3)  # of the bases
# Problems and noise of a measurement are not those of the answers that the base's heads learned from: a DSpark draft
# knew those by heart (6.6 tokens per verification at k = 7, 3.4 on others).
HELD_OUT = 1000
WORKLOADS = {"rooms": rlzero_tiny.get_config, "careful": rlthink_tiny.get_config}
# The paper's workload that each stands for.
NAMES = {"rooms": "Zero", "careful": "Think"}
# Head -> `kind` of its folder. A generic head learned from the base's answers in the other dialect.
HEADS = {"in-domain": "head", "generic": "generic"}


def folder(workload: str, kind: str, seed: int) -> str:
    """Return the folder of a base (`base`) or of a head (a value of HEADS)."""
    return f"runs/{workload}_{kind}_{seed}"


def config_of(workload: str, seed: int, head: str = "in-domain") -> ConfigDict:
    """Return the config of a workload with base and head of one seed, and problems and noise that they never saw."""
    config = WORKLOADS[workload]("rooms")
    config.policy.path = folder(workload, "base", seed)
    config.draft.path = folder(workload, HEADS[head], seed)
    config.seed = config.rollout.seed = HELD_OUT + seed
    return config
