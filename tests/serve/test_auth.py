"""Who is let in, and from where."""

from __future__ import annotations

import logging

import openai
import pytest
from server_process import start_server

from pageloom.config.schema import ServerConfig
from pageloom.errors import PageloomError
from pageloom.serve.auth import Keys, read_keys
from pageloom.serve.listen import warn_if_open

PATHS = (
    ("GET", "/v1/models"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/openapi.json"),
    ("GET", "/"),
    ("GET", "/no/such/path"),
    ("GET", "/health/"),
    ("GET", "//health"),
    ("DELETE", "/v1/models"),
)


@pytest.fixture(scope="module")
def guarded(config, tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys.txt"
    file.write_text("# of the team\n\n  key-in-file  \n")
    with start_server(
        config, "server.api_keys=[first-key, second-key]", f"server.api_key_file={file}"
    ) as server:
        yield server


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_without_a_key_every_path_is_closed_whether_it_exists_or_not(guarded, method, path):
    with guarded.client() as client:
        answer = client.request(method, path, content=b"{}" if method == "POST" else None)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


def test_health_needs_no_key(guarded):
    with guarded.client() as client:
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize("key", ["first-key", "second-key", "key-in-file"])
def test_each_key_opens(guarded, key):
    models = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key).models.list()
    assert [model.id for model in models] == ["tiny"]


@pytest.mark.parametrize("key", ["third-key", "first-key2", "first-ke", "# of the team"])
def test_a_wrong_key_does_not(guarded, key):
    client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.completions.create(model="tiny", prompt="hi")


@pytest.mark.parametrize(
    ("header", "admitted"),
    [
        (b"Bearer a", True),
        (b"bearer a", True),
        (b"Bearer  b ", True),
        (b"Basic a", False),
        (b"a", False),
        (b"Bearer", False),
        (b"Bearer a b", False),
        ("Bearer \xe4".encode(), False),
        (None, False),
    ],
)
def test_the_header_is_bearer_and_a_key(header, admitted):
    assert Keys(["a", "b"]).admit(header) is admitted


def test_without_keys_all_are_let_in():
    assert Keys([]).admit(None)
    assert Keys([]).admit(b"Bearer whatever")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"api_keys": [""]}, "has a key that is empty"),
        ({"api_keys": ["a b"]}, "clients cannot send"),
        ({"api_keys": ["\xe4"]}, "clients cannot send"),
        ({"api_key_file": "/nowhere"}, "api_key_file /nowhere cannot be read"),
        ({"api_key_file": "/dev/null"}, "has no key; write one per line"),
    ],
)
def test_keys_that_cannot_be_are_refused(options, message):
    with pytest.raises(PageloomError, match=message):
        read_keys(ServerConfig(**options))


@pytest.mark.parametrize(
    ("host", "has_keys", "warned"),
    [
        ("127.0.0.1", False, False),
        ("localhost", False, False),
        ("::1", False, False),
        ("0.0.0.0", False, True),
        ("192.168.1.5", False, True),
        ("0.0.0.0", True, False),
    ],
)
def test_a_server_that_is_open_to_others_without_a_key_says_so(caplog, host, has_keys, warned):
    with caplog.at_level(logging.WARNING):
        warn_if_open(host, has_keys)
    assert ("without API keys" in caplog.text) is warned
