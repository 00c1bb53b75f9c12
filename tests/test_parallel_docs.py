"""What docs/parallel.md and the manifest beside it say is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from pageloom.config import load_config
from pageloom.config.schema import Config, ParallelConfig

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "parallel.md").read_text()
MANIFEST = DOCS / "kubernetes" / "ray.yaml"

GIB = 2**30
LAYERS, HIDDEN, KV_HEADS, HEAD_SIZE, MLP = 80, 8192, 8, 128, 28672
VOCAB = {"Llama-2-70B": 32000, "Llama-3-70B": 128256}
CARDS = {"80 GB": 79.6 * GIB, "141 GB": 140.4 * GIB}
LINEARS = LAYERS * (2 * HIDDEN**2 + 2 * HIDDEN * KV_HEADS * HEAD_SIZE + 3 * HIDDEN * MLP)
TOKEN = LAYERS * 2 * KV_HEADS * HEAD_SIZE * 2  # bytes in the KV cache


def parameters(model):
    return LINEARS + 2 * VOCAB[model] * HIDDEN + (2 * LAYERS + 1) * HIDDEN


def weights(model, form):
    """Bytes."""
    if form == "bfloat16":
        return 2 * parameters(model)
    return 2 * (parameters(model) - LINEARS) + LINEARS * (4 + 20 / 128) / 8


def rows():
    """Of the table of tokens: model, form, card, and the cells."""
    what = None
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[1] in CARDS:
            what = cells[0].split(", ") if cells[0] else what
            yield *what, cells[1], cells[2:]


def test_the_tokens_that_fit_are_right():
    found = list(rows())
    assert len(found) == 8
    for model, form, card, cells in found:
        for ranks, cell in zip((1, 2, 4, 8), cells, strict=True):
            room = 0.9 * CARDS[card] - weights(model, form) / ranks - 2 * GIB
            tokens = room / (TOKEN / ranks) / 1000
            assert cell == "-" if room < 0 else int(cell) == pytest.approx(tokens, abs=1)


@pytest.mark.parametrize("model", VOCAB)
def test_the_sizes_of_the_weights_are_right(model):
    (line,) = re.findall(rf"^\| {model} \|.*", PAGE, re.MULTILINE)
    said = [float(number) for number in re.findall(r"(\d+\.\d) (?:billion|GB|GiB)", line)]
    whole, packed = weights(model, "bfloat16"), weights(model, "AWQ")
    true = [parameters(model) / 1e9, whole / 1e9, whole / GIB, packed / 1e9, packed / GIB]
    assert said == pytest.approx(true, abs=0.06)


def test_the_options_shown_are_the_defaults():
    (shown,) = re.findall(r"```yaml\n(parallel:.*?)```", PAGE, re.DOTALL)
    assert ParallelConfig(**yaml.safe_load(shown)["parallel"]) == Config().parallel


def test_the_manifest_fits_together(tmp_path, monkeypatch):
    config_map, cluster, service = yaml.safe_load_all(MANIFEST.read_text())
    head = cluster["spec"]["headGroupSpec"]["template"]
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    pods = [head["spec"], workers["template"]["spec"]]
    containers = [container for pod in pods for container in pod["containers"]]
    assert len({container["image"] for container in containers}) == 1
    for pod in pods:
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            assert "$KUBERAY_GEN_RAY_START_CMD" in container["args"][0]
    assert service["spec"]["selector"].items() <= head["metadata"]["labels"].items()
    ports = [port["name"] for port in head["spec"]["containers"][0]["ports"]]
    assert service["spec"]["ports"][0]["targetPort"] in ports

    (name,) = config_map["data"]
    mounts = {m["name"]: m["mountPath"] for m in head["spec"]["containers"][0]["volumeMounts"]}
    assert f"{mounts['config']}/{name}" in containers[0]["args"][0]
    monkeypatch.setenv("PAGELOOM_KEY", "key")
    path = tmp_path / name
    path.write_text(config_map["data"][name])
    config = load_config(path)
    assert config.server.api_keys == ["key"]
    assert config.model.path.startswith(mounts["models"])
    cards = int(containers[1]["resources"]["limits"]["nvidia.com/gpu"])
    assert config.parallel.world_size == cards
    assert config.parallel.most_replicas == workers["maxReplicas"]
