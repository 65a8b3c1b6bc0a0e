"""What the host keeps of speculation: alarm, the controller's prior, history, and all of it saved."""

import dataclasses
import json
import types

import numpy as np
import pytest

from specrl_jax.decoding.controller import Controller
from specrl_jax.decoding.draft_lengths import DraftLengthPolicy
from specrl_jax.decoding.rollouts import DecodeChunk, Rollouts
from specrl_jax.errors import InputError
from specrl_jax.io.checkpoint_reader import HostState
from specrl_jax.learner.draft_step import DraftDiagnostics
from specrl_jax.rollout.speculation import PROBE_STEPS, Speculation, coupled_acceptance

LENGTHS, SIZES = (0, 1, 3), (16, 4)
PREDICTED = np.array([0.8, 0.5, 0.25])
DIAGNOSTICS = DraftDiagnostics(np.array([0.9, 0.8, 0.7]), np.array([0.2, 0.3, 0.4]), PREDICTED)
HEALTHY, GONE = (800, 500, 250), (0, 0, 0)  # drafts kept of a thousand, by position


def setup_of(
    length=3,
    adaptive=False,
    temperature=1.0,
    weights=True,
    groups=0,
    history=2,
    sizes=SIZES,
    online=True,
    every=1,
    path="",
    argmax=False,
    cascade=0,
    rule="rejection",
):
    """Return as much of a plan and an engine as speculation reads."""
    draft = types.SimpleNamespace(length=length, adaptive=adaptive, history=history, online=online, path=path)
    draft.update_every, draft.argmax, draft.cascade = every, argmax, cascade
    engine = types.SimpleNamespace(
        draft_length=length,
        controller=lambda begins: Controller(LENGTHS, sizes, begins=begins),
        compiled=types.SimpleNamespace(lengths=LENGTHS, sizes=sizes),
        config=types.SimpleNamespace(groups=groups),
    )
    plan = types.SimpleNamespace(
        config=types.SimpleNamespace(draft=draft, rollout=types.SimpleNamespace(temperature=temperature, rule=rule)),
        draft=types.SimpleNamespace(vocab=9) if weights else None,
        model=types.SimpleNamespace(vocab=9),
    )
    return plan, engine


def rollouts_of(accepted=HEALTHY, drafted=(1000, 1000, 1000), texts=(([1, 2], [3]),)):
    """Two rows that drafted and kept so many in all, and the texts of `texts`: (prompt, response)."""
    sequences = [np.array([*prompt, *response], np.int32) for prompt, response in texts]
    tokens = np.stack([np.pad(text, (0, 9 - len(text))) for text in sequences])
    found = types.SimpleNamespace(
        drafted=np.array([[0] * len(drafted), drafted], np.int32),
        accepted=np.array([[0] * len(drafted), accepted], np.int32),
        tokens=tokens,
        prompt_length=np.array([len(prompt) for prompt, _ in texts]),
        length=np.array([len(text) for text in sequences]),
        sequence=lambda row: sequences[row],
        environment=np.zeros(tokens.shape, bool),
    )
    found.in_response = lambda: Rollouts.in_response(found)
    return found


def reloaded(setup, speculation):
    """Another run's, from what a checkpoint's file would hold of this one."""
    saved = speculation.state()
    return Speculation(*setup, HostState(json.loads(json.dumps(saved.values)), saved.arrays))


def k_of(speculation):
    return speculation.lengths.choose(16, 16, 50.0).k


def tripped(speculation):
    """The same, after its acceptance collapsed."""
    assert speculation.observe(rollouts_of(GONE), DIAGNOSTICS)["spec/alarm"] == 1.0
    assert speculation.alarm.message().startswith("acceptance collapsed")
    return speculation


# --- metrics


