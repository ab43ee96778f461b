import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
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

T, MARGIN, NEGATIVE_WEIGHT = 0.5, 0.2, 1.5
LOSSES = {
    "softmax": partial(softmax_loss, temperature=T),
    "bce": partial(bce_loss, temperature=T),
    "bpr": partial(bpr_loss, temperature=T),
    "cosine_contrastive": partial(cosine_contrastive_loss, margin=MARGIN, negative_weight=NEGATIVE_WEIGHT),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


def test_logq_lowers_the_logit_of_a_popular_candidate():
    # All scores are 0. The positive is expected once (log 1 = 0); its columns are expected three times and once.
    log_q_N = log_expected_count(torch.tensor([0.75, 0.25]), torch.zeros(2), num_positives=4, num_negatives=0)
    positive_score_B, negative_score_BN = torch.zeros(1), torch.zeros(1, 2, requires_grad=True)
    loss = partial(softmax_loss, positive_score_B, is_masked_BN=None, temperature=1.0)

    uncorrected_loss = loss(negative_score_BN)
    assert uncorrected_loss.item() == pytest.approx(math.log(3))
    corrected_loss = loss(negative_score_BN, log_q_B=torch.zeros(1), log_q_N=log_q_N)
    assert corrected_loss.item() == pytest.approx(math.log(1 + 1 / 3 + 1))  # the wrong sign: log(1 + 3 + 1)
    corrected_loss.backward()
    assert negative_score_BN.grad.tolist() == [
        pytest.approx([(1 / 3) / (7 / 3), 1 / (7 / 3)])
    ]  # the popular one is pushed less


def test_logq_lowers_the_logit_of_a_popular_positive():
    # Score 0 and expected three times: it counts 1/3 against a column that is expected once, so its gradient is -3/4.
    positive_score_B = torch.zeros(1, requires_grad=True)
    score = {"is_masked_BN": None, "temperature": 1.0, "log_q_N": torch.zeros(1)}
    loss = softmax_loss(positive_score_B, torch.zeros(1, 1), log_q_B=torch.tensor([3.0]).log(), **score)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(4))  # the wrong sign: log(4 / 3)
    assert positive_score_B.grad.tolist() == pytest.approx([-0.75])


# True choice probabilities of two types of queries over four items. Item 0 is by far the most popular.
CHOICES = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.6, 0.2, 0.15, 0.05]])


