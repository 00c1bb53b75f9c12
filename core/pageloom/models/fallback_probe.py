"""Finding out, by running it, what a model of ``transformers`` asks of attention.

Configurations name the same thing in dozens of ways, so nothing is read from them: two tokens
run through the model, and each attention layer is recorded as it calls. Its mask is taken as the
function that ``transformers`` would build the mask from, and must be causal with or without a
sliding window. Whatever else could mix tokens (a convolution, a recurrent state, positions
counted by the model) is found by running tokens in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from pageloom.contract import LayerSpec
from pageloom.errors import one_line
from pageloom.models.fallback_parallel import own_heads
from pageloom.models.model import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE = "pageloom_probe"

_HARMLESS = frozenset(
    {
        "cache",
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "dropout",  # none outside training
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",  # applied to q and k already
        "position_ids",
        "return_dict",
        "sliding_window",  # the mask says it
        "use_cache",
    }
)
"""Keyword arguments of an attention call that do not change its scores."""

MaskRule = Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]


class Probe:
    """The attention layers of one model, filled in while `record` runs tokens through it."""

    def __init__(self, model: PreTrainedModel, max_model_len: int) -> None:
        self.name = model.config.model_type
        self.specs: dict[int, LayerSpec] = {}  # by the model's layer_idx, in order of calling
        self._model = model
        self._max_model_len = max_model_len

    def record(self, token_ids: torch.Tensor) -> tuple[str, Any, torch.Tensor]:
        """Run ``token_ids`` int64 ``[T]``, T > 1, through the whole model.

        Returns the name of the submodule that computes the hidden states, what it returned, and
        the logits ``[T, vocab_size]``. Raises `UnsupportedModelError` for all that cannot be
        served.
        """
        calls = _Calls(self._model)
        for module in self._model.modules():
            attach(module, self)
        positions = torch.arange(len(token_ids), device=token_ids.device)
        try:
            with calls:
                output = self._model(
                    input_ids=token_ids[None], position_ids=positions[None], use_cache=False
                )
        except UnsupportedModelError:
            raise
        except Exception as error:  # whatever the model's own code raises
            raise self.refusal(f"it cannot compute two tokens ({one_line(error)})") from error
        self._check_layers()
        result = calls.results[calls.first]
        if getattr(result, "last_hidden_state", None) is None:
            raise self.refusal(f"its first part, {calls.first}, returns no last_hidden_state")
        return calls.first, result, output.logits[0]

    def refusal(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.name} cannot be served: {reason}.")

    def layer(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> None:
        """Record one call of attention; q, k and v are ``[1, heads, T, head_size]``."""
        index = getattr(module, "layer_idx", None)
        where = f"attention layer {index}"
        if index is None or index in self.specs:
            raise self.refusal(f"{where} is called twice or has no number")
        if k.shape[2] != q.shape[2]:
            raise self.refusal(f"{where} attends over other tokens (cross-attention)")
        if v.shape != k.shape or q.shape[3] != k.shape[3]:
            raise self.refusal(
                f"{where} has values of {v.shape[3]} and keys of {k.shape[3]} elements per head"
            )
        scale, softcap = kwargs.pop("scaling", None), kwargs.pop("softcap", None)
        sinks, causal = kwargs.pop("s_aux", None), kwargs.pop("is_causal", None)
        if sinks is not None and len(sinks) != q.shape[1]:
            raise self.refusal(
                f"{where} has {len(sinks)} sinks for the {q.shape[1]} query heads of this rank"
            )
        unknown = [n for n in sorted(kwargs) if n not in _HARMLESS and kwargs[n] is not None]
        if unknown:
            raise self.refusal(f"{where} passes {', '.join(unknown)}, which may change its scores")
        if causal is False:
            raise self.refusal(f"{where} is not causal")
        self.specs[index] = LayerSpec(
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_size=q.shape[3],
            scale=float(q.shape[3] ** -0.5 if scale is None else scale),
            window=self._window(where, module, mask),
            softcap=None if softcap is None else float(softcap),
            sinks=sinks is not None,
        )

    def _window(self, where: str, module: torch.nn.Module, mask: torch.Tensor | None) -> int | None:
        if mask is None:
            if getattr(module, "is_causal", False):
                return None
            raise self.refusal(f"{where} has no mask and is not causal")
        rule: MaskRule | None = getattr(mask, "rule", None)
        if rule is None:
            raise self.refusal(f"{where} changes its mask")
        length = self._max_model_len
        keys = torch.arange(length)
        seen = _seen(rule, length - 1, keys)
        window = int(seen.sum())
        for query in {0, length // 3, length // 2, length - 1}:
            expected = (keys <= query) & (keys > query - window)
            if not torch.equal(_seen(rule, query, keys), expected):
                raise self.refusal(f"{where} has a mask other than causal or sliding window")
        return None if window == length else window

    def _check_layers(self) -> None:
        expected = getattr(self._model.config.get_text_config(), "num_hidden_layers", None)
        found = len(self.specs)
        if found == 0:
            raise self.refusal("none of its layers uses the attention interface of transformers")
        if expected is not None and found != expected:
            raise self.refusal(f"{found} of its {expected} layers use the attention interface")


class _Calls:
    """Within the context, the results of all submodules by name, and which was called first."""

    first = ""

    def __init__(self, model: torch.nn.Module) -> None:
        self.results: dict[str, Any] = {}
        self._modules = {module: name for name, module in model.named_modules() if name}
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        for module in self._modules:
            self._hooks.append(module.register_forward_pre_hook(self._started))
            self._hooks.append(module.register_forward_hook(self._finished))

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _started(self, module: torch.nn.Module, _inputs: Any) -> None:
        self.first = self.first or self._modules[module]

    def _finished(self, module: torch.nn.Module, _inputs: Any, result: Any) -> None:
        self.results[self._modules[module]] = result


def attach(module: torch.nn.Module, handler: object) -> None:
    """Leave ``handler`` on a module, where the attention functions below look for it."""
    module.pageloom = handler  # type: ignore[assignment]


def _seen(rule: MaskRule, query: int, keys: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros((), dtype=torch.long)
    seen = rule(zero, zero, torch.full_like(keys, query), keys)
    return torch.as_tensor(seen).expand(len(keys))


def _probe_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    handler: Any = module.pageloom
    query, key, value = own_heads(module, query, key, value)
    handler.layer(module, query, key, value, attention_mask, kwargs)
    # Any function of the token alone will do.
    return query.transpose(1, 2).contiguous(), None


def _probe_mask(q_length: int, kv_length: int, mask_function: MaskRule, **_: Any) -> torch.Tensor:
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool)
    mask.rule = mask_function  # type: ignore[attr-defined]
    return mask


AttentionInterface.register(PROBE, _probe_attention)
AttentionMaskInterface.register(PROBE, _probe_mask)
