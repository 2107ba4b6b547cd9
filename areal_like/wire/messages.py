"""Every message that crosses a process border, in one place.

Owns: the tagged union of wire types. Refuses: behaviour; encoding lives in `wire`, sockets in `channel`.
Arrays (`numpy.ndarray`, read-only after decoding) travel as raw ZeroMQ frames alongside the msgpack header.

Who sends what:
  every process -> hub      Hello, Heartbeat, Goodbye            hub -> process   Welcome, Refused, Shutdown
  rollout -> controller     Progress, SampleFinished, SampleReturned, VersionStaged, VersionLoaded, VersionFailed,
                            MemoryReleased, Draining, Incident
  controller -> rollout     Lease, SampleAck, CancelLeases, RecallLeases, AnnounceVersion, SwapVersion, ReleaseMemory
  trainer -> controller     BatchRequest, VersionPublished, VersionRewritten, CheckpointSaved, CheckpointFailed
  controller -> trainer     Batch, NoMoreBatches, RewriteVersion, SaveCheckpoint
  rollout -> reward         ScoreRequest                          reward -> rollout   ScoreReply, ScoreRefused
  rollout -> reward         EnvironmentRequest, EnvironmentClosed reward -> rollout   EnvironmentReply
  anybody -> reward         StatsRequest                          reward -> anybody   StatsReply
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from areal_like.environment import Action, Step
from areal_like.trajectory import Segment, Trajectory, check_apart
from areal_like.turn_checkpoint import TurnCheckpoint
from areal_like.verdict import Verdict

PROTOCOL = 5
"""Number of the wire protocol; peers of another number are refused."""

SHARED_RUN = "shared"
"""Run id of a reward service that belongs to no run; its clients put their run's id in front of their names."""
MAX_RESPONSE_CHARS = 16 << 20
"""Longest answer that is scored; a longer one gets the verdict `invalid`."""

Role = Literal["controller", "rollout", "trainer", "reward"]
Purpose = Literal["train", "eval"]
ReturnReason = Literal["segment", "drain", "migrated", "cancelled", "rejected"]
"""Why a lease comes back unfinished: its token budget is used, its worker leaves, it was recalled, it was cancelled, or
it can never run (e.g. the prompt is longer than the context)."""


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all messages."""


# ---------------------------------------------------------------- every process


class Hello(Message, frozen=True, kw_only=True):
    """First message of a process to a hub. `incarnation` is random per process start."""

    role: Role
    name: str
    pid: int
    run_id: str
    incarnation: str
    protocol: int = PROTOCOL
    capacity: int = 0
    """Rollout: samples it can hold at once (its credits)."""
    token: str = ""
    """Proves that the process may use this name in this role (credentials.py). The hub does not pass it on."""

    def __repr__(self) -> str:
        return f"Hello(role={self.role!r}, name={self.name!r}, pid={self.pid}, run_id={self.run_id!r})"


class Welcome(Message, frozen=True, kw_only=True):
    """The hub accepted a Hello.

    `incarnation` names this registration: a change means that the hub restarted, or had forgotten us. It is secret: a
    connection that shows it continues the registration.
    """

    run_id: str
    incarnation: str


class Refused(Message, frozen=True, kw_only=True):
    """The hub refuses a peer (wrong run, wrong protocol, name taken); the peer must end with this reason."""

    reason: str


class Heartbeat(Message, frozen=True, kw_only=True):
    """Sent every `heartbeat_s`. `state` names what the process does now ("generate", "paused", "wait:batch", ...).

    counters: monotonic progress and time counters, e.g. tokens, samples, busy_s, wait_s.
    """

    state: str
    counters: dict[str, float] = {}


class Goodbye(Message, frozen=True, kw_only=True):
    """An orderly end."""

    reason: str = ""


class Shutdown(Message, frozen=True, kw_only=True):
    """End within `deadline_s`; finished but unacknowledged work should be sent before."""

    reason: str
    deadline_s: float


# ---------------------------------------------------------------- rollout <-> controller


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. temperature 0 is greedy (evaluation only); top_p 1 and top_k 0 switch the cuts off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 1024
    """Bound on the whole answer, tokens of earlier segments included."""
    stop_token_ids: tuple[int, ...] = ()
    """In addition to the model's own end-of-sequence ids."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, none empty."""
    ignore_eos: bool = False
    """No token ends an answer, only max_new_tokens does."""


