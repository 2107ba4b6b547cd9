"""All messages between processes.

Their encoding is in encoding.py, sockets are in areal_like/transport. Arrays (`numpy.ndarray`, read-only after
decoding) are sent as raw ZeroMQ frames after the msgpack header.

Senders and receivers:
  every process -> hub      Hello, Heartbeat, Goodbye            hub -> process   Welcome, Refused, Shutdown
  rollout -> controller     Progress, SampleFinished, SampleReturned, VersionStaged, VersionLoaded, VersionFailed,
                            MemoryReleased, Draining, Incident
  controller -> rollout     Lease, SampleAck, CancelLeases, RecallLeases, AnnounceVersion, SwapVersion, ReleaseMemory
  trainer -> controller     BatchRequest, VersionPublished, VersionRewritten, CheckpointSaved, CheckpointFailed
  controller -> trainer     Batch, NoMoreBatches, RewriteVersion, SaveCheckpoint
  rollout -> reward         ScoreRequest                          reward -> rollout   ScoreReply, ScoreRefused
  rollout -> reward         EnvironmentRequest, EnvironmentClosed reward -> rollout   EnvironmentReply
  any process -> reward StatsRequest                          reward -> any process StatsReply
  candidate -> controller   JoinRequest, JoinedWorkerEnded        controller -> candidate JoinOffer
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal

import msgspec

from areal_like.environment import Action, Step
from areal_like.trajectory import Segment, Trajectory, check_disjoint
from areal_like.turn_checkpoint import TurnCheckpoint
from areal_like.verdict import Verdict

PROTOCOL = 5
"""Version of the wire protocol; peers with another version are refused."""

SHARED_RUN = "shared"
"""Run id of a reward service that belongs to no run; its clients prefix their names with their run's id."""
MAX_RESPONSE_CHARS = 16 << 20
"""Longest answer that is scored; a longer one gets the verdict `invalid`."""

Role = Literal["controller", "rollout", "trainer", "reward", "candidate"]
"""`candidate`: the command that asks a run to admit a rollout worker (`areal-like worker --join`)."""
Purpose = Literal["train", "eval"]
ReturnReason = Literal["segment", "drain", "migrated", "cancelled", "rejected", "refused"]
"""Reason why a lease is returned unfinished: its token budget is used, its worker leaves, it was recalled, it was
cancelled or its teacher did not answer, it can never run (e.g. the prompt is longer than the context), or a stage of
`rollout.safety` refuses its prompt."""


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all messages."""


# ---------------------------------------------------------------- every process


class Hello(Message, frozen=True, kw_only=True):
    """First message of a process to a hub. `incarnation` is a random value for each process start."""

    role: Role
    name: str
    pid: int
    run_id: str
    incarnation: str
    protocol: int = PROTOCOL
    capacity: int = 0
    """For rollout: number of samples that it can hold at once (its credits)."""
    token: str = ""
    """Token that proves that the process may use this name in this role (credentials.py). The hub does not pass it to
    its caller."""

    def __repr__(self) -> str:
        return f"Hello(role={self.role!r}, name={self.name!r}, pid={self.pid}, run_id={self.run_id!r})"


class Welcome(Message, frozen=True, kw_only=True):
    """The hub accepted a Hello.

    `incarnation` names this registration: a change means that the hub restarted, or had removed the peer. It is secret:
    a connection that presents it continues the registration.
    """

    run_id: str
    incarnation: str


class Refused(Message, frozen=True, kw_only=True):
    """The hub refuses a peer (wrong run, wrong protocol, name taken); the peer must exit with this reason."""

    reason: str


WAITS_FOR_TRAFFIC: Final = "wait:traffic"
"""State of a rollout worker whose samples wait for clients, which have no deadline."""


class Heartbeat(Message, frozen=True, kw_only=True):
    """Sent every `heartbeat_s`. `state` is the current state of the process ("generate", "paused", "wait:batch", ...).

    counters: monotonic progress and time counters, e.g. tokens, samples, busy_s, wait_s.
    """

    state: str
    counters: dict[str, float] = {}


class Goodbye(Message, frozen=True, kw_only=True):
    """The process disconnects normally."""

    reason: str = ""


class Shutdown(Message, frozen=True, kw_only=True):
    """Request to exit within `deadline_s`; finished but unacknowledged work should be sent before."""

    reason: str
    deadline_s: float


# ---------------------------------------------------------------- candidate <-> controller


class JoinRequest(Message, frozen=True, kw_only=True):
    """A machine offers one rollout worker to the run. host: its name, for messages."""

    host: str


class JoinOffer(Message, frozen=True, kw_only=True):
    """Answer to a JoinRequest: everything with which the worker is started, or why the run does not admit it."""

    reason: str = ""
    """Why the request is refused, as a sentence; empty: it is granted."""
    name: str = ""
    """Name of the worker."""
    spec: str = ""
    """Its ProcessSpec as JSON, with paths of the controller's machine."""
    keys: dict[str, bytes] = {}
    """Its credentials, by file name."""
    reward_keys: dict[str, bytes] = {}
    """Credentials for shared reward services; empty if the run uses its own."""
    model_files: dict[str, bytes] = {}
    """Files of the model folder without weights (config, tokenizer); empty if they are too large to be sent."""

    def __repr__(self) -> str:
        return f"JoinOffer(name={self.name!r}, reason={self.reason!r})"


