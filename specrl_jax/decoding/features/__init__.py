"""Optional features of the engine: each module has one, with its part of the state and of every phase."""
