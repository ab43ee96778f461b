"""Losses compared with loops over queries and columns, and the effect of the logQ correction."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys_core.models.loss.losses import (
    bce_loss,
    bpr_loss,
    cosine_contrastive_loss,
    distillation_loss,
    softmax_loss,
    weighted_mean,
)
from recsys_core.models.loss.objective import log_expected_count

TEMPERATURE, MARGIN, NEGATIVE_WEIGHT = 0.5, 0.2, 1.5
LOSS_BY_NAME = {
    "softmax": partial(softmax_loss, temperature=TEMPERATURE),
    "bce": partial(bce_loss, temperature=TEMPERATURE),
    "bpr": partial(bpr_loss, temperature=TEMPERATURE),
    "cosine_contrastive": partial(cosine_contrastive_loss, margin=MARGIN, negative_weight=NEGATIVE_WEIGHT),
}
every_loss = pytest.mark.parametrize("loss_name", LOSS_BY_NAME)


def test_logq_lowers_the_logit_of_a_popular_candidate():
    # All scores are 0, so the softmax weight of a candidate is 1 / expected count. The expected counts are 4 x 0.75 = 3 and
    # 4 x 0.25 = 1 for the columns, and 1 for the positive.
    log_q_N = log_expected_count(torch.tensor([0.75, 0.25]), torch.zeros(2), num_positives=4, num_negatives=0)
    positive_score_B, negative_score_BN = torch.zeros(1), torch.zeros(1, 2, requires_grad=True)
    loss_of_negatives = partial(softmax_loss, positive_score_B, is_masked_BN=None, temperature=1.0)

    uncorrected_loss = loss_of_negatives(negative_score_BN)
    assert uncorrected_loss.item() == pytest.approx(math.log(3))
    corrected_loss = loss_of_negatives(negative_score_BN, log_q_B=torch.zeros(1), log_q_N=log_q_N)
    assert corrected_loss.item() == pytest.approx(math.log(1 + 1 / 3 + 1))  # with the wrong sign: log(1 + 3 + 1)
    corrected_loss.backward()
    # The popular candidate is pushed away less.
    assert negative_score_BN.grad.tolist() == [pytest.approx([(1 / 3) / (7 / 3), 1 / (7 / 3)])]


def test_logq_lowers_the_logit_of_a_popular_positive():
    # Both scores are 0, and the positive has the expected count 3. The softmax weights are 1/3 for the positive and 1 for the
    # column, so the probability of the positive is 0.25 and its gradient 0.25 - 1.
    positive_score_B = torch.zeros(1, requires_grad=True)
    loss = softmax_loss(
        positive_score_B,
        torch.zeros(1, 1),
        is_masked_BN=None,
        temperature=1.0,
        log_q_B=torch.tensor([3.0]).log(),
        log_q_N=torch.zeros(1),
    )
    loss.backward()
    assert loss.item() == pytest.approx(math.log(4))  # with the wrong sign: log(4 / 3)
    assert positive_score_B.grad.tolist() == pytest.approx([-0.75])


CHOICE_PROBABILITIES = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.6, 0.2, 0.15, 0.05]])
"""Probabilities with which two types of queries choose four items. Item 0 is the most popular."""


def learned_probabilities(correction, *, masks_positives, batch_size=128, num_steps=120):
    """Train scores of all items with in-batch negatives. Return the softmax of the trained scores for each type of query.

    correction: which logits logQ corrects: "none", "columns" or "positive and columns". "wrong sign" corrects the positive and
        the columns with the wrong sign.
    masks_positives: True masks all columns of the positive item, and False masks only the query's own column.
    """
    torch.manual_seed(0)
    popularity_I = CHOICE_PROBABILITIES.mean(dim=0)
    scores = torch.zeros(2, 4, requires_grad=True)
    mean_scores = torch.zeros(2, 4)
    query_type_B = torch.arange(batch_size) % 2
    is_own_column_BB = torch.eye(batch_size, dtype=torch.bool)
    for step in range(num_steps):
        item_B = torch.multinomial(CHOICE_PROBABILITIES, batch_size // 2, replacement=True).T.flatten()
        log_q_B = log_expected_count(
            popularity_I[item_B], torch.zeros(batch_size), num_positives=batch_size - 1, num_negatives=0
        )
        positive_sign, column_sign = {
            "none": (None, None),
            "wrong sign": (-1, -1),
            "columns": (None, 1),
            "positive and columns": (1, 1),
        }[correction]
        loss = softmax_loss(
            scores[query_type_B, item_B],
            scores[query_type_B][:, item_B],
            is_masked_BN=item_B[:, None] == item_B if masks_positives else is_own_column_BB,
            temperature=1.0,
            log_q_B=None if positive_sign is None else positive_sign * log_q_B,
            log_q_N=None if column_sign is None else column_sign * log_q_B,
        ).mean()
        (gradient,) = torch.autograd.grad(loss, scores)
        is_second_half = step >= num_steps // 2
        with torch.no_grad():  # the second half has a lower learning rate, and its scores are averaged
            scores -= (0.5 if is_second_half else 5.0) * gradient
            mean_scores += is_second_half * scores / (num_steps - num_steps // 2)
    return mean_scores.softmax(dim=1)


def ranked_items(scores):
    """Return the items of each type of query, by descending score."""
    return scores.argsort(dim=1, descending=True).tolist()


@pytest.mark.parametrize(("correction", "masks_positives"), [("positive and columns", False), ("columns", True)])
def test_logq_recovers_the_choice_probabilities_under_popularity_skew(correction, masks_positives):
    # If all columns of the positive item are masked, the item is never a negative, so only the columns need a correction.
    probabilities = learned_probabilities(correction, masks_positives=masks_positives)
    assert ranked_items(probabilities) == ranked_items(CHOICE_PROBABILITIES)
    torch.testing.assert_close(probabilities, CHOICE_PROBABILITIES, atol=0.03, rtol=0)


@pytest.mark.parametrize("correction", ["none", "wrong sign"])
def test_items_are_ranked_wrongly_without_logq_and_with_logq_of_the_wrong_sign(correction):
    learned_ranking = ranked_items(learned_probabilities(correction, masks_positives=False))
    for query_type, true_ranking in enumerate(ranked_items(CHOICE_PROBABILITIES)):
        assert learned_ranking[query_type] != true_ranking


def softplus(logit):
    return math.log1p(math.exp(logit))


def mean(values):
    return sum(values) / len(values) if values else 0.0


def query_loss(loss_name, positive_score, negative_scores):
    """Return the loss of one query from the score of its positive and the scores of its unmasked negatives."""
    match loss_name:
        case "softmax":
            logits = [score / TEMPERATURE for score in [positive_score, *negative_scores]]
            return math.log(sum(math.exp(logit) for logit in logits)) - positive_score / TEMPERATURE
        case "bce":
            return softplus(-positive_score / TEMPERATURE) + mean([softplus(score / TEMPERATURE) for score in negative_scores])
        case "bpr":
            return mean([softplus((score - positive_score) / TEMPERATURE) for score in negative_scores])
        case "cosine_contrastive":
            return 1 - positive_score + NEGATIVE_WEIGHT * mean([max(0, score - MARGIN) for score in negative_scores])


@st.composite
def scored_queries(draw):
    """Draw positive_score_B, negative_score_BN, is_masked_BN or None, and weight_B or None."""
    num_queries, num_columns = draw(st.integers(1, 4)), draw(st.integers(0, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    score_BC = torch.rand(num_queries, num_columns + 1, generator=generator) * 2 - 1
    column_masks = st.lists(st.booleans(), min_size=num_columns, max_size=num_columns)
    mask = draw(st.none() | st.lists(column_masks, min_size=num_queries, max_size=num_queries))
    is_masked_BN = None if mask is None else torch.tensor(mask, dtype=torch.bool).reshape(num_queries, num_columns)
    weight_values = st.sampled_from([0.0, 0.25, 1.0, 3.0])
    weights = draw(st.none() | st.lists(weight_values, min_size=num_queries, max_size=num_queries))
    return score_BC[:, 0], score_BC[:, 1:], is_masked_BN, None if weights is None else torch.tensor(weights)


@every_loss
@given(scored_queries())
def test_the_loss_equals_the_weighted_mean_of_a_loop_over_the_queries(loss_name, queries):
    positive_score_B, negative_score_BN, is_masked_BN, weight_B = queries
    positive_score_B.requires_grad_()
    negative_score_BN.requires_grad_()
    loss = weighted_mean(LOSS_BY_NAME[loss_name](positive_score_B, negative_score_BN, is_masked_BN=is_masked_BN), weight_B)

    total_loss = 0.0
    for query_index, positive_score in enumerate(positive_score_B.tolist()):
        unmasked_scores = [
            score
            for column, score in enumerate(negative_score_BN[query_index].tolist())
            if is_masked_BN is None or not is_masked_BN[query_index, column].item()
        ]
        weight = 1.0 if weight_B is None else weight_B[query_index].item()
        total_loss += weight * query_loss(loss_name, positive_score, unmasked_scores)
    assert loss.item() == pytest.approx(total_loss / len(positive_score_B), rel=1e-5, abs=1e-6)

    loss.backward()
    assert positive_score_B.grad.isfinite().all() and negative_score_BN.grad.isfinite().all()
    if is_masked_BN is not None:
        assert (negative_score_BN.grad[is_masked_BN] == 0).all()


@given(scored_queries(), st.integers(0, 10_000))
def test_a_logq_correction_equals_a_shift_of_the_scores(queries, seed):
    positive_score_B, negative_score_BN, is_masked_BN, _ = queries
    generator = torch.Generator().manual_seed(seed)
    log_q_B, log_q_N = (torch.rand(length, generator=generator) * 6 - 3 for length in negative_score_BN.shape)
    loss_of = partial(softmax_loss, is_masked_BN=is_masked_BN, temperature=TEMPERATURE)
    corrected_loss_B = loss_of(positive_score_B, negative_score_BN, log_q_B=log_q_B, log_q_N=log_q_N)
    loss_of_shifted_scores_B = loss_of(positive_score_B - TEMPERATURE * log_q_B, negative_score_BN - TEMPERATURE * log_q_N)
    assert corrected_loss_B.tolist() == pytest.approx(loss_of_shifted_scores_B.tolist(), rel=1e-5, abs=1e-6)


@every_loss
def test_a_query_whose_columns_are_all_masked_has_a_finite_loss_and_gradient(loss_name):
    positive_score_B = torch.tensor([0.5, 0.5], requires_grad=True)
    negative_score_BN = torch.tensor([[0.1, 0.9], [0.1, 0.9]], requires_grad=True)
    is_masked_BN = torch.tensor([[True, True], [False, False]])
    loss = LOSS_BY_NAME[loss_name](positive_score_B, negative_score_BN, is_masked_BN=is_masked_BN).mean()
    loss.backward()
    loss_without_negatives = query_loss(loss_name, 0.5, [])
    assert loss.item() == pytest.approx((loss_without_negatives + query_loss(loss_name, 0.5, [0.1, 0.9])) / 2, rel=1e-6)
    assert positive_score_B.grad.isfinite().all() and negative_score_BN.grad[0].tolist() == [0, 0]
    assert (negative_score_BN.grad[1] != 0).any()


@every_loss
def test_the_values_of_masked_scores_do_not_matter(loss_name):
    is_masked_BN = torch.tensor([[True, False]])
    loss_of = partial(LOSS_BY_NAME[loss_name], torch.tensor([0.5]), is_masked_BN=is_masked_BN)
    negative_score_BN = torch.tensor([[1e30, 0.9]], requires_grad=True)
    loss_of(negative_score_BN).backward()
    assert loss_of(negative_score_BN).item() == loss_of(torch.tensor([[0.0, 0.9]])).item()
    assert negative_score_BN.grad[0, 0] == 0 and negative_score_BN.grad.isfinite().all()


@every_loss
def test_losses_do_not_change_their_inputs(loss_name):
    negative_score_BN, is_masked_BN = torch.tensor([[0.3, 0.9]]), torch.tensor([[True, False]])
    LOSS_BY_NAME[loss_name](torch.tensor([0.5]), negative_score_BN, is_masked_BN=is_masked_BN)
    assert torch.equal(negative_score_BN, torch.tensor([[0.3, 0.9]]))


@every_loss
def test_losses_of_bfloat16_scores_are_computed_in_float32(loss_name):
    torch.manual_seed(0)
    positive_score_B, negative_score_BN = (torch.rand(3) - 0.5).bfloat16(), (torch.rand(3, 5_000) - 0.5).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        loss_B = LOSS_BY_NAME[loss_name](positive_score_B, negative_score_BN, is_masked_BN=None)
    expected_loss_B = LOSS_BY_NAME[loss_name](positive_score_B.float(), negative_score_BN.float(), is_masked_BN=None)
    assert loss_B.dtype == torch.float32
    assert loss_B.tolist() == expected_loss_B.tolist()


@pytest.mark.parametrize("loss_function", [softmax_loss, bce_loss, bpr_loss])
def test_the_gradient_of_the_temperature_equals_a_difference_quotient(loss_function):
    positive_score_B, negative_score_BN = torch.tensor([0.2, -0.1]), torch.tensor([[0.4, 0.1], [0.0, -0.6]])
    loss_of = partial(loss_function, positive_score_B, negative_score_BN, is_masked_BN=None)
    temperature = torch.tensor(0.5, requires_grad=True)
    loss_of(temperature=temperature).mean().backward()
    loss_above, loss_below = (loss_of(temperature=0.5 + offset).mean().item() for offset in (1e-3, -1e-3))
    assert temperature.grad.item() == pytest.approx((loss_above - loss_below) / 2e-3, rel=1e-3)


def test_bce_can_reach_zero_because_scores_can_be_negative():
    assert LOSS_BY_NAME["bce"](torch.tensor([30.0]), torch.tensor([[-30.0]]), is_masked_BN=None).item() < 1e-6


@given(st.integers(0, 10_000), st.lists(st.booleans(), min_size=4, max_size=4))
def test_the_distillation_loss_equals_the_kl_divergence_computed_in_a_loop(seed, has_teacher_C):
    generator = torch.Generator().manual_seed(seed)
    student_CD, teacher_CD = (torch.randn(4, width, generator=generator) for width in (2, 5))
    teacher_CD[~torch.tensor(has_teacher_C)] = 0
    item_C = torch.randint(0, 3, (4,), generator=generator)
    student_CD.requires_grad_()
    loss = distillation_loss(
        student_CD, teacher_CD=teacher_CD, item_C=item_C, num_queries=3, temperature=TEMPERATURE, min_norm=0.01
    )

    def similarity_softmax(vector_CD, query_index, columns):
        """Return the softmax of the cosines between the item of a query and the items of `columns`."""
        weights = [
            math.exp(torch.cosine_similarity(vector_CD[query_index], vector_CD[column], dim=0).item() / TEMPERATURE)
            for column in columns
        ]
        return [weight / sum(weights) for weight in weights]

    divergences = []
    for query_index in range(3):
        negative_columns = [column for column in range(4) if has_teacher_C[column] and item_C[query_index] != item_C[column]]
        if has_teacher_C[query_index] and negative_columns:
            teacher_softmax, student_softmax = (
                similarity_softmax(vector_CD, query_index, negative_columns) for vector_CD in (teacher_CD, student_CD)
            )
            divergences.append(sum(p * math.log(p / q) for p, q in zip(teacher_softmax, student_softmax, strict=True)))
    assert loss.item() == pytest.approx(sum(divergences) / 3, rel=1e-4, abs=1e-6)
    loss.backward()
    assert student_CD.grad.isfinite().all() and (student_CD.grad[~torch.tensor(has_teacher_C)] == 0).all()


def test_distillation_is_zero_where_the_student_agrees_with_a_wider_teacher():
    torch.manual_seed(0)
    student_CD = torch.randn(6, 3)
    isometry_DD = torch.linalg.qr(torch.randn(5, 5)).Q[:3]  # a map that keeps all angles
    arguments = {"teacher_CD": 4 * student_CD @ isometry_DD, "item_C": torch.arange(6), "num_queries": 6}
    arguments |= {"temperature": 0.05, "min_norm": 0.01}
    assert abs(distillation_loss(student_CD, **arguments).item()) < 1e-6
    with torch.autocast("cpu", torch.bfloat16):  # autocast does not change the result
        loss = distillation_loss(student_CD, **arguments)
    assert abs(loss.item()) < 1e-6 and loss.dtype == torch.float32


def test_distillation_does_not_train_the_teacher_and_ignores_items_without_a_teacher_vector():
    teacher_CD = torch.tensor([[1.0, 0.5], [1.0, 1.0], [0.0, 1.0], [0.0, 0.0]], requires_grad=True)
    student_CD = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 2.0]], requires_grad=True)
    loss = distillation_loss(
        student_CD, teacher_CD=teacher_CD, item_C=torch.arange(4), num_queries=4, temperature=1.0, min_norm=0.01
    )
    loss.backward()
    assert loss.item() > 0 and teacher_CD.grad is None
    assert student_CD.grad.isfinite().all() and (student_CD.grad[3] == 0).all()
