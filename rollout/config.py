"""Settings of the rollout package. Does not import torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from areal_like import limits
from areal_like.config import AddBos, Threads
from areal_like.device_names import AUTO
from areal_like.red_team import RedTeamSettings
from areal_like.safety import SafetyStage
from areal_like.settings import DType, Settings
from rollout.model_settings import CalledModelSettings as CalledModelSettings
from rollout.model_settings import by_engine as by_engine
from rollout.preemption import PreemptionSettings

Interruption = Literal["recompute", "keep_kv", "drain"]
"""Handling of running answers when a new version is swapped in."""


SINGLE_TURN = "single_turn"
BUILT_IN_WORKFLOWS = {
    SINGLE_TURN: "rollout.workflow:SingleTurn",
    "environment": "rollout.episode:EnvironmentWorkflow",
    "tools": "rollout.tool_episode:ToolWorkflow",
    "agent": "rollout.agent.workflow:AgentWorkflow",
    "verifiers": "rollout.agent.verifiers:VerifiersWorkflow",
    "tool_sum": "rollout.tool_sum:ToolSum",
    "traffic": "rollout.agent.traffic:TrafficWorkflow",
}
"""Import paths by name; imported in rollout workers only."""


class ServerSettings(Settings):
    """What the sections of engines with servers have in common."""

    port: int = Field(0, ge=0, lt=65536)
    """Port of the first worker's server; each further worker's is one higher; 0: any free ports. On loopback only."""
    tp_size: int = Field(1, gt=0, le=limits.THREADS)
    """GPUs (on a CPU: processes) that share one copy of the model."""
    environment: dict[str, str] = Field({})
    """Variables added to the servers' environment."""
    stream_tokens: int = Field(1, gt=0, le=limits.TOKENS)
    """Number of tokens after which a server reports an answer's progress."""
    control_timeout_s: float = Field(60.0, gt=0, le=limits.SECONDS)
    """Deadline of every control call except loading weights. A server that answers no call for this long counts as
    dead."""
    load_timeout_s: float = Field(300.0, gt=0, le=limits.SECONDS)
    """Deadline of one swap on the server, its pause included. A server that misses it is replaced, and that is
    reported."""
    stall_timeout_s: float = Field(120.0, gt=0, le=limits.SECONDS)
    """A server with work that reports no token for this long, and is not paused, counts as dead."""
    max_restarts: int = Field(3, ge=0, le=limits.STEPS)
    """Largest number of restarts of a dead server within `restart_window_s`; after that its worker exits with the
    reason."""
    restart_window_s: float = Field(600.0, gt=0, le=limits.SECONDS)
    """Restarts older than this are forgotten."""

    def port_of(self, index: int) -> int | None:
        """Port of the server of worker `index`; None: any free one."""
        return self.port + index if self.port else None


class SGLangSettings(ServerSettings):
    """SGLang servers, one per rollout worker; used with `rollout.engine.kind: sglang`."""

    attach: tuple[str, ...] = ()
    """Instead of launching: addresses of running servers, one per worker, e.g. [http://127.0.0.1:30000]."""
    attach_key_file: str | None = None
    """With `attach`: a file with the servers' key (their `--api-key`, which must also be their `--admin-api-key` if
    they have one). Each launched server gets a random key."""
    memory_fraction: float | None = Field(None, gt=0, lt=1)
    """Share of a GPU's memory for weights and cache (`--mem-fraction-static`); None: SGLang's own choice."""
    quantization: Literal["none", "fp8"] = "none"
    """`fp8`: SGLang quantises the weights of linear layers to 8 bits at every load, which makes generation faster.
    Log-probs then differ from the trainer's, which the correction weight corrects. CUDA, bfloat16, Qwen2 and Qwen3
    only."""
    unquantized_layers: tuple[str, ...] = ()
    """With `quantization`: layers that are not quantised, by any whole part of a module's name, e.g. [model.layers.0,
    down_proj]. The head is never quantised."""
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Dtype of keys and values; `auto`: the compute dtype. The others halve the cache and need CUDA."""
    deterministic: bool = False
    """Samples depend only on weights, prompt and seed: batch-invariant kernels, and one random stream per sample.
    Slower; needs CUDA."""
    release_idle_s: float | None = Field(None, gt=0, le=limits.SECONDS)
    """Release GPU memory after this many seconds without work (mode: sync on shared GPUs), and allocate it again when
    there is work; None: never."""
    release: Literal["kv_cache", "all"] = "kv_cache"
    """Memory that `release_idle_s` releases; `all`: weights too, which are restored from a copy in host memory."""
    routed_experts: bool = False
    """Mixture-of-experts models: return, with each answer, the experts that each token was routed to in each layer
    (`Answer.routed_experts`). They are stored with the sample (`Trajectory.routed_experts`), in the ledger and in the
    trainer's batch, with layers x experts per token bytes for each token; `trainer.router_replay` uses them."""
    checksums: bool = False
    """Verify every load: compare the server's own checksum of each tensor with the published version's. If they differ,
    the version counts as refused. It is part of the pause; on CPUs only, with tp_size 1, for Llama, Qwen2 and Qwen3."""
    arguments: dict[str, str | int | float | bool | None] = Field({})
    """Further arguments of sglang.launch_server without the dashes, e.g. {chunked-prefill-size: 4096}; true for a flag
    that takes no value. Checked against that version's own list before the launch."""

    @property
    def is_rounded(self) -> bool:
        """Whether weights, or keys and values, have fewer bits than the trainer's, so that log-probs are not exactly
        the policy's."""
        return self.quantization != "none" or self.kv_cache_dtype != "auto"


