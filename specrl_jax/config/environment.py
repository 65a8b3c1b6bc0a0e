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
    seconds: float = key(
        10.0,
        "time for one step; an environment that takes longer ends its rollout with reward 0",
        "s",
        above=0,
        high=86_400,
    )
    workers: int = key(
        0, "environment processes, each busy with one turn; 0 = one per core, at most 8", "processes", low=0, high=1024
    )
    template: str = key("[{message}]", "text around what an environment says, where the tokenizer has no chat template")
    pages: str = key(
        "copy",
        "keys and values of a rollout whose slot is needed while it waits for its environment: copied to the host and "
        "back, or prefilled again",
        choices=("copy", "prefill"),
    )
