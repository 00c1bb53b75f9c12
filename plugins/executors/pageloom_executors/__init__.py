"""Where the model runs: executors that come with Pageloom."""

from pageloom.contract import Register, hookimpl

contract_version = "1.2"


@hookimpl
def register_executors(register: Register) -> None:
    register("local", "pageloom_executors.local:LocalExecutor")
    register("simulated", "pageloom_executors.simulated:SimulatedExecutor")
    register("torch_distributed", "pageloom_executors.torch_distributed:TorchDistributedExecutor")
    register("ray", "pageloom_executors.ray_executor:RayExecutor")
