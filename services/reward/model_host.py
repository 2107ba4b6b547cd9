"""The process that has one reward model for all scoring processes, and batches their concurrent requests.

    python -m services.reward.model_host --options JSON --service-pid N

The model is in classifier.py; model_hosts.py restarts this process. It writes `ready`, or the user's mistake, to a file
next to its socket. Says `ready`, or the user's mistake, in a file alongside its socket.

Threads.  one per connection: waits for a request, puts it in the queue, waits for its answer (owner: the main thread).
main: waits for a request, woken by the queue; takes further waiting ones, at most `max_batch` texts; computes. Requests
are not delayed to fill a batch: those that arrive while the model computes are the next batch.
The queue is bounded, because each scorer sends one request at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import msgspec

from areal_like import quick_exit
from areal_like.errors import OperationError, UserError
from areal_like.process import die_with_parent, start_logging
from areal_like.secret_values import print_traceback
from services.reward.model_wire import Item, Reply, decode_items, receive, send
from services.reward.scorer_options import RewardModelOptions

QUIET_S = 5.0
BACKLOG = 256


@dataclass(frozen=True)
class Request:
    """A request of one connection; `answer` gets one Reply."""

    items: list[Item]
    answer: queue.SimpleQueue[Reply]


def status(socket_path: str) -> Path:
    """The file to which the process writes that it is ready, or why it cannot be."""
    return Path(f"{socket_path}.status")


def write_status(socket_path: str, refusal: str) -> None:
    """Write the status file; an empty `refusal` means ready."""
    half = Path(f"{socket_path}.half")
    half.write_text(refusal, encoding="utf-8")
    half.replace(status(socket_path))


def serve_connection(stream: socket.socket, requests: queue.SimpleQueue[Request]) -> None:
    """Serve one connection until it ends."""
    answer: queue.SimpleQueue[Reply] = queue.SimpleQueue()
    with contextlib.suppress(OSError), stream:  # the scorer was killed
        while (body := receive(stream)) is not None:
            try:
                items = decode_items(body)
            except msgspec.MsgspecError as error:
                send(stream, Reply(failure=f"not a request ({error})"))
                continue
            requests.put(Request(items, answer))
            send(stream, answer.get())  # the main thread answers every request, or the process ends


def accept(listener: socket.socket, requests: queue.SimpleQueue[Request]) -> None:
    """One thread per connection, indefinitely."""
    while True:
        stream, _ = listener.accept()
        threading.Thread(target=serve_connection, args=(stream, requests), daemon=True).start()


def next_batch(requests: queue.SimpleQueue[Request], max_texts: int) -> list[Request]:
    """Waiting requests, oldest first, up to `max_texts` texts; waits for the first. Empty after QUIET_S."""
    batch: list[Request] = []
    with contextlib.suppress(queue.Empty):
        batch.append(requests.get(timeout=QUIET_S))
        while sum(len(request.items) for request in batch) < max_texts:
            batch.append(requests.get_nowait())
    return batch


def serve(options: RewardModelOptions) -> None:
    """Load the model, write the status, and answer until killed. Raises UserError."""
    from transformers.utils import logging as transformers_logging

    from services.reward.classifier import Classifier

    transformers_logging.disable_progress_bar()
    assert options.socket is not None, "the service sets the socket"
    model = Classifier(options)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    Path(options.socket).unlink(missing_ok=True)  # of an earlier process
    listener.bind(options.socket)
    listener.listen(BACKLOG)
    requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
    threading.Thread(target=accept, args=(listener, requests), daemon=True).start()
    write_status(options.socket, "")
    while True:
        batch = next_batch(requests, options.max_batch)
        if not batch:
            continue
        try:
            scores = model.score([item for request in batch for item in request.items])
        except OperationError as error:
            for request in batch:
                request.answer.put(Reply(failure=str(error)))
            continue
        for request in batch:
            mine, scores = scores[: len(request.items)], scores[len(request.items) :]
            request.answer.put(Reply(scores=mine))


def main() -> None:
    parser = argparse.ArgumentParser(prog="services.reward.model_host")
    parser.add_argument("--options", required=True)
    parser.add_argument("--service-pid", type=int, required=True)
    arguments = parser.parse_args()
    start_logging("model-host", "WARNING")
    die_with_parent(arguments.service_pid)
    options = RewardModelOptions.model_validate_json(arguments.options)
    try:
        serve(options)
    except UserError as error:
        if error.__cause__ is not None:
            print_traceback(error.__cause__)
        assert options.socket is not None
        write_status(options.socket, str(error))
        sys.exit(2)


if __name__ == "__main__":
    quick_exit.run(main)
