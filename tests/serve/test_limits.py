"""What a client may send, and what becomes of one that overdoes it."""

from __future__ import annotations

import contextlib
import json
import time
from contextlib import ExitStack

import httpx
import pytest
from server_process import PATIENCE, connect, send, start_server, wait_for

LONG = {"prompt": "a", "max_tokens": 16_000, "ignore_eos": True, "temperature": 0}
# A server whose connections rest for 4 seconds only between two requests.
RESTLESS = """
from pageloom.cli import main
from pageloom.serve import run

run.KEEP_ALIVE = 4
main()
"""
CHUNKED = b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"


@pytest.fixture(scope="module")
def small(config):
    """One request runs, two wait, and nobody may stall for more than two seconds."""
    with start_server(
        config,
        "model.max_model_len=16384",
        "scheduler.max_num_seqs=1",
        "server.max_waiting=2",
        "server.max_body=64KiB",
        "server.stall_seconds=2",
        program=("-c", RESTLESS),
    ) as server:
        yield server
        server.wait_until_idle()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 129),
        ("n", 0),
        ("best_of", 129),
        ("logprobs", 21),
        ("stop", ["x"] * 17),
        ("stop", "x" * 257),
        ("stop_token_ids", list(range(257))),
        ("logit_bias", {str(n): 1 for n in range(1025)}),
        ("prompt", ["a"] * 257),
        ("prompt", []),
        ("prompt", ""),
        ("prompt", "a" * 2000),
        ("prompt", [5] * 2000),
        ("prompt", [2**31]),
        ("temperature", 1e9),
        ("priority", 2**40),
        ("min_tokens", 10**9),
    ],
)
def test_sizes_are_bounded_by_field(server, field, value):
    with server.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, field: value})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field


def test_a_body_is_bounded_whether_or_not_it_says_how_long_it_is(small):
    def parts():
        for _ in range(100):
            yield b" " * 1024

    with small.client() as client:
        for body in (b" " * 100_000, parts()):
            answer = client.post("/v1/completions", content=body)
            assert answer.status_code == 413
            assert "64KiB (server.max_body)" in answer.json()["error"]["message"]