class SampleTask(msgspec.Struct, frozen=True, kw_only=True):
    """One sample to produce. (group_id, sample_index) names it permanently; lease_id names this attempt at it."""

    lease_id: int
    group_id: int
    sample_index: int
    purpose: Purpose
    min_version: int
    """No token of this lease is sampled below this version; the worker waits for it if it must."""
    row: dict[str, Any]
    """The data row: at least `prompt` (str) or `messages` (list), and whatever the scorer needs."""
    sampling: Sampling
    seed: int
    """Key of the random stream: token at answer position p is drawn with (seed, p), wherever it is sampled."""
    prefix: Segment
    """Answer tokens already sampled by earlier leases (possibly empty)."""
    checkpoint: TurnCheckpoint | None = None
    """With a prefix, of an episode of several turns: where the prefix ends."""
    moved_from: str = ""
    """Worker that handed the sample back gracefully for this one to go on with; for the timeline."""
    segment_tokens: int = 0
    """Hand the sample back (SampleReturned) after this many new tokens; 0: never."""


class Lease(Message, frozen=True, kw_only=True):
    """Samples handed to a rollout worker; samples of one group come together where possible."""

    tasks: tuple[SampleTask, ...]


class SampleProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one lease since its last report; `start` is the answer position of the first of them.

    checkpoint: of an episode of several turns, where they end.
    """

    lease_id: int
    start: int
    segment: Segment
    checkpoint: TurnCheckpoint | None = None


class Progress(Message, frozen=True, kw_only=True):
    """Partial work of all running leases, at least once a second (`exact-interruption`)."""

    items: tuple[SampleProgress, ...]


class SampleFinished(Message, frozen=True, kw_only=True):
    """A finished and scored sample. Resent until SampleAck; the receiver drops duplicates.

    others: its trajectories besides `trajectory`, checked at birth to share no sampled token with it or each other.
    """

    lease_id: int
    group_id: int
    sample_index: int
    trajectory: Trajectory
    others: tuple[Trajectory, ...] = ()
    verdict: Verdict
    response_text: str = ""
    timings: dict[str, float] = {}
    """Seconds: queue_s, generate_s, paused_s, score_s; models_s where other models were called."""

    def __post_init__(self) -> None:
        check_apart(self.trajectories)

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """All of the sample."""
        return (self.trajectory, *self.others)


class SampleReturned(Message, frozen=True, kw_only=True):
    """A lease given back unfinished. `segment` holds the answer tokens from position `start` not reported yet, and
    `checkpoint` is as in SampleProgress."""

    lease_id: int
    start: int
    segment: Segment
    reason: ReturnReason
    detail: str = ""
    """Why it can never run, where reason is "rejected"."""
    checkpoint: TurnCheckpoint | None = None


class SampleAck(Message, frozen=True, kw_only=True):
    """The samples of these leases are in the ledger; the worker may forget them."""

    lease_ids: tuple[int, ...]


class CancelLeases(Message, frozen=True, kw_only=True):
    """Stop working on these leases; no answer is owed."""

    lease_ids: tuple[int, ...]


class RecallLeases(Message, frozen=True, kw_only=True):
    """Hand these leases back with their tokens so far: they go on elsewhere. What cannot move cheaply may be kept."""

    lease_ids: tuple[int, ...]


class Draining(Message, frozen=True, kw_only=True):
    """This worker leaves gracefully: no more leases; those it holds follow as SampleReturned, then Goodbye."""

    reason: str


class Incident(Message, frozen=True, kw_only=True):
    """Something broke inside this process and was recovered there (its SGLang server died and has a successor)."""

    text: str


class AnnounceVersion(Message, frozen=True, kw_only=True):
    """A new policy version is published; load it. Only the newest announced version matters."""

    version: int
    lineage: str
    manifest_path: str
    """Path of its manifest, or where it is streamed from (weights_stream.Locator)."""
    deadline_s: float = 120.0
    """For getting it to this host, complete and verified."""
    is_held: bool = False
    """Do not swap it in before SwapVersion says so."""


class VersionStaged(Message, frozen=True, kw_only=True):
    """A held version is complete and verified on this worker's host."""

    version: int
    lineage: str


