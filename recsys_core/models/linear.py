"""Matrix products in float32 on a CPU: oneDNN's, where torch itself takes MKL's.

On an AMD EPYC MKL 2024.2 reaches half of oneDNN's rate for the towers' layers and a quarter for scores of many candidates;
torch 2.13 asks oneDNN for bfloat16 only. The operator is the one that torch.compile puts in the place of nn.Linear.
Shapes: n rows, I input width, O output width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

FEWEST_ROWS = 256
"""oneDNN compiles a kernel for every shape that it meets, for a third of a millisecond: below this it is not worth it."""


class Linear(nn.Linear):
    """nn.Linear by `linear`."""

    def forward(self, value: Tensor) -> Tensor:
        """[n, I] -> [n, O]."""
        return linear(value, self.weight, self.bias)


def linear(value_nI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear: [n, O]."""
    if value_nI.dim() != 2 or len(value_nI) < FEWEST_ROWS or not _is_for_onednn(value_nI, weight_OI):
        return functional.linear(value_nI, weight_OI, bias_O)
    found: Tensor = _Linear.apply(value_nI, weight_OI, bias_O)  # type: ignore[no-untyped-call]
    return found


def _is_for_onednn(*values: Tensor) -> bool:
    if torch.is_autocast_enabled("cpu") or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return all(value.device.type == "cpu" and value.dtype == torch.float32 for value in values)


def _product(left_nI: Tensor, right_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """left right^T + bias."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(left_nI, right_OI, bias_O, "none", [], "")
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, value_nI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(value_nI, weight_OI)
        return _product(value_nI, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_nO: Tensor) -> tuple[Tensor | None, ...]:
        value_nI, weight_OI = ctx.saved_tensors
        wants_value, wants_weight, wants_bias = ctx.needs_input_grad
        grad_nO = grad_nO.contiguous()
        return (
            _product(grad_nO, weight_OI.T) if wants_value else None,
            _transposed_product(grad_nO, value_nI) if wants_weight else None,
            grad_nO.sum(dim=0) if wants_bias else None,
        )


def _transposed_product(grad_nO: Tensor, value_nI: Tensor) -> Tensor:
    """grad^T value, [O, I]. The operator copies its first factor into rows, so that is the narrower one."""
    if grad_nO.shape[1] <= value_nI.shape[1]:
        return _product(grad_nO.T, value_nI.T)
    return _product(value_nI.T, grad_nO.T).T
