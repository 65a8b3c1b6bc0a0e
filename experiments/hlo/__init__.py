"""What compiled programs multiply, send and move, read from the text that XLA writes of them."""
