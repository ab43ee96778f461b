"""The objective, compared with a loop over queries and candidates."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recsys_core.dataset.batch import Assembler, Batch
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.errors import InputError
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.loss.loss_config import DistillationConfig, LossConfig
from recsys_core.models.loss.losses import distillation_loss
from recsys_core.models.loss.objective import Objective, log_expected_count, negative_share, seen_pairs
from recsys_core.models.spec import ModelSpec
from tests.recsys_core.models.error_messages import raises_message

NUM_ITEMS, WIDTH, TEMPERATURE = 7, 4, 0.5
ITEM_COUNT_I = np.array([9, 4, 0, 2, 1, 1, 3])
LOSS_KINDS = ("softmax", "bce", "bpr", "cosine_contrastive")


@dataclass
class Case:
    """Queries and candidates of a batch.

    Attributes:
        candidates: item rows of the positives, then of sampled negatives, then of `num_known` known negatives of each query.
        weights: loss weights of the queries.
        seed: seed of the vectors.
    """

    histories: list[list[int]]
    candidates: list[int]
    weights: list[float] | None
    seed: int
    num_known: int = 0

    def batch(self) -> Batch:
        user_row_B = np.arange(len(self.histories))
        history_items = [item for items in self.histories for item in items]
        return Assembler(user_batch_key=None).batch(
            user_row_B=user_row_B,
            event_index_B=user_row_B,
            history=JaggedArray.from_lengths(
                np.array([len(items) for items in self.histories]), np.array(history_items, np.int64)
            ),
            candidate_row_C=np.array(self.candidates, np.int64),
            loss_weight_B=None if self.weights is None else np.array(self.weights, np.float32),
        )

    def vectors(self) -> tuple[Tensor, Tensor]:
        """Return query and candidate vectors of norm 1. Equal items have equal vectors."""
        torch.manual_seed(self.seed)
        query_BD = torch.nn.functional.normalize(torch.randn(len(self.histories), WIDTH), dim=1)
        item_vector_ID = torch.nn.functional.normalize(torch.randn(NUM_ITEMS, WIDTH), dim=1)
        return query_BD, item_vector_ID[self.candidates]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw queries with histories, candidates, weights or none, and known negatives."""
    num_queries, num_negatives = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rows = st.integers(0, NUM_ITEMS - 1)
    weights = st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=num_queries, max_size=num_queries)
    num_known = draw(st.integers(0, 2))
    num_candidates = num_queries + num_negatives + num_queries * num_known
    return Case(
        histories=draw(st.lists(st.lists(rows, max_size=4), min_size=num_queries, max_size=num_queries)),
        candidates=draw(st.lists(rows, min_size=num_candidates, max_size=num_candidates)),
        weights=draw(st.none() | weights),
        seed=draw(st.integers(0, 99)),
        num_known=num_known,
    )


CASE = Case(histories=[[0, 1], [3], []], candidates=[4, 6, 0, 1, 3, 6], weights=None, seed=5)


def objective_of(loss: LossConfig, **config: Any) -> Objective:
    spec = ModelSpec.sized(
        TwoTowerConfig.model_validate({"embedding_dim": WIDTH, "temperature": TEMPERATURE, **config}),
        num_users=1,
        num_items=NUM_ITEMS,
    )
    return Objective(spec, loss=loss, item_count_I=ITEM_COUNT_I, group=None)


def loss_of(case: Case, loss: LossConfig, *, teacher_CD: Tensor | None = None, **config: Any) -> float:
    return objective_of(loss, **config)(*case.vectors(), batch=case.batch(), teacher_CD=teacher_CD).item()


