"""With what plugin authors prove their plugins: pytest suites to inherit, and checks to call.

Needs pytest and hypothesis: ``pip install 'pageloom[testing]'``.
"""

try:
    import hypothesis  # noqa: F401
    import pytest
except ImportError as error:
    raise ImportError(
        f"pageloom.testing needs {error.name}: pip install 'pageloom[testing]'", name=error.name
    ) from error

# So that a failing check shows its values.
pytest.register_assert_rewrite(
    "pageloom.testing.scheduler_suite",
    "pageloom.testing.attention_suite",
    "pageloom.testing.attention_steps",
    "pageloom.testing.attention_rig",
    "pageloom.testing.attention_shadow",
    "pageloom.testing.attention_candidate",
    "pageloom.testing.kv_format_suite",
    "pageloom.testing.executor_suite",
    "pageloom.testing.tool_parser_suite",
)

from pageloom.testing.attention_suite import AttentionSuite  # noqa: E402
from pageloom.testing.executor_suite import ExecutorSuite  # noqa: E402
from pageloom.testing.kv_format_suite import KVFormatSuite  # noqa: E402
from pageloom.testing.kv_invariants import KVInvariants  # noqa: E402
from pageloom.testing.scheduler_suite import SchedulerSuite  # noqa: E402
from pageloom.testing.tool_parser_suite import ToolParserSuite  # noqa: E402

__all__ = [
    "AttentionSuite",
    "ExecutorSuite",
    "KVFormatSuite",
    "KVInvariants",
    "SchedulerSuite",
    "ToolParserSuite",
]