def test_the_predicted_length_is_that_of_the_lengths_drafted():
    """600 of 1000 verifications drafted three tokens, the others one: 1 + 0.8 + 0.6 (0.5 + 0.25)."""
    row = Speculation(*setup_of()).observe(rollouts_of((800, 300, 150), (1000, 600, 600)), DIAGNOSTICS)
    assert row == {"spec/acceptance_predicted": pytest.approx(2.25), "spec/alarm": 0.0}


@pytest.mark.parametrize(
    ("unrolled", "predicted"),
    [(1, 1 + 0.8 + 0.8**2 + 0.8**3), (2, 1 + 0.8 + 0.5 + 0.5 * 0.5 / 0.8), (3, 1 + 0.8 + 0.5 + 0.25)],
)
def test_drafts_longer_than_the_learner_unrolls_are_all_predicted(unrolled, predicted):
    """Given those before it, each further one as the last known; the alarm compares those that are known."""
    speculation = Speculation(*setup_of())
    short = DraftDiagnostics(*(x[:unrolled] for x in vars(DIAGNOSTICS).values()))
    row = speculation.observe(rollouts_of((800, 0, 0)), short)
    assert row == {"spec/acceptance_predicted": pytest.approx(predicted), "spec/alarm": 0.0}
    assert speculation.alarm.expected == pytest.approx(PREDICTED[:unrolled].sum())


def test_only_drafted_positions_are_predicted():
    """The learner unrolls three steps, drafts were two."""
    row = Speculation(*setup_of(length=2)).observe(rollouts_of((800, 500), (1000, 1000)), DIAGNOSTICS)
    assert row["spec/acceptance_predicted"] == pytest.approx(2.3)


@pytest.mark.parametrize("diagnostics", [None, DIAGNOSTICS], ids=["none", "known"])
@pytest.mark.parametrize(
    "setting", [{"temperature": 0.0}, {"argmax": True}, {"cascade": 2}], ids=["greedy", "argmax", "copies"]
)
def test_greedy_rollouts_likeliest_drafts_and_copies_have_no_prediction(setting, diagnostics):
    speculation = Speculation(*setup_of(**setting))
    assert speculation.observe(rollouts_of(GONE), diagnostics) == {"spec/alarm": 0.0}


def test_under_coupled_the_least_acceptance_is_expected():
    """Of shares 0.8, 5/8 and 1/2 of each draft a / (2 - a): 2/3, 5/11 and 1/3."""
    row = Speculation(*setup_of(rule="coupled")).observe(rollouts_of(), DIAGNOSTICS)
    expected = 1 + 2 / 3 * (1 + 5 / 11 * (1 + 1 / 3))
    assert row == {"spec/acceptance_predicted": pytest.approx(expected), "spec/alarm": 0.0}
    assert coupled_acceptance(np.array([1.0, 0.0, 0.0])).tolist() == [1.0, 0.0, 0.0]


def test_a_draft_as_good_as_coupled_lets_it_be_returns_from_an_alarm():
    speculation = tripped(Speculation(*setup_of(rule="coupled")))
    least = 1000 * coupled_acceptance(PREDICTED)
    assert speculation.observe(rollouts_of(tuple(least.astype(int) + 1)), DIAGNOSTICS)["spec/alarm"] == 0.0


def test_a_step_that_drafted_nothing_is_no_evidence():
    speculation = Speculation(*setup_of())
    before = speculation.alarm.state()
    assert speculation.observe(rollouts_of(GONE, GONE), DIAGNOSTICS) == {"spec/alarm": 0.0}
    assert speculation.alarm.state() == before


def test_a_copier_has_no_alarm():
    speculation = Speculation(*setup_of(weights=False))
    assert speculation.observe(rollouts_of(GONE), None) == {} and k_of(speculation) == 3


# --- the alarm