def loop_loss(case: Case, loss: LossConfig) -> float:
    """Return the loss, computed with plain floats for one query at a time."""
    query_BD, candidate_CD = case.vectors()
    score_BC = (query_BD @ candidate_CD.T).tolist()
    num_queries = len(case.histories)
    num_shared = len(case.candidates) - num_queries * case.num_known
    shared_rows = case.candidates[:num_shared]
    num_positives, num_negatives = num_queries if loss.uses_in_batch_negatives else 0, num_shared - num_queries
    positive_share_I = ITEM_COUNT_I / ITEM_COUNT_I.sum()
    negative_share_I = negative_share(ITEM_COUNT_I, loss.negative_sampling_alpha)

    def log_q(row: int) -> float:
        if loss.logq_correction == "none":
            return 0.0
        expected_count = num_positives * positive_share_I[row] + num_negatives * negative_share_I[row]
        return math.log(max(expected_count, float(np.finfo(np.float32).tiny)))

    total_loss = 0.0
    for query_index, history in enumerate(case.histories):
        positive_row = shared_rows[query_index]
        masked_rows = {"none": set(), "positive": {positive_row}, "seen": {positive_row, *history}}[loss.mask_negatives]
        columns = [
            column
            for column in range(0 if loss.uses_in_batch_negatives else num_queries, num_shared)
            if column != query_index and shared_rows[column] not in masked_rows
        ]
        first_known = num_shared + query_index * case.num_known
        known_negatives = [
            score_BC[query_index][column]
            for column in range(first_known, first_known + case.num_known)
            if case.candidates[column] != positive_row
        ]
        weight = 1.0 if case.weights is None else case.weights[query_index]
        query_loss = query_loss_of(
            loss,
            score_BC[query_index][query_index],
            [score_BC[query_index][column] for column in columns],
            log_q_positive=log_q(positive_row) if loss.mask_negatives == "none" else 0.0,
            log_q_columns=[log_q(shared_rows[column]) for column in columns],
            known_negatives=known_negatives,
        )
        total_loss += weight * query_loss
    return total_loss / num_queries


def query_loss_of(
    loss: LossConfig,
    positive: float,
    negatives: list[float],
    *,
    log_q_positive: float,
    log_q_columns: list[float],
    known_negatives: list[float],
) -> float:
    """Return the loss of one query from the scores of its positive, its negatives and its known negatives."""
    weight = loss.explicit_negative_weight

    def mean(negative_loss: Callable[[float], float]) -> float:
        losses = [negative_loss(score) for score in negatives]
        losses += [weight * negative_loss(score) for score in known_negatives]
        return sum(losses) / (len(negatives) + weight * len(known_negatives)) if losses else 0.0

    match loss.kind:
        case "softmax":
            logits = [score / TEMPERATURE - log_q for score, log_q in zip(negatives, log_q_columns, strict=True)]
            positive_logit = positive / TEMPERATURE - log_q_positive
            logits += [score / TEMPERATURE + math.log(weight) for score in known_negatives]
            return float(np.logaddexp.reduce([positive_logit, *logits]) - positive_logit)
        case "bce":
            return float(np.logaddexp(0, -positive / TEMPERATURE)) + mean(
                lambda negative: float(np.logaddexp(0, negative / TEMPERATURE))
            )
        case "bpr":
            return mean(lambda negative: float(np.logaddexp(0, (negative - positive) / TEMPERATURE)))
        case _:
            return 1 - positive + loss.negative_weight * mean(lambda negative: max(0.0, negative - loss.margin))


