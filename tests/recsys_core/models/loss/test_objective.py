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
        candidate_rows: item rows of the positives, then of sampled negatives, then of `num_known_negatives` known negatives
            per query.
        loss_weights: loss weights of the queries.
        seed: seed of the vectors.
    """

    histories: list[list[int]]
    candidate_rows: list[int]
    loss_weights: list[float] | None
    seed: int
    num_known_negatives: int = 0

    def batch(self) -> Batch:
        user_row_B = np.arange(len(self.histories))
        history_items = [item for items in self.histories for item in items]
        return Assembler(user_batch_key=None).batch(
            user_row_B=user_row_B,
            event_index_B=user_row_B,
            history=JaggedArray.from_lengths(
                np.array([len(items) for items in self.histories]), np.array(history_items, np.int64)
            ),
            candidate_row_C=np.array(self.candidate_rows, np.int64),
            loss_weight_B=None if self.loss_weights is None else np.array(self.loss_weights, np.float32),
        )

    def vectors(self) -> tuple[Tensor, Tensor]:
        """Return query and candidate vectors of norm 1. Equal items have equal vectors."""
        torch.manual_seed(self.seed)
        query_BD = torch.nn.functional.normalize(torch.randn(len(self.histories), WIDTH), dim=1)
        item_vector_ID = torch.nn.functional.normalize(torch.randn(NUM_ITEMS, WIDTH), dim=1)
        return query_BD, item_vector_ID[self.candidate_rows]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw queries, candidates, loss weights or None, and up to two known negatives per query."""
    num_queries, num_negatives = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    item_rows = st.integers(0, NUM_ITEMS - 1)
    loss_weights = st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=num_queries, max_size=num_queries)
    num_known_negatives = draw(st.integers(0, 2))
    num_candidates = num_queries + num_negatives + num_queries * num_known_negatives
    return Case(
        histories=draw(st.lists(st.lists(item_rows, max_size=4), min_size=num_queries, max_size=num_queries)),
        candidate_rows=draw(st.lists(item_rows, min_size=num_candidates, max_size=num_candidates)),
        loss_weights=draw(st.none() | loss_weights),
        seed=draw(st.integers(0, 99)),
        num_known_negatives=num_known_negatives,
    )


CASE = Case(histories=[[0, 1], [3], []], candidate_rows=[4, 6, 0, 1, 3, 6], loss_weights=None, seed=5)


def objective_of(loss_config: LossConfig, **model_settings: Any) -> Objective:
    spec = ModelSpec.sized(
        TwoTowerConfig.model_validate({"embedding_dim": WIDTH, "temperature": TEMPERATURE, **model_settings}),
        num_users=1,
        num_items=NUM_ITEMS,
    )
    return Objective(spec, loss=loss_config, item_count_I=ITEM_COUNT_I, group=None)


def loss_of(case: Case, loss_config: LossConfig, *, teacher_CD: Tensor | None = None, **model_settings: Any) -> float:
    return objective_of(loss_config, **model_settings)(*case.vectors(), batch=case.batch(), teacher_CD=teacher_CD).item()


