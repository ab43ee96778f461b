import json
from pathlib import Path

from recsys_core.evaluation.report import metric_table, plot_loss, plot_recall, to_markdown

METRICS = {
    "test/recall@10": 0.2,
    "test/recall@20": 0.4,
    "test/mrr": 0.1,
    "test/slice/cold_items/recall@20": 0.9,
    "baseline/popularity/recall@10": 0.05,
    "baseline/popularity/recall@20": 0.1,
    "baseline/popularity/mrr": 0.03,
}


def test_the_table_sets_the_model_beside_its_baselines() -> None:
    table = metric_table(METRICS)
    assert table.columns == ("recall@20", "mrr")
    assert table.rows == {"model": (0.4, 0.1), "popularity": (0.1, 0.03)}
    assert to_markdown(table).splitlines()[-1] == "| popularity | 0.1000 | 0.0300 |"


def test_cold_items_have_rows_of_their_own_below() -> None:
    cold = {"test/cold/recall@20": 0.7, "test/cold/users": 5.0, "baseline/zero_shot/cold/recall@20": 0.8}
    table = metric_table(METRICS | cold | {"baseline/zero_shot/recall@20": 0.3})
    assert list(table.rows) == ["model", "popularity", "zero_shot", "model, cold items", "zero_shot, cold items"]
    assert table.rows["model, cold items"] == (0.7, None)
    assert table.best_beside("popularity") == (0.4, 0.1)
    assert table.best_beside("model, cold items") == (0.8, 0.0)
    assert to_markdown(table).splitlines()[-1] == "| zero_shot, cold items | 0.8000 | - |"


def test_plots_are_png_files(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 3 / step, "samples_per_s": 100.0} for step in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*map(json.dumps, lines), json.dumps({"step": 9, "event": "saved"})]))
    for path in (
        plot_recall(METRICS, path=tmp_path / "recall.png"),
        plot_loss(tmp_path / "metrics.jsonl", path=tmp_path / "loss.png"),
    ):
        assert path.read_bytes().startswith(b"\x89PNG")