class SwapVersion(Message, frozen=True, kw_only=True):
    """It is this worker's turn to swap in the version it has staged."""

    version: int
    lineage: str


class ReleaseMemory(Message, frozen=True, kw_only=True):
    """Give the engine's memory back: the trainer, on the same devices, is next. The next AnnounceVersion ends it."""

    number: int
    """Of this request; the answer carries it."""


class MemoryReleased(Message, frozen=True, kw_only=True):
    """The engine holds neither weights nor cache any more; `num_bytes` were given back, within `seconds`."""

    number: int
    """Of the newest request that this answers."""
    num_bytes: int
    seconds: float


class VersionLoaded(Message, frozen=True, kw_only=True):
    """The worker samples with this version from now on."""

    version: int
    lineage: str
    stage_s: float
    """Fetching, reading and verifying, while generation went on."""
    pause_s: float
    """Generation stood still for this long (the swap)."""


class VersionFailed(Message, frozen=True, kw_only=True):
    """The worker could not load this version; it goes on with its old one until instructed otherwise."""

    version: int
    lineage: str
    reason: str
    is_damaged: bool = False
    """Bytes of the published version are damaged or missing: written again, it can be loaded."""


# ---------------------------------------------------------------- trainer <-> controller


class BatchSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of a training batch. `reward` is the raw scored value; `others` as in SampleFinished."""

    group_id: int
    sample_index: int
    trajectory: Trajectory
    others: tuple[Trajectory, ...] = ()
    reward: float

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """All of the sample."""
        return (self.trajectory, *self.others)


class BatchRequest(Message, frozen=True, kw_only=True):
    """The trainer wants the batch of this step (may be asked one step ahead)."""

    step: int


class RunPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Where the run stood when a batch was handed out; it goes into the checkpoint of the version the batch makes."""

    ledger_seq: int = 0
    """Facts the ledger had recorded, this batch's among them."""
    drawn: int = 0
    """Groups drawn: the position in the data."""
    filtered: int = 0
    dropped: int = 0
    staleness: tuple[int, ...] = ()
    """Of each group of this batch."""


class Batch(Message, frozen=True, kw_only=True):
    """The samples of one step, ordered by (group_id, sample_index); step n turns version n-1 into version n."""

    step: int
    lineage: str
    samples: tuple[BatchSample, ...]
    is_replay: bool = False
    position: RunPosition = RunPosition()


class NoMoreBatches(Message, frozen=True, kw_only=True):
    """The run is over after `last_step`: save, then end."""

    last_step: int
    reason: str


class SaveCheckpoint(Message, frozen=True, kw_only=True):
    """Save a checkpoint after the running step; answered by CheckpointSaved or CheckpointFailed."""

    reason: str


class VersionPublished(Message, frozen=True, kw_only=True):
    """Version `version` is stored in the weight store, complete. For version > 0 also: step `version` is done.

    metrics: what the step measured (loss, gradient norm, clip fraction, ...); empty for the starting version.
    note: what the trainer chose by itself (its attention kernel), for the screen; with its first version only.
    """

    version: int
    lineage: str
    manifest_path: str
    metrics: dict[str, float] = {}
    note: str = ""


