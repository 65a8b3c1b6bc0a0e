"""The answers that the reward `math` reads, with latex2sympy2_extended, the parser of math-verify.

The parser guesses where it does not understand: `5_6`, `5 \\text{ is wrong}` and `6=5` are 5 to math-verify. So an
answer is respelled and cut into its parts, and the parser gets each part whole, or it is refused. For workers only.
"""
