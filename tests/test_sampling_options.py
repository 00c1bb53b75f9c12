"""Options of sampling and of beam search, from the command line to `SamplingParams`."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from pageloom.cli import main
from pageloom.commands.generate import GenerateOptions
from pageloom.commands.sampling import sampling_params, takes


@pytest.mark.parametrize(
    ("given", "expected"),
    [((), False), (("true",), True), (("False",), False), (("never",), "never")],
)
def test_early_stopping_takes_what_transformers_does(given, expected):
    taken = []

    @takes(GenerateOptions)
    def command(**sampling):
        taken.append(sampling_params(sampling).early_stopping)

    app = typer.Typer()
    app.command()(command)
    options = [argument for value in given for argument in ("--early-stopping", value)]
    result = CliRunner().invoke(app, ["--beam-width", "2", *options])
    assert result.exit_code == 0, result.output
    assert taken == [expected]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--beam-width", "2", "--early-stopping", "soon"),
            """early_stopping is 'soon', but must be True, False or "never\"""",
        ),
        (("--early-stopping", "never"), "early_stopping is 'never', but without beam_width"),
    ],
)
def test_early_stopping_that_means_nothing_is_refused(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(["generate", "gone.yaml", "x", *arguments])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
