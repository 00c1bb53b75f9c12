"""The scheduling policies that come with Pageloom."""

from pageloom.contract import Register, hookimpl

contract_version = "1.0"


@hookimpl
def register_schedulers(register: Register) -> None:
    register("fcfs", "pageloom_schedulers.fcfs:FCFS")
    register("priority", "pageloom_schedulers.priority:Priority")
    register("sjf", "pageloom_schedulers.sjf:SJF")
    register("fair", "pageloom_schedulers.fair:Fair")