def loop_loss(case: Case, loss_config: LossConfig) -> float:
    """Return the loss, computed with plain floats for one query at a time."""
    query_BD, candidate_CD = case.vectors()
    score_BC = (query_BD @ candidate_CD.T).tolist()
    num_queries = len(case.histories)
    num_shared_candidates = len(case.candidate_rows) - num_queries * case.num_known_negatives
    shared_candidate_rows = case.candidate_rows[:num_shared_candidates]
    num_positives = num_queries if loss_config.uses_in_batch_negatives else 0
    num_negatives = num_shared_candidates - num_queries
    positive_share_I = ITEM_COUNT_I / ITEM_COUNT_I.sum()
    negative_share_I = negative_share(ITEM_COUNT_I, loss_config.negative_sampling_alpha)

    def log_q(row: int) -> float:
        if loss_config.logq_correction == "none":
            return 0.0
        expected_count = num_positives * positive_share_I[row] + num_negatives * negative_share_I[row]
        return math.log(max(expected_count, float(np.finfo(np.float32).tiny)))

    total_loss = 0.0
    for query_index, history in enumerate(case.histories):
        positive_row = shared_candidate_rows[query_index]
        masked_rows = {"none": set(), "positive": {positive_row}, "seen": {positive_row, *history}}[loss_config.mask_negatives]
        negative_columns = [
            column
            for column in range(0 if loss_config.uses_in_batch_negatives else num_queries, num_shared_candidates)
            if column != query_index and shared_candidate_rows[column] not in masked_rows
        ]
        first_known_column = num_shared_candidates + query_index * case.num_known_negatives
        known_negative_scores = [
            score_BC[query_index][column]
            for column in range(first_known_column, first_known_column + case.num_known_negatives)
            if case.candidate_rows[column] != positive_row
        ]
        weight = 1.0 if case.loss_weights is None else case.loss_weights[query_index]
        query_loss = query_loss_of(
            loss_config,
            score_BC[query_index][query_index],
            [score_BC[query_index][column] for column in negative_columns],
            positive_log_q=log_q(positive_row) if loss_config.mask_negatives == "none" else 0.0,
            negative_log_qs=[log_q(shared_candidate_rows[column]) for column in negative_columns],
            known_negative_scores=known_negative_scores,
        )
        total_loss += weight * query_loss
    return total_loss / num_queries


def query_loss_of(
    loss_config: LossConfig,
    positive_score: float,
    negative_scores: list[float],
    *,
    positive_log_q: float,
    negative_log_qs: list[float],
    known_negative_scores: list[float],
) -> float:
    """Return the loss of one query from the scores of its positive, its negatives and its known negatives."""
    known_negative_weight = loss_config.explicit_negative_weight

    def weighted_mean(negative_loss: Callable[[float], float]) -> float:
        losses = [negative_loss(score) for score in negative_scores]
        losses += [known_negative_weight * negative_loss(score) for score in known_negative_scores]
        return sum(losses) / (len(negative_scores) + known_negative_weight * len(known_negative_scores)) if losses else 0.0

    match loss_config.kind:
        case "softmax":
            logits = [score / TEMPERATURE - log_q for score, log_q in zip(negative_scores, negative_log_qs, strict=True)]
            positive_logit = positive_score / TEMPERATURE - positive_log_q
            logits += [score / TEMPERATURE + math.log(known_negative_weight) for score in known_negative_scores]
            return float(np.logaddexp.reduce([positive_logit, *logits]) - positive_logit)
        case "bce":
            return float(np.logaddexp(0, -positive_score / TEMPERATURE)) + weighted_mean(
                lambda score: float(np.logaddexp(0, score / TEMPERATURE))
            )
        case "bpr":
            return weighted_mean(lambda score: float(np.logaddexp(0, (score - positive_score) / TEMPERATURE)))
        case _:
            return (
                1
                - positive_score
                + loss_config.negative_weight * weighted_mean(lambda score: max(0.0, score - loss_config.margin))
            )


@given(
    case=cases(),
    loss_kind=st.sampled_from(LOSS_KINDS),
    in_batch_negatives=st.sampled_from([None, True, False]),
    mask_negatives=st.sampled_from(["none", "positive", "seen"]),
    logq_correction=st.sampled_from(["counts", "none"]),
    alpha=st.sampled_from([0.0, 0.75]),
    known_negative_weight=st.sampled_from([1.0, 2.5]),
)
def test_every_loss_equals_a_loop_over_queries_and_columns(
    case: Case,
    loss_kind: Any,
    in_batch_negatives: bool | None,
    mask_negatives: Any,
    logq_correction: Any,
    alpha: float,
    known_negative_weight: float,
) -> None:
    loss_config = LossConfig(
        kind=loss_kind,
        in_batch_negatives=in_batch_negatives,
        mask_negatives=mask_negatives,
        logq_correction=logq_correction,
        negative_sampling_alpha=alpha,
        margin=0.1,
        negative_weight=3.0,
        explicit_negatives=case.num_known_negatives,
        explicit_negative_weight=known_negative_weight,
    )
    assert loss_of(case, loss_config) == pytest.approx(loop_loss(case, loss_config), rel=1e-4, abs=1e-5)


