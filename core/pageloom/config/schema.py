"""All that a configuration may say, outside the ``options`` of components.

The values are what `load_config` leaves: interpolations resolved, types converted, ranges checked.
"""

# ruff: noqa: RUF009 (`option` makes a dataclass field)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from pageloom.config.rules import (
    FRACTION,
    SIZE,
    SIZE_OR_NONE,
    Rule,
    at_least,
    between,
    matching,
    one_of,
    option,
    parse_size,
)
from pageloom.contract.sizes import bytes_in
from pageloom.plugins import Plugins

HIDDEN = "(hidden)"
REQUIRED = "???"  # OmegaConf's mark for a value that must be given

_NOT_EMPTY = matching(r"(?s).+", "text that is not empty")
_DEVICE = matching(r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda or cuda:N")


@dataclass
class ModelConfig:
    """Which model to load, and how."""

    path: str = option(REQUIRED, "File, folder or hub id; ${pkg:MODULE/FILE} works.", _NOT_EMPTY)
    loader: str = option("auto", "Weight loader; auto asks each whether the path is its own.")
    tokenizer: str | None = option(None, "Another tokenizer's path; null takes the model's own.")
    dtype: str = option(
        "auto",
        "Of weights and activations; auto takes the model's own.",
        one_of("auto", "float32", "bfloat16", "float16"),
    )
    max_model_len: int | None = option(
        None, "Most tokens of prompt and output together; null takes the model's own.", at_least(1)
    )
    trust_remote_code: bool = option(False, "Whether code that comes with the model may run.")
    options: dict[str, Any] = option({}, "Options of the loader.")


@dataclass
class SchedulerConfig:
    """How each step is planned."""

    policy: str = option("fcfs", "Scheduler.")
    max_num_seqs: int = option(256, "Most branches that run at once (seats).", at_least(1))
    max_num_batched_tokens: int = option(2048, "Most tokens computed per step.", at_least(1))
    enable_chunked_prefill: bool = option(True, "Whether a prompt may be split over steps.")
    preemption_mode: str = option(
        "auto",
        "What becomes of the blocks of a request that gives way; auto swaps those that have "
        "several branches and recomputes others.",
        one_of("auto", "recompute", "swap"),
    )
    options: dict[str, Any] = option({}, "Options of the scheduler.")


@dataclass
class AttentionConfig:
    """Which backend stores and attends over the KV cache."""

    backend: str = option("auto", "Attention backend; auto takes the first that can run here.")
    options: dict[str, Any] = option({}, "Options of the backend.")


@dataclass
class KVCacheConfig:
    """How much KV cache there is, and in what format."""

    block_size: int | None = option(
        None, "Tokens per block; null leaves it to the backend.", at_least(1)
    )
    gpu_memory_utilization: float = option(
        0.90, "Part of GPU memory for weights and cache, if no other size is given.", FRACTION
    )
    memory: int | str | None = option(
        None, 'Size of the cache, such as "4GiB"; of each rank, if there are several.', SIZE
    )
    num_blocks: int | None = option(None, "Size of the cache in blocks.", at_least(1))
    enable_prefix_caching: bool = option(True, "Whether equal prefixes are computed only once.")
    swap_space: int | str | None = option(
        "1GiB",
        "Most host memory for blocks that are swapped out, of each rank; 0 or null for none.",
        SIZE_OR_NONE,
    )
    quantizer: str | None = option(None, "KV format; null stores the model's dtype.")
    options: dict[str, Any] = option({}, "Options of the quantizer.")

    @property
    def memory_bytes(self) -> int | None:
        """`memory` in bytes."""
        return None if self.memory is None else parse_size(self.memory)

    @property
    def swap_bytes(self) -> int:
        """`swap_space` in bytes."""
        return 0 if self.swap_space is None else bytes_in(self.swap_space) or 0


@dataclass
class PluginsConfig:
    """Which installed plugins are loaded, by entry-point or distribution name.

    The built-in ones are those of the distribution ``pageloom``.
    """

    allow: list[str] | None = option(None, "Only these; null allows all that are installed.")
    deny: list[str] = option([], "Not these.")


@dataclass
class RuntimeConfig:
    """Where and how the engine runs."""

    device: str = option("auto", "auto, cpu, cuda or cuda:N; auto takes a GPU if any.", _DEVICE)
    num_threads: int | None = option(
        None,
        "CPU threads of the whole process, every engine in it; null leaves it to torch.",
        between(1, 1024),  # beyond some thousands, OpenMP ends the process
    )
    enforce_eager: bool = option(
        False, "Whether a GPU is given decode steps kernel by kernel, not as CUDA graphs."
    )
    seed: int = option(0, "Seeds sampling of requests that bring no seed.", at_least(0))
    debug: bool = option(False, "Check the integrity of the KV blocks whenever the engine is idle.")


@dataclass
class ParallelConfig:
    """Over how many devices the model is divided, and by what."""

    executor: str = option(
        "auto", "Where the model runs; auto is local for one rank, torch_distributed for several."
    )
    tensor_parallel_size: int = option(
        1, "Ranks that each layer is divided over.", between(1, 1024)
    )
    pipeline_parallel_size: int = option(
        1, "Stages that the layers are divided into.", between(1, 1024)
    )
    timeout_seconds: float = option(
        60.0,
        "After which a rank that does not answer counts as hung.",
        Rule("a number above 0", lambda v: v > 0),
    )
    replicas: int = option(1, "Engines that the server has, each with all ranks.", between(1, 1024))
    max_replicas: int | None = option(
        None,
        "Most engines, where their number follows the queue; null leaves it at replicas.",
        between(1, 1024),
    )
    routing: str = option(
        "prefix",
        "How the server chooses an engine: the longest cached prefix and then the load, the load, "
        "or each in turn.",
        one_of("prefix", "least_loaded", "round_robin"),
    )
    options: dict[str, Any] = option({}, "Options of the executor.")

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def most_replicas(self) -> int:
        """The most engines that there may be at once."""
        return self.replicas if self.max_replicas is None else self.max_replicas


@dataclass
class ServerConfig:
    """What ``pageloom serve`` listens to, and what it lets in."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 is every one.", _NOT_EMPTY)
    port: int = option(8000, "TCP port; 0 takes any that is free.", between(0, 65535))
    model_name: str | None = option(
        None, "What clients call the model; null takes the last part of model.path.", _NOT_EMPTY
    )
    api_keys: list[str] = option([], "Keys that let a client in; with none, all are let in.")
    api_key_file: str | None = option(None, "File with further keys, one per line.", _NOT_EMPTY)
    max_waiting: int | None = option(
        1024, "Most requests that wait; more get status 429. null for no limit.", at_least(1)
    )
    max_body: int | str = option("16MiB", "Largest body of a request.", SIZE)
    drain_seconds: float = option(
        30.0, "How long open requests may go on after SIGTERM.", Rule("0 or more", lambda v: v >= 0)
    )
    stall_seconds: float = option(
        60.0,
        "How long a client may send nothing of its request, or take nothing of its answer, before "
        "its connection is ended.",
        Rule("a number above 0", lambda v: v > 0),
    )
    engine_timeout_seconds: float | None = option(
        300.0,
        "How long the engine may answer nothing, as between two steps it does, before its process "
        "is ended; null for ever.",
        Rule("a number above 0", lambda v: v > 0),
    )
    restart_engine: bool = option(False, "Whether an engine that died is started again.")
    tool_parser: str = option(
        "auto", "How the model calls tools; auto asks each parser about the chat template."
    )
    unknown_fields: str = option(
        "refuse", "What becomes of fields that are not known.", one_of("refuse", "ignore")
    )

    @property
    def max_body_bytes(self) -> int:
        """`max_body` in bytes."""
        return parse_size(self.max_body)


@dataclass
class Config:
    """One engine's configuration. See `pageloom.config.load_config`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    kv_cache: KVCacheConfig = field(default_factory=KVCacheConfig)
    plugins: PluginsConfig = field(default_factory=PluginsConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        # Not a field: where each given key came from, "file:line" or "--set KEY=VALUE".
        self.origins: dict[str, str] = {}
        # Not a field: the plugins that its components were looked up in.
        self.loaded_plugins = Plugins()

    @classmethod
    def of_values(cls, values: Mapping[str, Mapping[str, Any]]) -> Config:
        """What `asdict` made of a checked configuration, such as in another process. Sections that
        are left out have their defaults; the plugins are loaded as it says."""
        sections: dict[str, Any] = {f.name: f.default_factory for f in fields(cls)}
        config = cls(**{name: sections[name](**given) for name, given in values.items()})
        config.loaded_plugins = Plugins.load(config.plugins.allow, config.plugins.deny)
        return config

    def shown(self) -> dict[str, dict[str, Any]]:
        """All values by section, with keys that let somebody in left out."""
        values = asdict(self)
        values["server"]["api_keys"] = [HIDDEN] * len(self.server.api_keys)
        return values


@dataclass(frozen=True)
class Picker:
    """The field by which a section names its component."""

    section: str
    field: str
    kind: str  # of `pageloom.plugins.KINDS`
    unpicked: str | None  # the value with which no component is named yet
    optional: bool = False  # whether it may stay without a component
    has_options: bool = True  # whether the section has ``options`` of the component

    @property
    def key(self) -> str:
        return f"{self.section}.{self.field}"


PICKERS = (
    Picker("model", "loader", "weight_loader", unpicked="auto"),
    Picker("scheduler", "policy", "scheduler", unpicked=None),
    Picker("attention", "backend", "attention_backend", unpicked="auto"),
    Picker("kv_cache", "quantizer", "kv_quantizer", unpicked=None, optional=True),
    Picker("parallel", "executor", "executor", unpicked="auto"),
    Picker("server", "tool_parser", "tool_parser", unpicked="auto", has_options=False),
)
