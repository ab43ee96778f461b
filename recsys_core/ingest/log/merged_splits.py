"""An interactions stage whose validation and test events are training events, for the refit of a model."""

from pathlib import Path

import numpy as np

from recsys_core.dataset.events import EVENTS_PER_CHUNK, EventStore
from recsys_core.dataset.jagged import chunk_slices
from recsys_core.dataset.known_negatives import NUM_SPLITS, KnownNegatives
from recsys_core.dataset.layout import array_file, popularity_ranks, save_npy
from recsys_core.disk import link_or_copy
from recsys_core.ingest.log.event_writer import write_train_user
from recsys_core.manifests import InteractionsManifest, StageFolder, fingerprint_of

NEGATIVE_ARRAYS = ("negative_offset", "negative_item", "negative_event")
MERGED_ARRAYS = ("train_end", "validation_end", "train_user", "item_count", "item_rank", *NEGATIVE_ARRAYS)
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
        num_known_negatives = 0
        if store.known_negatives is not None:
            num_known_negatives = _write_merged_negatives(store.known_negatives, store=store, folder=new_folder)
        fields = interactions.model_dump(exclude={"fingerprint", "seconds", "files", "folder"})
        counts = {"num_train_events": num_events, "num_validation_events": 0, "num_test_events": 0}
        counts |= {"num_known_negatives": num_known_negatives}
        return stage.commit(**fields | counts | {"test_days": None, "parts": ()})


def _write_merged_negatives(known_negatives: KnownNegatives, *, store: EventStore, folder: Path) -> int:
    """Write the known negatives whose items are not among the user's held-out events. Return their number."""
    user_E, event_E = store.held_out_events(skip_validation_U=np.zeros(store.num_users, np.bool_))
    held_out_keys = np.unique(user_E * store.num_items + store.items_at(event_E))
    item_L, user_offset = known_negatives.item_L, known_negatives.offset[::NUM_SPLITS]
    is_kept_L, num_kept_U3 = np.empty(len(item_L), np.bool_), np.zeros((store.num_users, NUM_SPLITS), np.int64)
    for chunk in chunk_slices(len(item_L), length=EVENTS_PER_CHUNK):
        user_L = np.searchsorted(user_offset, np.arange(chunk.start, chunk.stop), side="right") - 1
        is_kept_L[chunk] = ~np.isin(user_L * store.num_items + item_L[chunk], held_out_keys)
        num_kept = np.bincount((user_L - user_L[0])[is_kept_L[chunk]])
        num_kept_U3[user_L[0] : user_L[0] + len(num_kept), 0] += num_kept
    save_npy(folder / array_file("negative_offset"), np.cumsum(np.append(0, num_kept_U3)))
    save_npy(folder / array_file("negative_item"), item_L[is_kept_L])
    if known_negatives.event_L is not None:
        save_npy(folder / array_file("negative_event"), known_negatives.event_L[is_kept_L])
    return int(is_kept_L.sum())
