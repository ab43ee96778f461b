"""A warm start: the launcher says which of the champion's rows and layers go on, each rank fills its own shards with them."""

import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import no_grad
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.optim.keyed import KeyedOptimizer

from recsys_core.data.events import mapped
from recsys_core.manifests import Dataset
from recsys_core.models.embedding_tables import LocalShard, table_shards
from recsys_core.models.initialisation import copy_pretrained
from recsys_core.models.optimizer_config import TableOptimizer
from recsys_core.models.spec import ModelSpec
from recsys_core.models.task import RetrievalTask
from recsys_core.training.champion import Champion, carried_tables, champion_layers, champion_rows, require_fit
from recsys_core.training.dense_parallel import fill
from recsys_core.training.job_spec import WarmStart
from recsys_core.training.optimizers import has_sums, sum_shards
from recsys_core.training.sharded_model import pretrained_rows

logger = logging.getLogger(__name__)
DENSE_NAME = "dense.safetensors"


def prepare_warm_start(
    champion: Champion,
    *,
    spec: ModelSpec,
    dataset: Dataset,
    optimizer: TableOptimizer,
    folder: Path,
) -> WarmStart:
    """Writes what WarmStart describes into the new folder `folder`, and says in the log how much goes on.

    Raises InputError where the champion does not fit tonight's settings, StageError where a file of it has changed.
    """
    require_fit(spec, champion=champion, dataset=dataset, optimizer=optimizer)
    layers = champion_layers(spec, champion=champion, dense=load_file(champion.export.path(DENSE_NAME)))
    folder.mkdir(parents=True)
    save_file(layers, folder / DENSE_NAME)
    vectors = {}
    if dataset.embeddings is not None:
        found = pretrained_rows(spec, dataset=dataset)
        vectors = {name: rows.vector_row for name, rows in found.items()}
    carried = carried_tables(spec, champion=champion)
    for name, table in spec.tables.items():
        if name not in carried:
            why = "frozen" if table.frozen else "new" if name not in champion.spec.tables else "frozen in the champion"
            logger.info("warm start from run %s: table %s: %s, it starts as in a full training", champion.run_id, name, why)
            continue
        row = champion_rows(
            name,
            interactions=(dataset.interactions, champion.interactions),
            features=(dataset.features, champion.features),
        )
        np.save(folder / f"rows_{name}.npy", row)
        told = _counted(row, vector_row=vectors.get(name), missing=table.settings.missing)
        logger.info("warm start from run %s: table %s: %s", champion.run_id, name, told)
    return WarmStart(run_id=champion.run_id, export=champion.export.folder, prepared=folder)


def _counted(row: NDArray[np.int64], *, vector_row: NDArray[np.int64] | None, missing: str) -> str:
    """How many rows come from where.

    >>> _counted(np.array([3, 0, -1, -1]), vector_row=np.array([0, -1, 1, -1]), missing="random")
    '2 of 4 rows from the champion, 2 new (1 from their vector, 1 random)'
    """
    new = row < 0
    told = f"{(~new).sum():,} of {len(row):,} rows from the champion, {new.sum():,} new"
    if not new.any():
        return told
    with_vector = 0 if vector_row is None else int((vector_row[new] >= 0).sum())
    return f"{told} ({with_vector:,} from their vector, {new.sum() - with_vector:,} {missing})"


def fill_from_champion(model: DistributedModelParallel, *, warm: WarmStart) -> None:
    """Overwrites, in a model as a full training starts from, this rank's rows and the layers that go on."""
    state = model.state_dict()
    task: RetrievalTask = get_unwrapped_module(model)
    parameters = dict(task.head.named_parameters())
    with no_grad():
        for name, path in warm.tables.items():
            row, table = mapped(path), mapped(warm.export / f"table_{name}.npy")
            for shard in table_shards(state, table=name):
                copy_pretrained(shard, vectors=table, vector_row=row, norm=None)
        for name, value in load_file(warm.prepared / DENSE_NAME).items():
            fill(parameters[name], value)


def fill_sums(optimizer: KeyedOptimizer, *, spec: ModelSpec, default: TableOptimizer, warm: WarmStart) -> None:
    """Gives each row that goes on what Adagrad had summed up for it; with none, its first step would be as large as the
    learning rate, however long it has been trained. Those of new rows stay zero.

    The moments of the layers' Adam, and of tables under Adam, are not carried: it finds them anew within the warm-up.
    """
    for name, path in warm.tables.items():
        if not has_sums(spec, name, default=default):
            continue
        row, saved = mapped(path), mapped(warm.export / f"state_{name}.npy")
        for shard in sum_shards(optimizer, spec=spec, table=name):
            one_each = shard.sum_RS.shape[1] == 1
            if one_each:  # where the champion had one per number, their mean is the row's
                sums = (saved if saved.ndim == 1 else saved.mean(axis=1))[:, None]
            else:
                sums = saved if saved.ndim == 2 else np.broadcast_to(saved[:, None], (len(saved), spec.tables[name].dim))
            place = LocalShard(shard.row, 0 if one_each else shard.column, shard.sum_RS)
            copy_pretrained(place, vectors=sums, vector_row=row, norm=None)
