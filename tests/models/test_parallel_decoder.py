"""The decoder divided over ranks computes what it does whole; no rank has more than its part."""

import threading

import pytest
import torch
from safetensors.torch import save_file
from test_decoder import BASE, MAX_LEN, prompts, run
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from groups import on_ranks
from pageloom.contract import Alone, Slice, WeightLoader
from pageloom.models.build import build_model
from pageloom.models.decoder import Decoder
from pageloom.models.dummy import DummyLoader
from pageloom.models.hf import HFLoader
from pageloom.models.model import Attend, UnsupportedModelError
from pageloom.ops.linear import Linear
from reference import DenseAttention, InMemoryLoader, random_model

WIDE = BASE | {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
CONFIGS = {
    "llama": LlamaConfig(**WIDE),
    "llama tied": LlamaConfig(**WIDE, tie_word_embeddings=True),
    "llama biases": LlamaConfig(**WIDE, attention_bias=True, mlp_bias=True),
    "mistral window": MistralConfig(**BASE, sliding_window=7, head_dim=16),
    "qwen2": Qwen2Config(**BASE, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": Qwen3Config(**WIDE, head_dim=16, attention_bias=True),
    "qwen3 tied": Qwen3Config(**BASE, head_dim=16, tie_word_embeddings=True),
}
CPU = torch.device("cpu")


def build(loader, group, dtype=torch.float32):
    config = loader.model_config()
    model = build_model(loader, config, dtype=dtype, device=CPU, max_model_len=MAX_LEN, group=group)
    assert isinstance(model, Decoder)
    return model


def logits_of(model):
    """Of a prompt in one call and of another in two; None of a stage that has none."""
    attend = DenseAttention(model.layers)
    first, second = prompts((30, 21))
    found = []
    for chunks in [[(0, first, 0), (1, second[:13], 0)], [(1, second[13:], 13)]]:
        if model.group.rank.is_last:
            found += run(model, attend, chunks)
            continue
        attend.step([(sequence, len(tokens)) for sequence, tokens, _ in chunks])
        tokens = torch.cat([tokens for _, tokens, _ in chunks])
        positions = torch.cat([torch.arange(at, at + len(t)) for _, t, at in chunks])
        model.forward(tokens, positions, Attend(attend))
    return torch.cat(found) if found else None


def logits_on_ranks(loader, tensor_size, stages):
    """Of each rank of the last stage; ``loader()`` makes one for each."""
    found = on_ranks(lambda group: logits_of(build(loader(), group)), tensor_size, stages)
    assert all(logits is None for logits in found[:-tensor_size])
    return found[-tensor_size:]


def assert_same(found, expected):
    assert expected.std() > 0.5
    for logits in found:
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("tensor_size", "stages"), [(2, 1), (3, 1), (1, 2), (1, 3), (2, 2)], ids=lambda n: str(n)
)
@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_together_compute_the_logits_of_the_whole_model(name, tensor_size, stages):
    config = CONFIGS[name]
    if tensor_size > config.num_key_value_heads:
        tensor_size = 4  # two ranks with a copy of each key-value head
    reference = random_model(config)
    state = reference.state_dict()
    expected = logits_of(build(InMemoryLoader(config, state), Alone()))
    found = logits_on_ranks(lambda: InMemoryLoader(config, state), tensor_size, stages)
    assert_same(found, expected)


def test_each_rank_may_have_one_query_head_and_a_copy_of_its_key_value_head():
    config = CONFIGS["llama"]
    state = random_model(config).state_dict()
    expected = logits_of(build(InMemoryLoader(config, state), Alone()))
    found = logits_on_ranks(lambda: InMemoryLoader(config, state), 9, 1)
    assert_same(found, expected)


def test_each_rank_has_the_layers_and_heads_that_it_computes():
    state = random_model(CONFIGS["llama"]).state_dict()
    models = on_ranks(lambda group: build(InMemoryLoader(CONFIGS["llama"], state), group), 2, 2)
    shapes = [[(s.num_heads, s.num_kv_heads) for s in model.layers] for model in models]
    assert shapes == [[(6, 2)] * 2, [(3, 1)] * 2, [(6, 2)], [(3, 1)]]
    assert [model.first_layer for model in models] == [0, 0, 2, 2]
    scales = {(0, "k"): 0.5, (1, "v"): 0.25, (2, "k"): 2.0}
    assert models[0].of_own_layers(scales) == {(0, "k"): 0.5, (1, "v"): 0.25}
    assert models[3].of_own_layers(scales) == {(0, "k"): 2.0}
    assert models[0].of_own_layers({(9, "k"): 1.0}) == {}
    assert models[2].of_own_layers({(9, "k"): 1.0}) == {(7, "k"): 1.0}  # somebody has to complain
    assert not any(model.supports_cuda_graphs for model in models)
    whole = build(InMemoryLoader(CONFIGS["llama"], state), Alone())
    assert whole.supports_cuda_graphs
    assert whole.of_own_layers(scales) == scales


def test_ranks_exchange_two_sums_per_layer_and_what_the_ends_need():
    state = random_model(CONFIGS["llama"]).state_dict()

    def calls(group):
        logits_of(build(InMemoryLoader(CONFIGS["llama"], state), group))
        return group.calls[: len(group.calls) // 2]  # of the first of two equal steps

    first, last = calls_of = on_ranks(calls, 2, 2)[::2]
    assert first == ["all_reduce", *["all_reduce"] * 4, "send"]
    assert last == ["receive", *["all_reduce"] * 2, "all_gather"]
    assert on_ranks(calls, 2, 2)[1::2] == calls_of
    assert on_ranks(calls, 1, 1) == [[]]


def test_logits_of_an_earlier_stage_are_an_error():
    state = random_model(CONFIGS["llama"]).state_dict()

    def ask(group):
        return build(InMemoryLoader(CONFIGS["llama"], state), group).logits(torch.zeros(1, 72))

    with pytest.raises(RuntimeError, match=r"rank 0 \(stage 0.* is not of the last stage"):
        on_ranks(ask, 1, 2)


def elements(model):
    """Of all weights, each counted once."""
    tensors = {}
    for part in model.weights():
        held = [part] if isinstance(part, torch.Tensor) else [part.weight, part.bias]
        tensors.update({id(t): t for t in held if t is not None})
    return sum(t.numel() for t in tensors.values())


class Counting(InMemoryLoader):
    """Counts the elements that it was asked for."""

    asked = 0

    def tensors_of(self, parts):
        for name, tensor in super().tensors_of(parts):
            self.asked += tensor.numel()
            yield name, tensor


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("tensor_size", "stages"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_no_rank_holds_or_is_given_more_than_its_part(tensor_size, stages, tied):
    sizes = {"num_hidden_layers": 4, "num_key_value_heads": 4, "vocab_size": 64}
    config = LlamaConfig(**BASE | sizes, tie_word_embeddings=tied)
    state = random_model(config).state_dict()

    def counts(group):
        loader = Counting(config, state)
        return elements(build(loader, group)), loader.asked

    whole = elements(build(InMemoryLoader(config, state), Alone()))
    every = on_ranks(counts, tensor_size, stages)
    for held, asked in every:
        assert held == asked
        assert held <= whole / (tensor_size * stages) * 1.15


class Spy:
    """An open file of safetensors that notes what is asked of it."""

    def __init__(self, data):
        self.data = data
        self.whole, self.sliced = [], []

    def keys(self):
        return self.data.keys()

    def get_tensor(self, name):
        self.whole.append(name)
        return self.data.get_tensor(name)

    def get_slice(self, name):
        self.sliced.append(name)
        return self.data.get_slice(name)


def saved(folder, config):
    """A loader of a checkpoint of ``config`` in one file, and the file's spy."""
    loader = HFLoader(HFLoader.Config(), str(folder))
    (file,) = set(loader._checkpoint.files.values())
    spy = loader._checkpoint._open[file] = Spy(loader._checkpoint._opened(file))
    return loader, spy


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with a model of three layers."""
    random_model(CONFIGS["llama"]).save_pretrained(tmp_path)
    return tmp_path


def test_slices_are_read_from_a_checkpoint_and_other_stages_are_not_touched(checkpoint):
    config = CONFIGS["llama"]

    def load(group):
        loader, spy = saved(checkpoint, config)
        return logits_of(build(loader, group)), spy

    expected, _ = load(Alone())
    results = on_ranks(load, 2, 2)
    assert_same([logits for logits, _ in results[2:]], expected)
    for (_, spy), own in zip(results, ["01", "01", "2", "2"], strict=True):
        layers = {name.split(".")[2] for name in spy.sliced + spy.whole if ".layers." in name}
        assert layers == set(own)
        assert all("norm" in name for name in spy.whole)
        ends = {name for name in spy.sliced + spy.whole if ".layers." not in name}
        first = {"model.embed_tokens.weight"}
        assert ends == (first if own == "01" else {"model.norm.weight", "lm_head.weight"})


def test_the_whole_model_reads_each_tensor_once(checkpoint):
    loader, spy = saved(checkpoint, CONFIGS["llama"])
    build(loader, Alone())
    assert not spy.sliced
    assert sorted(spy.whole) == sorted(spy.keys())


def test_checkpoints_of_the_base_model_are_divided_too():
    config = CONFIGS["llama tied"]
    state = random_model(config).state_dict()
    expected = logits_of(build(InMemoryLoader(config, state), Alone()))
    short = {
        name.removeprefix("model."): tensor for name, tensor in state.items() if "head" not in name
    }
    assert_same(logits_on_ranks(lambda: InMemoryLoader(config, short), 2, 2), expected)


DOWN = "model.layers.1.mlp.down_proj.weight"


def changed(change):
    state = dict(random_model(CONFIGS["llama"]).state_dict())
    change(state)
    return state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop(DOWN), rf"missing: {DOWN}"),
        (lambda state: state.update(other=torch.ones(2)), r"unexpected or repeated: other"),
        (
            lambda state: state.update({DOWN: torch.ones(72, 192)}),
            rf"tensor '{DOWN}' is \[72, 192\], but dimension 1, .* must have 96 elements",
        ),
        (
            lambda state: state.update({DOWN: torch.ones(71, 96)}),
            rf"of the wrong shape: {DOWN} is \[71, 48\], not \[72, 48\]",
        ),
        (
            lambda state: state.update({DOWN: torch.ones(96)}),
            rf"tensor '{DOWN}' is \[96\], but dimension 1",
        ),
    ],
    ids=["missing", "unexpected", "too large", "other dimension", "flat"],
)
def test_tensors_that_do_not_fit_are_named(change, message):
    state = changed(change)
    with pytest.raises(ValueError, match=message):
        on_ranks(lambda group: build(InMemoryLoader(CONFIGS["llama"], state), group), 2, 1)


def test_a_tensor_of_the_size_of_a_part_is_no_part(checkpoint, tmp_path_factory):
    config, folder = CONFIGS["llama"], tmp_path_factory.mktemp("halved")
    state = changed(lambda state: state.update({DOWN: torch.ones(72, 48)}))
    save_file(state, folder / "model.safetensors")
    config.save_pretrained(folder)
    message = rf"tensor '{DOWN}' is \[72, 48\], but dimension 1, .* must have 96"
    with pytest.raises(ValueError, match=message):
        on_ranks(lambda group: build(saved(folder, config)[0], group), 2, 1)


class Supplying(InMemoryLoader):
    """Makes its linear layers itself, as loaders did before they could be asked for parts."""

    def linear(self, names, in_features, out_features, bias, dtype, device):
        layer = Linear(torch.cat([self.state[f"{name}.weight"] for name in names]), None)
        assert layer.weight.shape == (sum(out_features), in_features)
        self.state = {k: v for k, v in self.state.items() if k.removesuffix(".weight") not in names}
        return layer


def test_a_loader_that_makes_whole_layers_serves_stages_and_refuses_tensor_ranks():
    config = CONFIGS["llama"]
    state = random_model(config).state_dict()
    expected = logits_of(build(InMemoryLoader(config, state), Alone()))
    assert_same(logits_on_ranks(lambda: Supplying(config, state), 1, 2), expected)
    message = r"Supplying makes linear layers itself and cannot divide them over 2 tensor ranks"
    with pytest.raises(UnsupportedModelError, match=message):
        on_ranks(lambda group: build(Supplying(config, state), group), 2, 1)


def test_made_up_weights_do_not_depend_on_how_they_are_divided(tmp_path):
    CONFIGS["qwen2"].save_pretrained(tmp_path)

    def dummy():
        options = DummyLoader.Config(initializer_range=0.2)
        return DummyLoader(options, str(tmp_path / "config.json"))

    lock = threading.Lock()  # torch has one generator for all threads, and so for all ranks here

    def compute(group):
        with lock:
            model = build(dummy(), group)
        return logits_of(model)

    assert_same(on_ranks(compute, 2, 2)[2:], logits_of(build(dummy(), Alone())))


def test_modules_of_other_stages_are_not_made_up(tmp_path):
    CONFIGS["llama"].save_pretrained(tmp_path)
    loader = DummyLoader(DummyLoader.Config(), str(tmp_path))
    every = dict(loader.tensors())
    parts = {name: None for name in every if ".layers.1." in name}
    parts["model.embed_tokens.weight"] = Slice(0, 10, 30, 131)
    some = dict(loader.tensors_of(parts))
    assert every.keys() - some.keys() == {name for name in parts if ".layers.1." in name}
    embedding = every.pop("model.embed_tokens.weight")
    assert torch.equal(some.pop("model.embed_tokens.weight"), embedding[10:30])
    assert all(torch.equal(tensor, every[name]) for name, tensor in some.items())


def test_loaders_that_know_no_slices_are_asked_through_all_their_tensors():
    state = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(2), "c": torch.ones(1)}
    loader = InMemoryLoader(None, state)
    assert type(loader).tensors_of is WeightLoader.tensors_of
    found = dict(loader.tensors_of({"a": Slice(1, 1, 3, 4), "b": None, "absent": None}))
    assert found.keys() == {"a", "c"}
    assert found["a"].tolist() == [[1.0, 2.0], [5.0, 6.0], [9.0, 10.0]]


def test_the_embedding_of_a_divided_model_is_in_its_own_dtype():
    config = CONFIGS["llama tied"]
    state = random_model(config).state_dict()
    whole = logits_of(build(InMemoryLoader(config, state), Alone(), torch.bfloat16))

    def load(group):
        return logits_of(build(InMemoryLoader(config, state), group, torch.bfloat16))

    for logits in on_ranks(load, 2, 1):
        torch.testing.assert_close(logits, whole, atol=0.3, rtol=0.1)
