"""Lines of metrics.jsonl: step times on a simulated GPU, and a file that is replaced while it is read."""

from pathlib import Path

import torch

from recsys_core.training.job import Progress
from recsys_core.training.metrics_log import MetricsLog, MetricsTail
from tests.gloo import cpu_process, run_ranks
from tests.recsys_core.training.small_model import small_spec

LAST_STEPS = (20, 25, 40, 50)
"""Last step of each line, with log_every_steps 20 and epochs of 25 steps."""


def write_lines(rank: int, path: Path) -> None:
    """Write a line after each of LAST_STEPS, as on a GPU; assert that one step per line is timed."""
    metrics_log = MetricsLog(
        path, spec=small_spec(), process=cpu_process(rank), total_steps=LAST_STEPS[-1], num_completed_steps=0
    )
    metrics_log._is_gpu = True
    torch.cuda.synchronize = lambda: None  # type: ignore[assignment]
    torch.cuda.max_memory_allocated = lambda device: 0  # type: ignore[assignment]
    for first_step, last_step in zip((0, *LAST_STEPS), LAST_STEPS, strict=False):
        for _ in range(first_step, last_step):
            with metrics_log.time_step():
                torch.ones(10).sum()
            metrics_log.add_step(torch.tensor(0.5), num_samples=8)
        assert metrics_log._num_timed_steps == 1
        metrics_log.write_line(last_step, epoch=1, learning_rate=0.1, trained_share_by_table={}, validation={})


def test_on_a_gpu_one_step_of_each_line_is_timed(tmp_path: Path) -> None:
    run_ranks(write_lines, world_size=1, arguments=(tmp_path / "metrics.jsonl",))
    lines = [Progress.model_validate_json(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.step for line in lines] == list(LAST_STEPS)
    assert all(line.ms_per_step["step"] > 0 for line in lines)


def test_a_replaced_metrics_file_is_read_from_its_beginning_even_if_it_is_longer(tmp_path: Path) -> None:
    def write_metrics(path: Path, *, losses: list[float]) -> None:
        lines = [
            Progress(step=step, total_steps=9, epoch=1, loss=loss, learning_rate=0.1, samples_per_s=1.0).model_dump_json()
            + "\n"
            for step, loss in enumerate(losses, 1)
        ]
        path.write_text("".join(lines))

    path = tmp_path / "metrics.jsonl"
    relayed_losses: list[tuple[int, float]] = []
    tail = MetricsTail(path, lambda line: relayed_losses.append((line.step, line.loss)))
    write_metrics(path, losses=[0.25])
    tail.relay()
    write_metrics(tmp_path / "new", losses=[0.5, 0.125])  # the second line begins before the end of the old file
    (tmp_path / "new").replace(path)
    tail.relay()
    assert relayed_losses == [(1, 0.25), (2, 0.125)]  # step 1 is not relayed twice
