"""Steps of decodes from CUDA graphs: captured once per batch size, replayed on other inputs.

A decode step is hundreds of kernels that take a GPU less time than a CPU needs to launch them;
a graph launches all of them at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from pageloom.contract import AttentionBackend, AttentionBatch
from pageloom.errors import PageloomError, one_line
from pageloom.memory import blocks_for
from pageloom.models.model import Attend, Model
from pageloom.runner.batch import StepBatch

MOST_SEQS = 256
"""Larger steps keep a GPU busy for longer than it takes to launch them."""

T = TypeVar("T")


class Recorder(Protocol):
    def __call__(self, compute: Callable[[], T]) -> Callable[[], T]:
        """Record what ``compute`` does to tensors on the device.

        The result does it again, on what the same memory holds by then, and returns what
        ``compute`` returned, which the next replay of any recording may overwrite. Raises
        `RuntimeError` if that cannot be recorded, such as waiting for the device.
        """


class CUDARecorder:
    """Records CUDA graphs, all of which share their memory, since no two run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], T]) -> Callable[[], T]:
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            # Once before: what compiles, or allocates for good, cannot do so while captured.
            with torch.cuda.stream(self._stream):
                compute()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Threads of other engines may allocate meanwhile.
            with torch.cuda.graph(
                graph, self._pool, self._stream, capture_error_mode="thread_local"
            ):
                result = compute()

        def replay() -> T:
            graph.replay()
            return result

        return replay


class DecodeInputs:
    """What graphs of decode steps read, always at the same addresses for a batch size.

    As made, every row is the same sequence of one token in slot 0, which is a valid step.
    """

    def __init__(self, most: int, max_blocks: int, device: torch.device) -> None:
        """For up to ``most`` sequences of up to ``max_blocks`` blocks."""
        self._device = device
        # Token ids, positions and slots of a step one after the other, for one transfer.
        self._tokens = torch.zeros(3 * most, dtype=torch.int64, device=device)
        self._seq_lens = torch.ones(most, dtype=torch.int32, device=device)
        self._block_tables = torch.zeros(most, max_blocks, dtype=torch.int32, device=device)
        self._query_start_host = torch.arange(most + 1, dtype=torch.int32)
        self._query_start = self._query_start_host.to(device)

    def token_ids(self, size: int) -> torch.Tensor:
        """Int64 ``[size]``."""
        return self._tokens[:size]

    def positions(self, size: int) -> torch.Tensor:
        """Int64 ``[size]``."""
        return self._tokens[size : 2 * size]

    def attention(self, seq_lens_host: torch.Tensor) -> AttentionBatch:
        """The batch of as many sequences as ``seq_lens_host`` (int32, on the CPU) has."""
        size = len(seq_lens_host)
        return AttentionBatch(
            query_start=self._query_start[: size + 1],
            seq_lens=self._seq_lens[:size],
            block_tables=self._block_tables[:size],
            slots=self._tokens[2 * size : 3 * size],
            query_start_host=self._query_start_host[: size + 1],
            seq_lens_host=seq_lens_host,
            num_decodes=size,
            max_query_len=1,
            max_seq_len=int(seq_lens_host.max()),
        )

    def fill(self, batch: StepBatch, size: int) -> AttentionBatch:
        """Take over a step of at most ``size`` decodes, which is on the CPU.

        It is filled up with its shortest sequence: what that stores again is the same.
        """
        attention = batch.attention
        rows = torch.full((size,), int(attention.seq_lens_host.argmin()))
        rows[: attention.num_seqs] = torch.arange(attention.num_seqs)
        tokens = torch.stack((batch.token_ids, batch.positions, attention.slots))[:, rows]
        self._send(tokens.view(-1), self._tokens[: 3 * size])
        seq_lens = attention.seq_lens_host[rows]
        self._send(seq_lens, self._seq_lens[:size])
        tables = attention.block_tables[rows]
        self._block_tables[:size].zero_()
        self._send(tables, self._block_tables[:size, : tables.shape[1]])
        return self.attention(seq_lens)

    def _send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if self._device.type == "cuda":
            source = source.pin_memory()  # else the copy would wait for the GPU
        target.copy_(source, non_blocking=True)


class DecodeGraphs:
    """A recording of the forward pass for each of `graph_sizes`."""

    @torch.inference_mode()
    def __init__(
        self, model: Model, backend: AttentionBackend, max_num_seqs: int, record: Recorder
    ) -> None:
        """Run and record every size, in a cache that holds nothing yet: block 0 is written to.

        Raises `PageloomError` if the model or the backend cannot be recorded.
        """
        self._model = model
        self._backend = backend
        self._sizes = graph_sizes(max_num_seqs)
        spec = backend.spec
        self._inputs = DecodeInputs(
            self._sizes[-1], blocks_for(spec.max_model_len, spec.block_size), spec.device
        )
        # The largest first: the memory that it takes and frees is enough for the others.
        self._replays = {size: self._record(size, record) for size in reversed(self._sizes)}

    def hold(self, batch: StepBatch) -> bool:
        """Whether ``batch`` has nothing but decodes, and not too many."""
        attention = batch.attention
        return attention.max_query_len == 1 and attention.num_seqs <= self._sizes[-1]

    def run(self, batch: StepBatch) -> torch.Tensor:
        """Plan and compute a step on the CPU that the graphs hold.

        Returns its hidden states ``[T, hidden_size]``, valid until the next call.
        """
        num_seqs = batch.attention.num_seqs
        size = self._sizes[bisect_left(self._sizes, num_seqs)]
        self._backend.plan(self._inputs.fill(batch, size))
        return self._replays[size]()[:num_seqs]

    def _record(self, size: int, record: Recorder) -> Callable[[], torch.Tensor]:
        token_ids, positions = self._inputs.token_ids(size), self._inputs.positions(size)
        self._backend.plan(self._inputs.attention(torch.ones(size, dtype=torch.int32)))
        attend = Attend.of(self._backend)
        try:
            return record(lambda: self._model.forward(token_ids, positions, attend))
        except RuntimeError as error:
            raise PageloomError(
                f"a step of {size} decodes cannot be captured in a CUDA graph: {one_line(error)}; "
                "set runtime.enforce_eager to true, or, if memory is short, lower "
                "kv_cache.gpu_memory_utilization"
            ) from error


def capture_decodes(
    model: Model, backend: AttentionBackend, max_num_seqs: int
) -> DecodeGraphs | None:
    """Graphs of steps of up to ``max_num_seqs`` decodes; None on a CPU, and where the model or
    the backend does not support them. Raises as `DecodeGraphs` does."""
    on_gpu = backend.spec.device.type == "cuda"
    if not (on_gpu and model.supports_cuda_graphs and backend.supports_cuda_graphs):
        return None
    return DecodeGraphs(model, backend, max_num_seqs, CUDARecorder(backend.spec.device))


def graph_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4 and multiples of 8 that steps are filled up to, ascending. The last is
    ``max_num_seqs``, or `MOST_SEQS` if that is less."""
    most = min(max_num_seqs, MOST_SEQS)
    return [size for size in (1, 2, 4, *range(8, most, 8)) if size < most] + [most]
