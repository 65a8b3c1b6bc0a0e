"""Rollouts of earlier epochs: which are kept, and that a checkpoint holds them all."""

import numpy as np

from specrl_jax.decoding.history import History


def text(*tokens):
    return np.array(tokens, np.int32)


def kept(history, prompt):
    return [rollout.tolist() for rollout in history.get(prompt)]


def test_a_prompt_without_rollouts_has_none():
    history = History(per_prompt=2, max_prompts=3)
    history.add([1, 2], [text(1, 2, 3)])
    assert history.get([1]) == [] and history.get([2, 1]) == []


def test_the_newest_rollouts_of_a_prompt_are_kept_newest_first():
    history = History(per_prompt=3, max_prompts=3)
    history.add([1], [text(1, 4), text(1, 5)])
    history.add(text(1), [text(1, 6, 6)])
    assert kept(history, [1]) == [[1, 6, 6], [1, 5], [1, 4]]
    history.add([1], [text(1, 7), text(1, 8)])
    assert kept(history, [1]) == [[1, 8], [1, 7], [1, 6, 6]]
    assert all(rollout.dtype == np.int32 for rollout in history.get([1]))


def test_a_history_of_no_rollouts_gives_none():
    history = History(per_prompt=0, max_prompts=3)
    history.add([1], [text(1, 4)])
    assert history.get([1]) == []
    assert History.from_arrays(0, 3, history.to_arrays()).get([1]) == []


def test_the_prompt_that_was_longest_not_used_is_dropped():
    history = History(per_prompt=1, max_prompts=2)
    for prompt in (1, 2):
        history.add([prompt], [text(prompt, 0)])
    history.get([1])
    history.add([3], [text(3, 0)])
    assert [len(history.get([prompt])) for prompt in (1, 2, 3)] == [1, 0, 1]
    # Asked for last: 3. Adding to 1 makes it the newer one.
    history.add([1], [text(1, 1)])
    history.add([4], [text(4, 0)])
    assert [len(history.get([prompt])) for prompt in (1, 3, 4)] == [1, 0, 1]


def test_what_is_kept_is_a_copy():
    """A view would change with the buffer, and keep all of it in memory."""
    buffer = np.arange(12, dtype=np.int32).reshape(3, 4)
    history = History(per_prompt=2, max_prompts=2)
    history.add(buffer[1, :2], [buffer[1]])
    buffer[:] = 0
    assert kept(history, [4, 5]) == [[4, 5, 6, 7]]
    assert history.get([4, 5])[0].base is None


def test_a_checkpoint_restores_rollouts_and_the_order_of_use(tmp_path):
    history = History(per_prompt=2, max_prompts=3)
    for prompt in (1, 2, 3):
        history.add([prompt] * prompt, [text(*[prompt] * prompt, i, *range(i)) for i in (4, 5)])
    history.add([2, 2], [text(2, 2, 9)])
    history.get([1])
    np.savez(tmp_path / "history.npz", **history.to_arrays())
    with np.load(tmp_path / "history.npz") as arrays:
        restored = History.from_arrays(2, 3, arrays)
    for name, values in history.to_arrays().items():
        np.testing.assert_array_equal(restored.to_arrays()[name], values)
    # [3, 3, 3] was used before the others.
    for one in (history, restored):
        one.add([7], [text(7)])
    for prompt in ([1], [2, 2], [3, 3, 3], [7]):
        assert kept(restored, prompt) == kept(history, prompt)
    assert kept(restored, [2, 2]) == [[2, 2, 9], [2, 2, 5, 0, 1, 2, 3, 4]]
    assert kept(restored, [3, 3, 3]) == []


def test_an_empty_history_is_restored_empty():
    assert History.from_arrays(2, 2, History(2, 2).to_arrays()).to_arrays()["rollouts"].tolist() == []


def test_restored_with_a_smaller_limit_the_newest_stay():
    history = History(per_prompt=3, max_prompts=3)
    for prompt in (1, 2):
        history.add([prompt], [text(prompt, i) for i in range(3)])
    restored = History.from_arrays(2, 1, history.to_arrays())
    assert kept(restored, [1]) == [] and kept(restored, [2]) == [[2, 2], [2, 1]]