def learned_choice(correction, *, mask_hits, batch_size=128, steps=120):
    """Train a table of scores with in-batch negatives; return its softmax over the items, by type of query."""
    torch.manual_seed(0)
    popularity_I = CHOICES.mean(dim=0)
    scores = torch.zeros(2, 4, requires_grad=True)
    mean_scores = torch.zeros(2, 4)
    query_B = torch.arange(batch_size) % 2
    own_BB = torch.eye(batch_size, dtype=torch.bool)
    for step in range(steps):
        item_B = torch.multinomial(CHOICES, batch_size // 2, replacement=True).T.flatten()
        log_q_B = log_expected_count(
            popularity_I[item_B], torch.zeros(batch_size), num_positives=batch_size - 1, num_negatives=0
        )
        positive, columns = {"none": (None, None), "wrong sign": (-1, -1), "columns": (None, 1), "both": (1, 1)}[correction]
        loss = softmax_loss(
            scores[query_B, item_B],
            scores[query_B][:, item_B],
            is_masked_BN=item_B[:, None] == item_B if mask_hits else own_BB,
            temperature=1.0,
            log_q_B=positive and positive * log_q_B,
            log_q_N=columns and columns * log_q_B,
        ).mean()
        (gradient,) = torch.autograd.grad(loss, scores)
        late = step >= steps // 2  # the second half has smaller steps and is averaged
        with torch.no_grad():
            scores -= (0.5 if late else 5.0) * gradient
            mean_scores += late * scores / (steps - steps // 2)
    return mean_scores.softmax(dim=1)


def descending(scores):
    return scores.argsort(dim=1, descending=True).tolist()


@pytest.mark.parametrize(("correction", "mask_hits"), [("both", False), ("columns", True)])
def test_logq_recovers_the_true_choices_under_popularity_skew(correction, mask_hits):
    # The positive is corrected only if it may occur again among the columns.
    learned = learned_choice(correction, mask_hits=mask_hits)
    assert descending(learned) == descending(CHOICES)
    torch.testing.assert_close(learned, CHOICES, atol=0.03, rtol=0)


@pytest.mark.parametrize("correction", ["none", "wrong sign"])
def test_without_logq_or_with_the_wrong_sign_the_popular_item_falls_behind(correction):
    learned = descending(learned_choice(correction, mask_hits=False))
    assert learned[0] != descending(CHOICES)[0] and learned[1] != descending(CHOICES)[1]


def softplus(value):
    return math.log1p(math.exp(value))


def query_loss(name, positive, negatives):
    """The loss of one query in plain floats; `negatives` are those that are not masked."""
    match name:
        case "softmax":
            return math.log(sum(math.exp(score / T) for score in [positive, *negatives])) - positive / T
        case "bce":
            below = [softplus(score / T) for score in negatives]
            return softplus(-positive / T) + (sum(below) / len(below) if below else 0)
        case "bpr":
            lost = [softplus((score - positive) / T) for score in negatives]
            return sum(lost) / len(lost) if lost else 0
        case "cosine_contrastive":
            above = [max(0, score - MARGIN) for score in negatives]
            average = sum(above) / len(above) if above else 0
            return 1 - positive + NEGATIVE_WEIGHT * average


@st.composite
def queries(draw):
    size, columns = draw(st.integers(1, 4)), draw(st.integers(0, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    scores_BN = torch.rand(size, columns + 1, generator=generator) * 2 - 1
    masks = st.lists(st.lists(st.booleans(), min_size=columns, max_size=columns), min_size=size, max_size=size)
    masked = draw(st.none() | masks)
    is_masked_BN = None if masked is None else torch.tensor(masked, dtype=torch.bool).reshape(size, columns)
    weight = draw(st.none() | st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0]), min_size=size, max_size=size))
    return scores_BN[:, 0], scores_BN[:, 1:], is_masked_BN, None if weight is None else torch.tensor(weight)


@every_loss
@settings(max_examples=60, deadline=None)
@given(queries())
def test_the_loss_equals_the_weighted_mean_of_a_loop_over_the_queries(name, case):
    positive_score_B, negative_score_BN, is_masked_BN, weight_B = case
    positive_score_B.requires_grad_()
    negative_score_BN.requires_grad_()
    loss = weighted_mean(LOSSES[name](positive_score_B, negative_score_BN, is_masked_BN=is_masked_BN), weight_B)

    total = 0.0
    for query_index, positive in enumerate(positive_score_B.tolist()):
        negatives = [
            score
            for column, score in enumerate(negative_score_BN[query_index].tolist())
            if is_masked_BN is None or not is_masked_BN[query_index, column].item()
        ]
        weight = 1.0 if weight_B is None else weight_B[query_index].item()
        total += weight * query_loss(name, positive, negatives)
    assert loss.item() == pytest.approx(total / len(positive_score_B), rel=1e-5, abs=1e-6)

    loss.backward()
    assert positive_score_B.grad.isfinite().all() and negative_score_BN.grad.isfinite().all()
    if is_masked_BN is not None:
        assert (negative_score_BN.grad[is_masked_BN] == 0).all()


@settings(max_examples=40, deadline=None)
@given(queries(), st.integers(0, 10_000))
def test_the_corrected_softmax_equals_a_plain_loop(case, seed):
    positive_score_B, negative_score_BN, is_masked_BN, _ = case
    generator = torch.Generator().manual_seed(seed)
    log_q_B, log_q_N = (torch.rand(length, generator=generator) * 6 - 3 for length in negative_score_BN.shape)
    loss = partial(softmax_loss, is_masked_BN=is_masked_BN, temperature=T)
    corrected_B = loss(positive_score_B, negative_score_BN, log_q_B=log_q_B, log_q_N=log_q_N)
    shifted_B = loss(positive_score_B - T * log_q_B, negative_score_BN - T * log_q_N)
    assert corrected_B.tolist() == pytest.approx(shifted_B.tolist(), rel=1e-5, abs=1e-6)


@every_loss
def test_a_query_whose_columns_are_all_masked_has_a_finite_loss_and_gradient(name):
    positive_score_B = torch.tensor([0.5, 0.5], requires_grad=True)
    negative_score_BN = torch.tensor([[0.1, 0.9], [0.1, 0.9]], requires_grad=True)
    is_masked_BN = torch.tensor([[True, True], [False, False]])
    loss = LOSSES[name](positive_score_B, negative_score_BN, is_masked_BN=is_masked_BN).mean()
    loss.backward()
    alone = query_loss(name, 0.5, [])
    assert loss.item() == pytest.approx((alone + query_loss(name, 0.5, [0.1, 0.9])) / 2, rel=1e-6)
    assert positive_score_B.grad.isfinite().all() and negative_score_BN.grad[0].tolist() == [0, 0]
    assert (negative_score_BN.grad[1] != 0).any()


@every_loss
def test_masked_scores_of_any_size_do_not_matter(name):
    is_masked_BN = torch.tensor([[True, False]])
    loss = partial(LOSSES[name], torch.tensor([0.5]), is_masked_BN=is_masked_BN)
    huge_BN = torch.tensor([[1e30, 0.9]], requires_grad=True)
    loss(huge_BN).backward()
    assert loss(huge_BN).item() == loss(torch.tensor([[0.0, 0.9]])).item()
    assert huge_BN.grad[0, 0] == 0 and huge_BN.grad.isfinite().all()


@every_loss
def test_losses_do_not_change_their_inputs(name):
    negative_score_BN, is_masked_BN = torch.tensor([[0.3, 0.9]]), torch.tensor([[True, False]])
    LOSSES[name](torch.tensor([0.5]), negative_score_BN, is_masked_BN=is_masked_BN)
    assert negative_score_BN.tolist() == torch.tensor([[0.3, 0.9]]).tolist()


@every_loss
def test_losses_of_bfloat16_scores_are_computed_in_float32(name):
    torch.manual_seed(0)
    scores = (torch.rand(3) - 0.5).bfloat16(), (torch.rand(3, 5_000) - 0.5).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        loss_B = LOSSES[name](*scores, is_masked_BN=None)
    assert loss_B.dtype == torch.float32
    assert loss_B.tolist() == LOSSES[name](*(score.float() for score in scores), is_masked_BN=None).tolist()


@pytest.mark.parametrize("loss", [softmax_loss, bce_loss, bpr_loss])
def test_a_temperature_can_be_learned(loss):
    positive_score_B, negative_score_BN = torch.tensor([0.2, -0.1]), torch.tensor([[0.4, 0.1], [0.0, -0.6]])
    loss = partial(loss, positive_score_B, negative_score_BN, is_masked_BN=None)
    temperature = torch.tensor(0.5, requires_grad=True)
    loss(temperature=temperature).mean().backward()
    up, down = (loss(temperature=0.5 + step).mean().item() for step in (1e-3, -1e-3))
    assert temperature.grad.item() == pytest.approx((up - down) / 2e-3, rel=1e-3)


def test_bce_can_reach_zero_because_scores_can_be_negative():
    assert LOSSES["bce"](torch.tensor([30.0]), torch.tensor([[-30.0]]), is_masked_BN=None).item() < 1e-6


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.booleans(), min_size=4, max_size=4))
def test_distillation_is_the_kl_divergence_over_the_known_pairs(seed, has_teacher_C):
    generator = torch.Generator().manual_seed(seed)
    student_CD, teacher_CD = (torch.randn(4, width, generator=generator) for width in (2, 5))
    teacher_CD[~torch.tensor(has_teacher_C)] = 0
    item_C = torch.randint(0, 3, (4,), generator=generator)
    student_CD.requires_grad_()
    loss = distillation_loss(student_CD, teacher_CD=teacher_CD, item_C=item_C, num_queries=3, temperature=T, min_norm=0.01)

    def shares(vector_CD, query_index, columns):
        weights = [
            math.exp(torch.cosine_similarity(vector_CD[query_index], vector_CD[column], dim=0).item() / T) for column in columns
        ]
        return [weight / sum(weights) for weight in weights]

    divergences = []
    for query_index in range(3):
        columns = [column for column in range(4) if has_teacher_C[column] and item_C[query_index] != item_C[column]]
        if has_teacher_C[query_index] and columns:
            pairs = zip(shares(teacher_CD, query_index, columns), shares(student_CD, query_index, columns), strict=True)
            divergences.append(
                sum(teacher_share * math.log(teacher_share / student_share) for teacher_share, student_share in pairs)
            )
    assert loss.item() == pytest.approx(sum(divergences) / 3, rel=1e-4, abs=1e-6)
    loss.backward()
    assert student_CD.grad.isfinite().all() and (student_CD.grad[~torch.tensor(has_teacher_C)] == 0).all()


