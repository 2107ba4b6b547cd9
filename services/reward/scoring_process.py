"""One process of the pool: loads the scorers, then scores one answer after the other until its stream ends.

    python -m services.reward.scoring_process --fd N

It has no deadlines or retries and does not clean up after itself, because it may hang or die at any point: the pool
kills its process tree from outside. The stream is a separate socket pair, never stdin or stdout, so output of a scorer
cannot damage it; stdout and stderr are one pipe that the service reads.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import sys

import msgspec

from areal_like.errors import UserError
from areal_like.external.errors import ExternalStop
from areal_like.import_check import append_user_path
from areal_like.process import die_with_parent, freeze_heap, start_logging
from areal_like.secret_values import print_traceback, without_secrets
from services.processes.framing import FrameStream
from services.processes.process_tree import become_subreaper
from services.reward.composition import WeightedSum
from services.reward.config import ClipSettings, ScorerSettings
from services.reward.job import Began, Job, Ready, Refusal, Setup, decode_for_process


class Stream(FrameStream):
    """Messages of the service."""

    def receive(self) -> Setup | Job | None:
        """The next message; None at the end of the stream."""
        body = self.receive_frame()
        return decode_for_process(body) if body is not None else None


def flush_output() -> None:
    """Flush the output of scorers, which may have closed or replaced the streams."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def load(setup: Setup) -> WeightedSum | Refusal:
    """Load and warm up the scorers; a user's mistake becomes a Refusal."""
    try:
        scorers = tuple(ScorerSettings.model_validate(settings) for settings in setup.scorers)
        clip = ClipSettings.model_validate(setup.clip) if setup.clip is not None else None
        weighted_sum = WeightedSum.from_settings(scorers, clip, is_shared=setup.is_shared)
        weighted_sum.warm_up()
    except UserError as error:
        if error.__cause__ is not None:
            print_traceback(error.__cause__)
        return Refusal(sentence=without_secrets(str(error)))
    except (Exception, SystemExit) as error:  # a scorer's warm-up may raise anything; reported, then the process ends
        print_traceback(error)
        return Refusal(sentence=without_secrets(f"the scorers cannot be loaded ({type(error).__name__}: {error})"))
    return weighted_sum


def serve(stream: Stream) -> int:
    """Answer jobs until the stream ends. Returns the exit status."""
    setup = stream.receive()
    if not isinstance(setup, Setup):
        return 1
    die_with_parent(setup.service_pid)
    loaded = load(setup)
    if isinstance(loaded, Refusal):
        stream.send(loaded)
        return 2
    freeze_heap()
    stream.send(Ready(names=loaded.names, label=loaded.label, volatile=loaded.volatile))
    while (job := stream.receive()) is not None:
        assert isinstance(job, Job)
        job_id = job.job_id

        def began(name: str, job_id: int = job_id) -> None:
            stream.send(Began(job_id=job_id, scorer=name))

        try:
            outcome = loaded.score(job, began)
        except ExternalStop as error:  # ends the service, and so the run
            flush_output()
            stream.send(Refusal(sentence=without_secrets(str(error))))
            return 2
        flush_output()
        stream.send(outcome)
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="services.reward.scoring_process")
    parser.add_argument("--fd", type=int, required=True)
    stream = Stream(parser.parse_args().fd)
    start_logging("scorer", "WARNING")
    become_subreaper()
    faulthandler.enable()
    append_user_path()
    try:
        status = serve(stream)
    except (ConnectionError, msgspec.MsgspecError):  # the service has exited
        status = 1
    flush_output()
    os._exit(status)  # the user's threads and exit handlers must not keep a finished process


if __name__ == "__main__":
    main()
