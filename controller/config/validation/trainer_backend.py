"""Cross-checks of the trainer backend, based on its descriptor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from controller.config.backends import REGISTERED, backend_of, layout_faults, ranks_fault
from controller.config.engines import as_problems, engine_of
from controller.config.problems import Problem
from controller.config.run_config import RunConfig
from trainer.model.split_sizes import split_fault


def backend_problems(config: RunConfig) -> Iterator[Problem]:
    """Problems of trainer.backend, trainer.ranks, and the sections of all backends."""
    trainer, backend = config.trainer, backend_of(config)
    if (fault := ranks_fault(backend, trainer.ranks)) is not None:
        what, remedy = fault
        yield Problem(("trainer.ranks", "trainer.backend"), what, remedy)
    if trainer.router_replay and not engine_of(config).records_routes(config.rollout.engine):
        yield Problem(
            ("trainer.router_replay", "rollout.engine.kind"),
            "the engine does not record which experts it uses",
            "set rollout.engine.kind: sglang with sglang.routed_experts: true, or set router_replay: false",
        )
    for layout in layout_faults(backend, trainer):
        yield Problem(layout.keys, layout.what, layout.remedy)
    yield from as_problems(backend.option_problems(trainer.backend_options))
    for known in {**REGISTERED, trainer.backend: backend}.values():
        yield from as_problems(known.setting_problems(trainer))
    if config.is_colocated and not backend.releases_devices(trainer):
        able = [known.when_colocated for known in REGISTERED.values() if known.when_colocated]
        yield Problem(
            ("trainer.backend", "placement"),
            f"with placement: colocated, the trainer must release the devices between steps, but {trainer.backend} "
            "keeps its state on them",
            f"set trainer.backend: {', or '.join(able)}",
        )


def head_problems(config: RunConfig, model: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of heads that the ranks of a sequence group cannot share, and of sizes that ranks cannot split. model:
    its config.json. Pure."""
    tensor = config.trainer.tensor_parallel
    if tensor > 1 and (fault := split_fault(model, tensor)) is not None:
        what, remedy = fault
        yield Problem(("trainer.tensor_parallel", "model.path"), what, remedy)
    size = config.trainer.sequence_parallel
    heads = {**model, **(model.get("text_config") or {})}.get("num_attention_heads")
    if isinstance(heads, int) and heads > 0 and heads % size:
        able = ", ".join(str(one) for one in range(1, heads + 1) if heads % one == 0)
        what = f"{size} ranks cannot share the model's {heads} attention heads equally"
        yield Problem(("trainer.sequence_parallel", "model.path"), what, f"set sequence_parallel to one of {able}")