class VLLMSettings(ServerSettings):
    """vLLM servers, one per rollout worker; used with `rollout.engine.kind: vllm`."""

    memory_fraction: float | None = Field(None, gt=0, lt=1)
    """Share of a GPU's memory for weights and cache (`--gpu-memory-utilization`); None: vLLM's own choice. On a CPU the
    cache has room for `num_slots` answers of `max_context` tokens."""
    probe: bool = False
    """Verify every load by a probe prompt: its log-probs on the server must be those of a forward pass by transformers
    with the published tensors, to 0.001 nats; if they differ, the version counts as refused. The worker then holds a
    copy of the model. CPUs and float32 only."""
    arguments: dict[str, str | int | float | bool | None] = Field({})
    """Further arguments of `vllm serve` without the dashes, e.g. {max-num-batched-tokens: 4096}; true for a flag that
    takes no value. Checked against that version's own list before the launch."""


class EngineSettings(Settings):
    """The generation engine and its capacity."""

    kind: str = "embedded"
    """`embedded`: our own continuous-batching decoder for Hugging Face causal LMs; `sglang` and `vllm`: an
    SGLang or a vLLM server per worker, in a separate environment; or `module:ATTRIBUTE`, the descriptor of your own
    engine."""
    options: dict[str, Any] = Field({})
    """Settings of your own engine, which its descriptor checks."""
    num_slots: int = Field(64, gt=0, le=limits.PROCESSES)
    """Answers generated concurrently (embedded: rows of the preallocated KV cache)."""
    max_context: int = Field(2048, gt=1, le=limits.TOKENS)
    """Longest prompt plus answer, in tokens."""
    session_cache_mb: float = Field(256.0, ge=0, le=limits.FILE_MEGABYTES)
    """Embedded engine, workflows of several turns: memory on the engine's device for keys and values of conversations
    between their turns, MB; the least recently used are removed first. 0: every turn computes its whole prompt."""
    device: str = AUTO
    """`cpu`, `cuda` or `cuda:N`; `auto`: GPUs if there are enough for all workers without the trainer's (with
    `placement: colocated`: with them), else `cpu`. On a cluster: if `launch.ray.rollout.gpus` or `pool_gpus` reserves
    them."""
    dtype: DType | None = None
    """Compute dtype; None: the model's."""
    python: str | None = None
    """Interpreter of the engine's environment, if it has a separate one; a relative path is searched in the current
    folder, then in the checkout. None: the engine's default (`.venv-sglang/bin/python` or
    `.venv-vllm/bin/python`, which `make sglang-cpu` and `make vllm-cpu` build for CPUs)."""
    stall_timeout_s: float = Field(300.0, gt=0, le=limits.SECONDS)
    """Embedded engine: an engine thread that makes no progress for this long counts as hung. The stacks of its process
    are logged, and its worker is restarted. The other engines have settings of their own."""
    sglang: SGLangSettings = SGLangSettings()
    """SGLang's own settings."""
    vllm: VLLMSettings = VLLMSettings()
    """vLLM's own settings."""


class RoutingSettings(Settings):
    """How samples are assigned to rollout workers."""

    policy: Literal["least_tokens", "round_robin"] = "least_tokens"
    """`least_tokens`: the worker that would finish first, by expected tokens and measured speed; `round_robin`: in
    turn."""
    affinity: float = Field(1.0, ge=0, le=limits.STEPS)
    """Samples of a group stay on one worker (one prefill of their prompt) while it has at most this many groups'
    expected work more than the least loaded worker; 0: each sample goes to the worker with the least waiting work."""
    migration: bool = True
    """Move running answers, by their tokens so far, from a loaded worker to one with idle slots."""
    min_gain_s: float = Field(2.0, gt=0, le=limits.SECONDS)
    """Smallest number of seconds by which a migration must shorten the longest wait."""


