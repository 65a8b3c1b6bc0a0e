"""Environments for the toy engine that answer by arithmetic, in orders of their own."""

import random

import numpy as np

from specrl_jax.decoding.turns import TurnAnswer

MOST_TURNS = 3


def said(turn, number, V):
    """Return what the toy environment says to the first tokens of turn `number`; None: the rollout ends."""
    total = int(np.sum(turn)) + number
    if number == MOST_TURNS or total % 7 == 6:
        return None
    return [(total + i) % V for i in range(1 + total % 4)]


class Talk:
    """Answers turns at once, in another order, or only those that have waited for some looks.

    Args:
      order: "first", "last" or "random": which of the waiting turns one look answers.
      looks: looks for an answer until a turn is answered.
      each: most answers of a look.
    """

    def __init__(self, V, turn_tokens=5, order="first", looks=0, each=100):
        self.V, self.turn_tokens, self.order, self.looks, self.each = V, turn_tokens, order, looks, each
        self.waiting, self.turns, self.random = [], {}, random.Random(0)
        self.asked = []

    def ask(self, turn):
        self.turns[turn.request] = self.turns.get(turn.request, 0) + 1
        self.asked.append(turn)
        tokens = said(turn.tokens, self.turns[turn.request], self.V) if turn.ended else None
        cut = turn.ended and self.turns[turn.request] == MOST_TURNS
        self.waiting.append([self.looks, TurnAnswer(turn.request, tokens, cut)])

    def answers(self, seconds):
        if self.order == "random":
            self.random.shuffle(self.waiting)
        ready = [one for one in self.waiting if one[0] <= 0]
        ready = (ready[::-1] if self.order == "last" else ready)[: self.each]
        self.waiting = [[left - 1, answer] for left, answer in self.waiting if (left, answer) not in map(tuple, ready)]
        return [answer for _, answer in ready]
