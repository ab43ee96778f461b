"""Vectors of unit length whose gradients stay bounded.

Shapes: n vectors, O their width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import normalize


def direction(vector_nO: Tensor, *, floor: float) -> Tensor:
    """Each vector divided by its length; zeros stay zeros.

    The gradient of x / |x| grows without limit as |x| falls. Here a vector shorter than `floor` has the gradient of a vector of
    length `floor` in the same direction, and zeros have the incoming gradient over `floor`. No gradient is therefore larger
    than the incoming one over `floor`, and zeros do not stay where they are.

    Args:
        floor: length at which a vector counts as short.

    >>> zeros = torch.zeros(1, 2, requires_grad=True)
    >>> direction(zeros, floor=0.5).sum().backward()
    >>> zeros.grad.tolist()
    [[2.0, 2.0]]
    """
    unit_nO: Tensor = _Direction.apply(vector_nO, floor)
    return unit_nO


class _Direction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vector_nO: Tensor, floor: float) -> Tensor:
        unit_nO = normalize(vector_nO, dim=1)
        ctx.save_for_backward(unit_nO, vector_nO.norm(dim=1, keepdim=True).clamp(min=floor))
        return unit_nO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_nO: Tensor) -> tuple[Tensor, None]:
        unit_nO, length_n1 = ctx.saved_tensors
        along_n1 = (gradient_nO * unit_nO).sum(dim=1, keepdim=True)
        return (gradient_nO - along_n1 * unit_nO) / length_n1, None
