"""Claims about what the sinks write: read back with their own readers."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import time
import urllib.request

import psutil
import pytest

from areal_like.errors import OperationError, UserError
from controller.telemetry.prometheus_sink import PrometheusSink, metric_of
from controller.telemetry.pulse import ProcessNow
from controller.telemetry.scalars import scalars
from controller.telemetry.sink_kinds import is_installed
from controller.telemetry.tracker_sink import WandbSink

STEP = {
    "reward_mean": 0.5, "loss": float("nan"), "kind": "step", "time_s": 1_700_000_000.0, "step": 3, "wall_s": 9.0,
    "staleness": [0, 1], "is_replay": False, "step_s": 0.25, "samples_per_s": 7.0,
}  # fmt: skip
EVAL = {"kind": "eval", "time_s": 1_700_000_001.0, "version": 3, "accuracy": 0.75, "eval": "periodic", "num_rows": 4}
PROCESSES = {
    "rollout-0": {**ProcessNow("rollout", "generate", None, "i", {"tokens": 100.0, "busy_s": 2.5}).row(), "rss_mb": 2},
    "reward": ProcessNow(
        "reward", "score", None, "j",
        {"queue": 4.0, "busy_s": 1.0, "score_p95_s": 0.1, "scorer.my.mod:fn.busy_s": 0.5, "pool.started": 2.0},
    ).row(),
    "trainer": ProcessNow("trainer", "starting", None).row(),
}  # fmt: skip
COUNTS = {"drawn": 5, "consumed": 2, "filtered": 1, "dropped": 0, "running": 1, "ready": 1}
PULSE = {"kind": "pulse", "time_s": 1_700_000_002.0, "wall_s": 12.5, "version": 3, "waits": [], "counts": COUNTS,
         "processes": PROCESSES}  # fmt: skip
NOW = {"kind": "now", "step": 3, "version": 3, "counts": COUNTS, "processes": PROCESSES}


def test_curves_of_a_row_have_names_and_an_axis():
    step, evaluation, pulse = scalars(STEP), scalars(EVAL), scalars(PULSE)
    assert step is not None
    assert evaluation is not None
    assert pulse is not None
    assert (step.axis, step.at) == ("step", 3.0)
    assert step.values == {
        "train/reward_mean": 0.5, "train/wall_s": 9.0, "train/step_s": 0.25, "train/samples_per_s": 7.0,
    }  # fmt: skip
    assert (evaluation.axis, evaluation.values) == ("version", {"eval/accuracy": 0.75, "eval/num_rows": 4.0})
    assert (pulse.axis, pulse.at) == ("wall_s", 12.5)
    assert pulse.values["run/running"] == 1.0
    assert pulse.values["process/rollout-0/tokens"] == 100.0
    assert "process/trainer/rss_mb" not in pulse.values, "unknown is not zero"
    assert scalars({"kind": "note", "time_s": 0.0}) is None


# ---------------------------------------------------------------- tensorboard


def test_tensorboard_reads_what_was_written_also_before_the_end(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from controller.telemetry.tensorboard_sink import TensorboardSink

    sink = TensorboardSink(tmp_path / "tb", remedy="")
    for row in (STEP, EVAL, PULSE):
        sink.write(row)
    found = EventAccumulator(str(tmp_path / "tb")).Reload()
    (reward,) = found.Scalars("train/reward_mean")
    assert (reward.step, reward.value, reward.wall_time) == (3, 0.5, 1_700_000_000.0)
    assert found.Scalars("eval/accuracy")[0].value == 0.75
    assert found.Scalars("process/reward/queue")[0].step == 12
    assert "train/loss" not in found.Tags()["scalars"], "not a number"
    sink.close()


def test_tensorboard_folder_that_cannot_be_made_is_a_users_mistake(tmp_path):
    pytest.importorskip("tensorboard")
    from controller.telemetry.tensorboard_sink import TensorboardSink

    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"metrics\.tensorboard"):
        TensorboardSink(tmp_path / "file" / "tb", remedy="")


@pytest.mark.processes
def test_no_sink_brings_torch_or_tensorflow_into_the_controller():
    code = (
        "import sys, pathlib, tempfile\n"
        "from controller.telemetry.tensorboard_sink import TensorboardSink\n"
        "from controller.telemetry.prometheus_sink import PrometheusSink\n"
        "from controller.telemetry.tracker_sink import WandbSink\n"
        "TensorboardSink(pathlib.Path(tempfile.mkdtemp()), remedy='').close()\n"
        "PrometheusSink('127.0.0.1', 0, run='r', losses=dict, remedy='').close()\n"
        "WandbSink({}, pathlib.Path('x'), remedy='')\n"
        "assert not {'torch', 'tensorflow', 'wandb'} & set(sys.modules)\n"
    )
    for package in ("tensorboard", "prometheus_client", "wandb"):
        pytest.importorskip(package)
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------- prometheus


@pytest.fixture
def endpoint():
    pytest.importorskip("prometheus_client")
    sink = PrometheusSink("127.0.0.1", 0, run="r", losses=lambda: {"wandb": {"written": 2, "lost": 1}}, remedy="")
    yield sink
    sink.close()


def scrape(sink):
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(sink.url, timeout=10.0) as answer:
        text = answer.read().decode()
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)), "a family stands there twice"
    return {
        (sample.name, frozenset(sample.labels.items())): (sample.value, family.type, family.documentation)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_finds_counters_by_process_and_role_and_the_newest_step(endpoint):
    assert scrape(endpoint)["areal_like_run_info", frozenset({("run", "r")})][0] == 1.0, "before the first row"
    for row in (STEP, EVAL, NOW):
        endpoint.write(row)
    found = scrape(endpoint)

    def value(name, **labels):
        return found[name, frozenset(labels.items())][:2]

    assert value("areal_like_tokens_total", process="rollout-0", role="rollout") == (100.0, "counter")
    assert value("areal_like_busy_seconds_total", process="reward", role="reward") == (1.0, "counter")
    assert value("areal_like_queue", process="reward", role="reward") == (4.0, "gauge")
    assert value("areal_like_score_p95_seconds", process="reward", role="reward") == (0.1, "gauge")
    assert value("areal_like_scorer_busy_seconds_total", process="reward", role="reward", scorer="my.mod:fn")[0] == 0.5
    assert value("areal_like_resident_memory_bytes", process="rollout-0", role="rollout") == (2.0 * 2**20, "gauge")
    assert value("areal_like_process_up", process="trainer", role="trainer") == (0.0, "gauge")
    assert value("areal_like_run_groups_total", fate="consumed") == (2.0, "counter")
    assert value("areal_like_run_steps_total") == (3.0, "counter")
    assert value("areal_like_train_reward_mean") == (0.5, "gauge")
    assert value("areal_like_train_step_seconds") == (0.25, "gauge")
    assert value("areal_like_train_samples_per_second") == (7.0, "gauge")
    assert value("areal_like_eval_accuracy") == (0.75, "gauge")
    assert value("areal_like_sink_lost_rows_total", sink="wandb") == (1.0, "counter")
    assert not any(name == "areal_like_train_loss" for name, _ in found), "not a number"
    assert all(documentation for _, _, documentation in found.values())


@pytest.mark.parametrize(
    ("key", "metric"),
    [
        ("wait_score_s", ("areal_like_wait_score_seconds", True, "")),
        ("hub.queue_full", ("areal_like_hub_queue_full", True, "")),
        ("scorer.a.b.p50_s", ("areal_like_scorer_p50_seconds", False, "a.b")),
        ("steps", ("areal_like_steps", True, "")),
        ("größe-1", ("areal_like_gr__e_1", True, "")),
    ],
)
def test_counter_gets_a_name_that_prometheus_takes(key, metric):
    assert metric_of(key) == metric


def test_port_in_use_is_one_clear_error_and_the_endpoint_is_gone_after_its_end(endpoint):
    port = int(endpoint.url.rsplit(":", 1)[1].split("/")[0])
    with pytest.raises(UserError, match=rf"metrics\.prometheus: 127\.0\.0\.1:{port}: the port is in use.*port=0"):
        PrometheusSink("127.0.0.1", port, run="r", losses=dict, remedy="")
    other = PrometheusSink("127.0.0.1", 0, run="r", losses=dict, remedy="")
    other.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(other.url, timeout=1.0)


def test_endpoint_listens_on_loopback_alone(endpoint):
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", int(endpoint.url.rsplit(":", 1)[1].split("/")[0])))  # nobody has it there


ANSWERED = {**EVAL, "answers": [{"row": 0, "prompt": "1|1", "answer": "2", "value": 1.0}]}


def test_tensorboard_shows_the_answers_of_an_evaluation_as_text(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from controller.telemetry.tensorboard_sink import TensorboardSink

    sink = TensorboardSink(tmp_path / "tb", remedy="")
    sink.write(ANSWERED)
    sink.close()
    found = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert list(found.PluginTagToContent("text")) == ["eval/answers/text_summary"]
    (event,) = found.Tensors("eval/answers/text_summary")
    assert event.step == 3
    assert event.tensor_proto.string_val[0].decode().splitlines()[2] == "| 3 | 0 | 1\\|1 | 2 | 1 |"


# ---------------------------------------------------------------- wandb


def log_records(data: bytes):
    """Records of a .wandb file: LevelDB's log format (blocks of 32 KiB; checksum, length, type) after 7 bytes."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, last
            yield whole
            whole = b""


