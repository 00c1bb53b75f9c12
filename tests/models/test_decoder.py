"""The decoder against the model code of `transformers`, at every position."""

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from pageloom.models.build import build_model
from pageloom.models.decoder import Decoder
from pageloom.models.model import Attend, UnsupportedModelError
from pageloom.ops.rope import rotate_
from reference import DenseAttention, InMemoryLoader, random_model

MAX_LEN = 48
BASE = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # logits of a few units, so that a wrong one shows
}


def rope(kind, **parameters):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


LONGROPE = {
    "factor": 4.0,
    "short_factor": [1.0 + i / 10 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 16}

CONFIGS = {
    "llama": LlamaConfig(**BASE),
    "llama multi-head": LlamaConfig(**BASE | {"num_key_value_heads": 4}),
    "llama attention bias": LlamaConfig(**BASE, attention_bias=True),
    "llama mlp bias": LlamaConfig(**BASE, mlp_bias=True),
    "llama tied": LlamaConfig(**BASE, tie_word_embeddings=True),
    "llama head_dim": LlamaConfig(**BASE, head_dim=24),
    "llama theta": LlamaConfig(**BASE, **rope("default") | {"rope_theta": 500.0}),
    "llama linear": LlamaConfig(**BASE, **rope("linear", factor=4.0)),
    "llama dynamic": LlamaConfig(**BASE, **rope("dynamic", factor=4.0)),
    "llama yarn": LlamaConfig(**BASE, **rope("yarn", factor=4.0, **ORIGINAL)),
    "llama longrope": LlamaConfig(**BASE, **rope("longrope", **LONGROPE, **ORIGINAL)),
    "llama llama3": LlamaConfig(**BASE, **rope("llama3", **LLAMA3, **ORIGINAL)),
    "mistral": MistralConfig(**BASE, sliding_window=None),
    "mistral window": MistralConfig(**BASE, sliding_window=7, head_dim=16),
    "qwen2": Qwen2Config(**BASE),
    "qwen2 window": Qwen2Config(
        **BASE, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen2 layer types": Qwen2Config(
        **BASE,
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen3": Qwen3Config(**BASE, head_dim=16),
    "qwen3 bias": Qwen3Config(**BASE, head_dim=32, attention_bias=True, tie_word_embeddings=True),
}


def pageloom_model(reference, dtype=torch.float32, max_model_len=MAX_LEN, state=None):
    return build_model(
        InMemoryLoader(reference.config, state or reference.state_dict()),
        reference.config,
        dtype=dtype,
        device=torch.device("cpu"),
        max_model_len=max_model_len,
    )


def prompts(lengths, vocab=131):
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(vocab, (n,), generator=generator) for n in lengths]


def run(model, attend, chunks):
    """Logits of one call; ``chunks`` lists (sequence, tokens, position of the first)."""
    attend.step([(sequence, len(tokens)) for sequence, tokens, _ in chunks])
    tokens = torch.cat([tokens for _, tokens, _ in chunks])
    positions = torch.cat([torch.arange(at, at + len(tokens)) for _, tokens, at in chunks])
    logits = model.logits(model.forward(tokens, positions, Attend(attend)))
    return logits.split([len(tokens) for _, tokens, _ in chunks])


def expected_logits(reference, tokens):
    with torch.inference_mode():
        return reference(tokens[None]).logits[0].float()


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers_at_every_position(name):
    reference = random_model(CONFIGS[name])
    model = pageloom_model(reference)
    assert isinstance(model, Decoder)
    # longrope has its long factors for an engine of this length, so only a long sequence agrees.
    lengths = (MAX_LEN, 30) if "longrope" in name else (1, 13, MAX_LEN, 2)
    sequences = prompts(lengths)
    chunks = [(i, tokens, 0) for i, tokens in enumerate(sequences)]
    found = run(model, DenseAttention(model.layers), chunks)
    for tokens, logits in zip(sequences, found, strict=True):
        expected = expected_logits(reference, tokens)
        assert expected.std() > 0.5
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama head_dim", "llama yarn", "qwen3"])
def test_attention_may_rotate_q_and_k_itself(name):
    reference = random_model(CONFIGS[name])
    model = pageloom_model(reference)
    attention = DenseAttention(model.layers).step([(0, 30)])
    given = []

    def attend(layer, q, k, v, out, sinks=None, rotary=None):
        given.append(rotary)
        cos, sin = rotary
        assert cos.shape == sin.shape == (30, q.shape[-1])
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        q, k = (rotate_(x.clone(), cos[:, None], sin[:, None]) for x in (q, k))
        attention(layer, q, k, v, out)

    (tokens,) = prompts((30,))
    hidden = model.forward(tokens, torch.arange(30), Attend(attend, fuses_rotary=True))
    assert len(given) == len(model.layers)
    expected = expected_logits(reference, tokens)
    torch.testing.assert_close(model.logits(hidden), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral window", "qwen3"])
def test_chunked_prefill_and_decode_give_the_logits_of_one_prefill(name):
    reference = random_model(CONFIGS[name])
    model = pageloom_model(reference)
    attend = DenseAttention(model.layers)
    first, second = prompts((20, 17))
    steps = [
        [(0, first[:9], 0)],
        [(0, first[9:16], 9), (1, second[:15], 0)],
        *[[(1, second[i : i + 1], i), (0, first[i + 1 : i + 2], i + 1)] for i in (15, 16)],
        [(0, first[18:], 18)],
    ]
    found = {0: [], 1: []}
    for step in steps:
        for (sequence, _, _), logits in zip(step, run(model, attend, step), strict=True):
            found[sequence].append(logits)
    for sequence, tokens in enumerate((first, second)):
        expected = expected_logits(reference, tokens)
        torch.testing.assert_close(torch.cat(found[sequence]), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama tied", "qwen2", "qwen3", "llama yarn"])
def test_bfloat16_is_as_close_to_float32_as_transformers_is(name):
    reference = random_model(CONFIGS[name])
    model = pageloom_model(reference, torch.bfloat16)
    (tokens,) = prompts((40,))
    exact = expected_logits(reference, tokens)
    (found,) = run(model, DenseAttention(model.layers), [(0, tokens, 0)])
    theirs = expected_logits(reference.to(torch.bfloat16), tokens)
    assert (found - exact).square().mean() < 1.5 * (theirs - exact).square().mean()


def test_dynamic_rope_is_stretched_for_max_model_len_whatever_the_sequence():
    reference = random_model(LlamaConfig(**BASE, **rope("dynamic", factor=4.0)))
    model = pageloom_model(reference, max_model_len=160)
    long, short = prompts((160, 11))
    expected = expected_logits(reference, long)  # stretched to the same 160
    chunks = [(0, short, 0), (1, long, 0)]
    found_short, found_long = run(model, DenseAttention(model.layers), chunks)
    torch.testing.assert_close(found_long, expected, atol=2e-4, rtol=1e-4)
    (alone,) = run(model, DenseAttention(model.layers), [(0, short, 0)])
    torch.testing.assert_close(found_short, alone, atol=2e-4, rtol=1e-4)


def test_windows_become_layer_specs():
    model = pageloom_model(random_model(CONFIGS["qwen2 window"]))
    assert [spec.window for spec in model.layers] == [None, 5, 5]
    assert {(s.num_heads, s.num_kv_heads, s.head_size, s.scale) for s in model.layers} == {
        (4, 2, 16, 0.25)
    }


def test_linear_layers_that_the_loader_supplies_are_used():
    class Supplies(InMemoryLoader):
        def linear(self, names, in_features, out_features, bias, dtype, device):
            if not names[0].endswith("q_proj"):
                return None
            parts = [self.state.pop(f"{name}.weight") for name in names]
            assert [len(part) for part in parts] == list(out_features)
            layer = torch.nn.Linear(in_features, sum(out_features), bias=bias, dtype=dtype)
            layer.weight.data = torch.cat(parts)
            self.supplied = [*getattr(self, "supplied", []), tuple(names)]
            return layer

    reference = random_model(CONFIGS["llama"])
    loader = Supplies(reference.config, dict(reference.state_dict()))
    device = torch.device("cpu")
    model = build_model(
        loader, reference.config, dtype=torch.float32, device=device, max_model_len=MAX_LEN
    )
    assert loader.supplied[0] == tuple(f"model.layers.0.self_attn.{p}_proj" for p in "qkv")
    (tokens,) = prompts((20,))
    (found,) = run(model, DenseAttention(model.layers), [(0, tokens, 0)])
    torch.testing.assert_close(found, expected_logits(reference, tokens), atol=2e-4, rtol=1e-4)


def test_a_tied_output_layer_that_the_loader_supplies_is_used():
    class SuppliesHead(InMemoryLoader):
        def linear(self, names, in_features, out_features, bias, dtype, device):
            if list(names) != ["lm_head"]:
                return None
            layer = torch.nn.Linear(in_features, *out_features, bias=bias, dtype=dtype)
            layer.weight.data = -self.state["model.embed_tokens.weight"]
            return layer

    reference = random_model(CONFIGS["llama tied"])
    model = build_model(
        SuppliesHead(reference.config, reference.state_dict()),
        reference.config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=MAX_LEN,
    )
    (tokens,) = prompts((20,))
    (found,) = run(model, DenseAttention(model.layers), [(0, tokens, 0)])
    torch.testing.assert_close(-found, expected_logits(reference, tokens), atol=2e-4, rtol=1e-4)


def test_a_checkpoint_of_the_base_model_or_an_old_one_loads():
    reference = random_model(CONFIGS["llama tied"])
    state = {name.removeprefix("model."): t for name, t in reference.state_dict().items()}
    state["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    model = pageloom_model(reference, state=state)
    (tokens,) = prompts((20,))
    (found,) = run(model, DenseAttention(model.layers), [(0, tokens, 0)])
    torch.testing.assert_close(found, expected_logits(reference, tokens), atol=2e-4, rtol=1e-4)


def test_tensors_that_do_not_fit_are_all_named():
    reference = random_model(CONFIGS["llama"])
    state = dict(reference.state_dict())
    del state["model.layers.1.self_attn.k_proj.weight"]
    state["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    state["model.norm.weight"] = torch.ones(63)
    with pytest.raises(UnsupportedModelError) as caught:
        pageloom_model(reference, state=state)
    assert str(caught.value) == (
        "The weights do not fit the model's configuration; tensors "
        "missing: model.layers.1.self_attn.k_proj.weight; "
        "unexpected or repeated: model.layers.0.self_attn.q_proj.bias; "
        "of the wrong shape: model.norm.weight is [63], not [64]."
    )


@pytest.mark.parametrize(
    "make_config",
    [
        lambda: MistralConfig(**BASE, attention_bias=True, mlp_bias=True),
        lambda: Qwen2Config(**BASE, attention_bias=True, mlp_bias=True),
        lambda: Qwen2Config(**BASE, attention_bias=False),
        lambda: Qwen3Config(**BASE, mlp_bias=True),
    ],
)
def test_switches_that_the_type_does_not_have_are_ignored(make_config):
    reference = random_model(make_config())
    model = pageloom_model(reference)
    assert isinstance(model, Decoder)
    (tokens,) = prompts((20,))
    (found,) = run(model, DenseAttention(model.layers), [(0, tokens, 0)])
    torch.testing.assert_close(found, expected_logits(reference, tokens), atol=2e-4, rtol=1e-4)


NOT_WEIGHTS = [torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", NOT_WEIGHTS)
def test_tensors_that_are_no_plain_floating_point_are_refused_by_name(dtype):
    state = dict(random_model(CONFIGS["llama"]).state_dict())
    name = "model.layers.1.mlp.down_proj.weight"
    state[name] = state[name].to(dtype)
    with pytest.raises(UnsupportedModelError) as caught:
        pageloom_model(random_model(CONFIGS["llama"]), state=state)
    assert f"does not unpack: {name} is {str(dtype).removeprefix('torch.')}." in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_are_cast_to_the_dtype_that_is_run(dtype):
    reference = random_model(CONFIGS["llama"])
    state = {name: tensor.to(dtype) for name, tensor in reference.state_dict().items()}
    model = pageloom_model(reference, state=state)
    reference.load_state_dict(state)
    (tokens,) = prompts((20,))
    (found,) = run(model, DenseAttention(model.layers), [(0, tokens, 0)])
    torch.testing.assert_close(found, expected_logits(reference, tokens), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"vocab_size": -3}, "vocab_size -3, but it must be at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0, but"),
        ({"num_key_value_heads": 0}, "num_key_value_heads 0, but"),
        ({"num_key_value_heads": 3}, "4 attention heads, which cannot share 3 key-value heads"),
        ({"head_dim": -8}, "head_dim -8, but"),
        ({"intermediate_size": 0}, "intermediate_size 0, but"),
        ({"vocab_size": 2**70}, "vocab_size 1180591620717411303424, but it must be at most 21474"),
    ],
)
def test_sizes_that_no_model_has_are_refused(sizes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        build_model(
            InMemoryLoader(None, {}),
            LlamaConfig(**BASE | sizes),
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_model_len=MAX_LEN,
        )
