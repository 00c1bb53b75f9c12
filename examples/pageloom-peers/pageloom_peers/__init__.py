"""Registers the kernels of others; their packages are imported when one is used."""

from pageloom.contract import Register, hookimpl

contract_version = "1.0"


@hookimpl
def register_attention_backends(register: Register) -> None:
    register("flash_attn", "pageloom_peers.flash:FlashAttention")
    register("flashinfer", "pageloom_peers.infer:FlashInfer")
