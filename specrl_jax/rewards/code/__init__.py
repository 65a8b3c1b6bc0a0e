"""The reward `code`: a response's program against the tests of its row."""
