"""Diagnosis of the policy: collapse distinguished from chance and success; samples that teach nothing."""

from __future__ import annotations

import numpy as np
import pytest
from made_run import config, made_run, stats, step_rows, titles, verdict

from controller.report.diagnosis import diagnose


def test_reward_that_wavers_by_chance_is_no_collapse():
    for seed in range(20):
        draws = np.random.default_rng(seed).binomial(48, 0.3, 40) / 48
        noisy = step_rows(reward_mean=draws, reward_std=np.sqrt(draws * (1 - draws)))
        assert "collapsed" not in titles(diagnose(made_run(steps=noisy)))


def test_entropy_that_falls_while_the_policy_learns_is_no_warning():
    sharp = step_rows(entropy=np.geomspace(1.0, 0.01, 40))
    assert verdict(steps=sharp).severity == "good"


def test_entropy_collapse_without_learning_is_a_warning():
    found = verdict(steps=step_rows(reward_mean=0.3, entropy=np.geomspace(1.0, 0.01, 40)))
    assert found.title.startswith("Updates are unstable: entropy collapsed from")
    assert "entropy_coef" in found.advice


@pytest.mark.parametrize(
    ("column", "values", "words"),
    [
        ("ess", np.linspace(0.99, 0.2, 40), "effective sample size"),
        ("kl_behaviour_proximal", np.linspace(0.0, 2.0, 40), "KL to the sampling policy"),
        ("weight_truncated_share", np.linspace(0.0, 0.4, 40), "truncated weight"),
        ("clip_fraction", np.linspace(0.1, 0.7, 40), "trust region"),
        ("grad_norm_max", np.geomspace(0.2, 50.0, 40), "gradient norm grew"),
        ("grad_norm_max", np.where(np.arange(40) == 20, 500.0, 0.2), "gradient norm reached 500"),
        ("response_len_mean", np.linspace(30, 400, 40), "answers grew"),
        ("response_len_mean", np.linspace(30, 2, 40), "answers shrank"),
    ],
)
def test_signs_of_a_collapse_to_come_are_a_warning_with_their_step(column, values, words):
    found = verdict(steps=step_rows(**{column: values}))
    assert words in found.title
    assert found.severity == "warning"
    assert found.title.startswith("Updates are unstable")


def test_truncated_answers_are_a_sign_of_instability_only_where_nothing_is_learned():
    cut = np.where(np.arange(40) < 30, 0.06, 0.58)
    learning = diagnose(made_run(steps=step_rows(cut_share=cut)))
    assert "policy_unstable" not in [one.kind for one in learning]
    assert ("answers_cut", "info") in [(one.kind, one.severity) for one in learning]
    stuck = diagnose(made_run(steps=step_rows(cut_share=cut, reward_mean=0.3)))
    assert "policy_unstable" in [one.kind for one in stuck]


def test_ordinary_ppo_is_warned_of_its_distance_and_of_the_decoupled_loss():
    naive = config(trainer__loss__proximal="behaviour", trainer__loss__weight__mode="off")
    away = step_rows(kl_behaviour_proximal=0.0, kl_proximal_current=np.linspace(0.0, 0.39, 40))
    found = verdict(steps=away, settings=naive)
    assert found.title == "Updates are unstable: KL to the sampling policy rose to 0.37"
    assert "trainer.loss.proximal: recompute" in found.advice
    assert verdict(steps=away).severity == "good", "with the decoupled loss that is within the step"


def test_a_token_that_ran_away_once_is_no_warning_but_again_and_again_it_is():
    once = np.where(np.arange(40) == 39, 1200.0, 1.5)
    assert verdict(steps=step_rows(ratio_max=once)).severity == "good"
    lasting = np.where(np.arange(40) >= 37, 1200.0, 1.5)
    finding = verdict(steps=step_rows(ratio_max=lasting))
    assert finding.title == "Updates are unstable: largest ratio within a step rose to 1,200"
    assert "trainer.loss.dual_clip: 3" in finding.advice
    clipped = config(trainer__loss__dual_clip=3.0)
    assert "dual_clip" not in verdict(steps=step_rows(ratio_max=lasting), settings=clipped).advice


