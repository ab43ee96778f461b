"""Random features of every form for users, items and events, and their table rows and weights."""

from typing import Any

import numpy as np

from recsys_core.dataset.feature_store import Feature, FeatureForm, FeatureStore
from recsys_core.manifests import IngestedFeature

FORMS: tuple[FeatureForm, ...] = ("single", "list", "weighted_list", "number")
OWNER_KINDS = ("user", "item", "context")
"""What a feature describes: a user, an item, or the context of an event."""
NUM_ROWS = 6
"""Number of rows in the table of each feature."""


def feature_store(
    *, num_users: int, num_items: int, num_events: int, seed: int = 0, has_zero_weights: bool = False
) -> FeatureStore:
    """Return a store with a random feature <owner_kind>.<form> for each owner kind and form. A list has 0 to 3 values.

    has_zero_weights: whether all weights are 0.
    """
    rng = np.random.default_rng(seed)
    features = {}
    for owner_kind, num_owners in zip(OWNER_KINDS, (num_users, num_items, num_events), strict=True):
        for form in FORMS:
            list_lengths = rng.integers(0, 4, num_owners) if "list" in form else np.ones(num_owners, np.int64)
            num_values = int(list_lengths.sum())
            weights = rng.normal(size=num_values) if form == "number" else rng.uniform(0.1, 2.0, num_values)
            if has_zero_weights:
                weights[:] = 0
            features[f"{owner_kind}.{form}"] = Feature(
                table_rows=rng.integers(0, NUM_ROWS, num_values).astype(np.int32),
                offset=np.concatenate([[0], list_lengths.cumsum()]).astype(np.int64) if "list" in form else None,
                weights=weights.astype(np.float32) if form in ("weighted_list", "number") else None,
            )
    return FeatureStore(features)


def ingested_features(*keys: str) -> dict[str, IngestedFeature]:
    """Return the manifest entries of the features `keys` (<owner_kind>.<form>), or of all features if `keys` is empty."""
    selected_keys = keys or tuple(f"{owner_kind}.{form}" for owner_kind in OWNER_KINDS for form in FORMS)
    fields_by_form: dict[str, dict[str, Any]] = {
        "single": {"kind": "categorical"},
        "list": {"kind": "list"},
        "weighted_list": {"kind": "weighted_list", "weight_column": "weights"},
        "number": {"kind": "numeric", "mean": 0.0, "std": 1.0},
    }
    counts = {"num_rows": NUM_ROWS, "num_values": 0, "num_out_of_vocabulary": 0, "num_missing": 0}
    shared_fields = counts | {"definition": "", "is_continued": False}
    return {key: IngestedFeature.model_validate(shared_fields | fields_by_form[key.split(".")[1]]) for key in selected_keys}


def values_of(store: FeatureStore, key: str, owner_index: int) -> tuple[list[int], list[float] | None]:
    """Return the table rows and the weights of one user, item or event, read by plain indexing."""
    feature = store.feature_by_key[key]
    if feature.offset is None:
        start, end = owner_index, owner_index + 1
    else:
        start, end = feature.offset[owner_index : owner_index + 2].tolist()
    return feature.table_rows[start:end].tolist(), None if feature.weights is None else feature.weights[start:end].tolist()
