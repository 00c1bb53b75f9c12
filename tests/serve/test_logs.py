"""What is logged can be read by programs, and a request be found in it by its id."""

from __future__ import annotations

import json
import logging
import sys

import pytest
from server_process import start_server, wait_for

from pageloom.serve.logs import JSONFormatter
from pageloom.serve.request_id import request_id


@pytest.fixture(scope="module")
def entries(config):
    """What a server logs of a request that is served, one that is refused, and one with a line
    break in its path."""
    with start_server(config, options=["--log-format", "json", "--log-level", "info"]) as server:
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "user": "me"}
        wrong = {"prompt": "a", "model": "nope"}
        with server.client() as client:
            path = "/v1/completions"
            served = client.post(path, json=body, headers={"x-request-id": "mine"})
            assert served.status_code == 200
            client.post(path, json=wrong, headers={"x-request-id": "wrong"})
            client.get("/no%0aline")

        def logged():
            return [json.loads(line) for line in server.log]

        # Three by the server, and one by the engine.
        wait_for(lambda: len([e for e in logged() if "status" in e or "finish_reason" in e]) == 4)
        return logged()


def test_a_request_is_logged_by_both_processes(entries):
    (of_server,) = [entry for entry in entries if entry.get("request_id") == "mine"]
    assert of_server["process"] == "server"
    assert (of_server["method"], of_server["path"], of_server["status"]) == (
        "POST", "/v1/completions", 200
    )  # fmt: skip
    (of_engine,) = [entry for entry in entries if entry.get("finish_reason")]
    assert of_engine["process"] == "engine"
    assert of_engine["request_id"].startswith("mine-")
    expected = {
        "user": "me", "finish_reason": "length", "prompt_tokens": 3, "cached_tokens": 0,
        "output_tokens": 4, "preemptions": 0,
    }  # fmt: skip
    assert {name: of_engine[name] for name in expected} == expected
    assert 0 <= of_engine["queue_seconds"] <= of_engine["ttft_seconds"] <= of_engine["e2e_seconds"]


def test_what_was_refused_is_logged_too(entries):
    (refused,) = [entry for entry in entries if entry.get("request_id") == "wrong"]
    assert refused["status"] == 404


def test_a_client_cannot_write_a_line_of_its_own(entries):
    (entry,) = [entry for entry in entries if "line" in entry.get("path", "")]
    assert "\n" not in entry["message"] + entry["path"]
    assert entry["path"] == r"/no\nline"


def test_where_it_is_served_is_in_the_log(entries):
    assert any("is served at http://127.0.0.1:" in entry["message"] for entry in entries)


def test_an_error_brings_its_traceback_and_its_request():
    token = request_id.set("that one")
    try:
        raise ZeroDivisionError("no\nluck")
    except ZeroDivisionError:
        record = logging.LogRecord("n", logging.ERROR, "", 0, "%s", ("failed",), sys.exc_info())
        line = JSONFormatter("server").format(record)
    finally:
        request_id.reset(token)
    assert "\n" not in line
    entry = json.loads(line)
    assert (entry["level"], entry["message"], entry["request_id"]) == (
        "error", "failed", "that one"
    )  # fmt: skip
    assert "ZeroDivisionError: no\nluck" in entry["exception"]