def test_a_collapse_switches_off_but_for_probes_and_a_recovery_switches_on():
    speculation = tripped(Speculation(*setup_of()))
    chosen = []
    for _ in range(2 * PROBE_STEPS):
        chosen.append(k_of(speculation))
        # What nothing drafted cannot tell; a probe finds it as broken as before.
        drafted = (1000,) * 3 if chosen[-1] else GONE
        assert speculation.observe(rollouts_of(GONE, drafted), DIAGNOSTICS)["spec/alarm"] == 1.0
    assert chosen.count(3) == 2 and chosen.count(0) == 2 * PROBE_STEPS - 2
    assert np.diff(np.flatnonzero(chosen)).tolist() == [PROBE_STEPS]
    assert speculation.observe(rollouts_of(), DIAGNOSTICS)["spec/alarm"] == 0.0
    assert k_of(speculation) == 3


@pytest.mark.parametrize("setup", [{}, {"temperature": 0.0}, {"adaptive": True}], ids=["fixed", "greedy", "adaptive"])
def test_a_draft_that_is_not_finite_switches_off(setup):
    """Also where a step drafted nothing, or compares no prediction; the controller learns nothing from it."""
    speculation = Speculation(*setup_of(**setup))
    speculation.observe(rollouts_of(), DIAGNOSTICS)
    lost = dataclasses.replace(DIAGNOSTICS, acceptance=np.array([0.9, np.nan, np.nan]))
    before = json.dumps(speculation.state().values["controller"])
    for drafted in (GONE, (1000,) * 3):
        row = speculation.observe(rollouts_of(GONE, drafted), lost)
        assert row["spec/alarm"] == 1.0 and np.isnan(row["spec/acceptance_predicted"])
    assert "not finite" in speculation.alarm.message()
    assert json.dumps(speculation.state().values["controller"]) == before
    assert k_of(speculation) == 0
    assert speculation.observe(rollouts_of(), DIAGNOSTICS)["spec/alarm"] == 0.0


def test_without_a_prediction_a_collapse_is_one_against_earlier_steps():
    """Greedy: only the first drafted token counts, whose acceptance does not depend on the length."""
    speculation = Speculation(*setup_of(temperature=0.0))
    for kept in ((900, 0, 0), (900, 900, 900)):
        assert speculation.observe(rollouts_of(kept), None)["spec/alarm"] == 0.0
    tripped(speculation)
    assert k_of(speculation) == 0


def test_a_tripped_alarm_holds_the_controller_back(monkeypatch):
    """It would draft three: they cost next to nothing and nearly all are kept. No probe before it is earned."""
    speculation = Speculation(*setup_of(adaptive=True))
    monkeypatch.setattr("specrl_jax.decoding.controller.INITIAL_BUDGET", 0.0)
    for size in SIZES:
        for k in LENGTHS:
            speculation.lengths.calibrate(size, k, 1.0 + 0.01 * k, live=50.0)
    speculation.observe(rollouts_of(), DIAGNOSTICS)
    speculation.lengths.observe(
        DecodeChunk(16, 3, 10.0, iterations=10, verifications=160, switch_seconds=0.0, live=50.0),
        np.array([128, 80, 40]),
    )
    assert k_of(speculation) == 3
    tripped(speculation)
    assert k_of(speculation) == 0
    speculation.observe(rollouts_of(), DIAGNOSTICS)
    assert k_of(speculation) == 3


@pytest.mark.parametrize("path", ["", "checkpoints/HEAD"])
def test_other_engines_draft_while_the_run_does(path, monkeypatch):
    """A head from a folder from the beginning, a random one once the run has seen that it pays; none under an alarm."""
    speculation = Speculation(*setup_of(adaptive=True, path=path))
    monkeypatch.setattr("specrl_jax.decoding.controller.INITIAL_BUDGET", 0.0)
    assert speculation.lengths_for(None).choose(4, 4, 50.0).k == (3 if path else 0)
    for size in SIZES:
        for k in LENGTHS:
            speculation.lengths.calibrate(size, k, 1.0 + 0.01 * k, live=50.0)
    assert k_of(speculation) == 3 and speculation.lengths_for(None).choose(4, 4, 50.0).k == 3
    speculation.controller.predict([0.01, 0.0, 0.0])
    assert k_of(speculation) == 0 and speculation.lengths_for(None).choose(4, 4, 50.0).k == 0
    fixed = Speculation(*setup_of(path=path))
    assert fixed.lengths_for(None).choose(4, 4, 50.0).k == 3
    tripped(fixed)
    assert fixed.lengths_for(None).choose(4, 4, 50.0).k == 0
    assert Speculation(*setup_of(adaptive=True, weights=False)).lengths_for(None).choose(4, 4, 50.0).k == 3


