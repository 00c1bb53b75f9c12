"""Pageloom beside ``transformers.generate`` on the same requests, in one interleaved run.

    python benchmarks/versus_transformers.py [--rounds 3] [--requests 64] [--json FILE]

The requests are the built-in trace of ``pageloom bench engine``: 50 to 500 prompt tokens and 16 to
200 output tokens, from a fixed seed.
``transformers`` runs them in static batches, which is what its ``generate`` does: prompts padded
to the longest, every batch as long as its longest output. Pageloom gets all at once. Both use
bfloat16, greedy decoding, the same weights and the same threads; tokens beyond a request's own
output length do not count. What is reported is the ratio of output tokens per second in each
round, its median and its spread; absolute speeds are for orientation on the machine of that run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from pageloom import Engine
from pageloom.bench.serving.replay import Client
from pageloom.bench.serving.trace import Trace, draw_token_ids, random_trace
from pageloom.models.loading import open_loader
from pageloom.plugins import Plugins

CONFIG = Path(__file__).parent.parent / "configs" / "smollm2.yaml"


class PageloomSide:
    def __init__(self) -> None:
        self.engine = Engine.from_config(CONFIG)
        self.client = Client(self.engine)

    def run(self, trace: Trace) -> None:
        self.engine.reset_prefix_cache()
        self.client.replay(trace)


class TransformersSide:
    def __init__(self, path: str, batch_size: int) -> None:
        loader = open_loader(Plugins.load(), path)
        config = loader.model_config()
        self.batch_size = batch_size
        self.pad = loader.tokenizer().pad_token_id
        self.model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
        missing, _ = self.model.load_state_dict(dict(loader.tensors()), strict=False)
        if set(missing) - {"lm_head.weight"}:
            raise RuntimeError(f"weights are missing: {missing}")
        self.model.tie_weights()
        self.model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def run(self, trace: Trace) -> None:
        for at in range(0, len(trace), self.batch_size):
            batch = trace[at : at + self.batch_size]
            prompts = [list(request.prompt) for request in batch]
            steps = max(request.output_tokens for request in batch)
            longest = max(map(len, prompts))
            ids = torch.tensor([[self.pad] * (longest - len(p)) + p for p in prompts])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
            output = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=steps,
                do_sample=False,
                pad_token_id=self.pad,
            )
            if output.shape[1] != longest + steps:
                raise RuntimeError(f"expected {steps} new tokens, got {output.shape[1] - longest}")


def timed(side: PageloomSide | TransformersSide, trace: Trace) -> float:
    started = time.perf_counter()
    side.run(trace)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=32, help="of transformers")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    ours = PageloomSide()
    theirs = TransformersSide(ours.engine.info.model, options.batch_size)
    trace = draw_token_ids(random_trace(options.requests), ours.engine.vocab_size)
    output_tokens = sum(request.output_tokens for request in trace)
    warm_up = [replace(request, output_tokens=4) for request in trace[:2]]
    for side in (ours, theirs):
        side.run(warm_up)

    rounds = []
    for number in range(options.rounds):
        sides = [ours, theirs] if number % 2 == 0 else [theirs, ours]
        seconds = {type(side).__name__: timed(side, trace) for side in sides}
        speeds = {name: output_tokens / spent for name, spent in seconds.items()}
        rounds.append(speeds | {"ratio": speeds["PageloomSide"] / speeds["TransformersSide"]})
        if options.json:  # after each round: all of them take minutes
            options.json.write_text(json.dumps({"argv": sys.argv[1:], "rounds": rounds}, indent=1))
        print(
            f"round {number + 1}: Pageloom {speeds['PageloomSide']:.1f}, transformers "
            f"{speeds['TransformersSide']:.1f} output tokens/s, ratio {rounds[-1]['ratio']:.2f}",
            flush=True,
        )
    ratios = [entry["ratio"] for entry in rounds]
    print(
        f"ratio: median {statistics.median(ratios):.2f}, from {min(ratios):.2f} to "
        f"{max(ratios):.2f} over {len(ratios)} rounds; {torch.get_num_threads()} threads"
    )


if __name__ == "__main__":
    main()
