"""The loop, the step with its five phases, rollouts, evaluation, metrics and asynchronous rollouts."""