@given(
    case=cases(),
    kind=st.sampled_from(LOSS_KINDS),
    in_batch_negatives=st.sampled_from([None, True, False]),
    mask=st.sampled_from(["none", "positive", "seen"]),
    logq_correction=st.sampled_from(["counts", "none"]),
    alpha=st.sampled_from([0.0, 0.75]),
    known_weight=st.sampled_from([1.0, 2.5]),
)
def test_every_loss_equals_a_loop_over_queries_and_columns(
    case: Case, kind: Any, in_batch_negatives: bool | None, mask: Any, logq_correction: Any, alpha: float, known_weight: float
) -> None:
    loss = LossConfig(
        kind=kind,
        in_batch_negatives=in_batch_negatives,
        mask_negatives=mask,
        logq_correction=logq_correction,
        negative_sampling_alpha=alpha,
        margin=0.1,
        negative_weight=3.0,
        explicit_negatives=case.num_known,
        explicit_negative_weight=known_weight,
    )
    assert loss_of(case, loss) == pytest.approx(loop_loss(case, loss), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_without_sampled_negatives_only_in_batch_negatives_are_used(kind: Any) -> None:
    case = Case(histories=[[0], [3], []], candidates=[4, 6, 0], weights=None, seed=1)
    loss = LossConfig(kind=kind, in_batch_negatives=True, num_negatives=0, margin=-1.0)
    if kind == "softmax":  # the expected count of an item is its share of the events times the 3 queries
        share_I = ITEM_COUNT_I / ITEM_COUNT_I.sum()
        query_BD, candidate_CD = case.vectors()
        logits = query_BD @ candidate_CD.T / TEMPERATURE - torch.tensor(3 * share_I[case.candidates]).log().float()
        positive_logit_B = (query_BD * candidate_CD).sum(dim=1) / TEMPERATURE
        logits[range(3), range(3)] = positive_logit_B  # the positive is not corrected, because it is in one column only
        assert loss_of(case, loss) == pytest.approx((logits.logsumexp(dim=1) - positive_logit_B).mean().item(), rel=1e-5)
    else:
        assert loss_of(case, loss) == pytest.approx(loop_loss(case, loss), rel=1e-5)


@pytest.mark.parametrize("kind", LOSS_KINDS)
@pytest.mark.parametrize("in_batch_negatives", [True, False])
def test_a_query_without_an_unmasked_negative_has_a_finite_loss_and_gradient(kind: Any, in_batch_negatives: bool) -> None:
    case = Case(histories=[[3, 1], [1]], candidates=[3, 3, 1, 3], weights=None, seed=2)
    query_BD, candidate_CD = (vectors.requires_grad_() for vectors in case.vectors())
    loss = LossConfig(kind=kind, in_batch_negatives=in_batch_negatives, mask_negatives="seen")
    loss_value = objective_of(loss)(query_BD, candidate_CD, batch=case.batch(), teacher_CD=None)
    loss_value.backward()
    assert loss_value.isfinite() and query_BD.grad is not None and query_BD.grad.isfinite().all()


def test_a_masked_column_has_no_gradient() -> None:
    case = Case(histories=[[0, 1]], candidates=[4, 1, 3, 6], weights=None, seed=5)  # 4 is the positive
    for mask, used_negatives in (("none", [1, 3, 6]), ("positive", [1, 3, 6]), ("seen", [3, 6])):
        loss = LossConfig(in_batch_negatives=False, mask_negatives=mask)
        query_BD, candidate_CD = case.vectors()
        candidate_CD.requires_grad_()
        objective_of(loss)(query_BD, candidate_CD, batch=case.batch(), teacher_CD=None).backward()
        assert candidate_CD.grad is not None
        rows_with_gradient = [row for row, gradient in zip(case.candidates, candidate_CD.grad, strict=True) if gradient.any()]
        assert rows_with_gradient == [4, *used_negatives]


@pytest.mark.parametrize("kind", LOSS_KINDS)
@pytest.mark.parametrize("in_batch_negatives", [True, False])
def test_a_known_negative_is_pushed_away_only_from_its_own_query(kind: Any, in_batch_negatives: bool) -> None:
    """Query 0 has the known negative 3. Query 1 has none, so its place is filled with its positive."""
    case = Case(histories=[[], []], candidates=[4, 6, 0, 3, 6], weights=None, seed=5, num_known=1)
    loss = LossConfig(kind=kind, in_batch_negatives=in_batch_negatives, explicit_negatives=1, margin=-1.0)
    query_BD, candidate_CD = (vectors.requires_grad_() for vectors in case.vectors())
    objective_of(loss)(query_BD, candidate_CD, batch=case.batch(), teacher_CD=None).backward()
    assert candidate_CD.grad is not None
    ratio_D = candidate_CD.grad[3] / query_BD[0]
    # The gradient is a positive multiple of the query, so gradient descent moves the item away from the query.
    assert (ratio_D > 0).all() and torch.allclose(ratio_D, ratio_D[:1].expand(WIDTH))
    assert not candidate_CD.grad[4].any()


def test_bce_with_known_negatives_alone_is_the_cross_entropy_of_labels() -> None:
    """Query 0 has the labels 1, 0 and 0 for the items 4, 3 and 1. Query 1 has the label 1 for item 6."""
    case = Case(histories=[[], []], candidates=[4, 6, 3, 1, 6, 6], weights=None, seed=5, num_known=2)
    loss = LossConfig(kind="bce", num_negatives=0, explicit_negatives=2)
    query_BD, candidate_CD = case.vectors()
    logit_BC = query_BD @ candidate_CD.T / TEMPERATURE
    logits = torch.stack([logit_BC[0, 0], logit_BC[0, 2], logit_BC[0, 3], logit_BC[1, 1]])
    labels = torch.tensor([1.0, 0, 0, 1])
    losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    expected = (losses[0] + losses[1:3].mean() + losses[3]) / 2
    assert loss_of(case, loss) == pytest.approx(expected.item(), rel=1e-5)
    with raises_message("loss.kind is softmax, which needs negatives"):
        LossConfig(kind="softmax", num_negatives=0, in_batch_negatives=False, explicit_negatives=2)


def test_known_negatives_are_rejected_with_the_whole_catalogue() -> None:
    with raises_message("loss.explicit_negatives adds known negatives, which the catalogue contains; leave explicit_negatives"):
        LossConfig(negatives="all", explicit_negatives=2)


def test_a_learned_temperature_starts_at_the_configured_value_and_has_a_gradient() -> None:
    for kind in ("softmax", "bce", "bpr"):
        loss = LossConfig(kind=kind)
        objective = objective_of(loss, learn_temperature=True)
        loss_value = objective(*CASE.vectors(), batch=CASE.batch(), teacher_CD=None)
        assert loss_value.item() == pytest.approx(loss_of(CASE, loss), rel=1e-6)
        loss_value.backward()
        assert objective.log_temperature is not None and objective.log_temperature.grad.abs() > 0
        with torch.no_grad():
            objective.log_temperature.fill_(math.log(2.0))
        changed_loss = objective(*CASE.vectors(), batch=CASE.batch(), teacher_CD=None).item()
        assert changed_loss == pytest.approx(loss_of(CASE, loss, temperature=2.0), rel=1e-6)
    assert not list(objective_of(LossConfig()).parameters())


@pytest.mark.parametrize("kind", LOSS_KINDS)
@pytest.mark.parametrize("logq_correction", ["counts", "none"])
@pytest.mark.parametrize("mask", ["none", "positive"])
def test_no_step_synchronises_with_the_accelerator(kind: Any, logq_correction: Any, mask: Any) -> None:
    """Tensors on the meta device have no values, so a synchronisation, which reads a value, raises an error."""
    meta = torch.device("meta")
    loss = LossConfig(kind=kind, logq_correction=logq_correction, mask_negatives=mask, explicit_negatives=1)
    objective = objective_of(loss, learn_temperature=True).to(meta)
    query_BD, candidate_CD = (vectors.to(meta) for vectors in CASE.vectors())
    for _ in range(2):
        assert objective(query_BD, candidate_CD, batch=CASE.batch().to(meta), teacher_CD=None).shape == ()


@settings(max_examples=30)
@given(seed=st.integers(0, 999))
def test_a_positive_has_the_same_score_as_the_same_item_among_the_negatives(seed: int) -> None:
    case = Case(histories=[[]], candidates=[4, 4], weights=None, seed=seed)  # the positive is also sampled as a negative
    with torch.autocast("cpu", torch.bfloat16):
        loss_value = loss_of(case, LossConfig(kind="bpr", in_batch_negatives=False, mask_negatives="none"), temperature=0.01)
    assert loss_value == pytest.approx(math.log(2), abs=1e-6)  # the BPR loss of equal scores


def test_item_counts_are_not_part_of_the_checkpoint() -> None:
    assert set(objective_of(LossConfig()).state_dict()) == set()  # they come from the ingest of each run


@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_distillation_adds_the_divergence_over_items_with_a_pretrained_vector(kind: Any) -> None:
    config_without_distillation = LossConfig(kind=kind)
    config = config_without_distillation.model_copy(update={"distillation": DistillationConfig(weight=0.25, temperature=0.3)})
    torch.manual_seed(0)
    teacher_vector_ID = torch.randn(NUM_ITEMS, 5)
    teacher_vector_ID[[1, 6]] = 0.0  # no vector
    teacher_CD = teacher_vector_ID[CASE.candidates]
    _, candidate_CD = CASE.vectors()
    divergence = distillation_loss(
        candidate_CD,
        teacher_CD=teacher_CD,
        item_C=torch.tensor(CASE.candidates),
        num_queries=3,
        temperature=0.3,
        min_norm=0.01,
    )
    assert divergence > 0.01
    loss_without_distillation = loss_of(CASE, config_without_distillation)
    expected = loss_without_distillation + 0.25 * divergence.item()
    assert loss_of(CASE, config, teacher_CD=teacher_CD) == pytest.approx(expected, rel=1e-5)
    assert loss_of(CASE, config, teacher_CD=torch.zeros(6, 5)) == pytest.approx(loss_without_distillation, rel=1e-6)
    loss_of_agreement = loss_of(CASE, config, teacher_CD=candidate_CD * 3)
    assert loss_of_agreement == pytest.approx(loss_without_distillation, rel=1e-5)
    # Known negatives are not distilled.
    case, known_setting = replace(CASE, candidates=[*CASE.candidates, 1, 0, 5], num_known=1), {"explicit_negatives": 1}
    difference = loss_of(case, config.model_copy(update=known_setting), teacher_CD=teacher_vector_ID[case.candidates])
    difference -= loss_of(case, config_without_distillation.model_copy(update=known_setting))
    assert difference == pytest.approx(0.25 * divergence.item(), rel=1e-4)


def test_the_expected_count_of_an_item_that_is_never_sampled_has_a_finite_log():
    log_q_C = log_expected_count(torch.tensor([0.0, 0.5]), torch.tensor([0.0, 0.0]), num_positives=4, num_negatives=2)
    assert log_q_C.isfinite().all() and log_q_C[0] < -80 and log_q_C[1].item() == pytest.approx(np.log(2))


def test_the_expected_count_is_the_mean_count_of_sampled_batches():
    rng = np.random.default_rng(0)
    positive_I, negative_I = np.array([0.6, 0.3, 0.1]), negative_share(np.array([6, 3, 1]), 0.0)
    mean_count_I = rng.multinomial(20, positive_I, 4000).mean(0) + rng.multinomial(5, negative_I, 4000).mean(0)
    log_q_I = log_expected_count(torch.from_numpy(positive_I), torch.from_numpy(negative_I), num_positives=20, num_negatives=5)
    np.testing.assert_allclose(log_q_I.exp(), mean_count_I, rtol=0.05)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=20).filter(any), st.sampled_from([0.0, 0.5, 0.75, 1.0, 40.0]))
