"""Sandboxes: where programs of a policy run, away from the trainer's account, files and network."""
