"""Registers the format; what it is made of is imported when a configuration picks it."""

from pageloom.contract import Register, hookimpl

contract_version = "1.0"


@hookimpl
def register_kv_quantizers(register: Register) -> None:
    register("rotated4", "pageloom_example_kvformat.rotated:Rotated4")