class JoinedWorkerEnded(Message, frozen=True, kw_only=True):
    """The process of the worker has ended without a Goodbye. reason: how."""

    name: str
    reason: str


# ---------------------------------------------------------------- rollout <-> controller


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. temperature 0 is greedy (evaluation only); top_p 1 and top_k 0 disable these filters."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 1024
    """Bound on the whole answer, including tokens of earlier segments."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end an answer, in addition to the model's own end-of-sequence ids."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, none empty."""
    ignore_eos: bool = False
    """Ignore end-of-sequence and stop tokens: only max_new_tokens ends an answer."""


class SampleTask(msgspec.Struct, frozen=True, kw_only=True):
    """One sample to generate. (group_id, sample_index) identifies the sample; lease_id identifies this attempt."""

    lease_id: int
    group_id: int
    sample_index: int
    purpose: Purpose
    min_version: int
    """Lowest version that may sample tokens of this lease; the worker waits for it if necessary."""
    row: dict[str, Any]
    """The data row: at least `prompt` (str) or `messages` (list), and the columns that the scorer needs."""
    sampling: Sampling
    seed: int
    """Key of the random stream: the token at answer position p is drawn with (seed, p), on any worker."""
    prefix: Segment
    """Answer tokens already sampled by earlier leases (possibly empty)."""
    checkpoint: TurnCheckpoint | None = None
    """With a prefix, for an episode of several turns: state of the episode at the end of the prefix."""
    moved_from: str = ""
    """Worker that returned the sample so that this worker continues it; for the timeline."""
    segment_tokens: int = 0
    """Return the sample (SampleReturned) after this many new tokens; 0: never."""


class Lease(Message, frozen=True, kw_only=True):
    """Samples leased to a rollout worker; samples of one group are sent together if possible."""

    tasks: tuple[SampleTask, ...]


class SampleProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one lease since its last report; `start` is the answer position of the first of them.

    checkpoint: for an episode of several turns, its state at the end of the tokens.
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

    others: its trajectories other than `trajectory`. The constructor checks that no two of them share a sampled token.
    """

    lease_id: int
    group_id: int
    sample_index: int
    trajectory: Trajectory
    others: tuple[Trajectory, ...] = ()
    verdict: Verdict
    response_text: str = ""
    timings: dict[str, float] = {}
    """Seconds: queue_s, generate_s, paused_s, score_s; models_s if other models were called."""

    def __post_init__(self) -> None:
        check_disjoint(self.trajectories)

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """All of the sample."""
        return (self.trajectory, *self.others)


class SampleReturned(Message, frozen=True, kw_only=True):
    """A lease that is returned unfinished. `segment` contains the answer tokens from position `start` that were not
    reported yet; `checkpoint` is as in SampleProgress."""

    lease_id: int
    start: int
    segment: Segment
    reason: ReturnReason
    detail: str = ""
    """Why it can never run, if the reason is "rejected" or "refused"; what failed, if it is "cancelled"."""
    checkpoint: TurnCheckpoint | None = None


class SampleAck(Message, frozen=True, kw_only=True):
    """The samples of these leases are in the ledger; the worker may discard them."""

    lease_ids: tuple[int, ...]


class CancelLeases(Message, frozen=True, kw_only=True):
    """Stop working on these leases; no reply is expected."""

    lease_ids: tuple[int, ...]


class RecallLeases(Message, frozen=True, kw_only=True):
    """Return these leases with their tokens so far, to continue on other workers. A worker may keep leases that are
    expensive to move."""

    lease_ids: tuple[int, ...]


class Draining(Message, frozen=True, kw_only=True):
    """The worker shuts down gracefully and takes no more leases; it sends those it has as SampleReturned, then
    Goodbye.
    """

    reason: str


class Incident(Message, frozen=True, kw_only=True):
    """A failure inside the process, which has recovered (for example, its SGLang server exited and was restarted), or
    a warning of its workflow."""

    text: str


class AnnounceVersion(Message, frozen=True, kw_only=True):
    """A new policy version is published; load it. Only the newest announced version matters."""

    version: int
    lineage: str
    manifest_path: str
    """Path of its manifest, or the location of its stream (areal_like.weights.stream.Locator)."""
    deadline_s: float = 120.0
    """Deadline for transferring it to this host and verifying it."""
    is_held: bool = False
    """Do not swap it in before SwapVersion arrives."""


class VersionStaged(Message, frozen=True, kw_only=True):
    """A held version is complete and verified on this worker's host."""

    version: int
    lineage: str


class SwapVersion(Message, frozen=True, kw_only=True):
    """It is this worker's turn to swap in the version it has staged."""

    version: int
    lineage: str


class ReleaseMemory(Message, frozen=True, kw_only=True):
    """Release the engine's memory for the trainer, which uses the same devices. The next AnnounceVersion ends this."""

    number: int
    """Number of this request; the reply contains it."""


class MemoryReleased(Message, frozen=True, kw_only=True):
    """The engine has released weights and cache: `num_bytes`, in `seconds`."""

    number: int
    """Number of the newest request that this answers."""
    num_bytes: int
    seconds: float


class VersionLoaded(Message, frozen=True, kw_only=True):
    """The worker samples with this version from now on."""

    version: int
    lineage: str
    stage_s: float
    """Time of fetching, reading and verifying, while generation continued."""
    pause_s: float
    """Time for which generation was paused (the swap)."""


class VersionFailed(Message, frozen=True, kw_only=True):
    """The worker could not load this version; it continues with its old one until another is announced."""

    version: int
    lineage: str
    reason: str
    is_damaged: bool = False
    """Files of the published version are damaged or missing; it can be loaded if it is written again."""


# ---------------------------------------------------------------- trainer <-> controller


class BatchSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of a training batch. `reward` is the raw scored value; `others` as in SampleFinished."""

    group_id: int
    sample_index: int
    trajectory: Trajectory
    others: tuple[Trajectory, ...] = ()
    reward: float
    is_reused: bool = False
    """Of an earlier step (`replay_buffer`)."""

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """All of the sample."""
        return (self.trajectory, *self.others)


class BatchRequest(Message, frozen=True, kw_only=True):
    """Request for the batch of this step; the trainer may send it one step ahead."""

    step: int


class RunPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Position of the run when a batch was sent; it is stored in the checkpoint of the version that the batch
    trains.
    """

    ledger_seq: int = 0
    """Number of facts that the ledger had recorded, including this batch's."""
    drawn: int = 0
    """Groups drawn: the position in the data."""
    filtered: int = 0
    dropped: int = 0
    staleness: tuple[int, ...] = ()
    """Ids of the groups of this batch."""


class Batch(Message, frozen=True, kw_only=True):
    """The samples of one step, ordered by (group_id, sample_index); step n turns version n-1 into version n."""

    step: int
    lineage: str
    samples: tuple[BatchSample, ...]
    is_replay: bool = False
    position: RunPosition = RunPosition()


