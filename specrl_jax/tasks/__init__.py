"""One function for each value of `task`."""
