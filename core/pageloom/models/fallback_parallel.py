"""Dividing a model of ``transformers`` over tensor ranks, by the plan that comes with it.

The plan (``tp_plan``) names modules and a style for each, as in Megatron-LM (arXiv 1909.08053,
section 3): the rows of a first linear layer's weight are divided, then the columns of a second
one's, whose outputs are summed. Here the named modules are shrunk in place to this rank's part, and
their results are summed and put together by the `Group`; heads follow, as attention modules take
their number from the width of what they are given. Where the plan puts queries, keys and values
together again (a norm over all heads, or one matrix for all three), each rank goes on with its
heads alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pageloom.contract import Group, Rank
from pageloom.models.model import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WHOLE = frozenset({"replicate", "replicated_with_grad_allreduce"})
_GATHERED = frozenset({"colwise_gather_output", "colwise_rep"})
_COLUMNS = _GATHERED | {"colwise"}
_SPLIT = frozenset({"rowwise_split_input", "rowwise_rep"})
_ROWS = _SPLIT | {"rowwise"}
_EMBEDDING = "embedding_rowwise"
_OF_HEADS = frozenset({"q_proj", "k_proj", "v_proj"})


@dataclass(frozen=True, slots=True)
class Cut:
    """The part from ``start`` to ``stop`` along ``dim`` of a parameter of ``shape``."""

    dim: int
    start: int
    stop: int
    shape: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of this part of a whole ``tensor``."""
        return tensor.narrow(self.dim, self.start, self.stop - self.start)


def divide(model: PreTrainedModel, group: Group) -> dict[str, Cut]:
    """Shrink ``model``, which is on the meta device, to the part of ``group``'s tensor rank.

    Returns the cut of each parameter that is not whole, by name. Raises `UnsupportedModelError`
    when the model has no plan, or one that cannot be followed.
    """
    return _Division(model, group).cuts


def divided(cls: type[PreTrainedModel], group: Group) -> type[PreTrainedModel]:
    """``cls`` of the same name, whose instances are divided as they are made."""

    def initialize(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, *args, **kwargs)
        divide(self, group)

    return type(cls.__name__, (cls,), {"__init__": initialize, "__module__": cls.__module__})


