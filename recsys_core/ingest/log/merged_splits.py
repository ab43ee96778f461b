"""An interactions stage whose validation and test events are training events, for the refit of a model."""

from pathlib import Path

import numpy as np

from recsys_core.dataset.events import EventStore
from recsys_core.dataset.layout import array_file, popularity_ranks, save_npy
from recsys_core.disk import link_or_copy
from recsys_core.ingest.log.event_writer import write_train_user
from recsys_core.manifests import InteractionsManifest, StageFolder, fingerprint_of

MERGED_ARRAYS = ("train_end", "validation_end", "train_user", "item_count", "item_rank")
"""Arrays that depend on the split. The other files of the stage are linked."""


def merge_splits(interactions: InteractionsManifest, folder: Path) -> InteractionsManifest:
    """Write the stage to `folder` with all events in the training split. The rows of users and items stay the same.

    The stage has no parts, so no later ingest can continue it.
    """
    fingerprint = fingerprint_of("merge_splits", interactions)
    stage = StageFolder(folder, InteractionsManifest, fingerprint=fingerprint)
    if stage.manifest is not None:
        return stage.manifest
    store = EventStore.open(interactions)
    num_events = interactions.num_train_events + interactions.num_validation_events + interactions.num_test_events
    with stage.writing() as new_folder:
        merged_files = {array_file(name) for name in MERGED_ARRAYS}
        for file_name in interactions.files:
            if "/" not in file_name and file_name not in merged_files:
                link_or_copy(interactions.path(file_name), new_folder / file_name)
        end_U, count_I = np.cumsum(store.event_count_U), store.event_count_I()
        arrays = {"train_end": end_U, "validation_end": end_U, "item_count": count_I, "item_rank": popularity_ranks(count_I)}
        for name, array in arrays.items():
            save_npy(new_folder / array_file(name), array)
        write_train_user(new_folder, store.event_count_U)
        fields = interactions.model_dump(exclude={"fingerprint", "seconds", "files", "folder"})
        return stage.commit(
            **fields
            | {"num_train_events": num_events, "num_validation_events": 0, "num_test_events": 0, "test_days": None, "parts": ()}
        )
