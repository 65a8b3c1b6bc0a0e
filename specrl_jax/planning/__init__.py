"""Config, data and devices to the plan of a run: what is chosen, checked and counted before any array exists."""
