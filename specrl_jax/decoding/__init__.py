"""One speculative iteration, the engine around it and the controller of draft lengths; knows no model."""
