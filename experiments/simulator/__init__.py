"""A roofline of a step on other machines with labelled overheads; runs nothing."""
