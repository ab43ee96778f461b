"""Loading of a package: its folders, contents and description."""

import shutil
from pathlib import Path

import numpy as np

from recsys_core.serving.retriever import Retriever
from tests.recsys_core.serving.conftest import (
    CONTEXT_FEATURES,
    DIM,
    ITEM_FILES,
    ITEM_IDS,
    NUM_ITEMS,
    NUM_USERS,
    USER_FEATURES,
    USER_IDS,
    ModelBuilder,
    PackagedModel,
    load_retriever,
)


def test_titles_of_items_are_read_from_the_package(build_packaged_model: ModelBuilder) -> None:
    items = load_retriever(build_packaged_model(item_files=ITEM_FILES).package).items
    assert items.titles(np.array([4, 3, 0])) == ["title 4", None, "title 0"]


def test_a_package_without_users_answers_from_the_history_of_the_request(build_packaged_model: ModelBuilder) -> None:
    exported_model, package = build_packaged_model(users="none", features=(*USER_FEATURES, *CONTEXT_FEATURES))
    file_names = {path.name for path in (package.folder / "package").iterdir()}
    assert not {"users.arrow", "users.sha256"} & file_names
    retriever = Retriever.load(package.folder)
    history_rows = [11, 250, 31]
    history = [ITEM_IDS[row] for row in history_rows]
    answers = retriever.recommend(
        [USER_IDS[5], "any", None, USER_IDS[5]],
        k=6,
        histories=[history, history, None, history],
        features={"user.single": [None, None, None, "user.single 2"]},
    )
    assert answers.fallbacks == [None, None, "popularity", None]
    expected_ids = exported_model.best_ids(exported_model.query_vector(None, history_rows), seen_rows=history_rows, k=6)
    assert answers[0].item_ids == answers[1].item_ids == expected_ids
    assert answers[3].item_ids == exported_model.best_ids(
        exported_model.query_vector(None, history_rows, given_features={"user.single": ([2], None)}),
        seen_rows=history_rows,
        k=6,
    )


def test_the_description_of_a_package_has_its_settings_its_data_and_its_metrics(
    flat_model: PackagedModel, retriever: Retriever
) -> None:
    exported_model = flat_model.exported_model
    package = retriever.package
    assert (package.dim, package.max_k, package.users, package.fallbacks) == (
        DIM,
        NUM_ITEMS,
        "stored",
        ("history", "popularity"),
    )
    assert (package.data.num_events, package.data.num_users) == (sum(map(len, exported_model.log)), NUM_USERS)
    recall = package.metrics["recall@20"]
    assert 0 < recall.value < 1 and recall.half_width is not None and recall.half_width > 0


def test_a_package_loads_from_a_stage_folder_a_package_folder_and_a_copy_in_an_mlflow_folder(
    flat_model: PackagedModel, retriever: Retriever, tmp_path: Path
) -> None:
    shutil.copytree(flat_model.package.folder / "package", tmp_path / "artifacts" / "package")
    folders = (flat_model.package.folder, flat_model.package.folder / "package", str(tmp_path))
    (expected_answer,) = retriever.recommend(USER_IDS[:1], k=5)
    for folder in folders:
        assert Retriever.load(folder).recommend(USER_IDS[:1], k=5)[0] == expected_answer
    assert Retriever.load(tmp_path, version="7").recommend([1], k=1)[0].version == "7"


def test_the_space_id_depends_on_the_model_but_not_on_its_index_and_quantization(
    build_packaged_model: ModelBuilder, retriever: Retriever
) -> None:
    assert load_retriever(build_packaged_model(index_kind="hnsw", quantization="int8").package).space_id == retriever.space_id
    assert load_retriever(build_packaged_model(similarity="dot").package).space_id != retriever.space_id
