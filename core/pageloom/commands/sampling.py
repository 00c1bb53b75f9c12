"""Options of commands that generate, and what they come to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pageloom.errors import PageloomError

if TYPE_CHECKING:
    from pageloom.scheduling import SamplingParams

MaxTokens = Annotated[int, typer.Option(help="Most output tokens per prompt.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens of this probability.")]
MinP = Annotated[float, typer.Option(help="Keep tokens this probable, relative to the likeliest.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1 discourages what was said.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
Stop = Annotated[
    list[str],
    typer.Option(
        help="End the output at this string; may be repeated.",
        default_factory=list,
        show_default=False,
    ),
]


def sampling_params(**fields: Any) -> SamplingParams:
    """`SamplingParams`, with what is wrong said as a user's error."""
    from pageloom.scheduling import SamplingParams

    try:
        return SamplingParams(**fields)
    except ValueError as error:
        raise PageloomError(str(error)) from error
