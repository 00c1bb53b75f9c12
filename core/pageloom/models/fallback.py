"""Any other causal language model of ``transformers``, with attention routed to our backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AttentionInterface

from pageloom.contract import Group, WeightLoader
from pageloom.models.fallback_load import model_on_meta, with_weights
from pageloom.models.fallback_parallel import own_heads, ranks_agree
from pageloom.models.fallback_probe import PROBE, Probe, attach
from pageloom.models.model import Attend, Model, UnsupportedModelError
from pageloom.models.rope import fix_length_dependent

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ATTENTION = "pageloom"
"""The name of our attention in the registry of ``transformers``. No mask is registered under it,
so ``transformers`` builds none."""


def load_transformers_model(
    loader: WeightLoader,
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    trust_remote_code: bool,
    group: Group,
) -> TransformersModel:
    """Load what `build_model` does not build itself. Arguments and errors as there.

    All tensor ranks of ``group`` must load at the same time, as they compute a probe together.
    """
    refused = _unservable(config)
    if refused is None and group.rank.stages > 1:
        raise UnsupportedModelError(
            f"{config.model_type} cannot be divided into {group.rank.stages} stages: it runs in "
            "the model code of transformers, which computes all layers; set "
            "parallel.pipeline_parallel_size to 1."
        )
    if refused is None:
        blank = model_on_meta(config, PROBE, trust_remote_code)
        if blank._is_stateful:
            refused = "it keeps a recurrent state beside the KV cache"
    if refused is not None:
        raise UnsupportedModelError(f"{config.model_type} cannot be served: {refused}.")
    model = with_weights(blank, loader, dtype, device, group)
    fix_length_dependent(model, max_model_len)
    return TransformersModel(model, max_model_len, group)


class TransformersModel(Model):
    """A ``transformers`` model split in two: what computes hidden states, and what makes logits.

    The first is the submodule that the model's forward calls first. The second is the model's own
    forward, in which that submodule is replaced by one that returns given hidden states, so that
    soft caps, logit scales and biases are applied as the architecture applies them.
    """

    @torch.inference_mode()
    def __init__(self, model: PreTrainedModel, max_model_len: int, group: Group) -> None:
        """Take over ``model``, which has its weights, or the part of them of ``group``'s tensor
        rank, and the `PROBE` attention.

        Raises `UnsupportedModelError` for what a probe of a few tokens shows to be unservable.
        """
        self.group = group
        probe = Probe(model, max_model_len)
        token_ids = torch.arange(1, 3, device=model.device)
        inner, result, logits = probe.record(token_ids)
        self.layers = tuple(probe.specs.values())
        self.vocab_size = logits.shape[1]
        if not ranks_agree(result.last_hidden_state[0], group):
            raise probe.refusal("its tensor-parallel plan gives each rank other hidden states")

        model.set_attn_implementation(ATTENTION)
        if model.config.get_text_config()._attn_implementation != ATTENTION:
            raise probe.refusal("its attention cannot be replaced")
        self._router = _Router(list(probe.specs), model.dtype)
        for module in model.modules():
            attach(module, self._router)
        self._hidden = model.get_submodule(inner)
        self._given = _Given(type(result))
        model.set_submodule(inner, self._given)
        self._head = model

        if not _close(self._try_logits(result.last_hidden_state[0], probe), logits):
            raise probe.refusal("its logits do not follow from its hidden states alone")
        self._check_order(probe, max_model_len)

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        self._router.attend = attend
        output = self._hidden(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._given.hidden = hidden[None]
        # The ids are looked at by nobody, but some models ask for them.
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        logits: torch.Tensor = self._head(input_ids=ids, use_cache=False).logits
        del self._given.hidden  # nothing of a step stays
        return logits[0].float()

    def weights(self) -> Sequence[nn.Module | torch.Tensor]:
        return [self._hidden, self._head]

    def _try_logits(self, hidden: torch.Tensor, probe: Probe) -> torch.Tensor:
        try:
            return self.logits(hidden)
        except Exception as error:
            reason = f"its logits need more than its hidden states ({error})"
            raise probe.refusal(reason) from error

    def _check_order(self, probe: Probe, max_model_len: int) -> None:
        """Refuse unless a token's result is its own, whatever precedes it outside attention."""
        tokens = torch.tensor([1, 2, 3, 4], device=self._head.device) % self.vocab_size
        positions = torch.tensor([3, 0, 2, 1], device=tokens.device) % max_model_len
        ahead = self.forward(tokens, positions, Attend(_pass_queries))
        changed = tokens.flip(0).clone()
        changed[0] = 0
        behind = self.forward(changed, positions.flip(0), Attend(_pass_queries))
        if not _close(ahead[:-1], behind.flip(0)[:-1]):
            raise probe.refusal(
                "its tokens influence each other outside attention, or it does not use the "
                "positions that it is given"
            )


class _Router:
    """Hands the attention calls of one model to the `Attend` of the forward under way."""

    attend: Attend

    def __init__(self, indices: list[int], dtype: torch.dtype) -> None:
        self._layer = {index: layer for layer, index in enumerate(indices)}
        self._dtype = dtype

    def __call__(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        # From [1, H, T, D] to rows of whole heads, which is what backends are promised.
        q, k, v = (x[0].transpose(0, 1).to(self._dtype).contiguous() for x in (query, key, value))
        out = torch.empty_like(q)
        self.attend(self._layer[index], q, k, v, out, sinks=sinks)
        return out[None].to(query.dtype)


class _Given(nn.Module):
    """Stands in for the submodule that computes hidden states and returns those it was given."""

    hidden: torch.Tensor

    def __init__(self, output: type[Any]) -> None:
        super().__init__()
        self._output = output

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._output(last_hidden_state=self.hidden)


def _unservable(config: PretrainedConfig) -> str | None:
    text = config.get_text_config()
    if config.is_encoder_decoder:
        return "it is an encoder-decoder"
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    return f"it has layers of type {', '.join(sorted(kinds))}" if kinds else None


def _pass_queries(
    layer: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    out.copy_(q)


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    tolerance = 1e-3 if found.dtype == expected.dtype == torch.float32 else 3e-2
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


def _routed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    router: Any = module.pageloom
    query, key, value = own_heads(module, query, key, value)
    return router(module.layer_idx, query, key, value, s_aux), None


AttentionInterface.register(ATTENTION, _routed_attention)
