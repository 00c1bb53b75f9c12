"""Decoder definitions, and the two weight loaders that need no further package.

This package is the entry point of the plugin ``core``, so importing it imports no torch.
"""

from pageloom.contract import Register, hookimpl

contract_version = "1.0"


@hookimpl
def register_weight_loaders(register: Register) -> None:
    register("hf", "pageloom.models.hf:HFLoader")
    register("dummy", "pageloom.models.dummy:DummyLoader")