@pytest.mark.parametrize("expect", [b"", b"expect: 100-continue\r\n"])
def test_a_body_that_says_it_is_too_large_is_not_waited_for(small, expect):
    with connect(small) as connection:
        head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\n" + expect
        connection.sendall(head + b"content-length: 99999999\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("size", [b"zz", b"-5", b"1\r\n{\r\nzz"])
def test_chunks_of_no_size_are_answered(small, size):
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    with connect(small) as connection:
        connection.sendall(head + size + b"\r\n")
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{", b"408"),
        (b"GET /health HTTP/1.1\r\nhost:", b"408"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /hea", b"200"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n\r\n", b"200"),
        (b"", b""),
    ],
)
def test_what_does_not_come_is_not_waited_for(small, sent, status):
    with connect(small) as connection:
        connection.sendall(sent)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert answer.partition(b" ")[2][:3] == status


TRICKLING = [
    (b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n", b"{", b"408"),
    (b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n", b" ", b"200"),
    (b"GET /health HTTP/1.1\r\nhost: x\r\n", b"x", b"408"),
    (b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1;", b"a", b"408"),
]


@pytest.mark.parametrize(("begin", "more", "status"), TRICKLING)
def test_what_comes_a_byte_at_a_time_is_not_waited_for(small, begin, more, status):
    """Though no pause is as long as a client may pause."""
    answer, deadline = b"", time.monotonic() + PATIENCE
    with connect(small) as connection:
        connection.sendall(begin)
        connection.settimeout(0.2)
        with contextlib.suppress(ConnectionError):  # it was closed with something unread
            while True:
                assert time.monotonic() < deadline
                connection.sendall(more)
                try:
                    part = connection.recv(1 << 16)
                except TimeoutError:
                    continue
                if not part:
                    break
                answer += part
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.partition(b" ")[2][:3] == status


def test_a_connection_may_rest_longer_than_clients_keep_theirs(server):
    """httpx and openai keep one for 5 seconds: closed by us first, it might be written to."""
    with connect(server) as connection:
        for pause in (0, 6):
            time.sleep(pause)
            connection.sendall(b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_the_next_request_does_not_end_the_answer_before_it(small):
    with send(small, LONG | {"max_tokens": 2000, "stream": True}, receive=1 << 20) as connection:
        connection.sendall(b"\r\nGET /health HTTP/1.1\r\nhost:")
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert b"data: [DONE]" in answer


@pytest.mark.parametrize("begin", [b"", b"content-length: 1\r\n\r\n{", CHUNKED])
def test_headers_are_bounded(small, begin):
    much = b"GET / HTTP/1.1\r\nx: " + b"x" * (1 << 25)
    with connect(small) as connection, pytest.raises(ConnectionError):
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\n" + begin + much)


def test_what_is_not_http_is_answered_in_the_same_form(small):
    with connect(small) as connection:
        connection.sendall(b"HELLO\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n")
    assert json.loads(body)["error"]["message"] == "this is not a valid HTTP request"


@pytest.mark.parametrize("body", [{"model": "x" * 10**6}, {"x" * 10**6: 1}])
def test_an_error_does_not_send_back_all_that_was_sent(server, body):
    with server.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "a", **body})
    assert answer.status_code in (400, 404)
    assert len(answer.content) < 2000


def test_more_than_may_wait_are_told_to_come_again(small):
    with small.client() as client, ExitStack() as connections:
        connections.enter_context(send(small, LONG))
        wait_for(lambda: small.metric("pageloom_blocks_used"))  # it runs
        for _ in range(2):
            connections.enter_context(send(small, LONG))
        wait_for(lambda: small.metric("pageloom_open_requests") == 3)
        for path, body in (("/v1/completions", LONG), ("/tokenize", {"prompt": "a"})):
            answer = client.post(path, json=body)
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["code"] == "overloaded"
        assert client.get("/health").status_code == 200
    small.wait_until_idle()
    with small.client() as client:
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": [1] * 20_000}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 20_000}]}, None),
        ("/v1/completions", {"prompt": "a", "n": 2}, "n"),
    ],
)
def test_what_is_too_much_is_told_by_its_field(small, path, fields, param):
    with small.client() as client:
        answer = client.post(path, json={"max_tokens": 1, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param or "messages"), error


def test_several_prompts_wait_one_by_one(small):
    with small.client() as client, ExitStack() as connections:
        connections.enter_context(send(small, LONG))
        wait_for(lambda: small.metric("pageloom_blocks_used"))  # it runs
        connections.enter_context(send(small, LONG))
        wait_for(lambda: small.metric("pageloom_open_requests") == 2)
        answer = client.post("/v1/completions", json={"prompt": ["a", "b"]})
        assert answer.status_code == 429
    small.wait_until_idle()
    with small.client() as client:
        answer = client.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 1})
        assert len(answer.json()["choices"]) == 2


def test_more_prompts_than_may_ever_wait_are_not_told_to_come_again(small):
    with small.client() as client:
        answer = client.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert "3 prompts, but no more than 2 requests may wait" in answer.json()["error"]["message"]
    assert "server.max_waiting" in answer.json()["error"]["message"]


def test_a_client_that_stops_reading_is_left_and_holds_nobody_up(small):
    aborted = small.metric("pageloom_aborted_requests_total")
    much = LONG | {"stream": True, "logprobs": 20}
    with send(small, much, receive=4096) as stalled:
        wait_for(lambda: small.metric("pageloom_aborted_requests_total") == aborted + 1)
        with small.client() as client:
            assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        taken = 0
        try:
            while part := stalled.recv(1 << 16):
                taken += len(part)
        except ConnectionError:
            pass
        assert taken < 4 << 20  # what the kernel had for it, and not all the 16,000 tokens


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("abc-123", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("a b", False),
        ("a\tb", False),
        ("", False),
        (None, False),
    ],
)
def test_a_request_id_is_echoed_or_made(server, sent, kept):
    with server.client() as client:
        headers = {} if sent is None else {"x-request-id": sent}
        ids = [client.get("/health", headers=headers).headers["x-request-id"] for _ in range(2)]
    if kept:
        assert ids == [sent, sent]
    else:
        assert len({*ids, sent}) == 3
        assert all(len(name) == 32 for name in ids)


@pytest.mark.parametrize("path", ["/health", "/metrics", "/version", "/v1/models", "/v1/models/x"])
def test_load_balancers_may_ask_for_the_head_alone(server, path):
    with server.client() as client:
        whole, head = client.get(path), client.head(path)
    assert head.status_code == whole.status_code == (404 if path.endswith("x") else 200)
    assert head.content == b""
    assert set(head.headers) == set(whole.headers)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/completions", 400),
    ],
)
def test_every_error_has_openai_s_form_and_no_inner_detail(server, method, path, status):
    with server.client() as client:
        answer = client.request(method, path, content=b"\xff{")
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert_no_inner_detail(answer)


def assert_no_inner_detail(answer: httpx.Response) -> None:
    for inner in ("Traceback", "/core/", "site-packages", ".py"):
        assert inner not in answer.text


def test_no_answer_says_where_the_model_lies(server, config):
    with server.client() as client:
        for path in ("/v1/models", "/metrics", "/openapi.json", "/version", "/tokenizer_info"):
            answer = client.get(path)
            assert answer.status_code == 200
            assert str(config.parent) not in answer.text