def test_a_gradient_that_was_large_once_is_no_growth():
    once = np.where(np.arange(40) == 39, 6.0, 0.3)
    assert verdict(steps=step_rows(grad_norm_max=once)).severity == "good"
    lasting = np.where(np.arange(40) >= 38, 6.0, 0.3)
    assert verdict(steps=step_rows(grad_norm_max=lasting, reward_mean=0.3)).title == (
        "Updates are unstable: gradient norm grew from 0.3 to 6"
    )


def test_a_gradient_that_grew_while_the_policy_learns_is_reported_only_with_other_signs():
    grown = np.where(np.arange(40) >= 30, 6.0, 0.3)
    assert verdict(steps=step_rows(grad_norm_max=grown)).severity == "good"
    away = verdict(steps=step_rows(grad_norm_max=grown, ess=np.linspace(0.99, 0.2, 40)))
    assert away.title.startswith("Updates are unstable: effective sample size")
    assert "gradient norm grew from 0.3 to 6" in away.detail
    fell = np.concatenate((np.linspace(0.2, 0.8, 30), np.full(10, 0.6)))
    assert "gradient norm grew" in verdict(steps=step_rows(grad_norm_max=grown, reward_mean=fell)).title
    flat = 0.3 + 0.001 * (np.arange(40) >= 20)
    assert "gradient norm grew" in verdict(steps=step_rows(grad_norm_max=grown, reward_mean=flat)).title
    spiked = np.where(np.arange(40) == 38, 600.0, np.where(np.arange(40) >= 32, 6.0, 0.3))
    assert "gradient norm grew" in verdict(steps=step_rows(grad_norm_max=spiked)).title
    later = np.where(np.arange(40) >= 37, 60.0, np.where(np.arange(40) >= 11, 4.0, 0.3))
    finding = verdict(steps=step_rows(grad_norm_max=later))
    assert "the first sign" not in finding.title
    assert "up to step 13" in finding.advice, "where it began to grow, not where it was a hundredfold"
    hundredfold = verdict(steps=step_rows(grad_norm_max=np.where(np.arange(40) >= 30, 60.0, 0.3)))
    assert hundredfold.title == "Updates are unstable: gradient norm grew from 0.3 to 60"


def test_what_needs_no_trend_is_reported_before_there_is_one():
    rows = step_rows(ess=np.where(np.arange(40) >= 3, 0.95, 0.99), entropy=np.geomspace(1.0, 1e-3, 40))
    assert "unstable" not in titles(diagnose(made_run(kind="running", steps=rows[:4])))
    found = diagnose(made_run(kind="running", steps=rows[:5]))
    assert "effective sample size of the weights" in titles(found)
    assert any("fell to 0.95" in one.detail for one in found)
    assert not any("entropy" in one.detail for one in found), "an early and a late mean would be the same"


def test_weights_that_fall_a_little_are_reported_only_if_the_reward_does_not_rise():
    for least, is_reported in ((0.94, False), (0.89, True)):
        falling = np.linspace(0.99, least, 40)
        falling[-3:] = least
        rising = verdict(steps=step_rows(ess=falling))
        assert (rising.kind == "policy_unstable") is is_reported
        flat = verdict(steps=step_rows(ess=falling, reward_mean=0.5))
        assert flat.title == f"Updates are unstable: effective sample size of the weights fell to {least:g}"


def test_a_policy_that_runs_away_in_its_first_steps_is_reported_by_versions():
    aging = {"staleness_mean": [0.0, 1.0, 2.0, 3.0, 3.1, 4.0], "ess": [1.0, 0.999, 0.995, 0.983, 0.969, 0.969]}
    rows = step_rows(**{key: [*values, *[values[-1]] * 34] for key, values in aging.items()})
    assert "unstable" not in titles(diagnose(made_run(kind="running", steps=rows[:4])))
    finding = titles(diagnose(made_run(kind="running", steps=rows[:5])))
    assert "effective sample size of the weights falls with each version by 0.00567" in finding
    aged = step_rows(staleness_mean=9.0, ess=[1.0, *[0.98] * 39])
    assert "unstable" not in titles(diagnose(made_run(kind="running", steps=aged[:5]))), (
        "as much, but over nine versions"
    )


