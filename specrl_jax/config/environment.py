"""Keys of environments."""

import dataclasses

from specrl_jax.config.schema import INT32, LONGEST, key


@dataclasses.dataclass(frozen=True)
class EnvironmentConfig:
    """The keys `environment.*`: tasks of several turns."""

    name: str = key(
        "",
        "calculator, tiny_calculator, guessing or your own FILE.py:Class or module:Class, which answers the policy's "
        "turns; '' = a response is one turn",
    )
    turns: int = key(8, "most turns of a rollout", "turns", low=1, high=INT32)
    turn_tokens: int = key(
        0,
        "longest turn; one that is cut ends the rollout; 0 = rollout.max_response_tokens, which bounds all turns and "
        "answers together",
        "tokens",
        low=0,
        high=LONGEST,
    )
