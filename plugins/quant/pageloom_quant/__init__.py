"""Quantized formats that come with Pageloom: of weights, and of the KV cache."""

from pageloom.contract import Register, hookimpl

contract_version = "1.0"


@hookimpl
def register_weight_loaders(register: Register) -> None:
    register("gguf", "pageloom_quant.gguf:GGUFLoader")
    register("awq", "pageloom_quant.awq:AWQLoader")
    register("compressed_tensors", "pageloom_quant.compressed_tensors:CompressedTensorsLoader")


@hookimpl
def register_kv_quantizers(register: Register) -> None:
    register("fp8_e4m3", "pageloom_quant.kv.static:FP8E4M3")
    register("fp8_e5m2", "pageloom_quant.kv.static:FP8E5M2")
    register("int8", "pageloom_quant.kv.static:Int8")
    register("int4", "pageloom_quant.kv.static:Int4")
    register("fp8_e4m3_token_head", "pageloom_quant.kv.token_head:FP8E4M3")
    register("fp8_e5m2_token_head", "pageloom_quant.kv.token_head:FP8E5M2")
    register("int8_token_head", "pageloom_quant.kv.token_head:Int8")
    register("int4_token_head", "pageloom_quant.kv.token_head:Int4")
