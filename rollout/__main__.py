"""`python -m rollout --spec FILE`: one rollout worker process.

It assembles the worker from a ProcessSpec. torch and transformers are imported inside `main`, after `run_process` has
limited the threads. torch and transformers are imported only inside `main`, after `run_process` has limited the
threads.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pydantic

from areal_like import quick_exit
from areal_like.config import ProcessSpec
from areal_like.errors import UserError
from areal_like.process import run_process
from areal_like.trace import Tracer
from areal_like.transport.channel import Peer
from areal_like.transport.credentials import Audience
from areal_like.wire.messages import SHARED_RUN, Heartbeat, Hello
from rollout import reward_client, worker
from rollout.config import RolloutSettings
from rollout.engine import registry
from rollout.engine.descriptor import EngineContext
from rollout.engine.port import Engine
from rollout.incidents import Incidents
from rollout.models.hosting import make_hosts
from rollout.preemption import PreemptionSettings, notice
from rollout.reward_client import RewardClient
from rollout.sample_context import arrow_of
from rollout.tokens import PromptTokens, load_tokenizer, stop_ids
from rollout.weights.choice import receiver_of
from rollout.weights.port import Receiver
from rollout.workflow import check_models, load_workflow


async def main(spec: ProcessSpec, stop: asyncio.Event) -> None:
    """Run one worker until `stop` is set."""
    settings = settings_of(spec)
    workflow = load_workflow(settings.workflow, settings.workflow_options)
    check_models(workflow, [model.name for model in settings.models], spec.teacher_model)
    if spec.model.path is None:
        raise UserError(
            "no model folder is set",
            where="model.path",
            remedy="set this key to a model folder (the launcher creates one from model.init)",
        )
    model_dir = Path(spec.model.path)
    tracer = Tracer.of(spec.run_dir, spec.name, spec.trace)
    incidents = Incidents()
    preempted = asyncio.create_task(_stop_on_notice(settings.preemption, stop, incidents.add), name="preemption")
    try:
        tokenizer = load_tokenizer(model_dir, spec.model.tokenizer)
        tokens = PromptTokens(
            tokenizer,
            template=settings.prompt_template,
            add_bos=settings.add_bos,
            max_context=settings.engine.max_context,
            stop_ids=stop_ids(model_dir, tokenizer),
        )
        connect = Connections(spec)
        await worker.RolloutWorker(
            spec,
            settings,
            engine=make_engine(spec, settings, model_dir, tracer, incidents),
            tokens=tokens,
            workflow=workflow,
            rewards=connect.rewards(settings, tracer),
            make_peer=connect.controller,
            tracer=tracer,
            receiver=connect.receiver(),
            incidents=incidents,
            models=make_hosts(spec, settings, model_dir, tokenizer),
        ).run(stop)
    finally:
        preempted.cancel()
        tracer.close()


async def _stop_on_notice(settings: PreemptionSettings, stop: asyncio.Event, report: Callable[[str], None]) -> None:
    """Have the worker leave as after SIGTERM when its machine will be taken away."""
    report(f"preemption notice: {await notice(settings, report)}; the worker drains")
    stop.set()


def settings_of(spec: ProcessSpec) -> RolloutSettings:
    """The rollout section of the spec. Raises UserError naming the key."""
    try:
        return RolloutSettings.model_validate(spec.settings)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["rollout", *map(str, first["loc"])])
        raise UserError(first["msg"], where=where, remedy="see areal-like validate") from error


def make_engine(
    spec: ProcessSpec, settings: RolloutSettings, model_dir: Path, tracer: Tracer, incidents: Incidents
) -> Engine:
    """Create the engine that the settings name; failures from which it recovers are added to `incidents`. Raises
    UserError."""
    digits = spec.name.rpartition("-")[2]
    descriptor = registry.find_engine(settings.engine.kind, is_emulated=spec.emulation is not None)
    context = EngineContext(
        worker=spec.name,
        index=int(digits) if digits.isdigit() else 0,
        model_dir=model_dir,
        settings=settings.engine,
        dtype=settings.engine.dtype or spec.model.dtype,
        num_threads=spec.num_threads,
        seed=spec.seed,
        interruption=worker.interruption_of(spec, settings),
        max_new_tokens=spec.sampling.max_new_tokens,
        starts_empty=spec.is_colocated,
        startup_timeout_s=spec.startup_timeout_s,
        log_dir=Path(spec.run_dir) / "logs",
        emulation=spec.emulation,
        tracer=tracer,
        report=incidents.add,
    )
    return registry.make_engine(descriptor, context)


class Connections:
    """Creates this process's sockets: one to the controller, one to each reward service."""

    def __init__(self, spec: ProcessSpec) -> None:
        self._spec = spec
        self._incarnation = secrets.token_hex(8)

    def controller(self, capacity: int, status: Callable[[], Heartbeat]) -> Peer:
        """The connection to the controller's hub."""
        spec = self._spec
        return self._peer(spec.hub_address, self._hello(capacity), spec.curve_dir, "controller", worker.ACCEPT, status)

    def rewards(self, settings: RolloutSettings, tracer: Tracer) -> RewardClient:
        """The client of the reward services."""
        spec, hello, curve_dir = self._spec, self._hello(0), self._spec.curve_dir
        if spec.are_rewards_shared:
            hello = msgspec.structs.replace(hello, run_id=SHARED_RUN, name=f"{spec.run_id}/{spec.name}")
            assert spec.reward_curve_dir is not None, "shared services without keys"
            curve_dir = spec.reward_curve_dir
        peers = [
            self._peer(address, hello, curve_dir, "services", reward_client.ACCEPT, lambda: Heartbeat(state="score"))
            for address in spec.reward_addresses
        ]
        return RewardClient(
            peers,
            name=f"{self._spec.name}.{self._incarnation}",
            deadline_s=settings.score_timeout_s,
            total_deadline_s=settings.score_timeout_s,
            silence_s=self._spec.silence_s,
            scorer=spec.reward_scorer,
            arrow_of=lambda task: arrow_of(task, tracer),
            seed=self._spec.seed,
        )

    def receiver(self) -> Receiver:
        """The receiver of new versions."""
        spec = self._spec
        return receiver_of(
            spec,
            lambda address, accept: self._peer(
                address, self._hello(0), spec.curve_dir, "services", accept, lambda: Heartbeat(state="fetch")
            ),
        )

    def _hello(self, capacity: int) -> Hello:
        return Hello(
            role="rollout",
            name=self._spec.name,
            pid=os.getpid(),
            run_id=self._spec.run_id,
            incarnation=self._incarnation,
            capacity=capacity,
        )

    def _peer(
        self,
        address: str,
        hello: Hello,
        curve_dir: str,
        audience: Audience,
        accept: frozenset[type],
        status: Callable[[], Heartbeat],
    ) -> Peer:
        return Peer(
            address=address,
            hello=hello,
            curve_dir=Path(curve_dir),
            audience=audience,
            accept=accept,
            heartbeat_s=self._spec.heartbeat_s,
            silence_s=self._spec.silence_s,
            status=status,
        )


if __name__ == "__main__":
    quick_exit.run(lambda: run_process(main, sys.argv[1:]))
