"""The float64 distribution of the toy's responses, and the responses that an engine drew, in the same order."""

import numpy as np

from lossless_certify.distributions import flat_index
from tests.helpers import toys
from tests.helpers.exact import final_probs


def response_distribution(table, prompt, longest, eos, sampling):
    """Return float64 probabilities of responses padded with end-of-text to `longest`, in the order of flat_index."""
    vocabulary = table.shape[-1]
    probabilities = np.zeros(vocabulary**longest)
    open_prefixes = {(): 1.0}
    for step in range(longest):
        grown = {}
        for prefix, mass in open_prefixes.items():
            probs = final_probs(toys.logits_after(table, [*prompt, *prefix]), sampling)
            for token in range(vocabulary):
                if token == eos or step == longest - 1:
                    padded = [*prefix, token] + [eos] * (longest - step - 1)
                    probabilities[flat_index(padded, vocabulary)] += mass * probs[token]
                else:
                    grown[*prefix, token] = mass * probs[token]
        open_prefixes = grown
    return probabilities


def observed(rollouts, longest, eos, vocabulary):
    """Return the flat_index [N] of the first `longest` response tokens of each rollout, padded with end-of-text."""
    tokens = np.full((len(rollouts.length), longest), 0 if eos is None else eos)
    for offset in range(longest):
        there = rollouts.response_length > offset
        tokens[there, offset] = rollouts.tokens[there, rollouts.prompt_length[there] + offset]
    return flat_index(tokens, vocabulary)


def greedy_response(table, prompt, longest, eos):
    """Return the toy's most likely tokens, one by one in plain Python."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + longest and (len(tokens) == len(prompt) or tokens[-1] != eos):
        tokens.append(int(toys.logits_after(table, tokens).argmax()))
    return tokens[len(prompt) :]
