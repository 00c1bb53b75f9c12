"""Models that run as `transformers` modules, against the same modules on their own."""

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from test_decoder import (
    BASE,
    LONGROPE,
    MAX_LEN,
    NOT_WEIGHTS,
    ORIGINAL,
    expected_logits,
    pageloom_model,
    prompts,
    rope,
    run,
)
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaModel

from pageloom.models.build import build_model
from pageloom.models.fallback import TransformersModel
from pageloom.models.model import Attend, UnsupportedModelError
from reference import DenseAttention, InMemoryLoader, random_model

IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
HEAD = {"head_dim": 16}
MULTI_HEAD = {k: v for k, v in BASE.items() if k != "num_key_value_heads"}
GPT2 = {"vocab_size": 131, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}

CONFIGS = {
    "gemma2": lambda: hf.Gemma2Config(
        **BASE,
        **HEAD,
        sliding_window=7,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=8.0,
        query_pre_attn_scalar=20,
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **BASE,
        **HEAD,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "phi3": lambda: hf.Phi3Config(**BASE, **IDS, sliding_window=9),
    "phi3 longrope": lambda: hf.Phi3Config(
        **BASE, **IDS, **rope("longrope", **LONGROPE), **ORIGINAL
    ),
    "gpt2": lambda: hf.GPT2Config(
        **GPT2, **IDS, initializer_range=0.2, scale_attn_by_inverse_layer_idx=True
    ),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**MULTI_HEAD, **IDS),
    "olmo2": lambda: hf.Olmo2Config(**BASE, **IDS),
    "starcoder2": lambda: hf.Starcoder2Config(**BASE, **IDS, sliding_window=8),
    "opt": lambda: hf.OPTConfig(
        **IDS,
        vocab_size=131,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        init_std=0.2,
    ),
    "cohere": lambda: hf.CohereConfig(**BASE, **IDS, logit_scale=0.5),
    "granite": lambda: hf.GraniteConfig(
        **BASE, **IDS, logits_scaling=0.5, attention_multiplier=0.3, residual_multiplier=0.5
    ),
    "stablelm": lambda: hf.StableLmConfig(**BASE, **IDS),
    "mixtral": lambda: hf.MixtralConfig(**BASE, **IDS, **EXPERTS, sliding_window=None),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(
        **BASE, **IDS, **HEAD, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "gpt_oss": lambda: hf.GptOssConfig(**BASE, **IDS, **HEAD, **EXPERTS, sliding_window=6),
    "llama with gelu": lambda: hf.LlamaConfig(**BASE, hidden_act="gelu"),
}


def gelu_llama():
    """A model whose classes the decoder would know, but whose configuration it does not."""
    return random_model(CONFIGS["llama with gelu"]())


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers_in_mixed_and_chunked_calls(name):
    reference = random_model(CONFIGS[name]())
    model = pageloom_model(reference)
    assert isinstance(model, TransformersModel)
    attend = DenseAttention(model.layers)
    # longrope has its long factors for an engine of this length, so only long sequences agree.
    first, second, third = prompts((MAX_LEN, 21, 17))
    one = run(model, attend, [(0, first, 0), (1, second[:20], 0), (2, third[:6], 0)])
    two = run(model, attend, [(1, second[20:], 20), (2, third[6:], 6)])
    found = [one[0], torch.cat((one[1], two[0])), torch.cat((one[2], two[1]))]
    for tokens, logits in zip((first, second, third), found, strict=True):
        expected = expected_logits(reference, tokens)
        assert expected.std() > 0.5
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "olmo2"])
def test_bfloat16_stays_close(name):
    reference = random_model(CONFIGS[name]())
    model = pageloom_model(reference, torch.bfloat16)
    (tokens,) = prompts((40,))
    exact = expected_logits(reference, tokens)
    (found,) = run(model, DenseAttention(model.layers), [(0, tokens, 0)])
    theirs = expected_logits(reference.to(torch.bfloat16), tokens)
    assert found.dtype == torch.float32
    assert (found - exact).square().mean() < 1.5 * (theirs - exact).square().mean()


def test_layers_are_described_as_the_model_calls_attention():
    gemma = pageloom_model(random_model(CONFIGS["gemma2"]())).layers
    assert [(s.window, s.softcap) for s in gemma] == [(7, 5.0), (None, 5.0), (7, 5.0)]
    assert gemma[0].scale == pytest.approx(20**-0.5)
    assert (gemma[0].num_heads, gemma[0].num_kv_heads, gemma[0].head_size) == (4, 2, 16)
    oss = pageloom_model(random_model(CONFIGS["gpt_oss"]())).layers
    assert [(s.window, s.sinks) for s in oss] == [(6, True), (None, True), (6, True)]
    gpt2 = pageloom_model(random_model(CONFIGS["gpt2"]())).layers
    assert [s.scale for s in gpt2] == pytest.approx([1 / 4, 1 / 8, 1 / 12])


