"""Requests, their branches, and the plan of a step. Integers only."""

from pageloom.scheduling.errors import RequestError, RequestTooLargeError
from pageloom.scheduling.params import SamplingParams
from pageloom.scheduling.plan import Chunk, Limits, PreemptionMode, StepPlan
from pageloom.scheduling.planner import Planner, PolicyError
from pageloom.scheduling.request import Branch, FinishReason, Request
from pageloom.scheduling.structured import Guide, GuideError, StructuredOutput

__all__ = [
    "Branch",
    "Chunk",
    "FinishReason",
    "Guide",
    "GuideError",
    "Limits",
    "Planner",
    "PolicyError",
    "PreemptionMode",
    "Request",
    "RequestError",
    "RequestTooLargeError",
    "SamplingParams",
    "StepPlan",
    "StructuredOutput",
]
