"""The attention backends that come with Pageloom."""

from pageloom.contract import Register, hookimpl

contract_version = "1.0"


@hookimpl
def register_attention_backends(register: Register) -> None:
    register("cpu_paged", "pageloom_attention.cpu_paged:CPUPaged")
    register("cuda_paged", "pageloom_attention.cuda_paged.backend:CUDAPaged")
    register("naive_contiguous", "pageloom_attention.naive_contiguous:NaiveContiguous")
    register("torch_paged", "pageloom_attention.torch_paged:TorchPaged")
    register("triton_paged", "pageloom_attention.triton_paged:TritonPaged")
