"""Stage `embed_log`: item vectors from the training events, as initial rows of the item table.

Shapes: U users, I items, D width of the vectors, V items with training events.
"""

from pathlib import Path

import numpy as np
from scipy.sparse import csr_array, csr_matrix
from threadpoolctl import threadpool_limits

from recsys_core.closed_form.config import EaseVectorsConfig, IalsVectorsConfig, LogVectorsConfig
from recsys_core.closed_form.linear_models import Floats32, ease_vectors, log_matrix, singular_vectors
from recsys_core.dataset.events import EventStore
from recsys_core.errors import InputError
from recsys_core.manifests import InteractionsManifest, LogVectorsManifest, StageFolder
from recsys_core.seeds import CLOSED_FORM_SEED

GIGABYTE = 1_000_000_000
MIN_RELATIVE_NORM = 1e-4
"""A vector with a smaller norm, relative to the mean norm, is only rounding noise."""


def embed_log(config: LogVectorsConfig, *, interactions: InteractionsManifest, folder: Path) -> LogVectorsManifest:
    """Write the vectors of the items with training events. Validation and test events are not read.

    Raises:
        InputError: a library is missing, too few items or users have training events for `dim` dimensions, or the matrices
            need more than `memory_gb`.
    """
    stage = StageFolder(folder, LogVectorsManifest, inputs=["embed_log", config.result_settings(), interactions])
    if stage.manifest is not None:
        return stage.manifest
    config.require_libraries()
    store = EventStore.open(interactions)
    matrix_UI = log_matrix(store, before="validation", max_events=config.max_events)
    has_event_I, has_event_U = (np.diff(matrix.indptr) > 0 for matrix in (matrix_UI.tocsc(), matrix_UI))
    matrix_UV = matrix_UI[has_event_U][:, has_event_I]
    check_size(config, num_users=matrix_UV.shape[0], num_items=matrix_UV.shape[1], num_pairs=matrix_UV.nnz)
    vector_VD = item_vectors(config, matrix_UV)
    norm_V = np.linalg.norm(vector_VD, axis=1)
    has_vector_V = norm_V > MIN_RELATIVE_NORM * norm_V.mean()
    item_row_V = np.flatnonzero(has_event_I)[has_vector_V]
    vector_row_I = np.full(store.num_items, -1, np.int64)
    vector_row_I[item_row_V] = np.arange(len(item_row_V))
    with stage.writing(min_bytes=vector_VD.nbytes) as output_folder:
        np.save(output_folder / "item.vectors.npy", vector_VD[has_vector_V])
        np.save(output_folder / "item.vector_row.npy", vector_row_I)
        return stage.commit(num_vectors=len(item_row_V), dim=config.dim)


def item_vectors(config: LogVectorsConfig, matrix_UV: csr_array) -> Floats32:
    """Return the vectors [V, D] of the items by the method of the config."""
    if isinstance(config, EaseVectorsConfig):
        return ease_vectors(matrix_UV, l2=config.l2, dim=config.dim)
    if isinstance(config, IalsVectorsConfig):
        return ials_vectors(config, matrix_UV)
    singular_value_D, vector_VD = singular_vectors(
        matrix_UV, num_vectors=config.dim, user_exponent=config.user_exponent, item_exponent=config.item_exponent
    )
    return vector_VD * singular_value_D**config.singular_power


def ials_vectors(config: IalsVectorsConfig, matrix_UV: csr_array) -> Floats32:
    """Return the item factors [V, D] of implicit alternating least squares (Hu et al., ICDM 2008), with a fixed seed."""
    from implicit.cpu.als import AlternatingLeastSquares  # an optional library

    model = AlternatingLeastSquares(
        factors=config.dim,
        regularization=config.l2,
        alpha=config.alpha,
        iterations=config.iterations,
        random_state=CLOSED_FORM_SEED,
    )
    with threadpool_limits(1, user_api="blas"):  # implicit has its own threads
        model.fit(csr_matrix(matrix_UV), show_progress=False)
    return np.ascontiguousarray(model.item_factors, np.float32)


def check_size(config: LogVectorsConfig, *, num_users: int, num_items: int, num_pairs: int) -> None:
    """Raise InputError if the matrix has too few users or items for `dim` dimensions, or needs too much memory."""
    if not num_pairs:
        raise InputError("embeddings: source is log, but the log has no training event; remove the entry, or add events")
    side_size, side_name = min((num_items, "items"), (num_users, "users"))
    if isinstance(config, EaseVectorsConfig):
        side_size, side_name = num_items, "items"
    if config.dim >= side_size and not isinstance(config, IalsVectorsConfig):
        max_dim = (side_size - 1) // 4 * 4  # a width is a multiple of 4
        fix = f"set dim to at most {max_dim}" if max_dim else "add events"
        raise InputError(
            f"embeddings.dim is {config.dim}, but only {side_size:,} {side_name} have training events, which give at most "
            f"{side_size - 1:,} dimensions; {fix}, or remove the entry"
        )
    if isinstance(config, EaseVectorsConfig):
        needed_bytes = 12 * num_items**2
        memory_text, fix = f"three matrices of {num_items:,} x {num_items:,} items", "set method to spectral"
    elif isinstance(config, IalsVectorsConfig):
        needed_bytes = 36 * num_pairs + 4 * config.dim * (num_users + num_items)
        memory_text = (
            f"three copies of {num_pairs:,} events, and {config.dim} factors of {num_users:,} users and {num_items:,} items"
        )
        fix = "lower embeddings.dim or embeddings.max_events"
    else:
        needed_bytes = 24 * num_pairs + (8 * config.dim + 4) * side_size + 8 * config.dim * num_items
        memory_text = f"three copies of {num_pairs:,} events, and {2 * config.dim + 1} vectors of {side_size:,} {side_name}"
        fix = "lower embeddings.dim or embeddings.max_events"
    if needed_bytes > config.memory_gb * GIGABYTE:
        raise InputError(
            f"embeddings.memory_gb is {config.memory_gb:g}, but method {config.method} needs {needed_bytes / GIGABYTE:,.3g} GB "
            f"({memory_text}); raise memory_gb, or {fix}"
        )
