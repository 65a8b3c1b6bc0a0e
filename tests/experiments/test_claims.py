"""Statistics, verdicts, tables, figures and pages of the reproduction, on made-up rows."""

import importlib
import re

import matplotlib.image
import numpy as np
import pytest
from scipy import stats

from experiments import claims, forest, report, verdicts
from experiments.accuracy_parity import plot as accuracy_parity
from experiments.claims import by_seed, put_table
from experiments.draft_length import plot as draft_length
from experiments.drafting_method import plot as drafting_method
from experiments.scale_projection import claims as scale_projection
from experiments.sweeps import config_of, make_name
from experiments.verdicts import (
    EQUAL,
    NEAR,
    RULE,
    Claim,
    Interval,
    interval,
    judge_difference,
    judge_level,
    judge_ratio,
    judge_share,
    judge_simulated,
    mark_shared,
    ratio_interval,
)
from specrl_jax.errors import InputError
from specrl_jax.io.plots import COLOURS
from tests.helpers.runs import ROOT

NAN = float("nan")


def test_an_interval_is_student_t():
    # t(0.975, 2) = 4.303; deviation 1, over sqrt(3).
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2 and found.high - 2 == pytest.approx(4.303 / 3**0.5, abs=1e-3)
    assert found.low == pytest.approx(4 - found.high)
    assert str(found) == "2.00 (-0.48 to 4.48)" and found.text("+.1f") == "+2.0 (-0.5 to +4.5)"
    assert np.isnan(interval([5.0]).low) and str(interval([5.0])) == "5.00" and str(interval([])) == "not run"


def test_the_interval_of_a_ratio_is_student_t_on_logarithms():
    # Logarithms -1, 0, 1 around that of 2: geometric mean 2, half width 4.303 / sqrt(3) in logarithms.
    found = ratio_interval(2 * np.exp([-1.0, 0.0, 1.0]))
    factor = np.exp(stats.t.ppf(0.975, 2) / 3**0.5)
    np.testing.assert_allclose(found, [2, 2 / factor, 2 * factor])
    # The interval of the inverse ratios is the inverse interval.
    inverse = ratio_interval(np.exp([-1.0, 0.0, 1.0]) / 2)
    np.testing.assert_allclose(inverse, [1 / 2, 1 / found.high, 1 / found.low])
    assert str(ratio_interval([1.5])) == "1.50" and str(ratio_interval([])) == "not run"


