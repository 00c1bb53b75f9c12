"""Registers the backend; what it is made of is imported when a configuration picks it."""

from pageloom.contract import Register, hookimpl

contract_version = "1.0"


@hookimpl
def register_attention_backends(register: Register) -> None:
    register("blockwise", "pageloom_example_attention.blockwise:Blockwise")