def start_of(folder):
    return {
        "project": "p", "entity": None, "group": "g", "tags": ["t"], "mode": "offline", "name": "job", "id": "abc123",
        "dir": str(folder), "config": {"num_steps": 9},
    }  # fmt: skip


def test_folder_that_wandb_left_behind_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "left_behind").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not is_installed("left_behind")
    assert not is_installed("no_such_thing")
    assert is_installed("pytest")


@pytest.mark.e2e
def test_wandb_offline_run_holds_rows_axes_config_and_answers_as_a_table(tmp_path):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    sink = WandbSink(start_of(tmp_path), tmp_path / "wandb.log", remedy="")
    for row in (STEP, ANSWERED, PULSE):
        sink.write(row)
    sink.close()
    assert sink._process is not None
    assert sink._process.returncode == 0, (tmp_path / "wandb.log").read_text()
    (path,) = (tmp_path / "wandb").glob("offline-run-*/run-abc123.wandb")
    records = [wandb_internal_pb2.Record.FromString(data) for data in log_records(path.read_bytes())]
    history = [
        {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [float(row["train/reward_mean"]) for row in history if "train/reward_mean" in row] == [0.5]
    assert [float(row["eval/accuracy"]) for row in history if "eval/accuracy" in row] == [0.75]
    assert any(float(row.get("process/reward/queue", 0)) == 4.0 and float(row["wall_s"]) == 12.5 for row in history)
    axes = {r.metric.glob_name: r.metric.step_metric for r in records if r.WhichOneof("record_type") == "metric"}
    assert axes["train/*"] == "step"
    assert axes["process/*"] == "wall_s"
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.run_id, run.display_name) == ("p", "abc123", "job")
    assert any(item.key == "num_steps" and item.value_json == "9" for item in run.config.update)
    (path,) = (tmp_path / "wandb").glob("offline-run-*/files/media/table/eval/answers_*.json")
    assert json.loads(path.read_text())["data"] == [[3, 0, "1|1", "2", 1.0]]


def fake_wandb(folder, body):
    (folder / "wandb.py").write_text(body)
    return str(folder)


@pytest.mark.processes
def test_wandb_that_cannot_begin_is_an_error_of_the_row_and_of_the_next(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(
        "PYTHONPATH", fake_wandb(tmp_path, "def Settings(**_): pass\ndef init(**_): raise OSError('api key')")
    )
    sink = WandbSink(start_of(tmp_path), tmp_path / "wandb.log", remedy="")
    with pytest.raises(OperationError, match="OSError: api key"):
        sink.write(STEP)
    with pytest.raises(OperationError, match="the process of the sink ended"):
        sink.write(STEP)
    sink.close()


@pytest.mark.processes
def test_wandb_that_hangs_is_given_up_and_killed(tmp_path, monkeypatch):
    from controller.telemetry import tracker_sink

    body = (
        "import subprocess, time\n"
        "def Settings(**_): pass\n"
        "def init(**_):\n"
        "    service = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(service.pid))\n"
        "    time.sleep(600)"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", fake_wandb(tmp_path, body))
    monkeypatch.setattr(tracker_sink, "ANSWER_S", 0.3)
    monkeypatch.setattr(tracker_sink, "FINISH_S", 0.1)
    sink = WandbSink(start_of(tmp_path), tmp_path / "wandb.log", remedy="")
    started_s = time.monotonic()
    with pytest.raises(OperationError, match="did not respond for"):
        sink.write(STEP)
    with pytest.raises(subprocess.TimeoutExpired):
        sink.close()
    assert sink._process is not None
    assert sink._process.wait(300.0) == -9
    if (tmp_path / "pid").exists() and (pid := (tmp_path / "pid").read_text()):  # a busy machine may not get so far
        assert not psutil.pid_exists(int(pid))
    assert time.monotonic() - started_s < 60
