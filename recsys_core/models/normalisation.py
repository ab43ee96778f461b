"""Normalisation to unit length with a bounded gradient."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import normalize


def unit_vectors(vector_BD: Tensor, *, min_norm: float) -> Tensor:
    """Divide each vector by its length; a zero vector stays zero.

    The gradient of x / |x| grows without limit as |x| goes to 0. Here, a vector shorter than `min_norm` has the gradient of a
    vector of length `min_norm` in the same direction. A zero vector has the incoming gradient divided by `min_norm`, so it is
    trained too. No gradient is larger than the incoming gradient divided by `min_norm`.

    Args:
        min_norm: length below which the gradient is limited.

    >>> zeros = torch.zeros(1, 2, requires_grad=True)
    >>> unit_vectors(zeros, min_norm=0.5).sum().backward()
    >>> zeros.grad.tolist()
    [[2.0, 2.0]]
    """
    unit_BD: Tensor = _UnitVectors.apply(vector_BD, min_norm)
    return unit_BD


class _UnitVectors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vector_BD: Tensor, min_norm: float) -> Tensor:
        unit_BD = normalize(vector_BD, dim=1)
        ctx.save_for_backward(unit_BD, vector_BD.norm(dim=1, keepdim=True).clamp(min=min_norm))
        return unit_BD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BD: Tensor) -> tuple[Tensor, None]:
        unit_BD, norm_B1 = ctx.saved_tensors
        radial_B1 = (gradient_BD * unit_BD).sum(dim=1, keepdim=True)
        return (gradient_BD - radial_B1 * unit_BD) / norm_B1, None
