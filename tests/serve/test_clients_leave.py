"""Clients that go away in the middle: what they asked for ends, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from random import Random

import httpx
import pytest
from server_process import PATIENCE, send, start_server, wait_for

from pageloom import SamplingParams

CLIENTS, AT_ONCE = 300, 200


@pytest.fixture(scope="module")
def patient(config):
    """A server whose answers may take so long that nobody gets one before leaving."""
    with start_server(config, "model.max_model_len=16384") as server:
        yield server


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2, "temperature": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_what_a_client_asked_for_ends_when_it_leaves(patient, path, prompt, stream):
    body = {"max_tokens": 16_000, "ignore_eos": True, "stream": stream, **prompt}
    asked = len(prompt["prompt"]) if isinstance(prompt.get("prompt"), list) else 1
    aborted = patient.metric("pageloom_aborted_requests_total")
    if stream:
        with patient.client() as client, client.stream("POST", path, json=body) as answer:
            next(answer.iter_lines())
    else:
        with send(patient, body, path=path):
            wait_for(lambda: patient.metric("pageloom_open_requests") == asked)
    # Less than all would mean that some went on to their end.
    wait_for(lambda: patient.metric("pageloom_aborted_requests_total") == aborted + asked)
    patient.wait_until_idle()


@dataclass
class Call:
    """A client's request, and after how many events it leaves (never, if None)."""

    body: dict
    leaves_after: int | None
    text: str = ""

    async def run(self, client: httpx.AsyncClient, turn: asyncio.Semaphore) -> None:
        async with (
            turn,
            client.stream("POST", "/v1/completions", json=self.body | {"stream": True}) as answer,
        ):
            assert answer.status_code == 200
            events = 0
            async for line in answer.aiter_lines():
                if events == self.leaves_after:
                    return
                if line.startswith("data: {"):
                    events += 1
                    self.text += json.loads(line[6:])["choices"][0]["text"]


def make_calls() -> list[Call]:
    """Some share a prefix, some are long, and a third will leave, at once or later."""
    random = Random(5)
    shared = "".join(random.choices("abcdefgh", k=100))
    calls = []
    for number in range(CLIENTS):
        own = "".join(random.choices("ijklmnop", k=random.randint(1, 60)))
        body = {
            "prompt": (shared if number % 2 else "") + own,
            "max_tokens": random.randint(1, 32),
            "temperature": 0,
            "ignore_eos": True,
        }
        calls.append(Call(body, random.randint(0, 20) if number % 3 == 0 else None))
    return calls


def test_of_many_clients_at_once_a_third_leaves_and_the_others_get_what_they_asked_for(
    server, offline
):
    calls, said = make_calls(), len(server.log)

    async def run() -> None:
        turn = asyncio.Semaphore(AT_ONCE)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(
            base_url=server.url, timeout=PATIENCE, limits=limits
        ) as client:
            await asyncio.gather(*(call.run(client, turn) for call in calls))

    asyncio.run(run())
    server.wait_until_idle()
    stayed = [call for call in calls if call.leaves_after is None]
    assert len(stayed) == CLIENTS * 2 // 3
    params = [
        SamplingParams(temperature=0, max_tokens=call.body["max_tokens"], ignore_eos=True)
        for call in stayed
    ]
    expected = offline.generate([call.body["prompt"] for call in stayed], params)
    assert [call.text for call in stayed] == [output.outputs[0].text for output in expected]
    assert server.log[said:] == []