class AutoscaleSettings(Settings):
    """How the number of rollout workers that the run starts follows its waits (docs/operations.md)."""

    min_workers: int = Field(1, gt=0, le=limits.PROCESSES)
    """The run keeps at least this many."""
    max_workers: int = Field(gt=0, le=limits.PROCESSES)
    """The run has at most this many; each needs a device, as one of `areal-like add` does."""
    window_s: float = Field(30.0, gt=0, le=limits.SECONDS)
    """Seconds over which waits are measured; several steps fit into a good value."""
    windows: int = Field(3, gt=0, le=limits.STEPS)
    """Number of windows in a row that must agree before a worker is added or removed."""
    add_at: float = Field(0.3, gt=0, le=1)
    """A worker is added when the trainer waits for samples, with all slots taken, for at least this share of a
    window."""
    remove_at: float = Field(0.6, gt=0, le=1)
    """A worker is removed when the staleness bound leaves one without work for at least this share of a window."""


class RolloutSettings(Settings):
    """The pool of rollout workers."""

    num_workers: int = Field(1, gt=0, le=limits.PROCESSES)
    """Number of rollout worker processes."""
    pool_gpus: int | None = Field(None, gt=0, le=limits.DEVICES)
    """Size of the pool in GPUs, instead of num_workers: one worker for each (SGLang: for each `tp_size` of them)."""
    pool_cpus: int | None = Field(None, gt=0, le=limits.DEVICES)
    """Size of the pool in CPUs, instead of num_workers: one worker for each `threads` of them (auto: 1)."""
    autoscale: AutoscaleSettings | None = None
    """Add and remove workers by what the run waits for, beginning with num_workers; None: the number stays."""
    engine: EngineSettings = EngineSettings()
    """The engine inside each worker."""
    interruption: Interruption = "recompute"
    """What a new version does to running answers (arXiv 2505.24298, section 4.1)."""
    segment_tokens: int = Field(0, ge=0, le=limits.TOKENS)
    """Return a sample after this many new tokens, to continue on any worker (partial rollout); 0: never."""
    queue_samples: int = Field(0, ge=0, le=limits.GROUPS)
    """Number of samples that a worker may hold in addition to its slots, waiting or being scored; 0: as many as
    slots.
    """
    routing: RoutingSettings = RoutingSettings()
    """How samples are assigned to workers; no effect with a single worker."""
    workflow: str = SINGLE_TURN
    """How one sample is produced: `single_turn`, `environment` (turns in `reward.environment`), `tools` (calls of tools
    that `reward.environment` runs), `agent` (a program that calls the policy through OpenAI's or Anthropic's API),
    `traffic` (conversations of clients outside the run), `tool_sum` (running sums with a calculator), or your own
    `module:Class`."""
    workflow_options: dict[str, Any] = Field({})
    """Keyword arguments of the workflow's constructor."""
    models: tuple[CalledModelSettings, ...] = ()
    """Models that the workflow calls in addition to the policy, and roles of the policy."""
    safety: tuple[SafetyStage, ...] = ()
    """Stages that refuse, mask or count what they find in prompts and answers (docs/safety.md)."""
    red_team: RedTeamSettings = RedTeamSettings()
    """How answers to data.red_team are judged (docs/safety.md)."""
    prompt_template: str | None = None
    """None: the chat template if the tokenizer has one, else the unchanged prompt. Otherwise text with {prompt}."""
    add_bos: AddBos = "auto"
    """`auto`: the tokenizer's default. A BOS is never doubled."""
    progress_s: float = Field(0.5, gt=0, le=1.0)
    """Seconds between reports of partial work (at most 1.0)."""
    score_timeout_s: float = Field(300.0, gt=0, le=limits.SECONDS)
    """Longest wait for a verdict, including retries and a restart of the reward service; after it the verdict is
    `crashed`."""
    threads: Threads = "auto"
    """Compute threads per worker; auto: 1, or all cores in `mode: sync`."""
    max_restarts: int = Field(3, ge=0, le=limits.STEPS)
    """Number of times that a dead worker is restarted."""
    preemption: PreemptionSettings = PreemptionSettings()
    """Notices that a worker's machine will be taken away, after which it drains (docs/operations.md)."""

    def capacity_of(self, num_slots: int) -> int:
        """Number of samples that a worker with `num_slots` slots holds, including its queue."""
        return num_slots + (self.queue_samples or num_slots)