def test_a_run_of_a_few_steps_gets_no_warning_from_signs_alone():
    rows = step_rows(ess=np.where(np.arange(40) >= 2, 0.9, 0.99))
    for count in (5, 7):
        assert "unstable" not in titles(diagnose(made_run(steps=rows[:count])))
        planned = made_run(kind="running", steps=rows[:count], settings=config(num_steps=count))
        assert "unstable" not in titles(diagnose(planned))
    assert "unstable" in titles(diagnose(made_run(steps=rows[:8])))


def test_drift_that_came_back_is_reported_only_where_it_lasted_a_fifth_of_the_run():
    n = np.arange(40)
    drift = np.where((n >= 8) & (n < 14), 0.05, 0.001)
    assert verdict(steps=step_rows(kl_behaviour_proximal=drift)).severity == "good"
    drift = np.where((n >= 8) & (n < 24), 0.05, 0.001)
    finding = verdict(steps=step_rows(kl_behaviour_proximal=drift))
    assert finding.title == "Updates are unstable: KL to the sampling policy rose to 0.05"


def test_ordinary_ppo_on_fresh_samples_has_no_drift_but_its_own_updates():
    naive = config(trainer__loss__proximal="behaviour", trainer__loss__weight__mode="off")
    fresh = step_rows(staleness_mean=0.0, kl_proximal_current=0.02)
    assert verdict(steps=fresh, settings=naive).severity == "good"


def test_an_engine_that_computes_otherwise_from_the_start_is_no_drift():
    assert verdict(steps=step_rows(ess=0.93)).severity == "good"
    sinking = np.where(np.arange(40) < 30, 0.93, 0.9)
    assert verdict(steps=step_rows(kl_behaviour_proximal=0.04)).severity == "good"
    finding = verdict(steps=step_rows(ess=sinking))
    assert finding.title == "Updates are unstable: effective sample size of the weights fell to 0.9"


def test_accuracy_that_falls_between_evaluations_is_a_collapse_though_the_reward_holds():
    evals = [{"version": v, "accuracy": a, "num_scored": 200} for v, a in ((0, 0.3), (20, 0.8), (40, 0.1))]
    found = verdict(evals=evals)
    assert found.title == "The policy collapsed: held-out accuracy fell from 0.8 (version 20) to 0.1"


def test_updates_without_a_finite_gradient_are_counted():
    skipped = np.arange(40) >= 10
    found = verdict(steps=step_rows(updates=~skipped, skipped_updates=skipped, reward_mean=0.3))
    assert found.title.startswith("75 % of the updates were skipped")
    assert found.severity == "bad"


def test_groups_of_equal_rewards_are_hopeless_or_solved():
    hopeless = np.zeros(320)
    hopeless[3] = 1.0
    found = verdict(samples=stats(hopeless), steps=step_rows(reward_mean=0.003))
    assert found.title.startswith("In the last steps, 100 % of the groups provide no learning signal")
    assert found.severity == "bad"
    solved = np.ones(320)
    solved[:8:2] = 0.0
    findings = diagnose(made_run(samples=stats(solved)))
    assert findings[0].severity == "good"
    assert findings[1].title.startswith("The task is nearly solved")


def test_on_emulated_devices_rewards_say_nothing_about_the_policy():
    hopeless = {"samples": stats(np.zeros(320)), "steps": step_rows(reward_mean=0.0)}
    assert verdict(**hopeless).severity == "bad"
    assert verdict(**hopeless, settings=config(emulation={"gpu": "h800", "model": "1.5b"})).severity == "good"


def test_equal_rewards_within_groups_do_carry_a_signal_where_the_batch_is_the_baseline():
    settings = config(trainer__advantage={"kind": "global_norm"})
    mixed = np.repeat([0.0, 1.0, 0.0, 0.0], 80)
    assert "no signal" not in titles(diagnose(made_run(samples=stats(mixed), settings=settings)))


def test_groups_left_out_for_want_of_signal_are_reported_where_they_are_many():
    found = verdict(summary={"audit": "clean", "groups_drawn": 1000, "groups_filtered": 750})
    assert found.title.startswith("75 % of all groups were excluded")
    assert "4 times as many batches" in found.predicted


def test_answers_that_are_all_cut_are_bad():
    found = verdict(steps=step_rows(cut_share=1.0, reward_mean=0.02))
    assert found.title == "100 % of the answers are truncated at sampling.max_new_tokens (100)"
    assert found.severity == "bad"


