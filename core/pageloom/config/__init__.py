"""Configuration: YAML files that extend each other, overrides, and one checked `Config`."""

from pageloom.config.errors import ConfigError, Problem
from pageloom.config.load import load_config
from pageloom.config.options import build_options
from pageloom.config.render import render
from pageloom.config.schema import (
    AttentionConfig,
    Config,
    KVCacheConfig,
    ModelConfig,
    PluginsConfig,
    RuntimeConfig,
    SchedulerConfig,
)

__all__ = [
    "AttentionConfig",
    "Config",
    "ConfigError",
    "KVCacheConfig",
    "ModelConfig",
    "PluginsConfig",
    "Problem",
    "RuntimeConfig",
    "SchedulerConfig",
    "build_options",
    "load_config",
    "render",
]
