"""Advantages, the GRPO objective and the losses of drafts; arrays only."""
