"""The commands, one per module. Importing one imports no torch: what is heavy waits until it runs.

`pageloom.cli` adds each to the application. A command raises `PageloomError` for whatever the
user can put right; `pageloom.cli.main` prints it.
"""

from typing import Annotated

import typer

ConfigArgument = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file.")]
SetOption = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key, such as runtime.seed=1.",
        default_factory=list,
        show_default=False,
    ),
]
