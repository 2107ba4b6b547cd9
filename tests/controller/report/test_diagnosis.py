"""Claims about the diagnosis: the right cause first, whatever the machine, and a healthy run called healthy."""

from __future__ import annotations

import numpy as np
import pytest
from made_run import config, made_run, process, pulse_rows, stats, step_rows, titles, verdict

from controller.ledger.sample_reader import Removed
from controller.report.advice import Pace, pace_of
from controller.report.data import RunData
from controller.report.diagnosis import diagnose
from controller.report.finding import Finding
from controller.report.overview import figures
from controller.report.shares import growth, measure

STEP_S = (0.05, 1.0, 600.0)
"""Machines from a toy to a cluster: a diagnosis rests on shares."""

TOO_FEW = {"wait": 0.6, "busy": 0.97, "slots_full": 0.98}
TOO_MANY = {"wait": 0.01, "busy": 0.2}
NO_OVERLAP = {"wait": 0.45, "busy": 0.5}
SLOW_SCORES = {"wait": 0.8, "busy": 0.1, "for_scores": 0.85, "queue": 40.0, "scoring": 1.0, "waiting": 60.0}
HUNG_SCORES = {**SLOW_SCORES, "verdicts": {"scored": 20.0, "timed_out": 20.0}}


# ------------------------------------------------------------ healthy, or too little to say


@pytest.mark.parametrize("step_s", STEP_S)
def test_healthy_run_is_said_to_be_healthy_in_one_sentence_with_its_numbers(step_s):
    run = made_run(steps=step_rows(step_s=step_s), pulses=pulse_rows(step_s=step_s))
    found = diagnose(run)
    assert [finding.severity for finding in found] == ["good"]
    assert found[0].title.startswith("Healthy: 40 of 40 steps")
    for number in ("reward 0.4", "trainer waited 2 %", "were idle 23 %", "staleness 1.9 of at most 2", "audit clean"):
        assert number in found[0].title


def test_running_run_is_healthy_so_far():
    steps, pulses = step_rows()[:20], pulse_rows()[:21]
    assert verdict(kind="running", steps=steps, pulses=pulses).title.startswith("Healthy so far: 20 of 40 steps")


def test_too_few_steps_are_not_judged():
    steps, pulses = step_rows()[:2], pulse_rows(**TOO_FEW)[:3]
    found = diagnose(made_run(steps=steps, pulses=pulses))
    assert found[0].title == "Too few steps for a diagnosis: 2 of 40 steps"
    assert len(found) == 1


def test_run_that_just_began_says_what_it_waits_for():
    run = made_run(kind="running", steps=[], pulses=[], status={"waits": ["controller waits for 1 rollout worker(s)"]})
    assert "controller waits for 1 rollout worker(s)" in diagnose(run)[0].detail


def test_evaluations_and_supervised_runs_are_not_judged_as_training():
    run = made_run(steps=[], pulses=[], evals=[{"version": 0, "accuracy": 0.5, "num_scored": 64}])
    run.state["command"] = "eval"
    assert diagnose(run)[0].title == "An evaluation: accuracy 0.500 on 64 prompts"
    run.state["command"] = "sft"
    assert "only supervised steps" in diagnose(run)[0].title


# ------------------------------------------------------------ the four of the issue


@pytest.mark.parametrize("step_s", STEP_S)
@pytest.mark.parametrize(
    ("shares", "severity", "words"),
    [
        (
            TOO_FEW,
            "bad",
            "The trainer waited for samples during 60 % of its time: there are too few rollout workers or slots",
        ),
        (TOO_MANY, "warning", "of their time, held back by the staleness bound (2): the trainer is the bottleneck"),
        (SLOW_SCORES, "bad", "Scoring slows down the run"),
        (HUNG_SCORES, "bad", "Scoring slows down the run"),
        (NO_OVERLAP, "warning", "Trainer and rollout workers wait for each other (max_staleness 2)"),
    ],
)
def test_cause_of_a_wait_is_named_first_on_any_machine(step_s, shares, severity, words):
    found = verdict(steps=step_rows(step_s=step_s), pulses=pulse_rows(step_s=step_s, **shares))
    assert words in found.title
    assert found.severity == severity


