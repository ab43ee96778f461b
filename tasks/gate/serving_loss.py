"""Loss of quality in serving: metrics of the trained model, of its packaged query tower, and of the served index.

Shapes: B queries, U users of the sample, I items, D width of a vector, L (user, seen item) pairs, T (user, target) pairs.
"""

from collections.abc import Mapping

import numpy as np
import torch

from recsys_core.dataset.jagged import JaggedArray
from recsys_core.evaluation.metrics import USER_METRICS_FILE, UserMetrics, read_user_metrics
from recsys_core.evaluation.ranking.queries import Queries
from recsys_core.evaluation.ranking.served import rank_as_served
from recsys_core.manifests import EvaluationManifest, ExportManifest, IndexManifest, PackageManifest
from recsys_core.retrieval.index import served_recall_by_user
from recsys_core.serving.retriever import Retriever
from tasks.gate.sample import UserSample
from tasks.runs.context import StageContext

TRAINED, PACKAGED = "exact_trained", "exact_packaged"
"""Rankers that search all item vectors in float32: with the query tower of the training, and with the packaged query tower."""
INDEX = "index"
"""Key of the recall of the served index against an exact search, for a sample of the test users."""
MAX_SCORES = 4_000_000_000
"""Largest number of scores (users times items) that the exact search computes. It leaves out the users that do not fit."""


def exact_metrics(context: StageContext, sample: UserSample) -> dict[str, UserMetrics]:
    """Return the metrics of TRAINED, PACKAGED and INDEX for users of the sample.

    The difference between TRAINED and PACKAGED is the cost of the quantization. The difference between PACKAGED and the served
    answers is the cost of the index. With `evaluation.exclude_seen: false`, the metrics of the trained model include seen items
    and cannot be compared with a package, so the result is empty.
    """
    results = context.results
    user_metrics_file = results[EvaluationManifest].path(USER_METRICS_FILE)
    trained_metrics = read_user_metrics(user_metrics_file, user_rows=sample.user_row_U).get("model")
    if trained_metrics is None:
        return {}
    num_users = min(sample.num_users, max(1, MAX_SCORES // sample.num_items))
    packaged_metrics = _packaged_metrics(
        sample,
        retriever=Retriever.load(results[PackageManifest].folder),
        item_vector_ID=torch.from_numpy(np.load(results[ExportManifest].path("item_vectors.npy"))),
        order_I=np.load(results[EvaluationManifest].path("popularity.npy")),
        num_users=num_users,
    )
    index = results[IndexManifest]
    user_row_B, recall_B = served_recall_by_user(index)
    index_recall = UserMetrics(user_row_B, {f"recall@{index.reports[index.served_index].k}": recall_B})
    return {TRAINED: trained_metrics.common_with(packaged_metrics), PACKAGED: packaged_metrics, INDEX: index_recall}


def _packaged_metrics(
    sample: UserSample, *, retriever: Retriever, item_vector_ID: torch.Tensor, order_I: np.ndarray, num_users: int
) -> UserMetrics:
    """Return the metrics of an exact search with the query vectors of the package, for the first `num_users` users.

    Args:
        order_I: item rows in the order of popularity, for users without a history.
    """
    user_row_U, history = sample.user_row_U[:num_users], sample.history.slice(0, num_users)
    seen = JaggedArray.from_lengths(sample.num_seen_U, sample.seen_pair_L % sample.num_items).slice(0, num_users)
    targets = JaggedArray.from_pairs(
        sample.target_pair_T // sample.num_items, sample.target_pair_T % sample.num_items, num_lists=sample.num_users
    ).slice(0, num_users)
    sample_columns, model_names = sample.feature_columns(retriever.package), retriever.request_features.columns
    values_by_column = {
        name: values.slice(0, num_users).to_pylist() for name, values in sample_columns.items() if name in model_names
    }
    given_features = retriever.request_features.encode(values_by_column, num_rows=num_users) if values_by_column else {}
    queries = Queries(
        query_BD=torch.from_numpy(retriever.query_reader.encode(user_row_U, history, given_features=given_features)),
        is_known_B=retriever.package.model.is_known(history_length_B=history.lengths, user_row_B=user_row_U, has_context=True),
        seen=seen,
        targets=targets,
    )
    ranking = rank_as_served(queries, item_vector_ID=item_vector_ID, order_I=order_I, k=0)
    return UserMetrics.of(ranking.target_positions(), user_row_B=user_row_U)


def mean_metrics(metrics_by_ranker: Mapping[str, UserMetrics]) -> dict[str, float]:
    """Return the mean of each metric over the users, by `<ranker>/<metric>`."""
    return {key: mean for ranker, metrics in metrics_by_ranker.items() for key, mean in metrics.means(ranker).items()}
