"""The styles in which models call tools that come with Pageloom."""

from pageloom.contract import Register, hookimpl

contract_version = "1.1"


@hookimpl
def register_tool_parsers(register: Register) -> None:
    register("hermes", "pageloom_tools.hermes:HermesParser")
    register("llama3_json", "pageloom_tools.llama3:Llama3Parser")
