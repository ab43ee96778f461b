"""Lines of metrics.jsonl, profiles, and the error about a loss that is not finite."""

import itertools
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from recsys_core.errors import StageError
from recsys_core.launching.rank import Process
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.tables.embedding_tables import table_shards
from recsys_core.models.tables.table_config import TableConfig, TableOptimizer
from recsys_core.training.config import ProfileConfig, TrainingConfig
from recsys_core.training.job import Progress
from recsys_core.training.metrics_log import MetricsLog, MetricsTail, make_profiler, raise_if_not_finite
from tests.gloo import cpu_process, run_ranks
from tests.recsys_core.training.small_model import sharded_model, small_spec

LAST_STEPS = (20, 25, 40, 50)
"""Last step of each line, with log_every_steps 20 and epochs of 25 steps."""


def write_lines(rank: int, metrics_path: Path) -> None:
    """Write a line after each of LAST_STEPS, as on a GPU; assert that one step per line is timed."""
    metrics_log = MetricsLog(
        metrics_path, spec=small_spec(), process=cpu_process(rank), total_steps=LAST_STEPS[-1], num_completed_steps=0
    )
    metrics_log._is_gpu = True
    torch.cuda.synchronize = lambda: None  # type: ignore[assignment]
    torch.cuda.max_memory_allocated = lambda device: 0  # type: ignore[assignment]
    for previous_last_step, last_step in itertools.pairwise((0, *LAST_STEPS)):
        for _ in range(previous_last_step, last_step):
            with metrics_log.timed_step():
                torch.ones(10).sum()
            metrics_log.add_step(torch.tensor(0.5), num_samples=8)
        assert metrics_log._num_timed_steps == 1
        metrics_log.write_line(last_step, epoch=1, learning_rate=0.1, trained_share_by_table={}, validation={})


def test_on_a_gpu_one_step_of_each_line_is_timed(tmp_path: Path) -> None:
    run_ranks(write_lines, world_size=1, arguments=(tmp_path / "metrics.jsonl",))
    lines = [Progress.model_validate_json(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.step for line in lines] == list(LAST_STEPS)
    assert all(line.ms_per_step["step"] > 0 for line in lines)


def progress_line(step: int, *, loss: float) -> str:
    progress = Progress(step=step, total_steps=9, epoch=1, loss=loss, learning_rate=0.1, samples_per_s=1.0)
    return progress.model_dump_json() + "\n"


def test_a_new_attempt_keeps_the_complete_lines_up_to_its_checkpoint(tmp_path: Path) -> None:
    metrics_path, process = tmp_path / "metrics.jsonl", Process(rank=0, world_size=1, device=torch.device("cpu"))
    lines = [progress_line(step, loss=1 / step) for step in (1, 2, 4)]
    metrics_path.write_text("".join(lines) + progress_line(2, loss=9.0)[:-1])  # a killed attempt wrote a part of a line
    for num_completed_steps, expected_lines, expected_loss in ((4, lines, 0.25), (3, lines[:2], 0.5), (2, lines[:2], 0.5)):
        metrics_log = MetricsLog(
            metrics_path, spec=small_spec(), process=process, total_steps=9, num_completed_steps=num_completed_steps
        )
        assert metrics_path.read_text() == "".join(expected_lines)
        assert metrics_log.last_loss == expected_loss


def write_lines_of_two_ranks(rank: int, metrics_path: Path) -> None:
    """Write two lines. The losses of rank r are r + 1 before the first line, and r + 5 before the second."""
    metrics_log = MetricsLog(metrics_path, spec=small_spec(), process=cpu_process(rank), total_steps=4, num_completed_steps=0)
    metrics_log._os_process = Mock(memory_info=lambda: Mock(rss=1_000 * (rank + 1)))
    for step, loss in ((1, 1.0), (2, 1.0), (3, 5.0)):
        metrics_log.add_step(torch.tensor(loss + rank), num_samples=8)
        if step > 1:
            metrics_log.write_line(step, epoch=1, learning_rate=0.1, trained_share_by_table={}, validation={})
    assert metrics_log.last_loss == 5.5


def test_a_line_has_the_mean_loss_and_the_largest_memory_of_all_ranks(tmp_path: Path) -> None:
    run_ranks(write_lines_of_two_ranks, world_size=2, arguments=(tmp_path / "metrics.jsonl",))
    lines = [Progress.model_validate_json(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line.step, line.loss, line.memory_bytes) for line in lines] == [(2, 1.5, {"rss": 2_000}), (3, 5.5, {"rss": 2_000})]


@pytest.mark.parametrize(("num_steps", "has_profile"), [(7, False), (8, True)])
def test_a_profile_without_a_step_is_not_written_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_steps: int, has_profile: bool
) -> None:
    process = Process(rank=0, world_size=1, device=torch.device("cpu"))
    config = ProfileConfig(after_steps=5)  # and two warm-up steps
    profiler = make_profiler(config, num_steps=num_steps, folder=tmp_path, process=process)
    if profiler is not None:
        with profiler:
            for _ in range(num_steps):
                profiler.step()
    assert (tmp_path / "rank-0.json.gz").exists() == has_profile
    expected_message = (
        f"training.profile records no step: the recording starts after step 7, but at most {num_steps} steps are left; "
        "lower training.profile.after_steps"
    )
    profile_messages = [message for message in caplog.messages if "training.profile" in message]
    assert profile_messages == ([] if has_profile else [expected_message])