def test_without_sampled_negatives_the_logq_correction_uses_the_expected_counts_of_the_positives() -> None:
    case = Case(histories=[[0], [3], []], candidate_rows=[4, 6, 0], loss_weights=None, seed=1)
    # The expected count of an item is its share of the events times the 3 queries.
    share_I = ITEM_COUNT_I / ITEM_COUNT_I.sum()
    query_BD, candidate_CD = case.vectors()
    logit_BB = query_BD @ candidate_CD.T / TEMPERATURE - torch.tensor(3 * share_I[case.candidate_rows]).log().float()
    positive_logit_B = (query_BD * candidate_CD).sum(dim=1) / TEMPERATURE
    logit_BB[range(3), range(3)] = positive_logit_B  # the positive is not corrected, because it is in one column only
    expected_loss = (logit_BB.logsumexp(dim=1) - positive_logit_B).mean().item()
    assert loss_of(case, LossConfig(num_negatives=0)) == pytest.approx(expected_loss, rel=1e-5)


@pytest.mark.parametrize("loss_kind", LOSS_KINDS)
@pytest.mark.parametrize("in_batch_negatives", [True, False], ids=["in-batch negatives", "sampled negatives"])
def test_a_query_whose_negatives_are_all_masked_has_a_finite_loss_and_gradient(
    loss_kind: Any, in_batch_negatives: bool
) -> None:
    case = Case(histories=[[3, 1], [1]], candidate_rows=[3, 3, 1, 3], loss_weights=None, seed=2)
    query_BD, candidate_CD = (vectors.requires_grad_() for vectors in case.vectors())
    loss_config = LossConfig(kind=loss_kind, in_batch_negatives=in_batch_negatives, mask_negatives="seen")
    loss = objective_of(loss_config)(query_BD, candidate_CD, batch=case.batch(), teacher_CD=None)
    loss.backward()
    assert loss.isfinite() and query_BD.grad is not None and query_BD.grad.isfinite().all()


def test_a_masked_column_has_no_gradient() -> None:
    case = Case(histories=[[0, 1]], candidate_rows=[4, 1, 3, 6], loss_weights=None, seed=5)  # item 4 is the positive
    for mask_negatives, used_negatives in (("none", [1, 3, 6]), ("positive", [1, 3, 6]), ("seen", [3, 6])):
        loss_config = LossConfig(in_batch_negatives=False, mask_negatives=mask_negatives)
        query_BD, candidate_CD = case.vectors()
        candidate_CD.requires_grad_()
        objective_of(loss_config)(query_BD, candidate_CD, batch=case.batch(), teacher_CD=None).backward()
        assert candidate_CD.grad is not None
        rows_with_gradient = [
            row for row, gradient in zip(case.candidate_rows, candidate_CD.grad, strict=True) if gradient.any()
        ]
        assert rows_with_gradient == [4, *used_negatives]


@pytest.mark.parametrize("loss_kind", LOSS_KINDS)
@pytest.mark.parametrize("in_batch_negatives", [True, False], ids=["in-batch negatives", "sampled negatives"])
def test_a_known_negative_is_pushed_away_only_from_its_own_query(loss_kind: Any, in_batch_negatives: bool) -> None:
    """Query 0 has the known negative 3. Query 1 has no known negative, so its positive, item 6, fills the place."""
    case = Case(histories=[[], []], candidate_rows=[4, 6, 0, 3, 6], loss_weights=None, seed=5, num_known_negatives=1)
    loss_config = LossConfig(kind=loss_kind, in_batch_negatives=in_batch_negatives, explicit_negatives=1, margin=-1.0)
    query_BD, candidate_CD = (vectors.requires_grad_() for vectors in case.vectors())
    objective_of(loss_config)(query_BD, candidate_CD, batch=case.batch(), teacher_CD=None).backward()
    assert candidate_CD.grad is not None
    ratio_D = candidate_CD.grad[3] / query_BD[0]
    # The gradient is a positive multiple of the query, so gradient descent moves the item away from the query.
    assert (ratio_D > 0).all() and torch.allclose(ratio_D, ratio_D[:1].expand(WIDTH))
    assert not candidate_CD.grad[4].any()


