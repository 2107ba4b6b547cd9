"""`areal-like serve` before it becomes the server: which model is meant, the key, mistakes."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
from argparse import Namespace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from made_adapter import UP, adapter_in

from areal_like.errors import UserError
from areal_like.serve_files import ServeSpec
from controller.cli import serve as module
from controller.cli.arguments import make_parser
from controller.cli.main import main
from controller.cli.serve import Found, find, is_loopback, key_of, safety_of


def model_in(folder: Path, *, template: str = "{{ messages }}") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template} if template else {}))
    header = b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    return folder


def run_in(folder: Path, config: str = "") -> Path:
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps({"format": 1, "status": "finished"}))
    (folder / "config.yaml").write_text(config)
    return folder


def arguments(*words: str) -> Namespace:
    return make_parser(lambda text: 2).parse_args(["serve", *words])


# ---------------------------------------------------------------- which model


def test_a_folder_a_finished_run_and_a_hub_name_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    model = model_in(tmp_path / "models" / "mine")
    assert find(str(model), None) == Found("mine", str(model), None, {})
    run = run_in(tmp_path / "first", "sampling: {temperature: 0.5}")
    model_in(run / "final")
    assert find(str(run), None) == Found("first", str(run / "final"), None, {"sampling": {"temperature": 0.5}})
    assert find("Qwen/Qwen3-0.6B", None) == Found("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", None, {})


def test_a_version_of_a_run_is_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_in(tmp_path / "first", "[damaged")
    model_in(run / "final")
    seen: list[Any] = []
    monkeypatch.setattr(module, "checkpoint_of", lambda *meant: seen.append(meant) or tmp_path / "step_000004")
    assert find(str(run), 4) == Found("first", None, tmp_path / "step_000004", {})
    (run / "final" / "config.json").unlink()
    assert find(str(run), None).checkpoint == tmp_path / "step_000004"
    assert seen == [(str(run), 4), (str(run), None)]


def test_a_checkpoint_in_the_parts_of_ranks_is_exported_first(tmp_path: Path) -> None:
    """The folder of one that rank 0 wrote is a model itself."""
    folder = model_in(tmp_path / "step_000004")
    (folder / "manifest.json").write_text("{}")
    (folder / "state.json").write_text("{}")
    assert find(str(folder), None) == Found("step_000004", str(folder), None, {})
    (folder / "model.safetensors").rename(folder / "part-00000-of-00001.safetensors")
    assert find(str(folder), None) == Found("step_000004", None, folder, {})
    with pytest.raises(UserError, match="--version can only be used with a run"):
        find(str(folder), 4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no-such-run"], "error: no-such-run: there is no run of this name, and there is no model folder"),
        (["models/mine", "--version", "3"], "error: --version: --version can only be used with a run"),
        (["models/cut"], "model.safetensors: the file is not a complete safetensors file"),
        (["models/base"], "error: models/base: the model's tokenizer has no chat template"),
        (
            ["models/mine", "--host", "0.0.0.0"],
            "--host: 0.0.0.0 is reachable from other machines, so an API key is required",
        ),
        (["models/mine", "--port", "65536"], "'65536' is not a port"),
        (
            ["models/mine", "--max-context", "1"],
            "'1' is too small: the minimum is 2, one token of the prompt and one of the answer",
        ),
        (["models/mine", "--temperature", "-1"], "'-1' is not a number from 0"),
        (["models/mine", "--key-file", "none.txt"], "error: --key-file: none.txt cannot be read"),
        (["models/mine", "--adapter", "sql"], "'sql' is not of the form NAME=FOLDER"),
        (["models/mine", "--adapter", "sql=none"], "none: no such folder -> specify the folder of an adapter"),
        (["models/mine", "--adapter", "mine=sql"], "--adapter: mine is already the name of the base model"),
        (["models/mine", "--adapter", "policy=sql"], "--adapter: policy is already the name of the base model"),
        (["models/mine", "--adapter", "a=sql", "--adapter", "a=sql"], "--adapter: two adapters have the name a"),
        (["models/mine", "--adapter", "a=dora"], "adapter_config.json: use_dora is true, which is not supported"),
        (["models/mine", "--adapter", "a=sql"], f"the base model has no linear module {UP}"),
    ],
)
def test_a_mistake_is_one_line_and_starts_nothing(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(module.KEY_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(module, "run_module", lambda *_: pytest.fail("nothing is prepared"))
    model_in(Path("models/mine"))
    model_in(Path("models/base"), template="")
    adapter_in(Path("sql"))
    adapter_in(Path("dora"), use_dora=True)
    (model_in(Path("models/cut")) / "model.safetensors").write_bytes(b"short")
    try:
        status = main(["serve", "--port", "0", *words])
    except SystemExit as ended:  # argparse's way
        status = int(str(ended.code))
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_port_in_use_is_known_before_the_model_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "run_module", lambda *_: pytest.fail("nothing is prepared"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", str(model_in(tmp_path / "mine")), "--port", str(port)]) == 2
    assert f"port {port} on 127.0.0.1 is in use" in capsys.readouterr().err


# ---------------------------------------------------------------- the key


def test_the_key_is_that_of_the_file_else_of_the_environment_else_a_random_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(module.KEY_VARIABLE, raising=False)
    assert key_of(arguments("m")) == ""
    monkeypatch.setenv(module.KEY_VARIABLE, "from-the-environment")
    assert key_of(arguments("m", "--host", "0.0.0.0")) == "from-the-environment"
    (file := tmp_path / "key").write_text("of-the-file\n")
    assert key_of(arguments("m", "--key-file", str(file))) == "of-the-file"


@pytest.mark.parametrize("key", ["two words", "schlüssel", "\n"])
def test_a_key_that_no_header_can_carry_is_refused(key: str, tmp_path: Path) -> None:
    (file := tmp_path / "key").write_text(key)
    with pytest.raises(UserError, match=r"printable ASCII characters|is empty"):
        key_of(arguments("m", "--key-file", str(file)))


@pytest.mark.parametrize(
    ("host", "is_safe"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.1", False), ("example.org", False)],
)  # fmt: skip
def test_only_loopback_needs_no_key_of_the_user_s(host: str, is_safe: bool) -> None:
    assert is_loopback(host) == is_safe


# ---------------------------------------------------------------- becoming the server


def order_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str, config: str = "") -> ServeSpec:
    """What the server would be started with; it is not started, and its folder goes."""
    run = run_in(tmp_path / "first", config)
    model_in(run / "final")
    orders: list[ServeSpec] = []

    class Store:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def newest(self) -> Path:
            return Path("manifest.json")

    def become(program: str, command: list[str], environment: dict[str, str]) -> None:
        assert command[:4] == [program, "-P", "-m", "rollout.serve"]
        assert module.KEY_VARIABLE not in environment
        assert set(module.ENDING) <= signal.pthread_sigmask(signal.SIG_BLOCK, ()), "it must clean up"
        path = Path(command[4])
        assert path.stat().st_mode & 0o077 == 0, "it holds the key"
        orders.append(msgspec.json.decode(path.read_bytes(), type=ServeSpec))
        raise OSError("not in a test")

    monkeypatch.setenv(module.KEY_VARIABLE, "the-key")
    monkeypatch.setattr(module, "run_module", lambda *_: None)
    monkeypatch.setattr(module, "WeightStore", Store)
    monkeypatch.setattr(module.os, "execve", become)
    with pytest.raises(OSError, match="not in a test"):
        module.serve(arguments(str(run), "--port", "0", *words))
    (order,) = orders
    assert not os.path.exists(order.folder)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(module.ENDING)
    return order


def test_a_run_is_served_as_it_was_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = """
        sampling: {temperature: 0.6}
        rollout: {workflow_options: {format: hermes}, engine: {max_context: 640}}
    """
    order = order_of(tmp_path, monkeypatch, config=config)
    assert (order.temperature, order.format, order.max_context) == (0.6, "hermes", 640)
    assert (order.name, order.key, order.host, order.dtype) == ("first", "the-key", "127.0.0.1", "float32")


def test_arguments_count_more_than_the_run_s_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--temperature 0 --format mistral --max-context 99 --max-tokens 8 --slots 3 --device cuda:1 --name n"
    config = "{sampling: {temperature: 0.6}, rollout: {engine: {max_context: 640}}}"
    order = order_of(tmp_path, monkeypatch, *words.split(), config=config)
    assert (order.temperature, order.format, order.max_context) == (0.0, "mistral", 99)
    assert (order.max_new_tokens, order.num_slots, order.device, order.dtype) == (8, 3, "cuda:1", "bfloat16")
    assert order.name == "n"


def test_adapters_are_passed_to_the_server_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module.model_folder, "tensor_shapes", lambda path: {f"{UP}.weight": (6, 4)})
    for name in ("sql", "chat"):
        adapter_in(tmp_path / name)
    order = order_of(tmp_path, monkeypatch, "--adapter", "one=sql", "--adapter", f"two={tmp_path / 'chat'}")
    assert order.adapters == {"one": str(tmp_path / "sql"), "two": str(tmp_path / "chat")}
    assert order.name == "first"


def test_a_model_without_a_run_has_settings_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = order_of(tmp_path, monkeypatch)
    assert (order.temperature, order.format, order.max_context, order.num_slots) == (1.0, None, 4096, 4)
    assert (order.max_new_tokens, order.adapters) == (0, {})


# ---------------------------------------------------------------- safety


def test_safety_stages_are_those_of_the_file_else_of_the_run(tmp_path: Path) -> None:
    of_run = [{"kind": "secrets", "action": "mask"}]
    (stage,) = safety_of(None, of_run)
    assert (stage["kind"], stage["action"], stage["look_at"]) == ("secrets", "mask", "both")
    file = tmp_path / "safety.yaml"
    file.write_text("- {kind: words, options: {words: [bad]}}")
    assert [one["kind"] for one in safety_of(str(file), of_run)] == ["words"]
    assert safety_of(None, None) == ()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("kind: words", "the safety stages must be a list of mappings"),
        ("- {kind: word}", "there is no safety stage `word`"),
        ("- {kind: words, options: {file: missing.txt}}", "missing.txt"),
        ("- {kind: secrets, colour: red}", r"stages.0.colour: Extra inputs are not permitted"),
        ("[{kind: secrets}, {kind: words, look_at: all}]", r"safety.yaml: stages.1.look_at: Input should be"),
        ("[{kind: secrets}, {kind: words, options: {file: none.txt}}]", r"stages.1: none.txt"),
        ("[", "the file cannot be read"),
    ],
)
def test_a_mistake_in_the_file_of_stages_is_named(tmp_path: Path, text: str, what: str) -> None:
    file = tmp_path / "safety.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=what):
        safety_of(str(file), None)
