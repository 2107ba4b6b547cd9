"""Settings of the rollout package. Torch-free."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from areal_like import limits
from areal_like.config import AddBos, Threads
from areal_like.settings import DType, Settings
from rollout.model_settings import CalledModelSettings as CalledModelSettings

Interruption = Literal["recompute", "keep_kv", "drain"]
"""What becomes of running answers when a new version is swapped in."""


BUILT_IN_WORKFLOWS = {
    "single_turn": "rollout.workflow:SingleTurn",
    "environment": "rollout.episode:EnvironmentWorkflow",
    "tools": "rollout.tool_episode:ToolWorkflow",
    "agent": "rollout.agent.workflow:AgentWorkflow",
    "verifiers": "rollout.agent.verifiers:VerifiersWorkflow",
    "tool_sum": "rollout.tool_sum:ToolSum",
}
"""Import paths by name; imported in rollout workers only."""


class SGLangSettings(Settings):
    """SGLang servers, one per rollout worker; used with `rollout.engine.kind: sglang`."""

    attach: tuple[str, ...] = ()
    """Instead of launching: addresses of running servers, one per worker, e.g. [http://127.0.0.1:30000]."""
    attach_key_file: str | None = None
    """With `attach`: a file that holds the servers' key (their `--api-key`, and `--admin-api-key` if they have one:
    the same). Servers that are launched get a random key each."""
    port: int = Field(0, ge=0, lt=65536)
    """Port of the first worker's server, each further worker's one higher; 0: any free ones. On loopback only."""
    tp_size: int = Field(1, gt=0, le=limits.THREADS)
    """GPUs (on a CPU: processes) that share one copy of the model."""
    memory_fraction: float | None = Field(None, gt=0, lt=1)
    """Share of a GPU's memory for weights and cache (`--mem-fraction-static`); None: SGLang's own choice."""
    quantization: Literal["none", "fp8"] = "none"
    """`fp8`: SGLang makes the linear layers' weights 8 bits wide at every load and computes with them, faster than it
    trains: log-probs then differ from the trainer's, which the correction weight fixes. CUDA, bfloat16, Qwen2 and
    Qwen3 only."""
    unquantized_layers: tuple[str, ...] = ()
    """With `quantization`: layers left as they are, by any whole part of a module's name, e.g. [model.layers.0,
    down_proj]. The head always is."""
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Keys and values; `auto`: the compute dtype. The others halve the cache and need CUDA."""
    deterministic: bool = False
    """Samples depend on nothing but weights, prompt and seed: kernels that do not care who shares their batch, one
    random stream per sample. Slower; needs CUDA."""
    release_idle_s: float | None = Field(None, gt=0, le=limits.SECONDS)
    """Give GPU memory back after so many seconds with nothing to generate (mode: sync on shared GPUs), and take it
    again when there is; None: never."""
    release: Literal["kv_cache", "all"] = "kv_cache"
    """What `release_idle_s` gives back; `all`: weights too, which a copy in host memory brings back."""
    routed_experts: bool = False
    """Mixture-of-experts models: bring back, with each answer, which experts each token was sent to in each layer
    (`Answer.routed_experts`). They are kept with the sample (`Trajectory.routed_experts`), in the ledger and in the
    trainer's batch, at layers x experts per token bytes a token; the trainer does not use them yet."""
    checksums: bool = False
    """Prove every load: ask the server for its own checksum of each tensor and compare with the published version's. A
    difference counts as a version it refused. Inside the pause; on CPUs, tp_size 1, Llama, Qwen2 and Qwen3."""
    arguments: dict[str, str | int | float | bool | None] = Field({})
    """Further arguments of sglang.launch_server without the dashes, e.g. {chunked-prefill-size: 4096}; true for a flag
    that takes no value. Checked against that version's own list before the launch."""
    environment: dict[str, str] = Field({})
    """Variables added to the servers' environment."""
    stream_tokens: int = Field(1, gt=0, le=limits.TOKENS)
    """A server reports an answer's progress every so many tokens."""
    control_timeout_s: float = Field(60.0, gt=0, le=limits.SECONDS)
    """Deadline of every control call but loading weights. A server that answers none for this long counts as dead."""
    load_timeout_s: float = Field(300.0, gt=0, le=limits.SECONDS)
    """Deadline of one swap on the server, its pause included. A server that misses it is replaced, and that is
    reported."""
    stall_timeout_s: float = Field(120.0, gt=0, le=limits.SECONDS)
    """A server with work that reports no token for this long, and is not paused, counts as dead."""
    max_restarts: int = Field(3, ge=0, le=limits.STEPS)
    """Restarts of a dead server within `restart_window_s`; one more, and its worker ends with the reason."""
    restart_window_s: float = Field(600.0, gt=0, le=limits.SECONDS)
    """Restarts older than this are forgotten."""

    @property
    def is_rounded(self) -> bool:
        """Weights, or keys and values, of fewer bits than the trainer's: the engine is another policy than it says."""
        return self.quantization != "none" or self.kv_cache_dtype != "auto"

    def port_of(self, index: int) -> int | None:
        """Port of the server of worker `index`; None: any free one."""
        return self.port + index if self.port else None


class EngineSettings(Settings):
    """Which engine generates, and with how much room."""

    kind: str = "embedded"
    """`embedded`: our own continuous-batching decoder for Hugging Face causal LMs; `sglang`: an SGLang server per
    worker, in an environment of its own; or `module:ATTRIBUTE`, the descriptor of an engine of your own."""
    options: dict[str, Any] = Field({})
    """Settings of an engine of your own, which its descriptor checks."""
    num_slots: int = Field(64, gt=0, le=limits.PROCESSES)
    """Answers generated at once (embedded: rows of the preallocated KV cache)."""
    max_context: int = Field(2048, gt=1, le=limits.TOKENS)
    """Longest prompt plus answer, in tokens."""
    session_cache_mb: float = Field(256.0, ge=0, le=limits.FILE_MEGABYTES)
    """Embedded engine, workflows of several turns: memory on the engine's device for keys and values of conversations
    between their turns, MB; the least recently used leave first. 0: every turn computes its whole prompt."""
    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:N`."""
    dtype: DType | None = None
    """Compute dtype; None: the model's."""
    python: str | None = None
    """Interpreter of the environment that the engine is installed in, where it has one of its own; a relative path is
    looked for in the current folder, then in the checkout. None: the engine's default (sglang:
    `.venv-sglang/bin/python`, which `make sglang-cpu` builds for CPUs)."""
    sglang: SGLangSettings = SGLangSettings()
    """SGLang's own settings."""


class RoutingSettings(Settings):
    """Which rollout worker takes which sample, where there are several."""

    policy: Literal["least_tokens", "round_robin"] = "least_tokens"
    """`least_tokens`: who would be done first, by expected tokens and measured speed; `round_robin`: in turn."""
    affinity: float = Field(1.0, ge=0, le=limits.STEPS)
    """Samples of a group stay on one worker (one prefill of their prompt) while it is at most so many groups' expected
    work behind the idlest worker; 0: each goes where the least work waits."""
    migration: bool = True
    """Move running answers, by their tokens so far, from a loaded worker to one with idle slots."""
    min_gain_s: float = Field(2.0, gt=0, le=limits.SECONDS)
    """A migration must bring the end of the longest wait nearer by this many seconds."""


class RolloutSettings(Settings):
    """The pool of rollout workers."""

    num_workers: int = Field(1, gt=0, le=limits.PROCESSES)
    """Rollout worker processes."""
    pool_gpus: int | None = Field(None, gt=0, le=limits.DEVICES)
    """Size of the pool in GPUs, instead of num_workers: one worker for each (SGLang: for each `tp_size` of them)."""
    pool_cpus: int | None = Field(None, gt=0, le=limits.DEVICES)
    """Size of the pool in CPUs, instead of num_workers: one worker for each `threads` of them (auto: 1)."""
    engine: EngineSettings = EngineSettings()
    """The engine inside each worker."""
    interruption: Interruption = "recompute"
    """What a new version does to running answers (arXiv 2505.24298, section 4.1)."""
    segment_tokens: int = Field(0, ge=0, le=limits.TOKENS)
    """Hand a sample back after this many new tokens, to continue anywhere (partial rollout); 0: never."""
    queue_samples: int = Field(0, ge=0, le=limits.GROUPS)
    """Samples a worker may hold alongside its slots, waiting or being scored; 0: as many as slots."""
    routing: RoutingSettings = RoutingSettings()
    """Which worker takes which sample; without effect for a single worker."""
    workflow: str = "single_turn"
    """How one sample is produced: `single_turn`, `environment` (turns in `reward.environment`), `tools` (calls of tools
    that `reward.environment` runs), `agent` (a program that asks an address with OpenAI's and Anthropic's APIs),
    `tool_sum` (running sums with a calculator), or `module:Class` of your own."""
    workflow_options: dict[str, Any] = Field({})
    """Keyword arguments of the workflow's constructor."""
    models: tuple[CalledModelSettings, ...] = ()
    """Models that the workflow calls besides the policy, and roles of the policy."""
    prompt_template: str | None = None
    """None: the chat template if the tokenizer has one, else the prompt as it is. Otherwise text with {prompt}."""
    add_bos: AddBos = "auto"
    """`auto`: what the tokenizer does by itself; a BOS is never doubled."""
    progress_s: float = Field(0.5, gt=0, le=1.0)
    """Seconds between reports of partial work (at most 1.0)."""
    score_timeout_s: float = Field(300.0, gt=0, le=limits.SECONDS)
    """Longest wait for a verdict, retries and a restart of the reward service included; past it: `crashed`."""
    threads: Threads = "auto"
    """Compute threads per worker; auto: 1, or all cores in `mode: sync`."""
    max_restarts: int = Field(3, ge=0, le=limits.STEPS)
    """How often a dead worker is started again."""

    def capacity_of(self, num_slots: int) -> int:
        """Samples that a worker with so many slots holds: those in its queue count as well."""
        return num_slots + (self.queue_samples or num_slots)