def test_bce_with_known_negatives_alone_is_the_cross_entropy_of_labels() -> None:
    """Query 0 has the labels 1, 0 and 0 for the items 4, 3 and 1. Query 1 has the label 1 for item 6."""
    case = Case(histories=[[], []], candidate_rows=[4, 6, 3, 1, 6, 6], loss_weights=None, seed=5, num_known_negatives=2)
    loss_config = LossConfig(kind="bce", num_negatives=0, explicit_negatives=2)
    query_BD, candidate_CD = case.vectors()
    logit_BC = query_BD @ candidate_CD.T / TEMPERATURE
    logits = torch.stack([logit_BC[0, 0], logit_BC[0, 2], logit_BC[0, 3], logit_BC[1, 1]])
    labels = torch.tensor([1.0, 0, 0, 1])
    losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    expected_loss = (losses[0] + losses[1:3].mean() + losses[3]) / 2
    assert loss_of(case, loss_config) == pytest.approx(expected_loss.item(), rel=1e-5)
    with raises_message("loss.kind is softmax, which needs negatives"):
        LossConfig(kind="softmax", num_negatives=0, in_batch_negatives=False, explicit_negatives=2)


def test_known_negatives_are_rejected_with_the_whole_catalogue() -> None:
    with raises_message("loss.explicit_negatives adds known negatives, which the catalogue contains; leave explicit_negatives"):
        LossConfig(negatives="all", explicit_negatives=2)


def test_a_learned_temperature_starts_at_the_configured_value_and_has_a_gradient() -> None:
    for loss_kind in ("softmax", "bce", "bpr"):
        loss_config = LossConfig(kind=loss_kind)
        objective = objective_of(loss_config, learn_temperature=True)
        loss = objective(*CASE.vectors(), batch=CASE.batch(), teacher_CD=None)
        assert loss.item() == pytest.approx(loss_of(CASE, loss_config), rel=1e-6)
        loss.backward()
        assert objective.log_temperature is not None and objective.log_temperature.grad.abs() > 0
        with torch.no_grad():
            objective.log_temperature.fill_(math.log(2.0))
        changed_loss = objective(*CASE.vectors(), batch=CASE.batch(), teacher_CD=None).item()
        assert changed_loss == pytest.approx(loss_of(CASE, loss_config, temperature=2.0), rel=1e-6)
    assert not list(objective_of(LossConfig()).parameters())


@pytest.mark.parametrize("loss_kind", LOSS_KINDS)
@pytest.mark.parametrize("logq_correction", ["counts", "none"])
@pytest.mark.parametrize("mask_negatives", ["none", "positive"])
def test_no_step_synchronises_with_the_accelerator(loss_kind: Any, logq_correction: Any, mask_negatives: Any) -> None:
    """Tensors on the meta device have no values, so a synchronisation, which reads a value, raises an error."""
    meta = torch.device("meta")
    loss_config = LossConfig(
        kind=loss_kind, logq_correction=logq_correction, mask_negatives=mask_negatives, explicit_negatives=1
    )
    objective = objective_of(loss_config, learn_temperature=True).to(meta)
    query_BD, candidate_CD = (vectors.to(meta) for vectors in CASE.vectors())
    for _ in range(2):
        assert objective(query_BD, candidate_CD, batch=CASE.batch().to(meta), teacher_CD=None).shape == ()


@settings(max_examples=30)
@given(seed=st.integers(0, 999))
def test_a_positive_has_the_same_score_as_the_same_item_among_the_negatives(seed: int) -> None:
    # The positive is also sampled as a negative.
    case = Case(histories=[[]], candidate_rows=[4, 4], loss_weights=None, seed=seed)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(case, LossConfig(kind="bpr", in_batch_negatives=False, mask_negatives="none"), temperature=0.01)
    assert loss == pytest.approx(math.log(2), abs=1e-6)  # the BPR loss of equal scores


def test_item_counts_are_not_part_of_the_checkpoint() -> None:
    assert set(objective_of(LossConfig()).state_dict()) == set()  # they come from the ingest of each run