def test_without_a_profile_setting_there_is_no_profiler(tmp_path: Path) -> None:
    process = Process(rank=0, world_size=1, device=torch.device("cpu"))
    assert make_profiler(None, num_steps=1, folder=tmp_path / "profile", process=process) is None
    assert list(tmp_path.iterdir()) == []


def test_a_replaced_metrics_file_is_read_from_its_beginning_even_if_it_is_longer(tmp_path: Path) -> None:
    def write_metrics(metrics_path: Path, *, losses: list[float]) -> None:
        metrics_path.write_text("".join(progress_line(step, loss=loss) for step, loss in enumerate(losses, 1)))

    metrics_path = tmp_path / "metrics.jsonl"
    relayed_steps_and_losses: list[tuple[int, float]] = []
    tail = MetricsTail(metrics_path, lambda line: relayed_steps_and_losses.append((line.step, line.loss)))
    write_metrics(metrics_path, losses=[0.25])
    tail.relay()
    write_metrics(tmp_path / "new", losses=[0.5, 0.125])  # the old file ends within the second new line
    (tmp_path / "new").replace(metrics_path)
    tail.relay()
    assert relayed_steps_and_losses == [(1, 0.25), (2, 0.125)]  # step 1 is not relayed twice


def assert_message_names_the_optimizer(rank: int) -> None:
    """Assert that the message about a table with a NaN names the setting of the optimizer that trains this table."""
    spec = small_spec(tables={"user": TableConfig(optimizer=TableOptimizer(kind="sgd"))})
    for table, setting in (("user", "tables.user.optimizer"), ("item", "training.table_optimizer")):
        model, _ = sharded_model(
            spec,
            sharding_type_by_table=dict.fromkeys(spec.tables, "row_wise"),
            training=TrainingConfig(),
            loss=LossConfig(),
            process=cpu_process(rank),
        )
        with torch.no_grad():
            (shard,) = table_shards(model.state_dict(), table=table)
            shard.weight_RD[3, 0] = torch.nan
        with pytest.raises(StageError) as error_info:
            raise_if_not_finite(torch.tensor(torch.nan), step=3, epoch=1, model=model, spec=spec, rank=rank)
        assert f"table {table}: 1 rows of this rank are not finite, the first is row 3" in str(error_info.value)
        assert f"lower the learning_rate of {setting} or training.dense_optimizer, set {setting}.gradient_clip_value or" in str(
            error_info.value
        )


def test_the_error_of_a_table_names_the_setting_of_its_optimizer() -> None:
    run_ranks(assert_message_names_the_optimizer, world_size=1)
