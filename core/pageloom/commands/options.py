"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

OWN = "Without --trace: "

ConfigArgument = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file.")]
ConfigsArgument = Annotated[
    list[str],
    typer.Argument(metavar="CONFIG...", help="YAML files; the first is the baseline."),
]


def set_option(example: str) -> Any:
    """``--set``, of a command whose YAML has the key of ``example``."""
    return typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help=f"Override a key, such as {example}.",
        default_factory=list,
        show_default=False,
    )


SetOption = Annotated[list[str], set_option("runtime.seed=1")]

# The load of a benchmark, each None if it was not given.

TraceOption = Annotated[
    Path | None, typer.Option(help="JSON object per line, instead of random requests.")
]
BurstinessOption = Annotated[
    float | None,
    typer.Option(help="Shape of the gamma distribution of their gaps; 1 (default) is Poisson."),
]
LengthsOption = Annotated[
    str | None,
    typer.Option(metavar="sharegpt|alpaca", help=OWN + "lengths as in that dataset."),
]
PromptTokensOption = Annotated[
    str | None, typer.Option(metavar="LEAST:MOST", help=OWN + "default 50:500.")
]
OutputTokensOption = Annotated[
    str | None, typer.Option(metavar="LEAST:MOST", help=OWN + "default 16:200.")
]
PrefixTokensOption = Annotated[
    int | None, typer.Option(min=1, help=OWN + "begin prompts with a shared prefix.")
]
PrefixGroupsOption = Annotated[
    int | None, typer.Option(min=1, help=OWN + "how many prefixes; default 1.")
]
PrefixShareOption = Annotated[
    float | None,
    typer.Option(min=0, max=1, help=OWN + "share of the prompts that have one; default 1."),
]
SLOOption = Annotated[
    str | None,
    typer.Option(metavar="ttft=S,tpot=S,e2e=S", help="Report goodput: requests within these."),
]

# What a benchmark writes.

OutputOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Write an HTML page and its figures here.")
]
JSONOption = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write every number."),
]