def test_shares_of_the_steady_part_and_of_the_whole_run_are_distinguished():
    steady = measure(made_run(pulses=pulse_rows(**TOO_FEW)))
    assert steady.is_steady
    assert "do not include the start and the end of the run" in verdict(pulses=pulse_rows(**TOO_FEW)).detail
    assert "without the start and the end of the run" in verdict(pulses=pulse_rows()).title


def shown(run: RunData, label: str) -> tuple[str, str]:
    (found,) = [one for one in figures(run) if one.label == label]
    return found.value, found.note


def test_the_trainers_wait_is_one_number_on_a_page():
    run = made_run(pulses=pulse_rows(wait=0.062), summary={"trainer_wait_share": 0.224, "steps": 40})
    assert "trainer waited 6 %" in diagnose(run)[0].title
    assert shown(run, "trainer waited") == ("6 %", "of its time, without start and end")
    run = made_run(pulses=[], summary={"trainer_wait_share": 0.224, "steps": 40}, steps=[])
    assert shown(run, "trainer waited") == ("22 %", "of its time, whole run")


def test_numbers_of_the_last_stretch_are_distinguished_from_those_of_the_whole_run():
    summary = {"samples_per_s": 12.0, "wall_s": 60.0, "groups_drawn": 90, "groups_consumed": 80}
    once, resumed = made_run(summary={**summary, "lives": 1}), made_run(summary={**summary, "lives": 2})
    for label in ("samples/s", "wall time"):
        assert "since the last resume" in shown(resumed, label)[1]
        assert "since" not in shown(once, label)[1]
    assert shown(resumed, "groups used")[1] == "of 90 drawn, all since the start"


def test_what_filters_left_out_is_shown_by_difficulty_and_length():
    run = made_run(
        samples=stats(np.array([0.0, 1.0]), removed={"passed over": [Removed(0.0, 1200, 40.4), Removed(1.0, 3, 9)]})
    )
    note = "1,200 at success rate 0 (40 tokens), 3 at success rate 1 (9 tokens)"
    assert shown(run, "draws passed over") == ("1,203", note)
    assert not [figure for figure in figures(run) if figure.label == "groups filtered"]


def test_without_a_summary_rates_count_the_time_of_every_stretch():
    halves = [*step_rows()[:20], *step_rows()[:20]]
    for step, row in enumerate(halves, start=1):
        row.update(step=step, num_samples=10)
    assert shown(made_run(steps=halves, summary=None), "samples/s")[0] == "10"


def test_cores_that_are_all_at_work_are_named_as_the_limit_with_whom_they_work_for():
    used = {"trainer": 0.95, "rollout-0": 0.8, "reward": 0.1, "controller": 0.1}
    full = verdict(pulses=pulse_rows(cores=2.0, used=used, **NO_OVERLAP)).detail
    assert "on average, 1.95 of 2 cores were busy (trainer 0.95, rollout-0 0.80, " in full
    assert (
        "cores of this machine are the bottleneck"
        not in verdict(pulses=pulse_rows(cores=3.0, used=used, **NO_OVERLAP)).detail
    )
    assert "2.0 of 3 cores in use" in verdict(pulses=pulse_rows(cores=3.0, used=used)).title
    pulses = pulse_rows(cores=2.0, used=used, **NO_OVERLAP)
    elsewhere = diagnose(made_run(pulses=pulses, settings=config(launch__kind="ray")))[0]
    assert "cores of this machine are the bottleneck" not in elsewhere.detail, "the processes are on several machines"
    untold = [{key: value for key, value in row.items() if key != "processor"} for row in pulses]
    assert "cores of this machine are the bottleneck" not in verdict(pulses=untold).detail


def test_collapsed_policy_comes_before_every_wait():
    reward = np.concatenate([np.linspace(0.4, 0.7, 20), np.linspace(0.7, 0.0, 5), np.zeros(15)])
    fallen = step_rows(reward_mean=reward, reward_std=np.sqrt(reward * (1 - reward)), cut_share=np.where(reward, 0, 1))
    found = diagnose(made_run(steps=fallen, pulses=pulse_rows(**TOO_FEW)))
    assert found[0].title.startswith("The policy collapsed: reward fell from 0.6")
    assert "to 0" in found[0].title
    assert "trainer.optimizer.lr from 0.0001 to 1e-05" in found[0].advice
    assert "waited" in titles(found[1:])