@pytest.mark.parametrize("loss_kind", LOSS_KINDS)
def test_distillation_adds_the_divergence_over_items_with_a_pretrained_vector(loss_kind: Any) -> None:
    config_without_distillation = LossConfig(kind=loss_kind)
    config_with_distillation = config_without_distillation.model_copy(
        update={"distillation": DistillationConfig(weight=0.25, temperature=0.3)}
    )
    torch.manual_seed(0)
    teacher_vector_ID = torch.randn(NUM_ITEMS, 5)
    teacher_vector_ID[[1, 6]] = 0.0  # no vector
    teacher_CD = teacher_vector_ID[CASE.candidate_rows]
    _, candidate_CD = CASE.vectors()
    divergence = distillation_loss(
        candidate_CD,
        teacher_CD=teacher_CD,
        item_C=torch.tensor(CASE.candidate_rows),
        num_queries=3,
        temperature=0.3,
        min_norm=0.01,
    )
    assert divergence > 0.01
    loss_without_distillation = loss_of(CASE, config_without_distillation)
    expected_loss = loss_without_distillation + 0.25 * divergence.item()
    assert loss_of(CASE, config_with_distillation, teacher_CD=teacher_CD) == pytest.approx(expected_loss, rel=1e-5)
    assert loss_of(CASE, config_with_distillation, teacher_CD=torch.zeros(6, 5)) == pytest.approx(
        loss_without_distillation, rel=1e-6
    )
    loss_of_agreeing_vectors = loss_of(CASE, config_with_distillation, teacher_CD=candidate_CD * 3)
    assert loss_of_agreeing_vectors == pytest.approx(loss_without_distillation, rel=1e-5)
    # Known negatives are not distilled.
    case_with_known_negatives = replace(CASE, candidate_rows=[*CASE.candidate_rows, 1, 0, 5], num_known_negatives=1)
    known_negatives_setting = {"explicit_negatives": 1}
    added_loss = loss_of(
        case_with_known_negatives,
        config_with_distillation.model_copy(update=known_negatives_setting),
        teacher_CD=teacher_vector_ID[case_with_known_negatives.candidate_rows],
    )
    added_loss -= loss_of(case_with_known_negatives, config_without_distillation.model_copy(update=known_negatives_setting))
    assert added_loss == pytest.approx(0.25 * divergence.item(), rel=1e-4)


def test_the_expected_count_of_an_item_that_is_never_sampled_has_a_finite_log():
    # The count 0 is replaced by the smallest normal float32, whose log is -87. The count of the second item is 4 x 0.5.
    log_q_C = log_expected_count(torch.tensor([0.0, 0.5]), torch.tensor([0.0, 0.0]), num_positives=4, num_negatives=2)
    assert log_q_C.isfinite().all() and log_q_C[0] < -80 and log_q_C[1].item() == pytest.approx(np.log(2))


def test_the_expected_count_is_the_mean_count_of_sampled_batches():
    rng = np.random.default_rng(0)
    positive_I, negative_I = np.array([0.6, 0.3, 0.1]), negative_share(np.array([6, 3, 1]), 0.0)
    mean_count_I = rng.multinomial(20, positive_I, 4000).mean(0) + rng.multinomial(5, negative_I, 4000).mean(0)
    log_q_I = log_expected_count(torch.from_numpy(positive_I), torch.from_numpy(negative_I), num_positives=20, num_negatives=5)
    np.testing.assert_allclose(log_q_I.exp(), mean_count_I, rtol=0.05)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=20).filter(any), st.sampled_from([0.0, 0.5, 0.75, 1.0, 40.0]))
def test_the_shares_of_negatives_add_up_to_one_and_rise_with_the_count(counts, alpha):
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
def test_seen_pairs_equal_the_pairs_of_a_plain_loop(histories, candidate_rows):
    history_H = torch.tensor([row for history in histories for row in history], dtype=torch.int64)
    offset = torch.tensor([0, *np.cumsum([len(history) for history in histories], dtype=int).tolist()])
    query_index_L, column_L = seen_pairs(history_H, offset, torch.tensor(candidate_rows, dtype=torch.int64))
    assert query_index_L.dtype == column_L.dtype == torch.int64
    expected_pairs = [
        (query_index, column)
        for query_index, history in enumerate(histories)
        for row in history
        for column, candidate_row in enumerate(candidate_rows)
        if candidate_row == row
    ]
    assert list(zip(query_index_L.tolist(), column_L.tolist(), strict=True)) == expected_pairs
