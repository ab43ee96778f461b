"""oneDNN's products beside torch's own: the same numbers, forward and backward, and nothing where they are not for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from recsys_core.models import linear as module
from recsys_core.models.linear import FEWEST_ROWS, Linear, linear


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """Rows of each product that oneDNN was asked for."""
    found, product = [], module._product
    monkeypatch.setattr(module, "_product", lambda left, *rest: found.append(len(left)) or product(left, *rest))
    return found


@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(FEWEST_ROWS, FEWEST_ROWS + 70),
    inputs=st.integers(1, 40),
    outputs=st.integers(1, 40),
    bias=st.booleans(),
    transposed=st.booleans(),
)
def test_product_and_gradients_are_those_of_torch(rows: int, inputs: int, outputs: int, bias: bool, transposed: bool) -> None:
    torch.manual_seed(rows)
    value = (torch.randn(inputs, rows).T if transposed else torch.randn(rows, inputs)).requires_grad_()
    layer = Linear(inputs, outputs, bias=bias)
    towards = torch.randn(rows, outputs)
    parameters = [value, *layer.parameters()]
    found = layer(value)
    gradients = torch.autograd.grad((found * towards).sum(), parameters)
    wanted = functional.linear(value, layer.weight, layer.bias)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients, torch.autograd.grad((wanted * towards).sum(), parameters), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_gradient_that_is_one_number_everywhere_is_summed_right(calls) -> None:
    value, layer = torch.randn(300, 8), Linear(8, 4)
    layer(value).sum().backward()
    torch.testing.assert_close(layer.weight.grad, value.sum(dim=0).expand(4, 8), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.bias.grad, torch.full((4,), 300.0))
    assert calls == [300, 4]  # forward, weight; nobody wants the gradient of the value


def test_few_rows_other_precisions_and_lists_of_matrices_are_left_to_torch(calls) -> None:
    weight = torch.randn(4, 8)
    many = torch.randn(FEWEST_ROWS, 8)
    assert torch.equal(linear(many[1:], weight), functional.linear(many[1:], weight))
    assert linear(many.double(), weight.double()).dtype == torch.float64
    assert linear(many.expand(2, -1, -1), weight).shape == (2, FEWEST_ROWS, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(many, weight).dtype == torch.bfloat16
    assert calls == []
    linear(many, weight)
    assert calls == [FEWEST_ROWS]


def test_two_calls_give_the_same_bits() -> None:
    value, weight = torch.randn(1000, 64), torch.randn(128, 64)
    assert torch.equal(linear(value, weight), linear(value, weight))


def test_without_gradients_and_in_inference_mode_the_product_is_the_same() -> None:
    value, layer = torch.randn(300, 8), Linear(8, 4)
    wanted = layer(value).detach()
    with torch.no_grad():
        assert torch.equal(layer(value), wanted)
    with torch.inference_mode():
        assert torch.equal(layer(value), wanted)