# ------------------------------------------------------------ advice and predictions


def test_more_slots_and_workers_are_advised_with_a_gain_capped_by_trainer_and_cores():
    pulses = pulse_rows(wait=0.8, busy=1.0, paused=0.0, slots=4, slots_full=1.0)
    run = made_run(pulses=pulses, settings=config(rollout__engine__num_slots=4))
    found = diagnose(run)[0]
    assert "rollout.engine.num_slots from 4 to" in found.advice
    assert "rollout.num_workers from 1 to 2" in found.advice
    assert (
        "Increasing max_staleness above 2 would not help, because the bound does not delay any rollout worker"
        in found.advice
    )
    # Work of 0.2 + 1.0 core-seconds in a step, on two cores: 0.6 s instead of 1.
    assert "+67 % with 2 workers" in found.predicted


def test_more_workers_on_cores_that_are_all_at_work_are_said_not_to_help():
    pulses = pulse_rows(wait=0.3, busy=1.0, paused=0.0, workers=2)
    run = made_run(pulses=pulses, settings=config(rollout__num_workers=2), cores=2)
    assert "More workers on the same 2 cores would not help" in diagnose(run)[0].advice


def test_on_devices_of_their_own_workers_are_capped_by_the_trainer_alone():
    settings = config(rollout__engine__device="cuda", trainer__device="cuda:0")
    run = made_run(pulses=pulse_rows(wait=0.5, busy=1.0, paused=0.0), settings=settings)
    found = diagnose(run)[0]
    assert "rollout.num_workers from 1 to 2 on separate devices" in found.advice
    assert "+100 % with 2 workers" in found.predicted


def test_both_waiting_gets_a_looser_bound_and_what_overlap_brings():
    found = verdict(pulses=pulse_rows(**NO_OVERLAP))
    assert found.advice == "Raise staleness.max_staleness from 2 to 4"
    assert "+82 % if both work at the same time" in found.predicted  # 1 / 0.55


def test_synchronous_run_waits_by_design_and_is_no_warning():
    settings = config(mode="sync", staleness__max_staleness=0)
    found = diagnose(made_run(pulses=pulse_rows(**NO_OVERLAP), settings=settings))
    assert found[0].severity == "good"
    assert "mode: async" in found[1].advice


def test_many_idle_rollouts_of_a_synchronous_run_are_no_warning_either():
    settings = config(mode="sync", staleness__max_staleness=0)
    assert diagnose(made_run(pulses=pulse_rows(**TOO_MANY), settings=settings))[0].severity == "good"


def test_bound_that_holds_rollouts_back_is_distinguished_from_other_reasons_to_idle():
    """Workers idle for want of work, or while they wait for scores or for the machine."""
    pulses = pulse_rows(wait=0.9, busy=0.36, paused=0.0, slots_full=0.98)
    for n, pulse in enumerate(pulses):
        pulse["processes"]["rollout-0"]["counters"]["wait_work_s"] = 0.004 * n
    assert verdict(pulses=pulses).kind == "rollouts_too_few"
    assert verdict(pulses=pulse_rows(wait=0.9, busy=0.36, paused=0.0, slots_full=0.98)).kind == "no_overlap"
    assert verdict(pulses=pulse_rows(wait=0.6, busy=0.8, paused=0.0, slots_full=0.03)).kind == "no_overlap", (
        "more slots would be as empty"
    )
    assert verdict(pulses=pulse_rows(wait=0.6, busy=0.8, paused=0.0, slots_full=0.6)).kind == "rollouts_too_few"


def test_slots_half_empty_while_the_trainer_waits_ask_for_a_looser_bound_not_for_more_slots():
    found = verdict(pulses=pulse_rows(wait=0.5, busy=0.98, slots_full=0.3))
    assert "num_slots" not in found.advice
    assert "raise staleness.max_staleness from 2 to 4 (only 30 % of the slots are in use" in found.advice


