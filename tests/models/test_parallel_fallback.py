"""`transformers` modules divided over tensor ranks, against the same modules whole."""

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from test_decoder import BASE, MAX_LEN, expected_logits, prompts, run
from test_fallback import CONFIGS, HEAD, IDS, MULTI_HEAD
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from groups import Threads, on_ranks
from pageloom.contract import Rank
from pageloom.models.fallback import load_transformers_model
from pageloom.models.model import UnsupportedModelError
from reference import DenseAttention, InMemoryLoader, random_model


def load(reference, group, state=None, dtype=torch.float32):
    return load_transformers_model(
        InMemoryLoader(reference.config, state or reference.state_dict()),
        reference.config,
        dtype=dtype,
        device=torch.device("cpu"),
        max_model_len=MAX_LEN,
        trust_remote_code=False,
        group=group,
    )


def elements(model):
    """How many all weights have."""
    parts = {id(p): p.numel() for part in model.weights() for p in part.parameters()}
    return sum(parts.values())


def logits(model, lengths=(MAX_LEN, 21)):
    """Of one prompt in one call, and of another in two."""
    attend = DenseAttention(model.layers)
    first, second = prompts(lengths)
    one = run(model, attend, [(0, first, 0), (1, second[:13], 0)])
    two = run(model, attend, [(1, second[13:], 13)])
    return torch.cat((*one, *two))