def test_the_controller_gets_the_prediction_of_every_sampled_step():
    speculation = Speculation(*setup_of(adaptive=True))
    assert speculation.controller.acceptance() == [1.0] * 3
    speculation.observe(rollouts_of(), DIAGNOSTICS)
    # Nothing was observed yet, so the prior is all there is.
    np.testing.assert_allclose(speculation.controller.acceptance(), PREDICTED)
    speculation.observe(rollouts_of(), None)
    np.testing.assert_allclose(speculation.controller.acceptance(), PREDICTED)
    greedy = Speculation(*setup_of(adaptive=True, temperature=0.0))
    greedy.observe(rollouts_of(), DIAGNOSTICS)
    assert greedy.controller.acceptance() == [1.0] * 3


def test_a_drafter_of_length_zero_has_nothing_to_choose():
    speculation = Speculation(*setup_of(length=0, adaptive=True))
    assert speculation.controller is None and k_of(speculation) == 0


# --- when the draft learns


def test_a_draft_learns_every_update_every_steps_where_the_run_lets_it():
    every_third = Speculation(*setup_of(every=3))
    assert [step for step in range(1, 10) if every_third.trains_draft(step)] == [3, 6, 9]
    for other in (setup_of(every=3, online=False), setup_of(weights=False)):
        assert not any(Speculation(*other).trains_draft(step) for step in range(1, 10))


# --- saved and loaded


def test_everything_saved_comes_back():
    setup = setup_of(adaptive=True, groups=2)
    speculation = Speculation(*setup)
    speculation.lengths.calibrate(16, 3, 0.5, live=50.0)
    speculation.observe(rollouts_of(), DIAGNOSTICS)
    speculation.observe(rollouts_of((100, 0, 0), (150, 150, 150)), DIAGNOSTICS)
    loaded = reloaded(setup, speculation)
    assert loaded.controller.state() == speculation.controller.state()
    assert loaded.alarm == speculation.alarm and loaded.alarm.pending != (0.0, 0.0, 0)
    # And goes on alike.
    for one in (speculation, loaded):
        tripped(one)
    assert loaded.alarm == speculation.alarm


@pytest.mark.parametrize(
    "part, written", [("controller", {"arguments": {"hysteresis": 0.03}}), ("alarm", {"longest": 3, "error": 1e-6})]
)
def test_what_another_version_saved_is_refused(part, written):
    setup = setup_of(adaptive=True)
    saved = Speculation(*setup).state()
    with pytest.raises(InputError, match="another version of specrl_jax"):
        Speculation(*setup, saved._replace(values=saved.values | {part: written}))


def test_the_turn_of_a_probe_is_kept():
    speculation = tripped(Speculation(*setup_of()))
    loaded = reloaded(setup_of(), speculation)
    for _ in range(PROBE_STEPS):
        assert k_of(loaded) == k_of(speculation)
        for one in (speculation, loaded):
            one.observe(rollouts_of(GONE, GONE), DIAGNOSTICS)


@pytest.mark.parametrize(("path", "first"), [("checkpoints/HEAD", 3), ("", 0)])
def test_until_costs_are_known_a_trained_draft_drafts(path, first):
    speculation = Speculation(*setup_of(adaptive=True, path=path))
    assert speculation.lengths.first(max(speculation.controller.sizes)) == first
    tripped(speculation)
    assert speculation.lengths.first(max(speculation.controller.sizes)) == 0