def test_too_many_workers_says_how_many_would_do_and_that_more_age_does_not_help():
    run = made_run(pulses=pulse_rows(**TOO_MANY, workers=4), settings=config(rollout__num_workers=4))
    found = diagnose(run)[0]
    assert found.title.endswith("there are more rollout workers than it needs")
    assert "Reduce rollout.num_workers from 4 to 1, which would be enough" in found.advice
    assert "no loss with 1 rollout worker" in found.predicted


def test_single_worker_with_time_to_spare_is_healthy_where_two_are_one_too_many():
    assert verdict(pulses=pulse_rows(busy=0.5, paused=0.0)).severity == "good"
    two = made_run(pulses=pulse_rows(busy=0.45, paused=0.0, workers=2), settings=config(rollout__num_workers=2))
    assert diagnose(two)[0].severity == "warning"


def test_slow_scores_are_distinguished_from_too_few_rollouts_with_scorer_share_and_verdicts():
    found = verdict(pulses=pulse_rows(**HUNG_SCORES))
    assert "mine:score" in found.title
    assert "% of the samples held by the workers are waiting for a score" in found.title
    assert "timed out" in found.detail
    assert "the cause is not a lack of rollout workers" in found.detail
    assert "reward.log" in found.advice


def test_slow_scorer_without_failures_gets_more_scoring_processes():
    found = verdict(pulses=pulse_rows(**SLOW_SCORES))
    assert "reward.num_workers from 1 to" in found.advice
    assert "if scores arrived without delay" in found.predicted


def test_stalled_scores_are_seen_before_any_step_is_done():
    found = diagnose(
        made_run(kind="running", steps=[], pulses=pulse_rows(8, **{**SLOW_SCORES, "wait": 1.0}, makes_steps=False))
    )
    assert found[0].title.startswith("Scoring slows down the run")


def test_failing_scores_are_reported_even_where_nobody_waits():
    pulses = pulse_rows(verdicts={"scored": 300.0, "crashed": 60.0, "invalid": 24.0})
    found = verdict(pulses=pulses)
    assert found.title == "22 % of the answers got no score (crashed: scorer mine:score)"
    assert found.severity == "bad"
    settings = config(reward__on_failure=0.0)
    assert "the policy learns from failures" in verdict(pulses=pulses, settings=settings).detail


@pytest.mark.parametrize(
    ("changes", "logs"),
    [
        ({}, "logs/reward.log"),
        ({"reward__num_services": 2}, "logs/reward-*.log"),
        ({"reward__addresses": ["tcp://10.0.0.1:5555"]}, "the logs of the reward services"),
        ({"reward__scorers": []}, "the logs of the rollout workers"),
        ({"reward__scorers": [], "reward__environment": {"kind": "mine:World"}}, "logs/reward.log"),
    ],
)
def test_advice_names_the_logs_that_contain_the_failures_of_scoring(changes, logs):
    settings = config(**changes)
    pulses = pulse_rows(verdicts={"scored": 300.0, "crashed": 60.0, "invalid": 24.0})
    assert verdict(pulses=pulses, settings=settings).advice.endswith(logs)
    for reason in ("too_few_scores", "verdict timed_out"):
        summary = {"audit": "clean", "dropped_by_reason": {reason: 300}, "groups_drawn": 2000}
        found = verdict(summary=summary, settings=settings)
        assert logs in found.advice
        assert ("rollout.workflow_options" in found.advice) is (logs == "the logs of the rollout workers")


def test_model_predicts_by_the_slowest_part():
    pace = Pace(step_s=1.0, trainer_s=0.25, rollout_s=1.0, workers=1, score_s=0.5)
    assert pace.predict(workers=2) == 0.5
    assert pace.predict(workers=100) == 0.5, "scoring is the next slowest"
    assert pace.predict(workers=100, scorers=2) == 0.25
    assert Pace(1.0, 0.25, 1.0, cores=2).predict(workers=100) == pytest.approx(0.625)
    assert Pace(1.0, 0.25, 1.0).enough_workers() == 4


# ------------------------------------------------------------ measuring


