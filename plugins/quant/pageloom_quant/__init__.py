"""Quantized formats that come with Pageloom: loaders of quantized weights."""

from pageloom.contract import Register, hookimpl

contract_version = "1.0"


@hookimpl
def register_weight_loaders(register: Register) -> None:
    register("gguf", "pageloom_quant.gguf:GGUFLoader")
