"""What a probe asks its processes for, and what it leaves out; the processes are stood in for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import controller.probe.probe as probing
from areal_like.errors import OperationError
from areal_like.probe_files import LogprobSpec, ProbeAnswer, ProbeAnswers, ProbeSpec, TrySpec, TryVerdict
from controller.config.loading import load_config
from controller.config.run_config import RunConfig
from controller.data.gold_answers import gold_answers
from controller.data.table import DrawOrder
from controller.probe.finding import Seen
from controller.probe.probe import Probe
from trainer.prepare_spec import PrepareSpec

ROWS: list[dict[str, Any]] = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(6)]


class Processes:
    """Answers as the processes would: two answers a row, scored 0, 1, 2 and so on in the order asked for."""

    def __init__(self) -> None:
        self.orders: list[Any] = []
        self.limits: set[float] = set()
        self.lost: set[str] = set()

    def run(self, arguments: list[str], limit_s: float) -> None:
        module, self.limits = arguments[0], self.limits | {limit_s}
        if module in self.lost:
            raise OperationError(f"{module} ended with status -9: much\nno memory")
        if module == "trainer.prepare":
            spec = PrepareSpec.load(Path(arguments[2]))
            self.orders.append(spec)
            (Path(str(spec.publish_to)) / "v0").mkdir(parents=True)
            return
        kinds: dict[str, Any] = {
            "rollout.probe_answers": (ProbeSpec, self.answers),
            "services.reward.try_answers": (TrySpec, self.verdicts),
            "trainer.probe_logprobs": (LogprobSpec, self.logprobs),
        }
        kind, answer = kinds[module]
        order = msgspec.json.decode(Path(arguments[1]).read_bytes(), type=kind)
        self.orders.append(order)
        Path(arguments[2]).write_bytes(msgspec.json.encode(answer(order)))

    def answers(self, order: ProbeSpec) -> ProbeAnswers:
        made = [
            ProbeAnswer(
                row=row, text=f"{row}/{sample}", prompt_P=[row], tokens_R=[sample] * 3, logprobs_R=[-1.0] * 3,
                is_cut=sample == 1,
            )
            for row in range(len(order.rows))
            for sample in range(order.num_samples)
        ]  # fmt: skip
        return ProbeAnswers(answers=made)

    def verdicts(self, order: TrySpec) -> list[TryVerdict]:
        count = len(order.answers)
        return [TryVerdict(kind="scored", value=float(at), correct=None, reason="") for at in range(count)]

    def logprobs(self, order: LogprobSpec) -> list[list[float]]:
        return [[-2.0] * len(tokens) for _, tokens in order.sequences]

    def only(self, kind: type[Any]) -> Any:
        (order,) = [one for one in self.orders if isinstance(one, kind)]
        return order


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    made = Processes()

    class Store:
        def __init__(self, folder: Path, kind: str, keep: int) -> None:
            assert kind == "disk"
            self.folder = folder

        def newest(self) -> Path:
            return self.folder / "v0"

    monkeypatch.setattr(probing, "run_module", made.run)
    monkeypatch.setattr(probing, "WeightStore", Store)
    return made


def config_of(tmp_path: Path, *overrides: str) -> RunConfig:
    return load_config("own_data", [f"runs_dir={tmp_path}", *overrides]).config


def looked(config: RunConfig, *, num_prompts: int = 2, num_samples: int = 2, **more: Any) -> tuple[Seen, list[str]]:
    return Probe(config, num_prompts, num_samples, more.pop("warm_start", False), lambda _: None, **more).run(ROWS)


def test_first_draws_of_the_run_are_sampled_and_each_answer_is_scored_with_its_own_row(
    processes: Processes, tmp_path: Path
) -> None:
    config = config_of(tmp_path)
    seen, notes = looked(config, num_prompts=3)
    order = DrawOrder.of(config, ROWS)
    rows = [ROWS[order.row_index(draw)] for draw in range(3)]
    asked, tried = processes.only(ProbeSpec), processes.only(TrySpec)
    assert (seen.rows, asked.rows, asked.num_samples, asked.seed) == (rows, rows, 2, config.seed)
    assert asked.sampling == config.train_sampling
    sampled = [(one.row, one.response, one.finish_reason, one.num_tokens) for one in tried.answers[:6]]
    assert sampled == [
        (rows[number], f"{number}/{sample}", ("stop", "length")[sample], 3) for number in range(3) for sample in (0, 1)
    ]
    gold = list(gold_answers(rows))
    assert [(one.row, one.response, one.finish_reason) for one in tried.answers[6:]] == [
        (rows[row], text, "stop") for row, _, text in gold
    ]
    assert [one.value for one in seen.verdicts] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert [(one.row, one.column, one.response) for one in seen.gold] == gold
    assert [one.verdict.value for one in seen.gold] == [6.0 + at for at in range(len(gold))]
    assert notes == []


def test_no_more_is_drawn_than_the_run_would_draw(processes: Processes, tmp_path: Path) -> None:
    seen, _ = looked(config_of(tmp_path, "data.epochs=3"), num_prompts=40)
    assert len(seen.rows) == 6, "every row once, though there are 18 draws"
    seen, _ = looked(config_of(tmp_path, "data.epochs=null"), num_prompts=4)
    assert len(seen.rows) == 4


def test_log_probs_of_the_first_sixteen_answers_are_compared(processes: Processes, tmp_path: Path) -> None:
    config = config_of(tmp_path, "sampling.temperature=0.7")
    seen, _ = looked(config, num_prompts=6, num_samples=3)
    order = processes.only(LogprobSpec)
    assert len(seen.trainer_logprobs) == len(order.sequences) == 16
    assert order.sequences == [([number // 3], [number % 3] * 3) for number in range(16)]
    assert (order.temperature, order.device) == (0.7, config.trainer_devices[0])


def test_nothing_is_compared_where_nothing_was_sampled(processes: Processes, tmp_path: Path) -> None:
    seen, notes = looked(config_of(tmp_path), num_samples=0)
    assert (seen.trainer_logprobs, notes) == ([], [])
    assert not [one for one in processes.orders if isinstance(one, LogprobSpec)]


def test_trainer_that_dies_costs_its_log_probs_alone_and_says_why(processes: Processes, tmp_path: Path) -> None:
    processes.lost.add("trainer.probe_logprobs")
    seen, notes = looked(config_of(tmp_path))
    assert seen.trainer_logprobs == []
    assert notes == ["log-probs of the trainer are not available: no memory"]
    assert len(seen.verdicts) == 4


@pytest.mark.parametrize("lost", ["trainer.prepare", "rollout.probe_answers", "services.reward.try_answers"])
def test_probe_without_another_of_its_processes_fails_and_leaves_nothing(
    processes: Processes, tmp_path: Path, lost: str
) -> None:
    processes.lost.add(lost)
    with pytest.raises(OperationError, match=lost):
        looked(config_of(tmp_path))
    assert list(tmp_path.iterdir()) == [], "its folder"


def test_rewards_of_other_services_are_left_out(processes: Processes, tmp_path: Path) -> None:
    seen, notes = looked(config_of(tmp_path, 'reward.addresses=["tcp://10.0.0.1:5000"]'))
    assert (seen.verdicts, seen.gold) == ([], [])
    assert notes == ["rewards are not computed, because separate services score the answers (reward.addresses)"]
    assert len(seen.trainer_logprobs) == 4


def test_gold_answers_go_to_no_service_that_others_run(processes: Processes, tmp_path: Path) -> None:
    scorers = 'reward.scorers=[{"kind": "http", "options": {"url": "http://127.0.0.1:1/score"}}]'
    seen, notes = looked(config_of(tmp_path, scorers))
    assert (len(seen.verdicts), seen.gold, len(processes.only(TrySpec).answers)) == (4, [], 4)
    assert notes == ["gold answers are not scored, because a scorer sends answers to a service"]


def test_every_process_may_take_half_an_hour_more_than_a_worker_may_take_to_start(
    processes: Processes, tmp_path: Path
) -> None:
    looked(config_of(tmp_path, "launch.startup_timeout_s=77"))
    assert processes.limits == {1877.0}


@pytest.mark.parametrize(
    ("overrides", "is_half"),
    [
        (("trainer.precision=float32", "model.dtype=float32"), False),
        (("trainer.precision=bfloat16", "model.dtype=float32"), True),
        (("trainer.precision=float32", "model.dtype=bfloat16"), True),
        (("trainer.precision=float32", "model.dtype=bfloat16", "rollout.engine.dtype=float32"), False),
        (("trainer.precision=float32", "model.dtype=float32", "rollout.engine.dtype=bfloat16"), True),
    ],
)
def test_sixteen_bit_arithmetic_on_either_side_widens_the_limit(
    processes: Processes, tmp_path: Path, overrides: tuple[str, ...], is_half: bool
) -> None:
    assert looked(config_of(tmp_path, *overrides))[0].is_half is is_half


WORKFLOW_NOTE = "a probe does not run rollout.workflow; it only samples answers to the first prompt of each episode"
FEW_NOTE = (
    "the model is probed before its warm start, so few or no rewards are expected; use `--warm-start` to run the "
    "supervised steps first, unless an earlier run has already done the warm start"
)


def test_model_before_its_warm_start_is_probed_as_such(processes: Processes, tmp_path: Path) -> None:
    seen, notes = looked(load_config("quickstart", [f"runs_dir={tmp_path}"]).config)
    assert (notes, seen.is_untrained, seen.warm_start_follows) == ([FEW_NOTE], True, True)
    spec = processes.only(PrepareSpec)
    assert (spec.sft, spec.sft_rows, spec.publish_kind) == (None, None, "disk")


def test_supervised_steps_are_made_where_the_user_asks(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def kept(rows: list[dict[str, Any]], path: Path) -> None:
        written.append(f"{path} {rows}")

    monkeypatch.setattr(probing, "load_demonstrations", lambda _: ROWS)
    monkeypatch.setattr(probing, "write_rows", kept)
    config = load_config("quickstart", [f"runs_dir={tmp_path}"]).config
    seen, notes = looked(config, warm_start=True)
    assert (notes, seen.is_untrained, seen.warm_start_follows) == ([], False, False)
    spec = processes.only(PrepareSpec)
    assert config.warm_start is not None
    assert (spec.sft, written) == (config.warm_start.sft, [f"{spec.sft_rows} {ROWS}"])


@pytest.mark.parametrize("warm_start", [True, False])
def test_model_that_an_earlier_run_has_warm_started_is_used_as_it_is(
    warm_start: bool, processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "prepared_before", lambda _: tmp_path / "warm")
    config = load_config("quickstart", [f"runs_dir={tmp_path}"]).config
    seen, notes = looked(config, warm_start=warm_start)
    assert (notes, seen.is_untrained, seen.warm_start_follows) == ([], False, False)
    spec = processes.only(PrepareSpec)
    assert (spec.model.path, spec.model.init, spec.model.tokenizer) == (str(tmp_path / "warm"), None, "from_model")
    assert (spec.sft, spec.sft_rows) == (None, None)


def test_rewards_of_a_workflow_of_several_turns_are_left_out(processes: Processes, tmp_path: Path) -> None:
    seen, notes = looked(load_config("guess_number", [f"runs_dir={tmp_path}", "warm_start=null"]).config)
    assert (seen.verdicts, seen.gold) == ([], [])
    assert notes == [f"rewards are not computed, because {WORKFLOW_NOTE}"]