def test_start_and_end_of_a_run_are_left_out_of_the_shares():
    pulses = pulse_rows(wait=0.0, busy=1.0, paused=0.0)
    for pulse in pulses[1:]:  # a start in which everybody waited ten times as long as the rest took
        pulse["processes"]["trainer"]["counters"]["wait_s"] += 400.0
        pulse["time_s"] += 400.0
        pulse["wall_s"] += 400.0
    for pulse in pulses[-3:]:  # and an end in which rollouts have nothing left to do
        pulse["processes"]["rollout-0"]["counters"]["idle_s"] += 400.0
    shares = measure(made_run(pulses=pulses))
    assert shares.is_steady
    assert shares.trainer_wait == 0.0
    assert shares.rollout_idle == 0.0


def test_counters_of_a_restarted_process_are_added_to_those_before():
    def pulse(seconds, incarnation):
        return {"processes": {"rollout-0": process("rollout", {"busy_s": seconds}, 1.0, incarnation)}}

    assert growth([pulse(5.0, "a"), pulse(9.0, "a"), pulse(2.0, "b"), pulse(3.0, "b")], "rollout") == {"busy_s": 7.0}


def test_run_of_an_older_layout_is_judged_by_its_steps_and_summary():
    summary = {"audit": "clean", "rollout_idle_share": 0.02, "rollout_paused_share": 0.01}
    found = verdict(pulses=[], summary=summary, steps=step_rows(trainer_wait_share=0.7))
    assert found.title.startswith("The trainer waited for samples during 70 %")


def test_pace_counts_the_workers_that_were_there():
    run = made_run(pulses=pulse_rows(workers=3), settings=config(rollout__num_workers=4))
    assert pace_of(run, measure(run)).workers == 3


# ------------------------------------------------------------ the rest


def test_stale_groups_that_are_dropped_ask_for_waiting_or_a_looser_bound():
    summary = {"audit": "clean", "dropped_by_reason": {"stale": 300, "timeout": 20}, "groups_drawn": 2000}
    found = verdict(summary=summary, settings=config(staleness__on_stale="drop"))
    assert found.title == "16 % of all groups were dropped; most common reason: stale (300)"
    assert "1.9 versions old on average; the bound is 2, which is close" in found.detail
    assert "on_stale: wait" in found.advice
    assert "up to 19 % more batches" in found.predicted


def test_idle_scoring_processes_are_not_called_a_stall():
    fast = {**SLOW_SCORES, "scoring": 0.001, "queue": 0.0}
    assert "slows down" not in titles(diagnose(made_run(pulses=pulse_rows(**fast))))
    failing = {**fast, "verdicts": {"scored": 20.0, "crashed": 20.0}}
    assert "Scoring slows down the run" in verdict(pulses=pulse_rows(**failing)).title


def test_unclean_audit_comes_before_all_other_findings():
    summary = {"audit": "step 3: group 7 used twice"}
    found = verdict(summary=summary, steps=step_rows(reward_mean=np.linspace(0.9, 0.0, 40)))
    assert "audit of the ledger failed" in found.title


def test_memory_that_grows_without_end_is_a_warning_and_a_cache_that_fills_is_not():
    leak = pulse_rows(rss=np.linspace(500, 3000, 41))
    found = verdict(pulses=leak)
    assert found.title.startswith("The memory use of trainer grew")
    assert "in about 0.774 times the running time of the process" in found.predicted
    cache = pulse_rows(rss=np.minimum(np.linspace(500, 5000, 41), 2000))
    assert verdict(pulses=cache).severity == "good"


def test_lost_processes_are_reported_and_those_that_leave_at_the_end_are_not():
    lost = [{"name": "rollout-0", "event": "lost", "reason": "ended with signal 9"}] * 3
    found = verdict(processes=[*lost, {"name": "rollout-0", "event": "restarted", "reason": ""}])
    assert found.title == "Processes were lost 3 times: rollout-0 most often (3)"
    assert "signal 9" in found.detail
    assert verdict(processes=lost[:1]).title == "The process rollout-0 was lost"
    gone = [{"name": "rollout-0", "event": "gone", "reason": "ended with signal 9"}]
    assert verdict(processes=gone).title == "The process rollout-0 was lost and not restarted"
    notes = [{"note": "worker_lost", "text": "rollout-0 is lost (the run is over); 0 samples return to the queue"}]
    assert verdict(notes=notes).severity == "good"