def test_the_shares_of_negatives_add_to_one_and_rise_with_the_count(counts, alpha):
    count_I = np.array(counts)
    share_I = negative_share(count_I, alpha)
    assert share_I.dtype == np.float64 and share_I.sum() == pytest.approx(1)
    assert (share_I[count_I == 0] == 0).all()
    assert (np.diff(share_I[np.argsort(count_I, kind="stable")]) >= 0).all()
    if alpha == 1:
        np.testing.assert_allclose(share_I, count_I / count_I.sum())


def test_sampling_negatives_without_a_training_event_is_an_error():
    with pytest.raises(InputError, match="0 of 3 items have a training event"):
        negative_share(np.zeros(3, dtype=np.int64), 0.75)


@given(
    st.lists(st.lists(st.integers(0, 7), max_size=5), max_size=5),
    st.lists(st.integers(0, 7), max_size=8),
)
def test_seen_pairs_equal_the_pairs_of_a_plain_loop(histories, candidates):
    history_H = torch.tensor([row for history in histories for row in history], dtype=torch.int64)
    offset = torch.tensor([0, *np.cumsum([len(history) for history in histories], dtype=int).tolist()])
    query_index, column_index = seen_pairs(history_H, offset, torch.tensor(candidates, dtype=torch.int64))
    assert query_index.dtype == column_index.dtype == torch.int64
    expected = [
        (query_index, column)
        for query_index, history in enumerate(histories)
        for row in history
        for column, item in enumerate(candidates)
        if item == row
    ]
    assert list(zip(query_index.tolist(), column_index.tolist(), strict=True)) == expected
