"""Claims about starting a server, and what is said when that does not work, against fake environments."""

from __future__ import annotations

import contextlib
import json
import socket

import psutil
import pytest

from areal_like.errors import EngineError, UserError
from rollout.config import EngineSettings, SGLangSettings
from rollout.engine.server.environment import Argument
from rollout.engine.server.http import ServerRefused
from rollout.engine.sglang.arguments import extra_words
from rollout.engine.sglang.attach import check_model, check_server
from rollout.engine.sglang.client import SGLangClient
from rollout.engine.sglang.environment import ENVIRONMENT
from rollout.engine.sglang.servers import explain_start

TABLE = {
    "chunked-prefill-size": Argument(True, False),
    "enable-metrics": Argument(False, False),
    "schedule-policy": Argument(True, False, ("lpm", "fcfs")),
    "cuda-graph-bs": Argument(True, True),
    "disable-overlap-schedule": Argument(False, False),
}


def words(interruption="recompute", **arguments):
    named = {name.replace("_", "-"): value for name, value in arguments.items()}
    return extra_words(
        EngineSettings(device="cpu", kind="sglang", sglang=SGLangSettings(arguments=named)), TABLE, interruption
    )


def test_further_arguments_become_words_of_the_command_line():
    given = {"chunked_prefill_size": 4096, "enable_metrics": True, "schedule_policy": "lpm", "cuda_graph_bs": "1 2 4"}
    assert words(**given) == [
        "--chunked-prefill-size", "4096", "--enable-metrics", "--schedule-policy", "lpm",
        "--cuda-graph-bs", "1", "2", "4",
    ]  # fmt: skip
    assert words(enable_metrics=False, schedule_policy=None) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"chunked_prefil_size": 1}, "no argument `chunked-prefil-size`.*did you mean chunked-prefill-size"),
        ({"enable_metrics": "yes"}, "does not accept a value"),
        ({"chunked_prefill_size": True}, "requires a value"),
        ({"schedule_policy": "best"}, "cannot be `best`.*one of lpm, fcfs"),
        ({"port": 30000}, "`port` is reserved for areal_like"),
        ({"model_path": "x"}, "`model-path` is reserved for areal_like"),
    ],
)
def test_arguments_this_version_does_not_take_are_refused(arguments, said):
    with pytest.raises(UserError, match=said):
        words(**arguments)


def test_keep_kv_refuses_the_overlapped_scheduler():
    with pytest.raises(UserError, match="keep_kv does not work with SGLang's overlap scheduler"):
        words("keep_kv", disable_overlap_schedule=False)


@pytest.mark.processes
def test_versions_are_asked_where_sglang_lives(fake_world):
    assert ENVIRONMENT.check_version(fake_world.python)["sglang"] == "0.5.23"
    with pytest.raises(UserError, match=r"SGLang 0\.4\.1 is installed .* 0\.5\.23 is required, .*policy version"):
        ENVIRONMENT.check_version(fake_world.environment("0.4.1"))
    with pytest.raises(UserError, match="SGLang is not installed"):
        ENVIRONMENT.check_version(fake_world.environment(None))
    with pytest.raises(UserError, match=r"no Python interpreter .*make sglang-cpu"):
        ENVIRONMENT.find_python(str(fake_world.root / "nothing"))


@pytest.mark.processes
def test_the_list_of_arguments_is_that_of_the_environment_and_asked_once(fake_world):
    table = ENVIRONMENT.argument_table(fake_world.python, is_cpu=True)
    assert table["schedule-policy"] == Argument(True, False, ("lpm", "fcfs"))
    assert not table["enable-metrics"].takes_value
    assert table["cuda-graph-bs"].takes_many
    (fake_world.python.parents[1] / "packages" / "sglang" / "srt" / "server_args.py").write_text("raise SystemExit")
    assert ENVIRONMENT.argument_table(fake_world.python, is_cpu=True) == table


@pytest.mark.parametrize(
    ("log", "kind", "said"),
    [
        ("launch_server.py: error: unrecognized arguments: --fast\n", UserError, "rejects its command line: .*--fast"),
        (
            "ValueError: Model architectures ['X'] are not supported for now. Supported",
            UserError,
            "cannot load this model",
        ),
        (
            "RuntimeError: Not enough memory. Please try increasing --mem-fraction-static.",
            UserError,
            "not enough memory for the SGLang",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate",
            UserError,
            "not enough memory for the SGLang.*CUDA out of memory",
        ),
        ("OSError: [Errno 98] Address already in use", UserError, "the port of the SGLang server is in use"),
        (
            'File "/x/sglang/srt/arg_groups/overrides.py", line 3, in f\nValueError: only triton, not torch_native\n',
            UserError,
            "rejects its arguments: ValueError: only triton, not torch_native",
        ),
        (  # as 0.5.23 said it
            '  File "/env/sglang/srt/arg_groups/resolution_hooks.py", line 139, in run_hook\n'
            '  File "/env/sglang/srt/arg_groups/overrides.py", line 1119, in _deterministic_attention_backend\n'
            "ValueError: Currently only ['ascend', 'fa3', 'fa4', 'flashinfer', 'intel_xpu', 'triton'] attention"
            " backends are supported for deterministic inference, but you explicitly specified 'torch_native'.\n",
            UserError,
            r"rejects its arguments: ValueError: Currently only \['ascend', .* for deterministic inference",
        ),
        (  # as 0.5.23 said it
            '  File "/env/sglang/srt/model_loader/utils.py", line 155, in resolve_transformers_arch\n'
            "ValueError: Cannot find model module. 'NobodyForCausalLM' is not a registered model in the Transformers"
            " library (only relevant if the model is meant to be in Transformers) and 'AutoModel' is not present in the"
            " model config's 'auto_map' (relevant if the model is custom).\n\n"
            "[2026-11-21 13:51:53] Received sigquit from a child process. It usually means the child failed.\n",
            UserError,
            "cannot load this model on this machine: .*'NobodyForCausalLM' is not a registered model ->",
        ),
        (
            "Exception: some_kernels with minimum required version 0.6.1 is not installed. Please install it.",
            UserError,
            "lacks a package: some_kernels with minimum required version 0.6.1 is not installed",
        ),
        ("starting\nKeyError: 'surprise'\nbye\n", EngineError, "status 1 before it was ready: KeyError: 'surprise'"),
    ],
)
def test_a_failed_start_is_explained_in_one_sentence(tmp_path, log, kind, said):
    error = explain_start(log, "the server ended with status 1", tmp_path / "log")
    assert type(error) is kind
    with pytest.raises(kind, match=said):
        raise error


