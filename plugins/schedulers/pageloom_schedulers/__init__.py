"""The scheduling policies that come with Pageloom."""

from pageloom.contract import Register, hookimpl

contract_version = "1.0"


@hookimpl
def register_schedulers(register: Register) -> None:
    register("fcfs", "pageloom_schedulers.fcfs:FCFS")
