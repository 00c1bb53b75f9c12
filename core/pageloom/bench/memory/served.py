"""The models and the GPU of the paper: how much KV memory there is, and how long a step takes."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    layers: int
    hidden_size: int
    parameters: float
    bytes_per_value: int = 2  # 16-bit weights and KV

    @property
    def kv_bytes_per_token(self) -> int:
        """A key and a value of the hidden size in every layer: no grouped heads in either model."""
        return 2 * self.layers * self.hidden_size * self.bytes_per_value

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.bytes_per_value


OPT_13B = ServedModel("OPT-13B", layers=40, hidden_size=5120, parameters=13e9)
LLAMA_13B = ServedModel("LLaMA-13B", layers=40, hidden_size=5120, parameters=13e9)

KV_MEMORY = 12 * GIB  # of the 40 GB, beside 26 GB of weights; table 1
KV_SLOTS = KV_MEMORY // OPT_13B.kv_bytes_per_token  # tokens; "15.7K" in table 1


PEAK_BANDWIDTH = 1.555e12  # bytes/s; A100 40 GB
PEAK_COMPUTE = 312e12  # 16-bit operations/s, tensor cores


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long one step takes on an A100: a roofline, and what the host adds.

    Matrix products read all weights and compute 2 operations per parameter and token, whichever
    takes longer. Attention reads the KV of every token. Kernels reach a part of the GPU's peaks.

    What the host does for every sequence (its inputs, sampling) is not published. It is taken from
    one of the paper's numbers: with Alpaca at 30 requests/s, where memory does not limit it, vLLM
    ran 132.44 requests at a time. By Little's law each step then took 132.44 / (30 x 58.45
    tokens/s) = 75.5 ms, of which this roofline explains 37 ms.
    """

    model: ServedModel = OPT_13B
    efficiency: float = 0.6  # of both peaks
    host_seconds: float = 0.29e-3  # per sequence

    def seconds(self, sequences: int, tokens: int, kv_tokens: int) -> float:
        """For a step that computes ``tokens`` tokens of ``sequences`` sequences, while the KV
        cache holds ``kv_tokens`` tokens."""
        bandwidth, compute = self.efficiency * PEAK_BANDWIDTH, self.efficiency * PEAK_COMPUTE
        weights = self.model.weight_bytes / bandwidth
        products = 2 * self.model.parameters * tokens / compute
        attention = kv_tokens * self.model.kv_bytes_per_token / bandwidth
        return max(weights, products) + attention + self.host_seconds * sequences
