"""Options of commands that generate, and what they come to."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from pageloom.errors import PageloomError

if TYPE_CHECKING:
    from pageloom.scheduling import SamplingParams

Command = TypeVar("Command", bound=Callable[..., None])


class SamplingOptions:
    """Options with their defaults, named after fields of `SamplingParams`. A command with other
    defaults or further options extends this."""

    stop: Annotated[
        list[str],
        typer.Option(
            help="End the output at this string; may be repeated.",
            default_factory=list,
            show_default=False,
        ),
    ]
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an output.")] = 256
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens of this probability.")] = (
        1.0
    )
    min_p: Annotated[
        float, typer.Option(help="Keep tokens this probable, relative to the likeliest.")
    ] = 0.0
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1 discourages what was said.")
    ] = 1.0
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None


def takes(options: type[SamplingOptions]) -> Callable[[Command], Command]:
    """Give a command these options in place of its ``**sampling``, where their values arrive."""
    added = [
        Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=getattr(options, name, Parameter.empty),
            annotation=annotation,
        )
        for name, annotation in get_type_hints(options, include_extras=True).items()
    ]

    def decorate(command: Command) -> Command:
        written = signature(command, eval_str=True)
        own = [p for p in written.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        # Typer reads what a command takes from its signature.
        command.__signature__ = written.replace(  # type: ignore[attr-defined]
            parameters=[*own, *added]
        )
        return command

    return decorate


def sampling_params(fields: dict[str, Any]) -> SamplingParams:
    """`SamplingParams`, with what is wrong said as a user's error."""
    from pageloom.scheduling import SamplingParams

    try:
        return SamplingParams(**fields)
    except ValueError as error:
        raise PageloomError(str(error)) from error
