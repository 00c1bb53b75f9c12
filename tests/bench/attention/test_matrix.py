"""The matrix: what it expands to, and what is said of a wrong one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pageloom.bench.attention.matrix import load_matrix
from pageloom.config import ConfigError

CONFIGS = Path(__file__).parents[3] / "configs" / "bench"


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("attention*.yaml")), ids=lambda f: f.stem)
def test_the_matrices_in_the_box_load_and_have_distinct_cases(file):
    matrix = load_matrix(str(file))
    ids = [case.id for case in matrix.cases]
    assert len(set(ids)) == len(ids) > 3


def test_lists_are_multiplied(tiny):
    group = {"phase": "prefill", "batch": [1, 2], "context": [8, 16], "dtype": ["float32"]}
    matrix = load_matrix(str(tiny), [f"cases={json.dumps([group])}"])
    assert [(case.batch, case.context, case.query) for case in matrix.cases] == [
        (1, 8, 8), (2, 8, 8), (1, 16, 16), (2, 16, 16)
    ]  # fmt: skip


def test_steps_are_what_their_phase_says(tiny):
    groups = [
        {"phase": "decode", "batch": [2], "context": [9]},
        {"phase": "prefill", "batch": [2], "context": [9], "query": 4},
        {"phase": "mixed", "batch": [4], "context": [30], "query": 8},
    ]
    decode, prefill, mixed = load_matrix(str(tiny), [f"cases={json.dumps(groups)}"]).cases
    assert decode.sequences == [(1, 9), (1, 9)]
    assert prefill.sequences == [(4, 9), (4, 9)]
    assert mixed.sequences == [(1, 10), (1, 20), (1, 30), (8, 30)]
    # Query 0 of the prefill sees 6 tokens, query 3 sees 9; 2 products of 2 FLOP each.
    assert prefill.flop == 2 * (6 + 7 + 8 + 9) * 6 * 32 * 4


def test_everything_that_is_wrong_is_said_at_once(tiny):
    wrong = [
        "rounds=0",
        'shapes.odd={"num_heads": 5, "num_kv_heads": 2, "head_size": 8, "layers": 1}',
    ]
    with pytest.raises(ConfigError) as caught:
        load_matrix(str(tiny), [wrong[0], "peers=[sdp]", "nope=1"])
    assert {problem.key for problem in caught.value.problems} == {"rounds", "peers", "nope"}
    groups = [
        {"phase": "decode", "query": 3, "batch": 3},
        {"phase": "prefill", "context": [8], "query": 9, "shapes": ["tinny"]},
        {"phase": "mixed", "batch": [1], "context": [8]},
        {"phase": "decod"},
    ]
    with pytest.raises(ConfigError) as caught:
        load_matrix(str(tiny), [wrong[1], f"cases={json.dumps(groups)}"])
    text = str(caught.value)
    assert {problem.key for problem in caught.value.problems} == {
        "shapes.odd.num_kv_heads",
        "cases[0].batch",
        "cases[1].query",
        "cases[1].shapes",
        "cases[2].batch",
        "cases[3].phase",
    }
    assert "did you mean tiny?" in text


def test_problems_name_the_line(tmp_path):
    file = tmp_path / "matrix.yaml"
    file.write_text(
        "shapes:\n"
        "  a: {num_heads: 2, num_kv_heads: 1, head_size: 8, layers: 1}\n"
        "cases:\n"
        "  - phase: decode\n"
        "    dtype: [int8]\n"
    )
    with pytest.raises(ConfigError, match=r"matrix.yaml:5: cases\[0\]\.dtype"):
        load_matrix(str(file))


def test_an_empty_list_of_cases_is_no_matrix(tiny):
    with pytest.raises(ConfigError, match="expected a list of cases"):
        load_matrix(str(tiny), ["cases=[]"])