class NoMoreBatches(Message, frozen=True, kw_only=True):
    """The run ends after `last_step`: save a checkpoint, then exit."""

    last_step: int
    reason: str


class SaveCheckpoint(Message, frozen=True, kw_only=True):
    """Save a checkpoint after the running step; answered by CheckpointSaved or CheckpointFailed."""

    reason: str


class VersionPublished(Message, frozen=True, kw_only=True):
    """Version `version` is stored in the weight store, complete. For version > 0 also: step `version` is done.

    metrics: what the step measured (loss, gradient norm, clip fraction, ...); empty for the starting version.
    note: choices of the trainer (its attention kernel) for the display; with its first version only.
    """

    version: int
    lineage: str
    manifest_path: str
    metrics: dict[str, float] = {}
    note: str = ""


class RewriteVersion(Message, frozen=True, kw_only=True):
    """Request to write this version again completely, because its files are damaged. Answered by VersionRewritten."""

    version: int
    lineage: str


class VersionRewritten(Message, frozen=True, kw_only=True):
    """The version was written again completely. With a `reason`: it could not be written, for this reason."""

    version: int
    lineage: str
    manifest_path: str = ""
    reason: str = ""


class CheckpointSaved(Message, frozen=True, kw_only=True):
    """A checkpoint of `version` is complete at `path` (a folder)."""

    version: int
    path: str
    stall_s: float = 0.0
    """Time for which training was paused while the state was copied."""
    write_s: float = 0.0
    """Time from then until it was complete on disk, while training continued."""
    num_bytes: int = 0
    digest: str = ""
    """SHA-256 of its manifest, which has that of every file; empty: unknown."""

    def __post_init__(self) -> None:
        if self.digest and not re.fullmatch(r"[0-9a-f]{64}", self.digest):
            raise ValueError(f"the digest {self.digest[:80]!r} must consist of 64 hexadecimal digits")


class CheckpointFailed(Message, frozen=True, kw_only=True):
    """The checkpoint of `version` could not be written; the previous one is unchanged, and training continues."""

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
    """Name of the sample on the timeline (trace.arrow_name); empty: it is not drawn."""


class ScoreReply(Message, frozen=True, kw_only=True):
    """The one verdict on a request."""

    request_id: str
    verdict: Verdict
    num_open: int = 0
    """Number of requests of all clients that wait or run in the service."""
    num_workers: int = 1
    """Number of its scoring processes."""


class ScoreRefused(Message, frozen=True, kw_only=True):
    """The service will not score the request and sends no verdict on it. Send it to another service, or later."""

    request_id: str
    reason: Literal["full", "draining"]


EnvironmentStatus = Literal["answered", "unknown", "full", "draining", "timed_out", "crashed", "invalid"]
"""`answered`: there is a step. `unknown`: send the request again with the history. `full`, `draining`: send it to
another service, or later. The others are kinds of a verdict: the episode has failed permanently."""


class EpisodeHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Everything needed to replay an episode: its row, its seed, the actions so far, and the digests of the replies to
    reset and to each action (`Step.digest`)."""

    row: dict[str, Any]
    seed: int
    actions: tuple[Action, ...] = ()
    digests: tuple[str, ...] = ()


class EnvironmentRequest(Message, frozen=True, kw_only=True):
    """One call of an environment. `turn` 0 is its reset, turn n its n-th action; repeating a request is harmless.

    history: sent with the first request to a service, and after `unknown`: `turn` digests, `turn - 1` actions.
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
    """The step, if `answered`."""
    reason: str = ""
    attempts: int = 1
    """Number of attempts at the episode: the failures that it caused, plus one."""


class EnvironmentClosed(Message, frozen=True, kw_only=True):
    """These episodes have ended; no reply is sent."""

    episode_ids: tuple[str, ...]


class StatsRequest(Message, frozen=True, kw_only=True):
    """Request for statistics. Answered at once, also by a service that is full or draining."""

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
    """Names of scorers that a ScoreRequest may select."""
    num_workers: int
    counters: dict[str, float]
