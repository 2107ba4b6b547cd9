"""Messages between the reward service and one scoring process: length-prefixed msgpack, no pickle.

Framing is in services/processes/framing.py.

    service -> process    Setup once, then Job, one at a time; at the end of the stream the process exits
    process -> service    Ready or Refusal once, then for each job: Began per scorer, and one Outcome; or a Refusal, if
                          the user must change something before anything can be scored, and the process exits (not of
                          a shared service)
"""

from __future__ import annotations

from typing import Any

import msgspec

from areal_like.verdict import Verdict
from services.reward.config import RewardSettings


class Setup(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """First message to a scoring process. scorers: `ScorerSettings` as dicts; clip: `ClipSettings` of the sum;
    is_shared: the service is shared by several runs, so that no answer may end it."""

    scorers: list[dict[str, Any]]
    service_pid: int
    clip: dict[str, Any] | None = None
    is_shared: bool = False


class Job(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One answer to score. scorer: empty for the weighted sum, else the name of one of its parts."""

    job_id: int
    scorer: str
    row: dict[str, Any]
    response: str
    finish_reason: str
    num_tokens: int


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """All scorers are loaded and warm. names: one per scorer, in order; label: name and version of the sum.

    volatile: names of those that are not deterministic.
    """

    names: list[str]
    label: str
    volatile: list[str] = []


class Refusal(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A scorer cannot be used as configured: the user's mistake, in one sentence."""

    sentence: str


class Began(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """This scorer starts now; if the process dies, it died in this scorer."""

    job_id: int
    scorer: str


class Outcome(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """How one job ended. kind: kind of the Verdict. scorer_s: seconds in each scorer."""

    job_id: int
    kind: str
    value: float | None = None
    components: dict[str, float] = {}
    reason: str = ""
    scorer: str = ""
    scorer_s: dict[str, float] = {}

    def verdict(self, *, scorer: str, num_attempts: int, wall_s: float) -> Verdict:
        """The verdict for the client. A scoring process may have forged the outcome; an invalid one gives the verdict
        `invalid`."""
        try:
            return Verdict(
                kind=self.kind,  # type: ignore[arg-type]
                value=self.value,
                components=self.components,
                reason=self.reason,
                wall_s=wall_s,
                scorer=scorer,
                failed_in=self.scorer if self.kind != "scored" else "",
                attempts=num_attempts,
            )
        except ValueError as error:
            return Verdict(kind="invalid", reason=str(error), wall_s=wall_s, scorer=scorer, attempts=num_attempts)


_to_process = msgspec.msgpack.Decoder(Setup | Job)
_to_service = msgspec.msgpack.Decoder(Ready | Refusal | Began | Outcome)


def decode_for_process(body: bytes) -> Setup | Job:
    """Decode a message. Raises msgspec.MsgspecError."""
    return _to_process.decode(body)


def decode_for_service(body: bytes) -> Ready | Refusal | Began | Outcome:
    """Decode a message. Raises msgspec.MsgspecError."""
    return _to_service.decode(body)


def make_setup(settings: RewardSettings, service_pid: int, *, is_shared: bool = False) -> Setup:
    """The first message to a scoring process."""
    return Setup(
        scorers=[scorer.model_dump(mode="json") for scorer in settings.scorers],
        service_pid=service_pid,
        clip=settings.clip.model_dump(mode="json") if settings.clip is not None else None,
        is_shared=is_shared,
    )
