"""Whatever fits or does not fit the OpenAPI description, the server answers it without failing."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from server_process import PATIENCE, start_server

OPERATIONS = {
    "/v1/completions": "POST",
    "/v1/chat/completions": "POST",
    "/v1/models": "GET",
    "/v1/models/{name}": "GET",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/tokenizer_info": "GET",
    "/health": "GET",
    "/metrics": "GET",
    "/version": "GET",
}


@pytest.fixture(scope="module")
def description(config):
    # What is generated may ask for as much as fits, which is little here.
    with start_server(config, "model.max_model_len=48") as server:
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        server.wait_until_idle()
        assert "Traceback" not in "\n".join(server.log)


def test_every_path_is_described_and_tried_here(description):
    found = [each.ok() for each in description.get_all_operations()]
    assert {each.path: each.method.upper() for each in found} == OPERATIONS


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("path", [path for path, method in OPERATIONS.items() if method == "POST"])
def test_no_body_makes_the_server_fail(description, path, mode):
    try_all(description[path]["POST"], mode, 40)


@pytest.mark.parametrize("path", [path for path, method in OPERATIONS.items() if method == "GET"])
def test_no_question_makes_the_server_fail(description, path):
    try_all(description[path]["GET"], GenerationMode.POSITIVE, 5)


def try_all(operation, mode, examples):
    statuses = []

    # What it takes to make a body that fits, or does not, is no fault of the server.
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def try_one(case):
        answer = case.call(timeout=PATIENCE)
        statuses.append(answer.status_code)
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            for inner in ("Traceback", "site-packages", ".py"):
                assert inner not in answer.text

    try_one()
    assert statuses