def test_worker_that_cannot_load_a_version_is_reported():
    notes = [{"note": "quarantined", "text": "rollout-0 cannot load version 3: no space"}]
    assert "rollout-0 cannot load version 3: no space" in verdict(notes=notes).detail


def test_sink_that_is_down_is_reported_with_its_loss():
    sinks = [
        {"sink": "wandb", "event": "down", "error": "no route to host"},
        {"sink": "wandb", "event": "closed", "lost": 12},
        {"sink": "tensorboard", "event": "closed", "lost": 0},
    ]
    found = verdict(sinks=sinks)
    assert found.title == "The metrics sink wandb was down: 12 rows did not reach it"
    assert found.detail == "no route to host"


def test_slow_swaps_slow_staging_and_a_full_shared_memory_are_reported(tmp_path):
    assert "paused rollout workers during 30 %" in verdict(pulses=pulse_rows(busy=0.65, paused=0.3)).title
    swaps = [{"stage_s": 0.7, "pause_s": 0.01}] * 3
    assert "trainer.weights.kind" not in verdict(swaps=swaps).advice, "the weights are in shared memory already"
    assert "trainer.weights.kind: shm" in verdict(swaps=swaps, settings=config(trainer__weights__kind="disk")).advice
    assert verdict(swaps=swaps).title == "New weights take 70 % of the time of a step to reach a rollout worker"
    found = verdict(folder=tmp_path, weight_dir=str(tmp_path / "weights"))
    assert (
        found.title == "Weights are transferred through files on disk, because shared memory had too little free space"
    )


def test_half_empty_micro_batches_are_reported_but_not_a_batch_that_fits_into_one():
    found = verdict(steps=step_rows(packing_efficiency=0.4))
    assert "only 40 % full" in found.title
    assert found.predicted.startswith("This saves at most 60 % of the trainer's time")
    assert verdict(steps=step_rows(packing_efficiency=0.53, micro_batches=2.0)).severity == "good", "1.06 budgets"
    assert verdict(steps=step_rows(packing_efficiency=0.4, micro_batches=1.0)).severity == "good"
    assert verdict(steps=step_rows(packing_efficiency=0.4, micro_batches=4.0, updates=4.0)).severity == "good"


def test_damage_is_reported_with_what_can_still_be_said():
    found = diagnose(made_run(problems=["ledger.sqlite: the file is missing"]))
    assert found[0].severity == "good"
    assert found[1].severity == "warning"
    assert "ledger.sqlite" in found[1].detail
    old = "metrics.jsonl has no rows of kind `pulse`, probably because an older version of areal_like wrote the file"
    assert diagnose(made_run(problems=[old]))[1].severity == "info"


def scaled(*kinds: str) -> Finding:
    texts = {
        "scaled": "a rollout worker is added (1 -> 2): the trainer waited",
        "scale_limit": "it waited, but the limit",
    }
    notes = [{"kind": "note", "note": kind, "text": texts[kind]} for kind in kinds]
    (found,) = [one for one in diagnose(made_run(notes=notes)) if one.kind == "workers_scaled"]
    return found


def test_decisions_of_autoscaling_are_reported_with_their_reasons_and_a_limit_with_what_to_change():
    found = scaled("scaled", "scaled")
    assert (found.severity, found.advice) == ("info", "")
    assert "2 times" in found.title
    assert "A rollout worker is added (1 -> 2): the trainer waited" in found.detail
    found = scaled("scaled", "scale_limit")
    assert found.severity == "warning"
    assert found.title.endswith("and would have added more")
    assert "rollout.autoscale.max_workers" in found.advice
    assert "because the limit is reached" in scaled("scale_limit").title


def test_a_worker_that_joined_from_outside_and_is_gone_is_no_process_that_the_run_lacks():
    rows = [
        {"kind": "process", "name": "rollout-7", "event": "joined", "reason": "", "host": "gpu7"},
        {"kind": "process", "name": "rollout-7", "event": "gone", "reason": "silent for 15 s"},
    ]
    (found,) = [one for one in diagnose(made_run(processes=rows)) if one.kind == "processes_lost"]
    assert found.severity == "warning"
    (own,) = [one for one in diagnose(made_run(processes=rows[1:])) if one.kind == "processes_lost"]
    assert own.severity == "bad"