def test_under_an_alarm_it_answers_all_that_an_engine_asks():
    lengths = Speculation(*setup_of(adaptive=True)).lengths
    assert {name for name in vars(DraftLengthPolicy) if not name.startswith("_")} <= vars(type(lengths)).keys()
    lengths.replay(10, np.array([5, 2, 1]))


def test_costs_of_other_shapes_are_not_taken_over():
    """Another num_slots: the alarm is still right, the table of seconds is not."""
    speculation = Speculation(*setup_of(adaptive=True))
    speculation.lengths.calibrate(16, 3, 0.5, live=50.0)
    tripped(speculation)
    other = reloaded(setup_of(adaptive=True, sizes=(32, 8)), speculation)
    assert other.controller.sizes == (32, 8) and other.controller.unmeasured(32) == list(LENGTHS)
    assert other.alarm.tripped
    fixed = reloaded(setup_of(), speculation)
    assert fixed.controller is None and fixed.alarm.tripped
    assert reloaded(setup_of(weights=False), speculation).alarm is None


def test_a_run_that_chose_nothing_saves_for_one_that_does():
    speculation = Speculation(*setup_of(weights=False))
    assert speculation.state() == ({"step": 0, "controller": None, "alarm": None}, {})
    loaded = reloaded(setup_of(adaptive=True, groups=1), speculation)
    assert loaded.controller is not None and not loaded.alarm.tripped


def test_rollouts_know_what_was_observed_before_their_policy_and_nothing_later():
    """With a lag, later steps may be observed before the rollouts are generated."""
    speculation = Speculation(*setup_of(groups=1))
    speculation.observe(rollouts_of(texts=[([1, 2], [3])]), DIAGNOSTICS)
    tripped(speculation)
    lengths, history = speculation.as_of(1)
    assert lengths.choose(16, 16, 50.0).k == 3 and [text.tolist() for text in history.get([1, 2])] == [[1, 2, 3]]
    lengths, history = speculation.as_of(2)
    assert lengths.choose(16, 16, 50.0).k == 0 and len(history.get([1, 2])) == 2


TEXTS = (([1, 2], [3]), ([1, 2], [4, 5]), ([1, 2], [6]), ([7], [8]))


def test_a_resumed_run_goes_on_counting_what_its_draft_vocabulary_misses():
    """The coverage of the next step is that of all steps, as in a run that nothing interrupted."""
    setup = setup_of(groups=4, path="head")
    setup[0].model.vocab = 12  # of which the draft knows 9
    state = types.SimpleNamespace(vocab_map=np.arange(9))
    speculation = Speculation(*setup)
    for _ in range(2):
        speculation.update_vocabulary(state, rollouts_of(texts=[([1, 2], [3] * 5)] * 9))
    missed = rollouts_of(texts=[([1, 2], [10])])
    found = [again.update_vocabulary(state, missed)[1] for again in (reloaded(setup, speculation), speculation)]
    assert found[0] == found[1] and 0.98 < found[0]["draft/coverage"] < 1


def test_history_holds_the_newest_rollouts_of_each_prompt_and_is_saved():
    setup = setup_of(groups=1, history=2)
    speculation = Speculation(*setup)
    speculation.observe(rollouts_of(texts=TEXTS), DIAGNOSTICS)
    for one in (speculation, reloaded(setup, speculation)):
        one.as_of(1)
        assert [text.tolist() for text in one.history.get([1, 2])] == [[1, 2, 6], [1, 2, 4, 5]]
        assert [text.tolist() for text in one.history.get([7])] == [[7, 8]]
    assert reloaded(setup_of(groups=0), speculation).history is None


def test_arrays_of_others_are_no_history():
    """Of a draft that replays but has drafted nothing yet: its run could not be resumed."""
    saved = Speculation(*setup_of(groups=1)).state()
    again = Speculation(*setup_of(groups=1), HostState(saved.values, {"replay.0": np.zeros(2)}))
    assert again.history.get([1, 2]) == []
