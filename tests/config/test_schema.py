import dataclasses

import pytest

from pageloom.config import Config
from pageloom.config.rules import parse_size
from pageloom.config.schema import KVCacheConfig, RuntimeConfig

REQUIRED = "???"

PUBLIC_OPTIONS = {
    "model.path": REQUIRED,
    "model.loader": "auto",
    "model.tokenizer": None,
    "model.dtype": "auto",
    "model.max_model_len": None,
    "model.trust_remote_code": False,
    "model.options": {},
    "scheduler.policy": "fcfs",
    "scheduler.max_num_seqs": 256,
    "scheduler.max_num_batched_tokens": 2048,
    "scheduler.enable_chunked_prefill": True,
    "scheduler.preemption_mode": "auto",
    "scheduler.options": {},
    "attention.backend": "auto",
    "attention.options": {},
    "kv_cache.block_size": None,
    "kv_cache.gpu_memory_utilization": 0.9,
    "kv_cache.memory": None,
    "kv_cache.num_blocks": None,
    "kv_cache.enable_prefix_caching": True,
    "kv_cache.swap_space": "1GiB",
    "kv_cache.quantizer": None,
    "kv_cache.options": {},
    "plugins.allow": None,
    "plugins.deny": [],
    "runtime.device": "auto",
    "runtime.num_threads": None,
    "runtime.enforce_eager": False,
    "runtime.seed": 0,
    "runtime.debug": False,
    "parallel.executor": "auto",
    "parallel.tensor_parallel_size": 1,
    "parallel.pipeline_parallel_size": 1,
    "parallel.replicas": 1,
    "parallel.max_replicas": None,
    "parallel.routing": "prefix",
    "parallel.timeout_seconds": 60.0,
    "parallel.options": {},
    "server.host": "127.0.0.1",
    "server.port": 8000,
    "server.model_name": None,
    "server.api_keys": [],
    "server.api_key_file": None,
    "server.max_waiting": 1024,
    "server.max_body": "16MiB",
    "server.drain_seconds": 30.0,
    "server.stall_seconds": 60.0,
    "server.engine_timeout_seconds": 300.0,
    "server.restart_engine": False,
    "server.tool_parser": "auto",
    "server.unknown_fields": "refuse",
}


def test_the_public_options_and_their_defaults_change_only_on_purpose():
    options = {
        f"{section}.{name}": value
        for section, values in dataclasses.asdict(Config()).items()
        for name, value in values.items()
    }
    assert options == PUBLIC_OPTIONS


def test_every_option_and_section_is_documented():
    for section in dataclasses.fields(Config):
        kind = section.default_factory
        assert kind.__doc__
        assert not kind.__doc__.startswith(f"{kind.__name__}(")  # what dataclass would make up
        for field in dataclasses.fields(kind):
            assert field.metadata["doc"], field.name


@pytest.mark.parametrize(
    ("size", "number"),
    [
        (1, 1),
        ("1", 1),
        ("10B", 10),
        ("1KiB", 1024),
        ("512MiB", 512 * 2**20),
        ("4GiB", 4 * 2**30),
        ("4 gib", 4 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("2GB", 2 * 10**9),
        ("1TiB", 2**40),
    ],
)
def test_sizes_are_bytes(size, number):
    assert parse_size(size) == number


@pytest.mark.parametrize("size", ["", "GiB", "4G", "-1GiB", "0", "0.1B", "4GiB!", "1e9", -5])
def test_what_is_no_size(size):
    with pytest.raises(ValueError, match=r"is not a size|is less than one byte"):
        parse_size(size)


@pytest.mark.parametrize(("threads", "valid"), [(0, False), (1, True), (1024, True), (1025, False)])
def test_threads_are_bounded(threads, valid):
    (field,) = [f for f in dataclasses.fields(RuntimeConfig) if f.name == "num_threads"]
    assert field.metadata["rule"].accepts(threads) is valid


@pytest.mark.parametrize(
    ("size", "number"), [(None, 0), (0, 0), ("0", 0), ("0GiB", 0), ("1KiB", 1024), (7, 7)]
)
def test_no_room_for_swapping_may_be_written_as_null_or_0(size, number):
    (field,) = [f for f in dataclasses.fields(KVCacheConfig) if f.name == "swap_space"]
    assert size is None or field.metadata["rule"].accepts(size)
    assert KVCacheConfig(swap_space=size).swap_bytes == number