@pytest.mark.processes
def test_a_server_that_refuses_to_start_leaves_nothing_behind(fake_world):
    async def body():
        fake_world.monkeypatch.setenv("FAKE_DIE_AT_START", "launch_server.py: error: argument --dtype: no")
        engine = fake_world.make()
        with pytest.raises(UserError, match="rejects its command line: argument --dtype: no"):
            await engine.start()
        await engine.close()
        assert fake_world.living_servers() == []

    fake_world.run(body())


def test_a_context_the_rotary_embedding_does_not_cover_is_refused_before_a_server_starts(fake_world):
    config = json.loads((fake_world.model_dir / "config.json").read_text())
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config["rope_parameters"] = {**rope, "original_max_position_embeddings": 64}
    (fake_world.model_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="128 is more than 64 positions"):
        fake_world.run(fake_world.make().start())
    assert fake_world.living_servers() == []


@pytest.mark.processes
def test_a_port_that_is_taken_is_said_before_anything_starts(fake_world):
    async def body():
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            engine = fake_world.make(port=port)
            with pytest.raises(UserError, match=rf"rollout.engine.sglang.port: port {port} is in use"):
                await engine.start()
        assert not (fake_world.root / "logs").exists()
        engine = fake_world.make(port=port)
        await engine.start()
        assert engine._keeper is not None
        assert (await engine._keeper.ready()).client.url == f"http://127.0.0.1:{port}"
        await engine.close()

    fake_world.run(body())


@pytest.mark.processes
def test_a_server_answers_nobody_without_its_random_key_which_no_command_line_shows(fake_world):
    async def body():
        async with fake_world.engine(load=None) as engine:
            live = await engine._keeper.ready()
            key = live.client._session.headers["Authorization"].removeprefix("Bearer ")
            assert len(key) == 64
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # one that has ended has no command line
                    assert key not in " ".join(process.cmdline())
            readable = [path for path in engine._keeper.scratch.rglob("*") if path.is_file()]
            for path in (*readable, fake_world.root / "logs" / "w.log"):
                assert path.stat().st_mode & 0o077 == 0, f"{path} is readable by others"
            for wrong in (None, "0" * 64):
                stranger = SGLangClient(live.client.url, control_timeout_s=5.0, load_timeout_s=5.0, key=wrong)
                with pytest.raises(ServerRefused, match="status 401"):
                    await stranger.pause("abort")
                with pytest.raises(ServerRefused, match="status 401"):
                    await stranger.model_info()
                await stranger.close()
            key_file = fake_world.root / "key"
            key_file.write_text(key + "\n")
            with pytest.raises(UserError, match=r"the SGLang server at .* cannot be used"):
                await fake_world.make(attach=live.client.url).start()
            guest = fake_world.make(attach=live.client.url, attach_key_file=str(key_file))
            await guest.start()
            await guest.load_version(fake_world.publish(1), "recompute")
            await guest.close()

    fake_world.run(body())


def test_an_attached_server_must_be_of_the_known_version_and_fit():
    good = {"version": "0.5.23", "disable_overlap_schedule": True, "context_length": 100}
    check_server("u", good, "keep_kv", 100)
    with pytest.raises(UserError, match=r"runs SGLang 0\.5\.22"):
        check_server("u", {**good, "version": "0.5.22"}, "recompute", 100)
    with pytest.raises(UserError, match="--disable-overlap-schedule"):
        check_server("u", {**good, "disable_overlap_schedule": False}, "keep_kv", 100)
    with pytest.raises(UserError, match="has a context of 100 tokens"):
        check_server("u", good, "recompute", 101)


def test_an_attached_server_must_hold_a_model_of_the_same_shape(tmp_path):
    for name, size in (("ours", 8), ("same", 8), ("other", 16)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"model_type": "qwen3", "hidden_size": {size}}}')
    check_model("u", {"model_path": str(tmp_path / "same")}, tmp_path / "ours")
    with pytest.raises(UserError, match="hidden_size is 16, expected 8"):
        check_model("u", {"model_path": str(tmp_path / "other")}, tmp_path / "ours")
    with pytest.raises(UserError, match="model_type is llama, expected qwen3"):
        check_model("u", {"model_path": "elsewhere", "model_type": "llama"}, tmp_path / "ours")
