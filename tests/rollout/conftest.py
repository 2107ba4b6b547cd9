"""A rollout worker in a test: real hubs on loopback, a fake engine, controller and reward service played by hand."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from made_keys import run_keys

from areal_like.config import ModelSettings, ProcessSpec, SamplingSettings, StalenessSettings
from areal_like.errors import UserError, WeightError
from areal_like.trace import Tracer
from areal_like.trajectory import Segment
from areal_like.transport.channel import Hub, Peer
from areal_like.verdict import Verdict
from areal_like.wire import messages as m
from rollout import reward_client, worker
from rollout.config import RolloutSettings
from rollout.engine.port import EngineCapabilities, GenerationOutcome, LoadReport
from rollout.incidents import Incidents
from rollout.reward_client import RewardClient
from rollout.sample_context import arrow_of
from rollout.tokens import PromptTokens
from rollout.workflow import SingleTurn

EOS = 2
RUN = "run-1"
PATIENCE_S = 300.0


class CharTokenizer:
    """One token a character: its code point. Enough of a tokenizer for a worker, and quick to make."""

    bos_token_id, eos_token_id, chat_template = None, EOS, None

    def encode(self, text, add_special_tokens=True):
        return [ord(character) for character in text]

    def decode(self, ids, **_):
        return "".join(chr(token) for token in ids if token != EOS)


def answer_token(seed: int, position: int, length: int) -> int:
    """The fake model: a pure function of (seed, position); an answer of `length` tokens, the last one EOS."""
    return EOS if position == length - 1 else 97 + (seed * 7 + position) % 26


class FakeEngine:
    """Samples `answer_token` at once, up to position `limit` (all requests stop there until it is raised)."""

    def __init__(self, *, num_slots=4, max_context=1000, length=6):
        self.capabilities = EngineCapabilities(
            num_slots=num_slots,
            max_context=max_context,
            interruptions=("recompute", "keep_kv", "drain"),
            per_request_seed=True,
        )
        self.version, self.length, self.limit = -1, length, 10**9
        self.requests, self.loads, self.interruptions, self.ended_sessions = [], [], [], []
        self.live: dict[int, list[tuple[int, float, int]]] = {}
        self.moved = asyncio.Event()
        self.load_gate = asyncio.Event()
        self.load_gate.set()
        self.failure: Exception | None = None
        self.is_closed = False
        self.num_tokens = 0

    async def start(self):
        pass

    def allow(self, limit):
        self.limit = limit
        self.moved.set()

    async def generate(self, request):
        assert self.version >= 0, "generate before any version"
        self.requests.append(request)
        if len(request.prompt_P) + len(request.prefix) + 1 > self.capabilities.max_context:
            raise UserError("does not fit")
        made = self.live[request.request_id] = []
        try:
            while True:
                position = len(request.prefix) + len(made)
                while position >= self.limit or self.failure is not None:
                    if self.failure is not None:
                        raise self.failure
                    self.moved.clear()
                    await self.moved.wait()
                made.append((answer_token(request.seed, position, self.length), -0.1 * (position + 1), self.version))
                self.num_tokens += 1
                end = self.end_of(request, made)
                if end is not None:
                    return GenerationOutcome(
                        request_id=request.request_id, segment=as_segment(made), end_reason=end, generate_s=0.5
                    )
                await asyncio.sleep(0)
        finally:
            del self.live[request.request_id]

    def end_of(self, request, made):
        total = len(request.prefix) + len(made)
        if made[-1][0] in request.sampling.stop_token_ids:
            return "stop"
        if total >= request.sampling.max_new_tokens:
            return "length"
        return "segment" if request.segment_tokens and len(made) >= request.segment_tokens else None

    def end_session(self, session_key):
        self.ended_sessions.append(session_key)

    def progress(self) -> Mapping[int, Segment]:
        return {request_id: as_segment(made) for request_id, made in self.live.items()}

    async def load_version(self, manifest_path, interruption):
        self.loads.append(manifest_path.name)
        self.interruptions.append(interruption)
        await self.load_gate.wait()
        if manifest_path.name.startswith("bad"):
            raise WeightError("checksum")
        self.version = int(manifest_path.name.removeprefix("v"))
        return LoadReport(version=self.version, stage_s=0.25, pause_s=0.125)

    async def release_memory(self):
        self.version = -1
        return 1000

    def counters(self):
        return {"tokens": float(self.num_tokens), "busy_s": 1.0, "idle_s": 2.0, "paused_s": 0.0}

    async def close(self):
        self.is_closed = True


def as_segment(made):
    tokens, logprobs, versions = zip(*made, strict=True) if made else ((), (), ())
    return Segment(np.array(tokens, np.int32), np.array(logprobs, np.float32), np.array(versions, np.int32))


def answer_of(task, length=6, start=0):
    """The tokens the fake model gives for a task, from position `start` on."""
    return [answer_token(task.seed, position, length) for position in range(start, length)]


@dataclasses.dataclass
class Rig:
    """One worker between a controller and a reward service that the test plays."""

    tmp_path: Path
    settings: RolloutSettings
    engine: FakeEngine
    workflow: object
    spec: ProcessSpec
    hub: Hub
    reward_hub: Hub | None
    score_timeout_s: float
    resend_s: float
    tokenizer: object
    stop: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    inbox: list = dataclasses.field(default_factory=list)
    reports: dict = dataclasses.field(default_factory=dict)
    questions: list = dataclasses.field(default_factory=list)
    incidents: Incidents = dataclasses.field(default_factory=Incidents)
    holds_verdicts: bool = False
    acks: bool = True

    def start(self):
        tokens = PromptTokens(
            self.tokenizer,
            template=self.settings.prompt_template,
            add_bos="auto",
            max_context=self.engine.capabilities.max_context,
            stop_ids=(EOS,),
        )
        peers = [self.peer(address, 0, reward_client.ACCEPT) for address in self.spec.reward_addresses]
        tracer = Tracer(self.tmp_path / "w.trace.jsonl", "w")
        rewards = RewardClient(
            peers,
            name="r0",
            deadline_s=5.0,
            total_deadline_s=self.score_timeout_s,
            silence_s=self.spec.silence_s,
            tick_s=0.05,
            arrow_of=lambda task: arrow_of(task, tracer),
        )
        self.worker = worker.RolloutWorker(
            self.spec,
            self.settings,
            engine=self.engine,
            tokens=tokens,
            workflow=self.workflow,
            rewards=rewards,
            make_peer=lambda capacity, status: self.peer(self.spec.hub_address, capacity, worker.ACCEPT, status),
            tracer=tracer,
            incidents=self.incidents,
            resend_s=self.resend_s,
        )
        self.task = asyncio.create_task(self.worker.run(self.stop))
        self.players = [asyncio.create_task(self.play_controller())]
        if self.reward_hub is not None:
            self.players.append(asyncio.create_task(self.play_rewards(self.reward_hub)))

    def peer(self, address, capacity, accept, status=lambda: m.Heartbeat(state="score")):
        hello = m.Hello(
            role="rollout", name="rollout-0", pid=os.getpid(), run_id=RUN, incarnation="i", capacity=capacity
        )
        return Peer(
            address=address,
            hello=hello,
            curve_dir=run_keys(),
            audience="controller" if address == self.spec.hub_address else "services",
            accept=accept,
            heartbeat_s=0.05,
            silence_s=self.spec.silence_s,
            status=status,
        )

    async def play_controller(self):
        while True:
            received = await self.hub.receive(0.2)
            if received is None:
                continue
            message = received[1]
            self.inbox.append(message)
            if isinstance(message, m.Progress):
                for item in message.items:
                    self.report(item.lease_id, item.start, item.segment)
            elif isinstance(message, m.SampleReturned):
                self.report(message.lease_id, message.start, message.segment)
            elif isinstance(message, m.SampleFinished) and self.acks:
                self.send(m.SampleAck(lease_ids=(message.lease_id,)))

    def report(self, lease_id, start, segment):
        """Reports of a lease must join without a gap and without an overlap."""
        if lease_id not in self.reports:
            self.reports[lease_id] = (start, Segment.empty())
        base, known = self.reports[lease_id]
        assert start == base + len(known), "a report does not start where the last one ended"
        self.reports[lease_id] = (base, known.joined(segment))

    async def play_rewards(self, hub):
        while True:
            received = await hub.receive(0.2)
            if received is not None and isinstance(received[1], m.ScoreRequest):
                self.questions.append(received[1])
                if not self.holds_verdicts:
                    self.give_verdict(received[1], hub)

    def give_verdict(self, question, hub=None):
        verdict = Verdict(kind="scored", value=float(question.num_tokens), scorer="fake")
        reply = m.ScoreReply(request_id=question.request_id, verdict=verdict)
        assert (hub or self.reward_hub).send("rollout-0", reply)

    def send(self, message):
        assert self.hub.send("rollout-0", message)

    async def until(self, condition, what="condition"):
        """Wait for something that must come; tests name no durations."""
        ends_s = time.monotonic() + PATIENCE_S
        while not condition():
            if self.task.done() and self.task.exception() is not None:
                raise self.task.exception()
            assert time.monotonic() < ends_s, f"never came: {what}"
            await asyncio.sleep(0.005)

    def got(self, kind):
        return [message for message in self.inbox if isinstance(message, kind)]

    async def ready(self, version=0):
        """Connected, and `version` loaded."""
        await self.until(lambda: "rollout-0" in self.hub.peers, "Hello")
        if version is not None:
            await self.load(version)

    async def load(self, version, lineage="l0"):
        self.announce(version, lineage)
        await self.until(lambda: any(x.version == version for x in self.got(m.VersionLoaded)), "VersionLoaded")

    def announce(self, version, lineage="l0", name=None, is_held=False):
        path = str(self.tmp_path / (name or f"v{version}"))
        self.send(m.AnnounceVersion(version=version, lineage=lineage, manifest_path=path, is_held=is_held))

    def lease(self, *tasks):
        self.send(m.Lease(tasks=tasks))

    def beat(self):
        """The newest heartbeat the controller has."""
        info = self.hub.peers.get("rollout-0")
        return info.heartbeat if info is not None and info.heartbeat is not None else m.Heartbeat(state="?")

    async def close(self):
        self.task.cancel()
        for player in self.players:
            player.cancel()
        results = await asyncio.gather(self.task, *self.players, return_exceptions=True)
        await self.worker._peer.close()
        await self.hub.close()
        if self.reward_hub is not None:
            await self.reward_hub.close()
        for result in results[1:]:
            if isinstance(result, Exception):
                raise result


def make_task(lease_id=1, *, group_id=0, index=0, prompt="ab", purpose="train", prefix=None, seed=None, **more):
    given = {"min_version": 0, "sampling": m.Sampling(max_new_tokens=100), **more}
    return m.SampleTask(
        lease_id=lease_id,
        group_id=group_id,
        sample_index=index,
        purpose=purpose,
        row={"prompt": prompt, "answer": "x"} if isinstance(prompt, str) else prompt,
        seed=10 * group_id + index if seed is None else seed,
        prefix=prefix or Segment.empty(),
        **given,
    )


async def make_hub(role, bind="tcp://127.0.0.1:0"):
    accept = {
        "controller": {
            m.Progress,
            m.SampleFinished,
            m.SampleReturned,
            m.VersionStaged,
            m.VersionLoaded,
            m.VersionFailed,
            m.Draining,
            m.Incident,
        },
        "reward": {m.ScoreRequest},
    }
    hub = Hub(run_id=RUN, role=role, bind=bind, curve_dir=run_keys(), accept=frozenset(accept[role]))
    return hub, await hub.start()


@pytest.fixture
def rig(tmp_path):
    """`rig(scenario, ...)` runs `scenario(rig)` with a worker started and everything closed afterwards."""

    def run(
        scenario,
        *,
        engine=None,
        workflow=None,
        tokenizer=None,
        with_rewards=True,
        mode="async",
        controller_silence_s=PATIENCE_S,
        score_timeout_s=PATIENCE_S,
        resend_s=PATIENCE_S,
        **settings,
    ):
        async def whole():
            hub, address = await make_hub("controller")
            reward_hub, reward_address = await make_hub("reward") if with_rewards else (None, None)
            spec = ProcessSpec(
                role="rollout",
                name="rollout-0",
                run_id=RUN,
                run_dir=str(tmp_path),
                hub_address=address,
                reward_addresses=(reward_address,) if with_rewards else (),
                parent_pid=os.getpid(),
                seed=1,
                heartbeat_s=0.05,
                silence_s=PATIENCE_S,
                controller_silence_s=controller_silence_s,
                mode=mode,
                model=ModelSettings(path=str(tmp_path)),
                sampling=SamplingSettings(),
                staleness=StalenessSettings(),
                groups_per_step=1,
                group_size=2,
                num_steps=1,
                weight_dir=str(tmp_path),
                settings={},
            )
            made = Rig(
                tmp_path=tmp_path,
                settings=RolloutSettings(**{"progress_s": 0.02, **settings}),
                engine=engine() if engine else FakeEngine(),
                workflow=workflow or SingleTurn(),
                spec=spec,
                hub=hub,
                reward_hub=reward_hub,
                score_timeout_s=score_timeout_s,
                resend_s=resend_s,
                tokenizer=tokenizer or CharTokenizer(),
            )
            made.start()
            try:
                async with asyncio.timeout(3 * PATIENCE_S):
                    await scenario(made)
            finally:
                await made.close()

        asyncio.run(whole())

    return run


@pytest.fixture
def fake():
    """The fake model and its parts."""
    return SimpleNamespace(
        Engine=FakeEngine, answer_of=answer_of, task=make_task, segment=as_segment, hub=make_hub, EOS=EOS, RUN=RUN
    )