def own_heads(module: nn.Module, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What an attention ``module`` of a divided model has of ``tensors [1, heads, T, head_size]``:
    all heads, or this rank's if the plan puts the heads of all ranks together before it."""
    rank: Rank | None = getattr(module, "pageloom_rank", None)
    if rank is None:
        return tensors
    return tuple(tensor.chunk(rank.tensor_size, 1)[rank.tensor_rank] for tensor in tensors)


def ranks_agree(hidden: torch.Tensor, group: Group) -> bool:
    """Whether all tensor ranks have about the same ``hidden [T, hidden_size]``. For all of them to
    call."""
    if group.rank.tensor_size == 1:
        return True
    mean = hidden.float().contiguous().clone()
    group.all_reduce(mean)
    mean /= group.rank.tensor_size
    return bool((mean - hidden).abs().max() <= 1e-2 * mean.abs().max())


class _Division:
    """One model while it is divided."""

    def __init__(self, model: PreTrainedModel, group: Group) -> None:
        self.cuts: dict[str, Cut] = {}
        self._model = model
        self._group = group
        self._rank = group.rank
        self._modules = dict(model.named_modules())
        styles = dict(self._styles())
        self._check_plan(styles)
        self._check_heads()
        for name, style in styles.items():
            if style in _COLUMNS:
                self._divide_columns(name, style)
            elif style in _ROWS:
                self._divide_rows(name, style)
            elif style == _EMBEDDING:
                self._divide_embedding(name)
        for tied, source in model.all_tied_weights_keys.items():
            if self.cuts.get(tied) != self.cuts.get(source):
                raise self._refusal(f"{tied} and {source} are one tensor, and divided differently")

    def _styles(self) -> Iterator[tuple[str, str]]:
        """The plan's style for each module and parameter that it names."""
        names = [*self._modules, *(name for name, _ in self._model.named_parameters())]
        for rule, style in (self._model.tp_plan or {}).items():
            pattern = re.compile(re.escape(rule).replace(r"\*", r"\d+"))
            for name in filter(pattern.fullmatch, names):
                yield name, style

    def _check_plan(self, styles: dict[str, str]) -> None:
        # In layers, which are numbered: a class may name its output layer only.
        if not any(re.search(r"\.\d+\.", name) for name in styles):
            raise self._refusal("its layers have no tensor-parallel plan in transformers")
        for name, style in styles.items():
            if style not in _COLUMNS | _ROWS | _WHOLE | {_EMBEDDING}:
                raise self._refusal(f"{name} would be divided as {style!r}, which is not supported")
            parent, _, part = name.rpartition(".")
            if part in _OF_HEADS:
                others = {styles.get(f"{parent}.{p}") for p in _OF_HEADS if self._has(parent, p)}
                if others != {style}:
                    raise self._refusal(
                        f"the queries, keys and values of {parent} are not divided alike"
                    )

    def _check_heads(self) -> None:
        text: Any = self._model.config.get_text_config()
        layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]
        size = self._rank.tensor_size
        for key, what in (
            ("num_attention_heads", "query heads"),
            ("num_key_value_heads", "key-value heads"),
        ):
            for layer in layers:
                count = getattr(layer, key, None)
                if isinstance(count, int) and count % size:
                    raise self._refusal(
                        f"{count} {what} would be {count} / {size} = {count / size:.4g} on each",
                        "a number that divides them",
                    )

    def _divide_columns(self, name: str, style: str) -> None:
        module = self._linear(name, style)
        cut = self._cut(name, module, 0)
        module.out_features = cut.stop - cut.start
        if style in _GATHERED:
            module.forward = _gathering(module, cut, self._group)  # type: ignore[method-assign]

    def _divide_rows(self, name: str, style: str) -> None:
        module = self._linear(name, style)
        cut = self._cut(name, module, 1)
        module.in_features = cut.stop - cut.start
        module.forward = _summing(module, cut, self._group)  # type: ignore[method-assign]
        if style in _SPLIT:  # if its input comes from attention, the latter may do its heads alone
            self._modules[name.rpartition(".")[0]].pageloom_rank = self._rank

    def _divide_embedding(self, name: str) -> None:
        module = self._modules[name]
        plain = type(module).forward is nn.Embedding.forward
        if not isinstance(module, nn.Embedding) or not (plain or hasattr(module, "embed_scale")):
            raise self._refusal(f"{name} is a {type(module).__name__}, not an embedding")
        cut = self._cut(name, module, 0)
        module.num_embeddings = cut.stop - cut.start
        module.padding_idx = None  # matters in training only, and may be another rank's
        module.forward = _looking_up(module, cut, self._group)  # type: ignore[method-assign]

    def _cut(self, name: str, module: nn.Linear | nn.Embedding, dim: int) -> Cut:
        """Divide the weight along ``dim``, and a bias with the weight's rows. Ranks have equal
        parts but for the last ones, which may have less."""
        shape = tuple(module.weight.shape)
        size, whole = self._rank.tensor_size, shape[dim]
        width = -(-whole // size)
        if width * (size - 1) >= whole:
            raise self._refusal(
                f"{name} is {list(shape)}, and {size} parts of {width} leave the last rank none"
            )
        start = width * self._rank.tensor_rank
        cut = Cut(dim, start, min(start + width, whole), shape)
        self._shrink(f"{name}.weight", module, "weight", cut)
        if dim == 0 and getattr(module, "bias", None) is not None:
            self._shrink(f"{name}.bias", module, "bias", Cut(0, cut.start, cut.stop, shape[:1]))
        return cut

    def _shrink(self, name: str, module: nn.Module, part: str, cut: Cut) -> None:
        parameter: torch.Tensor = getattr(module, part)
        held = torch.empty_like(cut.of(parameter), memory_format=torch.contiguous_format)
        setattr(module, part, nn.Parameter(held, requires_grad=False))
        self.cuts[name] = cut

    def _linear(self, name: str, style: str) -> nn.Linear:
        module = self._modules.get(name)
        if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
            kind = "a parameter" if module is None else f"a {type(module).__name__}"
            raise self._refusal(
                f"{name} would be divided as {style!r} but is {kind}, not a linear layer"
            )
        return module

    def _has(self, parent: str, part: str) -> bool:
        return f"{parent}.{part}" in self._modules

    def _refusal(self, reason: str, what_fits: str = "1") -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self._model.config.model_type} cannot be divided over {self._rank.tensor_size} "
            f"tensor ranks: {reason}; set parallel.tensor_parallel_size to {what_fits}."
        )


def _gathering(module: nn.Linear, cut: Cut, group: Group) -> Callable[..., torch.Tensor]:
    """The forward of a linear layer with the rows ``cut`` of its weight."""
    width = -(-cut.shape[0] // group.rank.tensor_size)
    lacking = width - (cut.stop - cut.start)

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        own = nn.functional.linear(inputs, module.weight, module.bias)
        # The parts of the last ranks may be narrower, so the padding comes at the end.
        own = nn.functional.pad(own, (0, lacking)) if lacking else own
        outputs = group.all_gather(own.reshape(-1, width))
        return outputs[:, : cut.shape[0]].reshape(*inputs.shape[:-1], cut.shape[0])

    return forward


def _summing(module: nn.Linear, cut: Cut, group: Group) -> Callable[..., torch.Tensor]:
    """The forward of a linear layer with the columns ``cut`` of its weight and all of its bias."""

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        if inputs.shape[-1] == cut.shape[1]:
            inputs = inputs[..., cut.start : cut.stop]
        outputs = nn.functional.linear(inputs, module.weight)
        group.all_reduce(outputs)
        return outputs if module.bias is None else outputs + module.bias

    return forward


def _looking_up(module: nn.Embedding, cut: Cut, group: Group) -> Callable[..., torch.Tensor]:
    """The forward of an embedding with the rows ``cut`` of its weight."""
    look_up = module.forward

    def forward(token_ids: torch.Tensor) -> torch.Tensor:
        outside = (token_ids < cut.start) | (token_ids >= cut.stop)
        outputs = look_up((token_ids - cut.start).masked_fill(outside, 0))
        outputs = outputs.masked_fill(outside[..., None], 0)
        group.all_reduce(outputs)
        return outputs

    return forward
