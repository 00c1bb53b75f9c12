"""The attention backends that come with Pageloom."""

from pageloom.contract import Register, hookimpl

contract_version = "1.0"


@hookimpl
def register_attention_backends(register: Register) -> None:
    register("naive_contiguous", "pageloom_attention.naive_contiguous:NaiveContiguous")
    register("torch_paged", "pageloom_attention.torch_paged:TorchPaged")