def test_a_window_that_max_model_len_never_fills_is_none():
    reference = random_model(hf.Starcoder2Config(**BASE, **IDS, sliding_window=MAX_LEN))
    assert {spec.window for spec in pageloom_model(reference).layers} == {None}


def test_q_k_and_v_reach_the_backend_as_whole_rows():
    reference = random_model(CONFIGS["gpt2"]())
    model = pageloom_model(reference)

    def attend(layer, q, k, v, out, sinks=None):
        assert q.is_contiguous()
        assert k.is_contiguous()
        assert v.is_contiguous()
        assert q.shape == out.shape == (5, 4, 16)
        out.zero_()

    model.forward(torch.arange(5), torch.arange(5), Attend(attend))


def test_longrope_is_decided_by_max_model_len_not_by_the_batch():
    reference = random_model(CONFIGS["phi3 longrope"]())
    model = pageloom_model(reference)
    short, long = prompts((9, 40))
    (alone,) = run(model, DenseAttention(model.layers), [(0, short, 0)])
    together, _ = run(model, DenseAttention(model.layers), [(0, short, 0), (1, long, 0)])
    torch.testing.assert_close(alone, together, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt2", "gemma2"])
def test_checkpoints_as_they_are_on_disk_load(name, tmp_path):
    reference = random_model(CONFIGS[name]())
    reference.save_pretrained(tmp_path)  # experts apart, tied heads left out
    state = load_file(tmp_path / "model.safetensors")
    assert set(state) != set(reference.state_dict())
    model = pageloom_model(reference, state=state)
    (tokens,) = prompts((20,))
    (found,) = run(model, DenseAttention(model.layers), [(0, tokens, 0)])
    torch.testing.assert_close(found, expected_logits(reference, tokens), atol=2e-4, rtol=1e-4)


def test_checkpoints_of_the_base_model_load():
    reference = random_model(CONFIGS["gpt2"]())
    model = pageloom_model(reference, state=reference.transformer.state_dict())
    (tokens,) = prompts((20,))
    (found,) = run(model, DenseAttention(model.layers), [(0, tokens, 0)])
    torch.testing.assert_close(found, expected_logits(reference, tokens), atol=2e-4, rtol=1e-4)


def test_tensors_that_do_not_fit_are_all_named():
    reference = random_model(CONFIGS["olmo2"]())
    state = dict(reference.state_dict())
    del state["model.layers.1.self_attn.k_proj.weight"]
    state["model.layers.0.self_attn.rel_bias"] = torch.zeros(64)
    state["model.norm.weight"] = torch.ones(63)
    with pytest.raises(UnsupportedModelError) as caught:
        pageloom_model(reference, state=state)
    assert str(caught.value) == (
        "The weights do not fit the model's configuration; tensors "
        "missing: model.layers.1.self_attn.k_proj.weight; "
        "unexpected or repeated: model.layers.0.self_attn.rel_bias; "
        "of the wrong shape: model.norm.weight is [63], not [64]."
    )


REFUSED = {
    "alibi": (
        lambda: hf.BloomConfig(vocab_size=131, hidden_size=64, n_layer=2, n_head=4),
        "bloom cannot be served: none of its layers uses the attention interface of transformers.",
    ),
    "own attention classes": (
        lambda: hf.FalconConfig(
            vocab_size=131, hidden_size=64, num_hidden_layers=2, num_attention_heads=4
        ),
        "falcon cannot be served: its attention in transformers cannot be replaced (it has no "
        "attention interface).",
    ),
    "latent attention": (
        lambda: hf.DeepseekV3Config(
            **BASE | {"num_key_value_heads": 4},
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=12,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
        ),
        "deepseek_v3 cannot be served: attention layer 0 has values of 12 and keys of 16 "
        "elements per head.",
    ),
    "recurrent": (
        lambda: hf.MambaConfig(vocab_size=131, hidden_size=64, num_hidden_layers=2),
        "mamba cannot be served: it has layers of type linear_attention.",
    ),
    "convolutions": (
        lambda: hf.Lfm2Config(**BASE, layer_types=["conv", "full_attention", "conv"]),
        "lfm2 cannot be served: it has layers of type conv.",
    ),
    "chunked attention": (
        lambda: hf.Llama4TextConfig(**BASE, **HEAD, attention_chunk_size=8, num_local_experts=2),
        "llama4_text cannot be served: it has layers of type chunked_attention.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_with_the_reason(name):
    make_config, message = REFUSED[name]
    with pytest.raises(UnsupportedModelError) as caught:
        pageloom_model(random_model(make_config()))
    assert str(caught.value) == message


def test_an_encoder_decoder_is_refused():
    reference = gelu_llama()
    reference.config = hf.T5Config(vocab_size=131, d_model=64, num_layers=2, num_heads=4)
    with pytest.raises(UnsupportedModelError, match="t5 cannot be served: it is an encoder-deco"):
        pageloom_model(reference)


def test_tokens_that_mix_outside_attention_are_noticed(monkeypatch):
    reference, forward = gelu_llama(), LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, x.cumsum(1)))
    with pytest.raises(UnsupportedModelError, match="influence each other outside attention"):
        pageloom_model(reference)


def test_a_model_that_counts_positions_itself_is_noticed(monkeypatch):
    reference, forward = gelu_llama(), LlamaModel.forward

    def counting(self, input_ids=None, position_ids=None, **kwargs):
        return forward(self, input_ids, position_ids=None, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", counting)
    with pytest.raises(UnsupportedModelError, match="does not use the positions"):
        pageloom_model(reference)


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"position_bias": torch.zeros(1)}, "passes position_bias, which may change its scores"),
        ({"is_causal": False}, "is not causal"),
    ],
)
def test_arguments_of_attention_that_are_not_understood_are_refused(monkeypatch, kwargs, reason):
    from transformers.models.llama.modeling_llama import LlamaAttention

    reference, forward = gelu_llama(), LlamaAttention.forward
    monkeypatch.setattr(
        LlamaAttention, "forward", lambda self, *a, **k: forward(self, *a, **k, **kwargs)
    )
    with pytest.raises(UnsupportedModelError, match=f"attention layer 0 {reason}"):
        pageloom_model(reference)


