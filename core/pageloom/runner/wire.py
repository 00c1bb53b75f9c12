"""Steps and their outputs as bytes, for workers in other processes: MessagePack, nothing pickled.

A step says all that there is to know, so that workers keep nothing of requests. What a draw does
not depend on stays behind: a prompt travels only where a penalty reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from pageloom.contract import StepOutput
from pageloom.runner.sampler import SampleRow
from pageloom.runner.step import BeamRow, DrawRow, ScoreRow, Step, StepArrays
from pageloom.scheduling.logprobs import TokenLogprobs
from pageloom.scheduling.params import SamplingParams

# The fields of `SamplingParams` that a token is drawn by.
DRAWN_BY = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "min_tokens",
    "stop_token_ids",
    "logprobs",
)
_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}


class _Draw(msgspec.Struct, array_like=True):
    sequence: int
    params: bytes  # by what it is drawn, packed on its own: most draws of most steps have the same
    index: int
    num_output: int  # tokens of the output so far
    mask: bytes | None
    history: tuple[list[int], list[int]] | None  # prompt and output, for penalties


class _Message(msgspec.Struct, array_like=True):
    token_ids: bytes
    query_start: bytes
    seq_lens: bytes
    block_tables: bytes
    draws: list[_Draw]
    beams: list[BeamRow]
    scored: list[ScoreRow]
    moves: tuple[Sequence[int], Sequence[int], Sequence[int]]  # out, in, copies; pairs are flat


class _Output(msgspec.Struct, array_like=True):
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    failures: dict[int, str]
    candidates: list[list[tuple[int, float]] | None]
    scores: list[list[TokenLogprobs]]


_encoder = msgspec.msgpack.Encoder(enc_hook=list)
_message_decoder = msgspec.msgpack.Decoder(_Message)
_output_decoder = msgspec.msgpack.Decoder(_Output)


def pack_step(step: Step) -> bytes:
    arrays = step.arrays
    message = _Message(
        arrays.token_ids.astype(np.int32).tobytes(),
        arrays.query_start.tobytes(),
        arrays.seq_lens.tobytes(),
        arrays.block_tables.tobytes(),
        [_pack_draw(draw) for draw in step.draws],
        list(step.beams),
        [ScoreRow(s.sequence, s.first, list(s.token_ids), s.num_top) for s in step.scored],
        (_flat(step.swapped_out), _flat(step.swapped_in), _flat(step.copies)),
    )
    return _encoder.encode(message)


def unpack_step(data: bytes) -> Step:
    message = _message_decoder.decode(data)
    query_start = np.frombuffer(message.query_start, dtype=np.int32).copy()
    seq_lens = np.frombuffer(message.seq_lens, dtype=np.int32).copy()
    tables = np.frombuffer(message.block_tables, dtype=np.int32).copy()
    arrays = StepArrays(
        token_ids=np.frombuffer(message.token_ids, dtype=np.int32).astype(np.int64),
        query_start=query_start,
        seq_lens=seq_lens,
        block_tables=tables.reshape(len(seq_lens), -1) if len(seq_lens) else tables.reshape(0, 0),
    )
    swapped_out, swapped_in, copies = (_pairs(flat) for flat in message.moves)
    return Step(
        np.diff(query_start).tolist(),
        seq_lens.tolist(),
        lambda: arrays,
        draws=[_unpack_draw(draw) for draw in message.draws],
        beams=message.beams,
        scored=message.scored,
        swapped_out=swapped_out,
        swapped_in=swapped_in,
        copies=copies,
    )


def pack_output(output: StepOutput) -> bytes:
    return _encoder.encode(
        _Output(
            output.token_ids, output.logprobs, output.failures, output.candidates, output.scores
        )
    )


def unpack_output(data: bytes) -> StepOutput:
    output = _output_decoder.decode(data)
    return StepOutput(
        output.token_ids, list(output.logprobs), output.failures, output.candidates, output.scores
    )


def _pack_draw(draw: DrawRow) -> _Draw:
    row, params = draw.sample, draw.sample.params
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    history = None
    if penalties != (1.0, 0.0, 0.0):
        history = list(row.prompt_token_ids), list(row.output_token_ids)
    return _Draw(
        draw.sequence,
        _encoder.encode((_sampling_fields(params), sorted(row.eos_token_ids))),
        row.index,
        len(row.output_token_ids),
        row.mask,
        history,
    )


def _unpack_draw(draw: _Draw) -> DrawRow:
    params, eos_token_ids = _unpack_params(draw.params)
    # Where nobody reads the tokens, their number is all that a draw depends on.
    prompt, output = draw.history or ((), range(draw.num_output))
    sample = SampleRow(params, prompt, output, eos_token_ids, draw.index, draw.mask)
    return DrawRow(draw.sequence, sample)


def _sampling_fields(params: SamplingParams) -> dict[str, Any]:
    given = {name: getattr(params, name) for name in DRAWN_BY}
    if given["logit_bias"] is not None:
        given["logit_bias"] = dict(given["logit_bias"])
    return {name: value for name, value in given.items() if value != _DEFAULTS[name]}


@lru_cache(maxsize=4096)
def _unpack_params(data: bytes) -> tuple[SamplingParams, frozenset[int]]:
    given, eos_token_ids = msgspec.msgpack.decode(data, strict=False)
    return SamplingParams(**given), frozenset(eos_token_ids)


def _flat(pairs: Sequence[tuple[int, int]]) -> list[int]:
    return [block for pair in pairs for block in pair]


def _pairs(flat: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(flat[::2], flat[1::2], strict=True))
