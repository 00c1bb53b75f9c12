"""Folders as `transformers` saves models: where they are, their configuration and tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
MOST_LAYERS = 10_000  # `transformers` makes lists of as many entries
HUB_PATTERNS = ("*.json", "*.jinja", "tokenizer.model")
"""What to fetch besides weights."""
WEIGHT_DTYPES = ("bfloat16", "float16", "float32", "float64")
"""What a plain weight may be stored in. What is narrower means something only with its scales."""

_HUB_ID = re.compile(r"\w[\w-]*|\w[\w.-]*/\w[\w.-]*")
_FILE_SUFFIXES = (".gguf", ".safetensors", ".json", ".yaml", ".bin", ".pt", ".pth")


def is_hub_id(path: str) -> bool:
    """Whether ``path`` is written as a hub id (``org/name``) and nothing here has that path."""
    if path.endswith(_FILE_SUFFIXES) or Path(path).exists():
        return False
    return _HUB_ID.fullmatch(path) is not None


def find_folder(path: str, patterns: Sequence[str]) -> Path:
    """The folder of a model: ``path`` itself, or the local snapshot of a hub id.

    A folder is used as it is, without network. From the hub only files that match ``patterns``
    are fetched (``HF_HUB_OFFLINE`` and the other variables of `huggingface_hub` apply). Raises
    `ValueError` when there is no such folder and no such model on the hub.
    """
    if Path(path).is_dir():
        return Path(path)
    if not is_hub_id(path):
        what = "is not a folder" if Path(path).exists() else "does not exist"
        raise ValueError(f"model path {path} {what}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(path, allow_patterns=list(patterns)))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"model path {path} is not a folder here, and the hub did not give it: {reason}"
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `OSError` or `ValueError` that names the file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} does not hold a JSON object")
    return content


def read_config(file: Path, trust_remote_code: bool) -> PretrainedConfig:
    """The configuration in ``file`` (a ``config.json``), with every id that ends a generation.

    ``generation_config.json`` next to it adds to ``eos_token_id``, which becomes a list: chat
    models name the token that ends a turn only there. Raises `ValueError` that names the file.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    if not file.is_file():
        raise ValueError(f"{file.parent} has no {file.name}, which describes the model")
    content = read_json(file)
    if "model_type" not in content and "auto_map" not in content:
        raise ValueError(f"{file} has no 'model_type', so it cannot be known which model it is")
    kind = content.get("model_type")
    if not isinstance(kind, str | None):
        raise ValueError(f"{file} has model_type {kind!r}, which is not text")
    layers = content.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise ValueError(f"{file} has num_hidden_layers {layers}, but at most {MOST_LAYERS} can be")
    known = kind in CONFIG_MAPPING
    if "auto_map" in content and not known and not trust_remote_code:
        raise ValueError(
            f"{file} needs Python code that comes with the model; set model.trust_remote_code to "
            "true if that code may run here"
        )
    source = file.parent if file.name == CONFIG_FILE else file
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            source, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # strict configuration classes raise types of their own
        raise ValueError(f"{file} cannot be used: {_one_line(error)}") from error
    dtype = getattr(config, "dtype", None)
    if dtype is not None and str(dtype).removeprefix("torch.") not in WEIGHT_DTYPES:
        names = ", ".join(WEIGHT_DTYPES)
        raise ValueError(f"{file} has dtype {dtype}, which no model runs in; it may be {names}")
    ends = _end_tokens(file, getattr(config, "eos_token_id", None))
    generation = file.with_name(GENERATION_FILE)
    if generation.is_file():
        ends = _end_tokens(generation, read_json(generation).get("eos_token_id")) + ends
    config.eos_token_id = list(dict.fromkeys(ends)) or None
    return config


def read_tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer in ``folder``, or None if it has none. Raises `ValueError` if it is damaged."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # whatever the tokenizer's own code raises
        raise ValueError(
            f"the tokenizer in {folder} cannot be loaded: {_one_line(error)}"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _end_tokens(file: Path, ids: object) -> list[int]:
    """``eos_token_id`` as a list, whether ``file`` gives one, several or none."""
    if ids is None:
        return []
    listed = list(ids) if isinstance(ids, list | tuple) else [ids]
    ends = [end for end in listed if isinstance(end, int) and not isinstance(end, bool)]
    if len(ends) < len(listed):
        raise ValueError(
            f"{file} has eos_token_id {ids!r}, but it must be a token id or a list of them"
        )
    return ends
