"""Checks a config on this machine before a start: model, data, folders, port, packages, devices.

Calls the checks of the other modules of this package and reads the rows. Contradictions inside the config are found in
controller/config/run.py. torch is not imported. What another machine may have (a GPU, a free port) stops a start here,
and is only a remark in `validate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from areal_like.errors import OperationError, UserError
from areal_like.red_team import RedTeamJudge
from areal_like.safety import SafetyFilter
from controller.config.engines import as_problems, engine_job, engine_of
from controller.config.launchers import launcher_of
from controller.config.problems import Problem
from controller.config.run_config import RunConfig, silent_endpoints
from controller.data import eval_slices
from controller.data.cleaned_rows import reading_cleaned
from controller.data.forced_lengths import KEY, forced_lengths
from controller.data.live import load_training
from controller.data.table import Table, load_demonstrations, load_eval
from controller.launch.choice import survey
from controller.preflight import called_models, chat_format, machine, own_code, packages, reward_services
from controller.preflight.dataset.languages import check_library
from controller.preflight.found import Preflight, Purpose, as_problem
from controller.preflight.memory import look_at_memory
from controller.preflight.starting_model import look_at_model
from controller.preflight.train_stages import KEY as STAGES
from controller.preflight.train_stages import CleanedTrain, words
from controller.wiring.scoring import sandbox_problems


def look(config: RunConfig, purpose: Purpose) -> Preflight:
    """Run all checks that `purpose` requires."""
    found = Preflight()
    look_at_model(config, found)
    if purpose != "sft":
        found.problems += chat_format.problems_of(config)
        found.problems += called_models.problems_of(config, found.model)
    if purpose in ("train", "validate", "probe"):
        found.train = _table("data.train", lambda: load_training(_cleaned(config, found)), found, purpose)
    if purpose in ("train", "validate", "eval"):
        found.eval = _table("data.eval", lambda: load_eval(config), found, purpose)
        found.problems += eval_slices.problems_of(config.eval.slices, found.eval, check_library)
    if purpose != "eval":
        _table("warm_start.data", lambda: load_demonstrations(_one_demonstration(config)), found, purpose)
    if purpose == "eval" and not config.data.eval_sources:
        found.problems.append(
            Problem(
                ("data.eval",),
                "an evaluation requires evaluation rows, but data.eval is not set",
                "set data.eval.path, data.eval.dataset or data.eval.generator",
            )
        )
    if purpose == "sft" and config.warm_start is None:
        found.problems.append(
            Problem(("warm_start",), "supervised fine-tuning requires this section", "set warm_start.data")
        )
    try:
        forced_lengths(config)
    except UserError as mistake:
        found.problems.append(as_problem(KEY, mistake))
    found.problems += machine.folders(config)
    found.problems += packages.problems_of(config)
    is_here = launcher_of(config).is_one_machine or purpose == "sft"
    engine, job = engine_of(config), engine_job(config)
    for lack in engine.environment_problems(job) if purpose != "sft" and is_here else ():
        (found.absent if lack.is_local else found.problems).extend(as_problems([lack]))
    if purpose != "sft":
        found.problems += _safety_problems(config)
    if purpose != "sft" and not found.problems:  # a missing module is already reported
        found.problems += own_code.problems_of(config, found.train)
    if is_here:
        found.absent += machine.devices(config)
        found.notes += _unused_gpus(config, purpose)
    if purpose != "sft":
        found.absent += reward_services.problems_of(config)
        found.absent += [Problem((f"reward.{key}",), *words) for key, *words in silent_endpoints(config.reward)]
        found.absent += [Problem((f"reward.{key}",), *words) for key, *words in sandbox_problems(config.reward)]
        found.absent += called_models.silent_endpoints(config)
    found.absent += machine.ports(config)
    if purpose in ("train", "validate"):
        look_at_memory(config, found, is_here)
    if is_here:
        found.absent += machine.room_for_workers(config)
    elif purpose == "validate":  # a run checks this when it has its folder, which must be visible on every node
        seen = survey(config)
        found.problems, found.absent, found.seats = (
            found.problems + seen.problems,
            found.absent + seen.absent,
            seen.seats,
        )
    return found


def _safety_problems(config: RunConfig) -> Iterator[Problem]:
    """Problems of the files and functions of safety stages, which each rollout worker loads."""
    for key, make in (
        ("rollout.safety", lambda: SafetyFilter(config.rollout.safety, "rollout.safety")),
        ("rollout.red_team", lambda: RedTeamJudge(config.rollout.red_team)),
    ):
        try:
            make()
        except UserError as error:
            yield as_problem(error.where or key, error)


def _cleaned(config: RunConfig, found: Preflight) -> RunConfig:
    """The configuration that reads the rows which the stages of data.train kept. Raises UserError."""
    if not config.data.train.stages:
        return config
    found.cleaned = CleanedTrain(config)
    found.notes += [words(found.cleaned.report), *found.cleaned.report.notes]
    return reading_cleaned(config, found.cleaned.folder)


def _unused_gpus(config: RunConfig, purpose: Purpose) -> Iterator[str]:
    """Notes about GPUs that the processes of this purpose do not use."""
    if purpose != "sft":
        return machine.unused_gpus(config)
    start = config.warm_start
    return machine.unused_by_one_process(start.sft.device, "warm_start.sft.device") if start else iter(())


def _one_demonstration(config: RunConfig) -> RunConfig:
    """The config with one generated demonstration instead of all, which is enough to check that they can be
    generated.
    """
    start = config.warm_start
    if start is None or start.data.generator is None:
        return config
    data = start.data.model_copy(update={"limit": 1})
    return config.model_copy(update={"warm_start": start.model_copy(update={"data": data})})


def _table(key: str, load: Callable[[], Table | None], found: Preflight, purpose: Purpose) -> Table | None:
    try:
        table = load()
    except (UserError, OperationError) as caught:
        error = caught if isinstance(caught, UserError) else UserError(str(caught))
        problem = as_problem(error.where if error.where.startswith(STAGES) else key, error)
        if key == "data.eval" and purpose != "eval":
            problem = replace(problem, remedy=f"{problem.remedy}; or set data.eval=null to disable evaluation")
        found.problems.append(problem)
        return None
    if table is not None and table.skipped:
        found.notes.append(
            f"{key}: {len(table.skipped)} rows were skipped; the problem of the first one: {table.skipped[0]}"
        )
    return table