def test_a_difference_of_two_samples_is_welch():
    # Variances 1 and 4, three values each: standard error sqrt(5 / 3).
    gap = verdicts.welch([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    freedom = (5 / 3) ** 2 / ((1 / 3) ** 2 / 2 + (4 / 3) ** 2 / 2)
    half = stats.t.ppf(0.975, freedom) * (5 / 3) ** 0.5
    np.testing.assert_allclose(gap, [-2, -2 - half, -2 + half])


@pytest.mark.parametrize(
    "paper, ours, direction",
    [
        (1.8, (1.2, 1.1, 1.3), "shown"),
        (0.7, (0.8, 0.7, 0.9), "shown"),
        (0.7, (1.2, 1.1, 1.3), "opposite"),
        (1.8, (0.8, 0.7, 0.9), "opposite"),
        (1.8, (1.2, 0.9, 1.5), "undecided"),
        (1.8, (1.2, NAN, NAN), "one seed"),
        (1.8, (NAN, NAN, NAN), "not run"),
        # The paper shows no difference: equivalence.
        (1.01, (0.99, 0.96, 1.04), "shown"),
        (1.05, (1.02, 1.01, 1.05), "shown"),
        (0.99, (0.94, 0.92, 0.96), "undecided"),
        (0.99, (1.00, 0.90, 1.10), "undecided"),
        (0.95, (0.90, 0.87, 0.94), "opposite"),
        (1.02, (1.10, 1.06, 1.14), "opposite"),
        (1.06, (1.02, 1.01, 1.05), "shown"),
        (1.06, (1.02, 0.99, 1.04), "undecided"),
    ],
)
def test_a_direction_needs_the_whole_interval(paper, ours, direction):
    assert verdicts.direction(paper, Interval(*ours)) == direction


@pytest.mark.parametrize(
    "ours, size",
    [
        ((3.0, 1.9, 4.0), "within the interval"),
        ((2.29, 2.1, 2.4), "within 15 %"),
        ((1.71, 1.6, 1.9), "within 15 %"),
        ((2.31, 2.1, 2.4), "larger"),
        ((1.69, 1.6, 1.9), "smaller"),
        ((2.31, NAN, NAN), "larger"),
        ((2.29, NAN, NAN), "within 15 %"),
        ((NAN, NAN, NAN), ""),
    ],
)
def test_a_size_is_relative_to_the_papers_value(ours, size):
    assert verdicts.size(2.0, Interval(*ours)) == size


def test_the_rule_says_the_bounds_that_judge():
    assert f"{100 * EQUAL:.0f} %" in RULE and f"{100 * NEAR:.0f} %" in RULE


def test_ratios_shares_levels_and_simulated_values_are_judged():
    ratio = judge_ratio("r", 0.68, "Table 4", [1.2, 1.3, 1.25])
    assert (ratio.direction, ratio.size, ratio.sample) == ("opposite", "larger", "paired by seed, 3 seeds")
    assert ratio.paper == "0.68 (Table 4)" and ratio.here == "1.25 (1.13 to 1.38)"
    assert judge_ratio("r", 0.68, "Table 4", [1.2], "round").sample == "paired by round, 1 round"
    assert judge_ratio("r", None, "", [1.2, 1.3]).direction == "not in the paper"
    assert judge_ratio("r", 1.5, "Table 4", []) == Claim("r", "1.5 (Table 4)", sample="paired by seed, 0 seeds")
    # A share has 0 in place of 1, and may be negative.
    assert judge_share("s", 0.36, "Table 5", [0.5, 0.52, 0.54])[3:5] == ("shown", "larger")
    assert judge_share("s", 0.36, "Table 5", [-0.3, 0.2, 0.4]).direction == "undecided"
    assert judge_level("l", 3.32, "Table 2", [3.6, 3.62, 3.58])[3:5] == ("", "within 15 %")
    simulated = judge_simulated("m", 2.72, "simulated", Interval(2.85, 2.7, 2.91))
    assert simulated[3:5] == ("shown", "within the interval") and simulated.simulated


def test_a_difference_that_should_be_none_is_judged_by_five_percent_of_its_reference():
    def judged(mean, half, paper="overlap"):
        return judge_difference("", paper, Interval(mean, mean - half, mean + half), 0.6, "Welch")

    assert judged(0.005, 0.024)[2:5] == ("+0.005 (-0.019 to +0.029)", "shown", "within the interval")
    assert judged(0.02, 0.01)[3:5] == ("shown", "within 15 %")  # not zero, and yet within the bound of 0.03
    assert judged(0.01, 0.03).direction == "undecided"
    assert judged(-0.06, 0.02)[3:5] == ("opposite", "within 15 %")
    assert judged(-0.12, 0.02)[3:5] == ("opposite", "smaller")
    absent = judged(0.005, 0.024, paper="")
    assert absent[3:5] == ("not in the paper", "") and absent.why == "no difference at 5 %: shown"
    np.testing.assert_allclose(judged(0.006, 0.024).ratio, [1.01, 0.97, 1.05])


def test_a_sample_shown_in_several_folders_is_named():
    lengths = judge_level("l", 3.32, "Table 2", [3.6, 3.5, 3.7])
    other, single = judge_level("l", 3.32, "Table 2", [3.6, 3.5, 3.8]), judge_level("l", 3.32, "Table 2", [3.6])
    found = [("a", lengths), ("b", lengths), ("b", other), ("c", lengths), ("a", single), ("b", single)]
    assert [claim.sample for _, claim in mark_shared(found)] == [
        "3 seeds; the same measurement as in b and c",
        "3 seeds; the same measurement as in a and c",
        "3 seeds",
        "3 seeds; the same measurement as in a and b",
        "1 seed",
        "1 seed",
    ]


def test_workloads_that_share_the_papers_name_are_told_apart():
    rows = [{"workload": w} for w in ("rlzero_tiny_small", "rlthink_tiny", "rlzero_steps")]
    assert claims.workload_labels(rows) == {
        "rlzero_tiny_small": "Zero (rlzero_tiny_small)",
        "rlthink_tiny": "Think",
        "rlzero_steps": "Zero (rlzero_steps)",
    }


def test_a_speed_that_the_papers_tokens_would_not_give_has_another_reason():
    rows = [
        {"workload": "rlzero_tiny", "draft.kind": kind, "draft.cascade": "", "seed": s}
        | {"benchmark/k_3_acceptance_length": tokens, "benchmark/k_3_over_plain": speed + 0.01 * s}
        for kind, tokens, speed in (("ngram", 1.1, 0.6), ("eagle3", 3.6, 1.8))
        for s in range(3)
    ]
    found = {claim.text: claim for claim in drafting_method.claims(rows) if claim.paper}
    # The paper's 2.47 tokens at the cost of an iteration here, 1.1 / 0.6, would be a gain.
    ngram, head = (found[f"Zero: {name}, k = 3, generation over plain"] for name in ("n-gram", "EAGLE-3"))
    assert (ngram.direction, head.direction) == ("shown", "shown")
    assert ngram.why == "for another reason, few tokens: an iteration over a plain one: 1.80 here, 3.53 in the paper"
    assert head.why == "an iteration over a plain one: 1.99 here, 1.84 in the paper"


def test_long_drafts_are_judged_at_one_sequence_and_at_the_most_there_are(tmp_path, monkeypatch):
    """Table 4: in the paper k = 7 is slower than k = 3; each claim says how many sequences it is about."""
    speeds = {1: {3: 100, 5: 120, 7: 130, "none": 50}, 16: {3: 100, 5: 100, 7: 90, "none": 90}}
    lines = [
        f"eagle3,{slots},{who},{i},{speed + i},4"
        for slots, of in speeds.items()
        for who, speed in of.items()
        for i in range(4)
    ]
    lines.append("ngram,64,3,1,1,1")  # another drafter
    header = "drafter,slots,who,round,tokens_per_second,acceptance_length"
    (tmp_path / "controller.csv").write_text("\n".join([header, *lines]) + "\n")
    monkeypatch.setattr(draft_length, "BY_SEQUENCES", tmp_path / "controller.csv")
    rows = made_up(draft_length, ["rlzero_tiny_small"])
    for row in rows:
        row |= {f"benchmark/k_{k}_over_plain": 2 + 0.1 * k + 0.01 * row["seed"] for k in draft_length.LENGTHS}
    found = {claim.text: claim for claim in draft_length.claims(rows)}
    one = found["Zero: generation at k = 7 over that at k = 3, 1 sequence at once"]
    many = found["Zero, the tiny base: generation at k = 7 over that at k = 3, 16 sequences at once"]
    assert (one.direction, one.sample) == ("opposite", "paired by seed, 3 seeds")
    # Round 0 is learning and left out.
    assert (many.direction, many.sample) == ("shown", "paired by round, 3 rounds of one process and seed")
    # Four tokens at the speed of plain decoding cost four plain iterations.
    assert many.why == "an iteration over a plain one: 4.00 here, 4.18 in the paper"
    assert found[many.text.replace("k = 7", "k = 5")].direction == "undecided"
    for row in rows:
        row["rollout.num_slots"] = 4
    assert any("4 sequences at once" in claim.text for claim in draft_length.claims(rows))


def test_the_config_of_a_workload_is_found_by_its_name():
    assert config_of("rlzero_tiny_small").rollout.num_slots == 1
    assert config_of("rlzero_tiny").policy.path == "experiments/tiny_base/checkpoint"
    with pytest.raises(InputError, match="no file in configs"):
        config_of("nothing_small")


def test_a_claim_that_depends_on_a_constant_chosen_afterwards_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(scale_projection, "HERE", tmp_path)
    (tmp_path / "sensitivity.csv").write_text(
        f'changed,"512, k = 3: rollout","512, k = 3: end to end"\n{scale_projection.WITHOUT},2.0,1.0\n'
    )
    (tmp_path / "validation.csv").write_text("set,cell,measured,predicted,low,high\nasync,speedup,1.2,1.1,1.0,1.2\n")
    row = {"view": scale_projection.VIEW, "lengths": scale_projection.LENGTHS, "use": "predicted", "low": 1, "high": 3}
    row |= {"table": "512 GPUs, lag 0, k = 3"}
    rows = [row | {"row": name, "measured": 2.0, "predicted": 2.1} for name in ("rollout", "end to end")]
    found = scale_projection.claims(rows)
    assert [claim.size for claim in found] == ["within the interval"] * 3
    assert [claim.why for claim in found] == [
        "",
        "a constant was chosen after a first comparison (1.00 without it)",
        "of four readings of the asynchronous run, the one that fits these rows best",
    ]


def test_medians_are_by_seed():
    rows = [{"seed": s, "kind": "a", "x": v} for s, values in ((0, (1, 2, 9)), (1, (4, "", 6))) for v in values]
    np.testing.assert_array_equal(by_seed(rows, "x", kind="a"), [2.0, 5.0])


def test_rows_of_unfinished_runs_are_kept(tmp_path):
    sweep = claims.seeded([{"a": 1}], seeds=(0, 1, 2))
    assert [run["seed"] for run in sweep] == [0, 1, 2] and sweep[0] == {"a": 1, "seed": 0, "rollout.seed": 0}
    workdir = tmp_path / "rlzero_tiny_small_folder"
    for run in sweep[:2]:
        place = workdir / make_name(run)
        place.mkdir(parents=True)
        lines = ('{"step": 0, "y": 1}', '{"step": 0, "x": 1}', '{"step": 1, "x": 2.5, "y": true}')
        (place / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (workdir / make_name(sweep[0]) / "finished.json").write_text("{}")
    rows = claims.collect([str(workdir)], "folder", sweep, ["x"])
    assert [row["state"] for row in rows] == ["finished", "finished", "failed", "not run"]
    # Step 0 is the evaluation before training, of which other folders keep nothing.
    first = {"workload": "rlzero_tiny_small", "state": "finished", "step": 0, "x": 1} | sweep[0]
    assert rows[:2] == [first, first | {"step": 1, "x": 2.5}]
    claims.write_rows(tmp_path / "results.csv", rows)
    assert claims.finished_rows(tmp_path / "results.csv") == rows[:2]


def test_a_new_table_replaces_the_old_one(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{claims.marks()[0]}\nold\n{claims.marks()[1]}\nafter\n")
    put_table(readme, "new\n")
    assert readme.read_text() == f"before\n{claims.marks()[0]}\nnew\n{claims.marks()[1]}\nafter\n"
    readme.write_text("no marks")
    with pytest.raises(ValueError, match="once each"):
        put_table(readme, "new")


def made_up(module, workloads):
    """Rows of every run of the folder's sweep with a random value for each run, metric and step."""
    rng, rows = np.random.default_rng(0), []
    for workload in workloads:
        for run in module.get_sweep():
            for step in (1, 8, 9):
                row = {"workload": workload, "state": "finished", "step": step} | run
                rows.append(row | {key: float(rng.uniform(1, 2)) for key in module.KEYS})
    return rows


PLOTTED = [name for name, folder in report.CLAIM_FOLDERS.items() if folder.module == "plot"]
FOLDERS = dict.fromkeys(PLOTTED, ("rlzero_tiny_small", "rlthink_tiny"))
FOLDERS["draft_init"] = ("rlzero_tiny_small",)
FOLDERS |= dict.fromkeys(("accuracy_parity", "async_lag", "quantized_rollouts"), ("rlzero_tiny",))


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_writes_its_table_figure_and_claims(folder, tmp_path):
    module = importlib.import_module(f"experiments.{folder}.plot")
    claims.write_rows(tmp_path / "results.csv", made_up(module, FOLDERS[folder]))
    rows = claims.finished_rows(tmp_path / "results.csv")
    lines = module.table(rows).splitlines()
    kinds = {"drafting_method": 2}.get(folder, 3)  # lines of the table, at least
    assert "nan" not in module.table(rows) and len(lines) >= 2 + kinds
    blocks = [block.splitlines() for block in module.table(rows).split("\n\n") if block.startswith("|")]
    assert all(len({line.count("|") for line in block}) == 1 for block in blocks)
    for claim in module.claims(rows):
        assert claim.here and "nan" not in claim.here + claim.why
        assert claim.direction in ("shown", "opposite", "undecided", "not in the paper", "") and claim.sample
    module.draw(rows, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_the_step_speedup_is_bounded_by_amdahl():
    from experiments.step_breakdown.plot import Saved

    def row(kind, generate, total, speed):
        seconds = {"time/data": 0.0, "time/prepare": 0.0, "time/logprob": 1.0, "time/train": 3.0}
        seconds |= {"time/generate": generate, "time/total": total}
        return seconds | {"workload": "w", "seed": 0, "step": 2, "draft.kind": kind} | speed

    plain = row("none", 12.0, 16.0, {"rollout/tokens_per_second": 100, "spec/acceptance_length": ""})
    spec = row("eagle3", 6.0, 10.0, {"rollout/tokens_per_second": 200, "spec/acceptance_length": 3.0})
    saved = Saved([plain, spec], "w")
    found = [float(x[0]) for x in (saved.share, saved.generation, saved.step, saved.bound, saved.others)]
    np.testing.assert_allclose(found, [0.75, 2.0, 1.6, 1.6, 1.0])


def test_a_runs_score_counts_every_measurement_after_the_first_update_once():
    run = accuracy_parity.RUNS["plain"]
    rows = [run | {"seed": seed, "step": 0, "reward/mean": "", "eval/accuracy": 0.9} for seed in (0, 1)]
    for seed in (0, 1):
        for step, reward, accuracy in ((1, 0.2, ""), (2, 0.4, ""), (3, 0.6, 0.8)):
            rows.append(run | {"seed": seed, "step": step, "reward/mean": reward + seed, "eval/accuracy": accuracy})
    np.testing.assert_allclose(accuracy_parity.trained(rows, run), [0.5, 1.25])
    np.testing.assert_allclose(accuracy_parity.trained(rows, run, ("eval/accuracy",)), [0.8, 0.8])


def test_how_many_seeds_and_answers_are_enough():
    """By t quantiles: deviation 0.01, half width t(0.975, 2 n - 2) 0.01 sqrt(2 / n)."""
    assert accuracy_parity.half_width(0.01, 3) == pytest.approx(2.776 * 0.01 * (2 / 3) ** 0.5, rel=1e-3)
    rows = []
    for name in ("plain", "rejection", "block"):
        for seed, shift in enumerate((-0.01, 0.0, 0.01)):
            run = accuracy_parity.RUNS[name] | {"seed": seed, "step": 1}
            rows.append(run | {"reward/mean": 0.5 + shift, "eval/accuracy": 0.5 + shift})
    # With 3 seeds a side 0.0227, with 4 0.0173; at accuracy 0.5, 3 seeds: (2.776 / 0.02)^2 (2 / 3) / 4 answers.
    said = accuracy_parity.enough(rows)
    assert "a deviation of 0.010 over seeds, so 4 seeds" in said and "(accuracy 0.50)" in said
    assert f"{int(np.ceil((stats.t.ppf(0.975, 4) / 0.02) ** 2 * 2 / 3 / 4)):,} for 3" in said


def test_coupled_runs_that_differ_are_not_called_identical():
    from experiments.accuracy_parity import plot

    rows = made_up(plot, ["rlzero_tiny"])
    assert not plot.identical(rows)
    by_place = {(r["seed"], r["step"]): r for r in rows if claims.matching([r], **plot.RUNS["coupled"])}
    for r in claims.matching(rows, **plot.RUNS["plain, coupled"]):
        r |= {key: by_place[r["seed"], r["step"]][key] for key in plot.KEYS}
    assert plot.identical(rows)


def test_the_page_is_self_contained():
    text = report.folders_page(report.all_claims())
    assert all(f'id="{folder}"' in text for folder in report.CLAIM_FOLDERS)
    sources = re.findall(r'src="([^"]*)"', text)
    assert sources and all(source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r'<script|<link rel="stylesheet"', text)


def test_the_pages_say_what_the_rows_say():
    """Whoever changes rows or the rule runs `python -m experiments.report --output FILE --docs`."""

    def between(page):
        return (ROOT / page).read_text().split(claims.marks()[0])[1].split(claims.marks()[1])[0].strip()

    found = report.all_claims()
    table = report.claims_table(found, "../experiments/{}/README.md")
    assert between("docs/results.md") == f"{RULE}\n\n{table}"
    assert between("README.md") == report.asked_table(found)
    assert between("experiments/README.md").startswith(report.summary(found))
    assert RULE in between("experiments/README.md")


def test_the_readme_has_five_results_and_one_of_them_is_a_miss():
    lines = report.asked_table(report.all_claims()).splitlines()
    assert len(lines) - 2 == 5 and sum(f"| {verdicts.OPPOSITE} |" in line for line in lines) == 1
    assert lines[0] == "| claim | paper | here (interval) | direction | size | why |"


def test_claims_of_several_workloads_stand_in_one_row(monkeypatch):
    pairs = [judge_ratio(f"{w}: speed", p, "Table 1", [1.2, 1.3, 1.25]) for w, p in (("Zero", 1.8), ("Think", 0.9))]
    found = [("f", claim) for claim in pairs]
    monkeypatch.setattr(report, "ASKED", (report.Asked("f", "speed", "because"),))
    cells = [cell.strip() for cell in report.asked_table(found).splitlines()[-1].strip("|").split("|")]
    here, size = "1.25 (1.13 to 1.38)", "smaller / larger"
    assert cells == ["Zero / Think: speed", "1.8 (Table 1) / 0.9 (Table 1)", here, "shown / opposite", size, "because"]
    monkeypatch.setattr(report, "ASKED", (report.Asked("f", "speeds", "because"),))
    with pytest.raises(ValueError, match="no claim of f has the pattern 'speeds'"):
        report.asked_table(found)


def test_the_summary_counts_claims_of_the_paper():
    found = [
        ("f", judge_ratio("a", 1.8, "Table 1", [1.2, 1.3, 1.25])),
        ("f", judge_ratio("b", 0.9, "Table 1", [1.2, 1.3, 1.25])),
        ("f", judge_ratio("c", None, "", [1.2, 1.3, 1.25])),
        ("f", judge_level("d", 3.0, "Table 1", [3.0, 3.1])),
    ]
    said, _, *counts = report.summary(found).splitlines()
    assert said.startswith("Of the 4 rows of ") and " 3 have a value in the paper." in said
    assert counts == [
        "* Size, of these 3: 1 within the interval, 0 within 15 %, 1 larger, 1 smaller.",
        "* Direction, of the 2 of them that are no levels (tokens per verification): 1 shown, 1 opposite, 0 undecided.",
    ]


def test_the_figure_of_all_ratios_has_a_line_for_each(tmp_path):
    ratio = judge_ratio("a", 1.8, "Table 1", [1.2, 1.3, 1.25])
    level = judge_level("d", 3.0, "Table 1", [3.0, 3.1])  # not a ratio
    simulated = judge_simulated("m", 2.72, "simulated", Interval(2.85, 2.7, 2.91))
    heights = []
    for found in ([ratio, level], [ratio, level, simulated], [ratio, simulated, ratio]):
        forest.draw([("f", claim) for claim in found], tmp_path / "claims.png")
        heights.append(matplotlib.image.imread(tmp_path / "claims.png").shape[0])
    assert heights == [round(100 * (0.32 * lines + 1.6)) for lines in (1, 2, 3)]


def test_no_colour_of_the_figures_is_green():
    """Beside red no colour-blind reader would see it."""
    for colour in COLOURS:
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        assert not (green > red + 20 and green > blue + 20), colour
