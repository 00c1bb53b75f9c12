"""AutoAWQ's search, made right and fast on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from awq.quantize.quantizer import AwqQuantizer

GRID = 20  # candidates are 1, 19/20, ... of the largest weight of a group
SHRINKS = 10  # how many of them are tried


class CPUQuantizer(AwqQuantizer):
    """Searches as AutoAWQ does, with two of its steps replaced."""

    @torch.no_grad()
    def _compute_best_scale(
        self,
        x: torch.Tensor,
        w_mean: torch.Tensor,
        x_mean: torch.Tensor,
        module2inspect: torch.nn.Module,
        linears2scale: list[torch.nn.Linear],
        fp16_output: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """AutoAWQ's own, but the state to which it returns after each candidate is a copy.

        It takes that state to the CPU, which copies nothing if it is there already: the weights
        would keep the scales of the first candidate.
        """
        hook = module2inspect.register_state_dict_post_hook(_copy_tensors)
        try:
            scales: torch.Tensor = super()._compute_best_scale(
                x, w_mean, x_mean, module2inspect, linears2scale, fp16_output, kwargs
            )
        finally:
            hook.remove()
        return scales

    @torch.no_grad()
    def _compute_best_clip(self, w: torch.Tensor, input_feat: torch.Tensor) -> torch.Tensor:
        """The largest magnitude to keep, ``[out, groups, 1]``, of weights ``[out, in]`` that are
        multiplied by inputs ``[..., in]``.

        The mean of ``(x . d)^2`` over tokens is ``d' (X'X / n) d``: the number that AutoAWQ gets
        from every token's output, but from these second moments it takes all tokens and costs as
        much as one for each input of a group.
        """
        inputs = input_feat.reshape(-1, w.shape[1])
        grouped = inputs.float().unflatten(1, (-1, self.group_size)).transpose(0, 1)
        moments = grouped.transpose(1, 2) @ grouped / len(inputs)  # [groups, size, size]
        weight = w.unflatten(1, (-1, self.group_size))  # [out, groups, size]
        largest = weight.abs().amax(-1, keepdim=True)
        best: torch.Tensor = largest.clone()
        least = torch.full_like(largest, torch.inf)
        for shrink in range(SHRINKS):
            limit = largest * (1 - shrink / GRID)
            clipped = weight.clamp(-limit, limit)
            difference = (self.pseudo_quantize_tensor(clipped)[0] - weight).transpose(0, 1)
            error = ((difference @ moments) * difference).sum(-1, keepdim=True).transpose(0, 1)
            better = error < least
            least = torch.where(better, error, least)
            best = torch.where(better, limit, best)
        return best


def _copy_tensors(
    module: torch.nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: dict[str, Any]
) -> None:
    for name, tensor in state.items():
        state[name] = tensor.clone()
