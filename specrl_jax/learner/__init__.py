"""Training state, optimizer, batches and the jitted updates of policy and draft."""
