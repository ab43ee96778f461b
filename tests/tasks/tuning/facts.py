"""Facts about five kinds of logs: sparse or dense, with or without an order of events, item features and vectors."""

from tasks.tuning.suggestions import DataFacts

SPARSE = DataFacts(
    num_users=22_000, num_items=12_000, num_train_events=150_000, density=0.0006, history_median=5, history_p95=22,
    is_ordered=True, has_item_features=True, vector_share=1.0, vector_dim=128,
    cold_share=0.01, cold_validation_share=0.01, cold_test_share=0.01, is_validation_sampled=False,
)  # fmt: skip
DENSE = DataFacts(
    num_users=6_000, num_items=3_000, num_train_events=900_000, density=0.05, history_median=80, history_p95=500,
    is_ordered=False, has_item_features=False, vector_share=0.0, vector_dim=0,
    cold_share=0.0, cold_validation_share=0.0, cold_test_share=0.0, is_validation_sampled=False,
)  # fmt: skip
DENSE_ORDERED = DENSE.model_copy(update={"is_ordered": True})
SPARSE_IDS = SPARSE.model_copy(update={"has_item_features": False, "vector_share": 0.0, "vector_dim": 0})
SPARSE_UNORDERED = SPARSE.model_copy(update={"is_ordered": False, "has_item_features": False})
