"""Real lengths in place of the distributions."""

from __future__ import annotations

from pathlib import Path

from pageloom.bench.serving.trace import read_trace
from pageloom.bench.workload import MAX_MODEL_LEN, Lengths, RecordedLengths
from pageloom.errors import PageloomError


def read_lengths(name: str, path: Path) -> RecordedLengths:
    """The lengths in a trace file (see `read_trace`), under the name of the workload.

    Raises `PageloomError` for what the paper's model could not serve.
    """
    lengths = []
    for request in read_trace(path):
        prompt = request.prompt
        if isinstance(prompt, str) and request.random_prompt is None:
            raise PageloomError(
                f"{path} has a prompt as text, whose length no tokenizer is there to tell; give "
                "prompt_tokens instead"
            )
        tokens = request.random_prompt.tokens if request.random_prompt else len(prompt)
        if tokens + request.output_tokens > MAX_MODEL_LEN:
            raise PageloomError(
                f"{path} has a request of {tokens} prompt and {request.output_tokens} output "
                f"tokens, but the paper's model takes {MAX_MODEL_LEN} together; leave such out, as "
                "the paper's benchmark does"
            )
        lengths.append(Lengths(tokens, request.output_tokens))
    return RecordedLengths(name, lengths)