class RewriteVersion(Message, frozen=True, kw_only=True):
    """Write this version again, whole: its files are damaged. Answered by VersionRewritten."""

    version: int
    lineage: str


class VersionRewritten(Message, frozen=True, kw_only=True):
    """The version was written again, complete; with a `reason`: it was not, and why."""

    version: int
    lineage: str
    manifest_path: str = ""
    reason: str = ""


class CheckpointSaved(Message, frozen=True, kw_only=True):
    """A checkpoint of `version` is complete at `path` (a folder)."""

    version: int
    path: str
    stall_s: float = 0.0
    """Training stood still for so long while the state was copied."""
    write_s: float = 0.0
    """From then until it was complete on disk, while training went on."""
    num_bytes: int = 0


class CheckpointFailed(Message, frozen=True, kw_only=True):
    """The checkpoint of `version` could not be written; the one before is as it was, and training goes on."""

    version: int
    reason: str


# ---------------------------------------------------------------- reward


class ScoreRequest(Message, frozen=True, kw_only=True):
    """Score one answer. `row` is the data row; `deadline_s` bounds scoring, queueing excluded."""

    request_id: str
    scorer: str
    row: dict[str, Any]
    response: str
    finish_reason: str
    num_tokens: int
    deadline_s: float
    arrow: str = ""
    """Names the sample on the timeline (trace.arrow_name); empty: it is not drawn."""


class ScoreReply(Message, frozen=True, kw_only=True):
    """The one verdict on a request."""

    request_id: str
    verdict: Verdict
    num_open: int = 0
    """Requests that wait or run in the service, of all its clients."""
    num_workers: int = 1
    """Its scoring processes."""


class ScoreRefused(Message, frozen=True, kw_only=True):
    """This service will not score the request; it was not begun, or nobody will hear of it. Ask elsewhere, or later."""

    request_id: str
    reason: Literal["full", "draining"]


EnvironmentStatus = Literal["answered", "unknown", "full", "draining", "timed_out", "crashed", "invalid"]
"""`answered`: there is a step. `unknown`: ask again with the history. `full`, `draining`: ask elsewhere, or later. The
others are kinds of a verdict: the episode has failed for good."""


class EpisodeHistory(msgspec.Struct, frozen=True, kw_only=True):
    """All that makes an episode again: its row, its seed, the actions so far and what was answered to reset and each
    of them (`Step.digest`)."""

    row: dict[str, Any]
    seed: int
    actions: tuple[Action, ...] = ()
    digests: tuple[str, ...] = ()


class EnvironmentRequest(Message, frozen=True, kw_only=True):
    """One call of an environment. `turn` 0 is its reset, turn n its n-th action; asking again is harmless.

    history: with the first request to a service, and where it says `unknown`: `turn` digests, `turn - 1` actions.
    """

    episode_id: str
    turn: int
    action: Action = ""
    history: EpisodeHistory | None = None


class EnvironmentReply(Message, frozen=True, kw_only=True):
    """The answer to one request."""

    episode_id: str
    turn: int
    status: EnvironmentStatus
    step: Step | None = None
    """With `answered`."""
    reason: str = ""
    attempts: int = 1
    """How often the episode was begun because of itself."""


class EnvironmentClosed(Message, frozen=True, kw_only=True):
    """These episodes are over; nothing is answered."""

    episode_ids: tuple[str, ...]


class StatsRequest(Message, frozen=True, kw_only=True):
    """How are you? Answered at once, also by a service that is full or drains."""

    request_id: str


class StatsReply(Message, frozen=True, kw_only=True):
    """Health and statistics of a reward service; counters as in its heartbeats."""

    request_id: str
    name: str
    pid: int
    state: str
    uptime_s: float
    label: str
    """Names and versions of its scorers."""
    scorers: tuple[str, ...]
    """Names that a ScoreRequest may ask for alone."""
    num_workers: int
    counters: dict[str, float]
