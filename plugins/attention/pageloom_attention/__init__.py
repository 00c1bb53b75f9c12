"""The attention backends that come with Pageloom."""

from pageloom.contract import Register, hookimpl

contract_version = "1.0"


@hookimpl
def register_attention_backends(register: Register) -> None:
    register("cpu_paged", "pageloom_attention.cpu_paged:CPUPaged")
    register("naive_contiguous", "pageloom_attention.naive_contiguous:NaiveContiguous")
    register("torch_paged", "pageloom_attention.torch_paged:TorchPaged")
