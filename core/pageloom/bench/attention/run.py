"""A whole run of the matrix: what the command and ``benchmarks/test_attention.py`` share."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cached_property

import torch

from pageloom.bench.attention.candidates import Candidate, find_candidates, make_quantizer
from pageloom.bench.attention.matrix import Case, Matrix
from pageloom.bench.attention.rates import Rates
from pageloom.bench.attention.rounds import CaseResult, run_case
from pageloom.engine.device import find_device
from pageloom.errors import PageloomError, suggest
from pageloom.plugins import Plugins


class MatrixRun:
    """Runs the cases of ``matrix``, each when it is asked for, with all installed backends.

    Raises `PageloomError` if the matrix asks for what is not there.
    """

    def __init__(self, matrix: Matrix) -> None:
        settings = matrix.settings
        self.matrix = matrix
        self.plugins = Plugins.load()
        self.candidates: list[Candidate] = find_candidates(
            self.plugins, settings.backends, settings.peers
        )
        for quantizer in {case.quantizer for case in matrix.cases}:
            make_quantizer(self.plugins, quantizer)
        self.device = find_device(settings.device, "device")
        if settings.num_threads:
            torch.set_num_threads(settings.num_threads)

    def require(self, name: str) -> None:
        """Raises `PageloomError` if nobody of that name takes part."""
        names = [candidate.name for candidate in self.candidates]
        if name not in names:
            raise PageloomError(f"{name!r} takes no part; {suggest(name, names)}")

    @cached_property
    def rates(self) -> Rates:
        """Made when the first case is run: it takes seconds."""
        with torch.inference_mode():
            return Rates(self.device)

    def run(self, case: Case, say: Callable[[str], None] = lambda what: None) -> CaseResult:
        """``say`` is told what is being done."""
        result = run_case(case, self.matrix, self.candidates, self.plugins, self.rates, say)
        gc.collect()  # the caches of one case must not lie beside those of the next
        return result
