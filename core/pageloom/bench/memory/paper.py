"""The numbers of the vLLM paper: Kwon et al., SOSP 2023, arXiv:2309.06180."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

CITATION = (
    "Kwon et al., Efficient Memory Management for Large Language Model Serving with "
    "PagedAttention, SOSP 2023, arXiv:2309.06180"
)

ORCA_MAX, ORCA_POW2, ORCA_ORACLE = "Orca (Max)", "Orca (Pow2)", "Orca (Oracle)"
PAGED = "Paged"  # vLLM there, this engine's control plane here
SYSTEMS = (ORCA_MAX, ORCA_POW2, ORCA_ORACLE, PAGED)

SHAREGPT, ALPACA = "ShareGPT", "Alpaca"

REQUEST_RATES: Mapping[str, float] = {SHAREGPT: 2.0, ALPACA: 30.0}  # per second; figure 13

# Figure 2, percent of the KV memory. Of vLLM only the first is printed. That what the buddy
# allocator adds by rounding up counts as external follows from Orca (Oracle), which has no internal
# fragmentation there.
MEMORY: Mapping[str, Mapping[str, float]] = {
    ORCA_MAX: {
        "token_states": 20.4,
        "reserved": 13.3,
        "internal": 57.3,
        "external_and_others": 8.9,
    },
    ORCA_POW2: {
        "token_states": 26.8,
        "reserved": 17.9,
        "internal": 13.6,
        "external_and_others": 41.6,
    },
    ORCA_ORACLE: {"token_states": 38.2, "reserved": 25.2, "external_and_others": 36.6},
    PAGED: {"token_states": 96.3},
}

# Figure 13: average number of batched requests, OPT-13B.
BATCHED: Mapping[str, Mapping[str, float]] = {
    SHAREGPT: {ORCA_MAX: 7.00, ORCA_POW2: 9.81, ORCA_ORACLE: 13.62, PAGED: 30.42},
    ALPACA: {ORCA_MAX: 7.00, ORCA_POW2: 43.24, ORCA_ORACLE: 72.75, PAGED: 132.44},
}

Method = Literal["parallel sampling", "beam search"]
WIDTHS = (2, 4, 6)  # samples or beams

# Percent of blocks saved, OPT-13B: figure 15 for Alpaca; for ShareGPT section 6.3 gives the range,
# whose ends are taken to be those of the widths.
SAVED: Mapping[tuple[str, Method], Mapping[int, float]] = {
    (ALPACA, "parallel sampling"): {2: 6.1, 4: 8.5, 6: 9.8},
    (ALPACA, "beam search"): {2: 37.6, 4: 53.1, 6: 55.2},
    (SHAREGPT, "parallel sampling"): {2: 16.2, 6: 30.5},
    (SHAREGPT, "beam search"): {2: 44.3, 6: 66.3},
}

BLOCK_SIZE = 16  # section 7.2: large enough for the kernels, small enough to waste little
MAX_NUM_SEQS = 256  # vLLM's default
POLICY = "fcfs"  # section 4.5