WIDE = BASE | {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
GEMMA4 = {
    **BASE,
    **IDS,
    **HEAD,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 131,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
DIVIDED = {
    "gemma2": CONFIGS["gemma2"],
    "gemma3": CONFIGS["gemma3"],
    "phi3": CONFIGS["phi3"],  # one matrix for queries, keys and values, and one for gate and up
    "phi3 longrope": CONFIGS["phi3 longrope"],
    "gpt_neox": CONFIGS["gpt_neox"],
    "olmo2": CONFIGS["olmo2"],  # norms over the queries and keys of all heads
    "starcoder2": CONFIGS["starcoder2"],  # biases, also of layers whose outputs are summed
    "cohere": CONFIGS["cohere"],
    "granite": CONFIGS["granite"],
    "llama with gelu": CONFIGS["llama with gelu"],
    "layers of unlike heads": lambda: hf.Gemma4TextConfig(**GEMMA4, num_global_key_value_heads=4),
    "odd sizes": lambda: hf.GraniteConfig(**BASE | {"intermediate_size": 97}, **IDS),
    "untied": lambda: hf.Gemma2Config(**BASE, **HEAD, tie_word_embeddings=False),
}


def assert_equal_on_ranks(reference, size, state=None):
    (whole,) = on_ranks(lambda group: logits(load(reference, group)), 1)
    assert whole.std() > 0.5
    for found in on_ranks(lambda group: logits(load(reference, group, state)), size):
        torch.testing.assert_close(found, whole, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", DIVIDED)
def test_two_ranks_give_the_logits_of_one(name):
    assert_equal_on_ranks(random_model(DIVIDED[name]()), 2)


@pytest.mark.parametrize("make", [hf.Olmo2Config, hf.GraniteConfig, hf.Phi3Config])
def test_three_ranks_give_the_logits_of_one_though_the_last_has_less_of_the_vocabulary(make):
    assert_equal_on_ranks(random_model(make(**WIDE, **IDS)), 3)


def test_one_rank_of_the_whole_gives_the_logits_of_transformers():
    reference = random_model(CONFIGS["granite"]())
    (tokens,) = prompts((20,))
    (model,) = on_ranks(lambda group: load(reference, group), 1)
    (found,) = run(model, DenseAttention(model.layers), [(0, tokens, 0)])
    torch.testing.assert_close(found, expected_logits(reference, tokens), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gemma2", "phi3", "olmo2"])
def test_bfloat16_stays_close(name):
    reference = random_model(CONFIGS[name]())
    (exact,) = on_ranks(lambda group: logits(load(reference, group)), 1)
    (whole,) = on_ranks(lambda group: logits(load(reference, group, dtype=torch.bfloat16)), 1)
    for found in on_ranks(lambda group: logits(load(reference, group, dtype=torch.bfloat16)), 2):
        assert found.dtype == torch.float32
        assert (found - exact).square().mean() < 1.5 * (whole - exact).square().mean()


@pytest.mark.parametrize("name", ["gemma2", "phi3", "olmo2", "starcoder2", "gpt_neox"])
def test_each_rank_holds_its_part_alone(name):
    reference = random_model(DIVIDED[name]())
    (whole,) = on_ranks(lambda group: load(reference, group), 1)
    for model in on_ranks(lambda group: load(reference, group), 2):
        assert elements(model) < 0.55 * elements(whole)
        for part in model.weights():
            for parameter in part.parameters():  # no view of what is whole
                assert parameter.untyped_storage().nbytes() == parameter.nbytes


@pytest.mark.parametrize("name", ["gemma3", "phi3", "olmo2", "gpt_neox"])
def test_each_rank_attends_with_its_own_heads(name):
    reference = random_model(DIVIDED[name]())
    (whole,) = on_ranks(lambda group: load(reference, group), 1)
    for model in on_ranks(lambda group: load(reference, group), 2):
        for mine, every in zip(model.layers, whole.layers, strict=True):
            assert (mine.num_heads * 2, mine.num_kv_heads * 2) == (
                every.num_heads,
                every.num_kv_heads,
            )
            assert (mine.scale, mine.window, mine.softcap) == (
                every.scale,
                every.window,
                every.softcap,
            )


@pytest.mark.parametrize("name", ["gemma2", "gpt_neox"])
def test_checkpoints_as_they_are_on_disk_load_in_parts(name, tmp_path):
    reference = random_model(CONFIGS[name]())
    reference.save_pretrained(tmp_path)  # tied heads left out, and names as they used to be
    state = load_file(tmp_path / "model.safetensors")
    assert set(state) != set(reference.state_dict())
    assert_equal_on_ranks(reference, 2, state)


def test_checkpoints_of_the_base_model_load_in_parts():
    reference = random_model(CONFIGS["gemma2"]())
    assert_equal_on_ranks(reference, 2, reference.model.state_dict())


def test_tensors_that_do_not_fit_are_named_with_their_whole_shapes():
    reference = random_model(CONFIGS["olmo2"]())
    state = dict(reference.state_dict())
    state["model.layers.1.mlp.down_proj.weight"] = torch.zeros(64, 128)
    with pytest.raises(UnsupportedModelError) as caught:
        on_ranks(lambda group: load(reference, group, state), 2)
    assert str(caught.value) == (
        "The weights do not fit the model's configuration; tensors of the wrong shape: "
        "model.layers.1.mlp.down_proj.weight is [64, 128], not [64, 96]."
    )


def test_tensors_that_are_missing_are_named():
    reference = random_model(CONFIGS["olmo2"]())
    state = dict(reference.state_dict())
    del state["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(UnsupportedModelError, match=r"missing: model\.layers\.1\.self_attn\.k_pr"):
        on_ranks(lambda group: load(reference, group, state), 2)


REFUSED = {
    "no plan": (
        CONFIGS["gpt2"],
        2,
        "gpt2 cannot be divided over 2 tensor ranks: its layers have no tensor-parallel plan in "
        "transformers; set parallel.tensor_parallel_size to 1.",
    ),
    "no plan for layers": (
        CONFIGS["gpt_oss"],
        2,
        "gpt_oss cannot be divided over 2 tensor ranks: its layers have no tensor-parallel plan "
        "in transformers; set parallel.tensor_parallel_size to 1.",
    ),
    "experts": (
        CONFIGS["mixtral"],
        2,
        "mixtral cannot be divided over 2 tensor ranks: model.layers.0.mlp.experts.gate_up_proj "
        "would be divided as 'packed_colwise', which is not supported; set "
        "parallel.tensor_parallel_size to 1.",
    ),
    "key-value heads": (
        CONFIGS["gemma2"],
        4,
        "gemma2 cannot be divided over 4 tensor ranks: 2 key-value heads would be 2 / 4 = 0.5 "
        "on each; set parallel.tensor_parallel_size to a number that divides them.",
    ),
    "key-value heads of one layer": (
        lambda: hf.Gemma4TextConfig(**GEMMA4, num_global_key_value_heads=1),
        2,
        "gemma4_text cannot be divided over 2 tensor ranks: 1 key-value heads would be 1 / 2 = 0.5 "
        "on each; set parallel.tensor_parallel_size to a number that divides them.",
    ),
    "query heads": (
        CONFIGS["gpt_neox"],
        3,
        "gpt_neox cannot be divided over 3 tensor ranks: 4 query heads would be 4 / 3 = 1.333 "
        "on each; set parallel.tensor_parallel_size to a number that divides them.",
    ),
    "no part for the last rank": (
        lambda: hf.GraniteConfig(**MULTI_HEAD | {"intermediate_size": 5}, **IDS),
        4,
        "granite cannot be divided over 4 tensor ranks: model.layers.0.mlp.gate_proj is [5, 64], "
        "and 4 parts of 2 leave the last rank none; set parallel.tensor_parallel_size to 1.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_is_refused_with_the_reason(name):
    make_config, size, message = REFUSED[name]
    reference = random_model(make_config())
    with pytest.raises(UnsupportedModelError) as caught:
        on_ranks(lambda group: load(reference, group), size)
    assert str(caught.value) == message


PLAN = hf.LlamaConfig.base_model_tp_plan
UNUSABLE = {
    "unlike heads": (
        {k: v for k, v in PLAN.items() if "v_proj" not in k},
        "the queries, keys and values of model.layers.0.self_attn are not divided alike",
    ),
    "no linear layer": (
        PLAN | {"layers.*.input_layernorm": "colwise"},
        "model.layers.0.input_layernorm would be divided as 'colwise' but is a LlamaRMSNorm, not",
    ),
    "parameter": (
        PLAN | {"layers.*.input_layernorm.weight": "rowwise"},
        "model.layers.0.input_layernorm.weight would be divided as 'rowwise' but is a parameter",
    ),
    "no embedding": (
        PLAN | {"norm": "embedding_rowwise"},
        "model.norm is a LlamaRMSNorm, not an embedding",
    ),
    "unknown style": (
        PLAN | {"norm": "sequence_parallel"},
        "model.norm would be divided as 'sequence_parallel', which is not supported",
    ),
    "widths that do not meet": (
        {k: v for k, v in PLAN.items() if "down_proj" not in k},
        "llama cannot be served: it cannot compute two tokens",
    ),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_plans_that_cannot_be_followed_are_refused(monkeypatch, name):
    plan, reason = UNUSABLE[name]
    monkeypatch.setattr(hf.LlamaConfig, "base_model_tp_plan", plan)
    reference = random_model(CONFIGS["llama with gelu"]())
    with pytest.raises(UnsupportedModelError) as caught:
        on_ranks(lambda group: load(reference, group), 2)
    assert reason in str(caught.value)


def test_tied_weights_that_are_divided_differently_are_refused(monkeypatch):
    plan = PLAN | {"embed_tokens": "replicate"}
    monkeypatch.setattr(hf.LlamaConfig, "base_model_tp_plan", plan)
    reference = random_model(hf.LlamaConfig(**BASE, hidden_act="gelu", tie_word_embeddings=True))
    with pytest.raises(UnsupportedModelError, match=r"are one tensor, and divided differently"):
        on_ranks(lambda group: load(reference, group), 2)


def test_stages_are_refused():
    group = Threads(Rank(stage=1, stages=2), None, None, None)
    with pytest.raises(UnsupportedModelError) as caught:
        load(random_model(CONFIGS["granite"]()), group)
    assert str(caught.value) == (
        "granite cannot be divided into 2 stages: it runs in the model code of transformers, which "
        "computes all layers; set parallel.pipeline_parallel_size to 1."
    )


def test_ranks_that_come_to_other_hidden_states_are_noticed(monkeypatch):
    def forget(self, tensor):  # as if the plan lacked the sums within layers
        if tensor.ndim == 2:
            all_reduce(self, tensor)

    all_reduce = Threads.all_reduce
    monkeypatch.setattr(Threads, "all_reduce", forget)
    reference = random_model(CONFIGS["granite"]())
    with pytest.raises(UnsupportedModelError, match="gives each rank other hidden states"):
        on_ranks(lambda group: load(reference, group), 2)


def test_the_probe_finds_on_ranks_what_it_finds_in_the_whole(monkeypatch):
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, x.cumsum(1)))
    reference = random_model(CONFIGS["llama with gelu"]())
    with pytest.raises(UnsupportedModelError, match="influence each other outside attention"):
        on_ranks(lambda group: load(reference, group), 2)


def test_sinks_that_the_plan_leaves_whole_are_refused(monkeypatch):
    forward = LlamaAttention.forward

    def with_sinks(self, *args, **kwargs):
        return forward(self, *args, **kwargs, s_aux=torch.zeros(4))

    monkeypatch.setattr(LlamaAttention, "forward", with_sinks)
    reference = random_model(CONFIGS["llama with gelu"]())
    with pytest.raises(UnsupportedModelError, match="has 4 sinks for the 2 query heads of this"):
        on_ranks(lambda group: load(reference, group), 2)