def test_episodes_that_end_at_a_limit_do_not_explain_equal_rewards():
    """An episode that never succeeds ends at its number of turns."""
    silent = {"reward_std": 0.0, "advantage_abs_mean": 0.0}
    rows = step_rows(reward_mean=0.0, cut_share=1.0, turns_max=3.0, **silent)
    first, second, *_ = diagnose(made_run(steps=rows, samples=stats(np.zeros(320))))
    assert (first.kind, second.kind, second.severity) == ("no_signal", "answers_cut", "warning")
    assert second.title == "100 % of the episodes were stopped by a limit before they had finished"
    assert "max_turns" in second.advice


SILENT = {"reward_std": 0.0, "advantage_abs_mean": 0.0}


@pytest.mark.parametrize(("reward", "why"), [(1.0, "the scorer gives every answer the same"), (0.0, "not recognise")])
def test_rewards_that_were_always_the_same_are_no_solved_task(reward, why):
    run = made_run(steps=step_rows(reward_mean=reward, **SILENT), samples=stats(np.full(320, reward)))
    first = diagnose(run)[0]
    assert (first.kind, first.severity) == ("no_signal", "bad")
    assert first.title == f"Nothing can be learned: every answer since the first step got the reward {reward:g}"
    assert why in first.detail


def test_answers_that_are_all_cut_explain_equal_rewards_unless_these_are_the_best():
    cut = {"cut_share": 0.97, **SILENT}
    hopeless = diagnose(made_run(steps=step_rows(reward_mean=0.0, **cut), samples=stats(np.zeros(320))))
    assert [one.kind for one in hopeless][:2] == ["answers_cut", "no_signal"]
    full = diagnose(made_run(steps=step_rows(reward_mean=1.0, **cut), samples=stats(np.ones(320))))
    assert [one.kind for one in full][:2] == ["no_signal", "answers_cut"]


def test_a_temperature_near_zero_explains_equal_rewards_of_answers_that_are_cut():
    rows = step_rows(reward_mean=0.0, cut_share=1.0, **SILENT)
    same = diagnose(
        made_run(steps=rows, samples=stats(np.zeros(320)), settings=config(sampling={"temperature": 0.001}))
    )
    assert [one.kind for one in same][:2] == ["no_signal", "answers_cut"]
    assert "sampling.temperature is 0.001" in same[0].title
    usual = diagnose(made_run(steps=rows, samples=stats(np.zeros(320)), settings=config(sampling={"temperature": 0.7})))
    assert [one.kind for one in usual][:2] == ["answers_cut", "no_signal"]


def test_cut_answers_are_no_alarm_where_the_reward_rises():
    found = diagnose(made_run(steps=step_rows(cut_share=1.0)))
    assert found[0].kind == "healthy"
    assert "does not depend on the end of an answer" in found[1].detail


def aligned(cosine, *, newest=(), staleness=2.0):
    """Rows of which every second one has a cosine."""
    rows = step_rows(staleness_mean=staleness)
    cosines = [*[cosine] * (len(rows) // 2 - len(newest)), *newest]
    return [row | ({"gradient_cosine": cosines[place // 2]} if place % 2 else {}) for place, row in enumerate(rows)]


def test_gradients_that_stay_aligned_while_samples_are_stale_are_a_warning():
    found = verdict(steps=aligned(0.7))
    assert (found.kind, found.severity) == ("gradients_aligned", "warning")
    assert "their cosine similarity stays at 0.7" in found.title
    assert "trainer.lr_by_ess" in found.advice


def test_five_measurements_in_a_row_make_the_warning():
    assert verdict(steps=aligned(0.1, newest=[0.5] * 5)).kind == "gradients_aligned"


@pytest.mark.parametrize(
    "steps",
    [
        aligned(0.3), aligned(0.7, staleness=0.0), aligned(0.7)[:8], step_rows(), aligned(0.1, newest=[0.9] * 4),
        aligned(0.9, newest=[0.49, 0.9, 0.9, 0.9, 0.9]), aligned(0.9, newest=[0.9, 0.9, None]),
    ],
)  # fmt: skip
def test_gradients_are_no_warning_where_they_differ_or_nothing_is_stale_or_few_are_measured(steps):
    assert "gradients_aligned" not in {finding.kind for finding in diagnose(made_run(steps=steps))}