def test_a_mask_that_is_no_window_is_refused(monkeypatch):
    from transformers.masking_utils import create_chunked_causal_mask
    from transformers.models.llama import modeling_llama

    reference = gelu_llama()
    reference.config.attention_chunk_size = 8
    monkeypatch.setattr(modeling_llama, "create_causal_mask", create_chunked_causal_mask)
    with pytest.raises(UnsupportedModelError, match="a mask other than causal or sliding window"):
        pageloom_model(reference)


UNKNOWN = {
    "activation": (
        lambda: hf.LlamaConfig(**BASE, hidden_act="bogus"),
        "llama cannot be served: its configuration has 'bogus' as hidden_act, which",
    ),
    "activation of gpt2": (
        lambda: hf.GPT2Config(**GPT2, **IDS, activation_function="bogus"),
        "gpt2 cannot be served: its configuration has 'bogus' as activation_function, which",
    ),
    "rope type": (
        lambda: hf.LlamaConfig(**BASE, **rope("bogus")),
        "llama cannot be served: its configuration has 'bogus' as rope_parameters.rope_type, which",
    ),
    "rope type of the wrong kind": (
        lambda: hf.LlamaConfig(**BASE, **rope(["x"])),
        "llama cannot be served: its configuration cannot be used (TypeError",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_transformers_does_not_know_is_named_with_its_key(name):
    make_config, message = UNKNOWN[name]
    with pytest.raises(UnsupportedModelError) as caught:
        build_model(
            InMemoryLoader(None, {}),
            make_config(),
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_model_len=MAX_LEN,
        )
    assert str(caught.value).startswith(message)


def test_a_model_that_fails_on_two_tokens_is_refused(monkeypatch):
    def fail(self, x):
        raise IndexError("too far")

    reference = gelu_llama()
    monkeypatch.setattr(LlamaMLP, "forward", fail)
    with pytest.raises(UnsupportedModelError, match=r"two tokens \(IndexError: too far\)"):
        pageloom_model(reference)


@pytest.mark.parametrize("dtype", NOT_WEIGHTS)
@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_tensors_that_are_no_plain_floating_point_are_refused_by_name(name, dtype):
    reference = random_model(CONFIGS[name]())
    state = dict(reference.state_dict())
    weight = next(n for n, t in state.items() if ".0." in n and t.ndim == 2)
    state[weight] = state[weight].to(dtype)
    with pytest.raises(UnsupportedModelError, match=f"{weight} is {str(dtype)[6:]}"):
        pageloom_model(reference, state=state)


def test_the_integer_masks_of_old_gpt2_checkpoints_are_dropped():
    reference = random_model(CONFIGS["gpt2"]())
    state = dict(reference.state_dict())
    state["transformer.h.0.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.uint8).tril()
    model = pageloom_model(reference, state=state)
    (tokens,) = prompts((20,))
    (found,) = run(model, DenseAttention(model.layers), [(0, tokens, 0)])
    torch.testing.assert_close(found, expected_logits(reference, tokens), atol=2e-4, rtol=1e-4)
