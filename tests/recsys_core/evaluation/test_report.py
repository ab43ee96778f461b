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


def test_plots_are_png_files(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 3 / step, "samples_per_s": 100.0} for step in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*map(json.dumps, lines), json.dumps({"step": 9, "event": "saved"})]))
    for path in (
        plot_recall(METRICS, path=tmp_path / "recall.png"),
        plot_loss(tmp_path / "metrics.jsonl", path=tmp_path / "loss.png"),
    ):
        assert path.read_bytes().startswith(b"\x89PNG")
