"""A performance model of a step on other machines; runs nothing."""