def test_distillation_is_zero_where_the_student_agrees_with_a_wider_teacher():
    torch.manual_seed(0)
    student_CD = torch.randn(6, 3)
    wider_DD = torch.linalg.qr(torch.randn(5, 5)).Q[:3]  # an isometry: keeps all angles
    arguments = {"teacher_CD": 4 * student_CD @ wider_DD, "item_C": torch.arange(6), "num_queries": 6}
    arguments |= {"temperature": 0.05, "min_norm": 0.01}
    assert abs(distillation_loss(student_CD, **arguments).item()) < 1e-6
    with torch.autocast("cpu", torch.bfloat16):  # autocast does not change the result
        agree = distillation_loss(student_CD, **arguments)
    assert abs(agree.item()) < 1e-6 and agree.dtype == torch.float32


def test_the_teacher_gets_no_gradient_and_may_be_zero_for_items_without_a_vector():
    teacher_CD = torch.tensor([[1.0, 0.5], [1.0, 1.0], [0.0, 1.0], [0.0, 0.0]], requires_grad=True)
    student_CD = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 2.0]], requires_grad=True)
    loss = distillation_loss(
        student_CD, teacher_CD=teacher_CD, item_C=torch.arange(4), num_queries=4, temperature=1.0, min_norm=0.01
    )
    loss.backward()
    assert loss.item() > 0 and teacher_CD.grad is None
    assert student_CD.grad.isfinite().all() and (student_CD.grad[3] == 0).all()
