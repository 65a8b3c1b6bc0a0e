"""The loop, the step with its five phases, evaluation, metrics, and what a run resumes from."""
