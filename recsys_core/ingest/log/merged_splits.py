"""An interactions stage in which all validation and test events have become training events, for the refit of a model.

Shapes: U users, I items, S shards, E held-out events of a shard, L known negatives of a shard.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from recsys_core.dataset.events import EVENTS_PER_CHUNK, EventStore
from recsys_core.dataset.jagged import chunk_slices
from recsys_core.dataset.known_negatives import NUM_SPLITS
from recsys_core.dataset.layout import EventArrays, array_file, array_files, popularity_ranks, save_npy
from recsys_core.disk import link_or_copy
from recsys_core.ingest.log.event_writer import write_examples
from recsys_core.manifests import EventShard, InteractionsManifest, StageFolder

NEGATIVE_ARRAYS = ("negative_offset", "negative_item", "negative_event")
SPLIT_END_ARRAYS = ("train_end", "validation_end")
MERGED_ARRAYS = (*SPLIT_END_ARRAYS, "event_offset", "train_user", "item_count", "item_rank", *NEGATIVE_ARRAYS)
"""Arrays that depend on the split. The other files of the stage are linked."""


def merge_splits(interactions: InteractionsManifest, folder: Path) -> InteractionsManifest:
    """Write a copy of the stage to `folder`, in which all events are training events. Users and items keep their rows.

    The copy has no parts, so no later ingest can continue it.
    """
    stage = StageFolder(folder, InteractionsManifest, inputs=["merge_splits", interactions])
    if stage.manifest is not None:
        return stage.manifest
    store, num_shards = EventStore.open(interactions), interactions.num_shards
    with stage.writing() as output_folder:
        merged_file_names = {
            file_name for array_name in MERGED_ARRAYS for file_name in array_files(array_name, num_shards=num_shards)
        }
        for file_name in interactions.files:
            if "/" not in file_name and file_name not in merged_file_names:
                link_or_copy(interactions.path(file_name), output_folder / file_name)
        event_count_I = store.event_count_I()
        save_npy(output_folder / array_file("item_count"), event_count_I)
        save_npy(output_folder / array_file("item_rank"), popularity_ranks(event_count_I))
        train_count_U3 = np.zeros((store.num_users, NUM_SPLITS), np.int64)
        train_count_U3[:, 0] = store.event_count_U
        write_examples(output_folder, user_count_U3=train_count_U3, num_shards=num_shards)
        num_negatives_S = []
        for shard, arrays in enumerate(EventArrays.open(interactions).shards()):
            path_by_array = {
                array_name: output_folder / array_files(array_name, num_shards=num_shards)[shard]
                for array_name in SPLIT_END_ARRAYS + NEGATIVE_ARRAYS
            }
            end_U = np.cumsum(EventStore(arrays, is_ordered=store.is_ordered).event_count_U)
            for array_name in SPLIT_END_ARRAYS:
                save_npy(path_by_array[array_name], end_U)
            num_negatives_S.append(_write_merged_negatives(arrays, path_by_array=path_by_array))
        manifest_fields = interactions.model_dump(exclude={"fingerprint", "input_fingerprints", "seconds", "files", "folder"})
        count_by_field = {"num_train_events": interactions.num_events, "num_validation_events": 0, "num_test_events": 0}
        count_by_field |= {"num_known_negatives": sum(num_negatives_S)}
        shards = [
            EventShard(num_events=shard.num_events, num_known_negatives=num_negatives)
            for shard, num_negatives in zip(interactions.shards, num_negatives_S, strict=False)
        ]
        return stage.commit(**manifest_fields | count_by_field | {"test_days": None, "parts": (), "shards": shards})


def _write_merged_negatives(arrays: EventArrays, *, path_by_array: Mapping[str, Path]) -> int:
    """Write the known negatives of a shard without items of the user's held-out events; return their number."""
    if arrays.negative_offset is None or arrays.negative_item is None:
        return 0
    store = EventStore(arrays, is_ordered=arrays.negative_event is not None)
    user_E, event_E = store.held_out_events(skip_validation_U=np.zeros(store.num_users, np.bool_))
    held_out_pair_keys = np.unique(user_E * store.num_items + store.items_at(event_E))
    item_L, first_negative_of_user = np.asarray(arrays.negative_item), np.asarray(arrays.negative_offset)[::NUM_SPLITS]
    remains_L, num_remaining_U3 = np.empty(len(item_L), np.bool_), np.zeros((store.num_users, NUM_SPLITS), np.int64)
    for chunk in chunk_slices(len(item_L), length=EVENTS_PER_CHUNK):
        user_L = np.searchsorted(first_negative_of_user, np.arange(chunk.start, chunk.stop), side="right") - 1
        remains_L[chunk] = ~np.isin(user_L * store.num_items + item_L[chunk], held_out_pair_keys)
        num_remaining_U = np.bincount((user_L - user_L[0])[remains_L[chunk]])
        num_remaining_U3[user_L[0] : user_L[0] + len(num_remaining_U), 0] += num_remaining_U
    save_npy(path_by_array["negative_offset"], np.cumsum(np.append(0, num_remaining_U3)))
    save_npy(path_by_array["negative_item"], item_L[remains_L])
    if arrays.negative_event is not None:
        save_npy(path_by_array["negative_event"], np.asarray(arrays.negative_event)[remains_L])
    return int(remains_L.sum())
