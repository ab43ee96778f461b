"""Operational settings, which are not part of a fingerprint, and secrets in settings, which are rejected."""

from typing import Annotated

import pytest
from pydantic import TypeAdapter, ValidationError

from recsys_core.config import OPERATIONAL, FilePath, Settings
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.vectors.config import EmbeddingsConfig
from recsys_core.launching.config import TorchxLauncher
from recsys_core.training.config import TrainingConfig


class ExampleSettings(Settings):
    num_rows: int = 1
    threads: Annotated[int | None, OPERATIONAL] = None


def test_operational_settings_are_not_part_of_the_fingerprint() -> None:
    assert ExampleSettings.operational_settings() == {"threads"}
    assert (
        ExampleSettings(num_rows=2, threads=3).result_settings()
        == {"num_rows": 2}
        == ExampleSettings(num_rows=2).result_settings()
    )


def test_settings_that_change_the_result_are_never_operational() -> None:
    for config_class, result_settings in (
        (TrainingConfig, {"seed", "epochs", "precision"}),
        (InteractionsConfig, {"paths", "split"}),
    ):
        assert config_class.operational_settings() and not config_class.operational_settings() & result_settings
    assert EmbeddingsConfig.operational_settings() == {"batch_rows", "threads", "max_expansion_ratio"}


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("s3://me:hunter2@bucket/log", "contains credentials, which every run would copy; remove them"),
        ("gs://hunter2@bucket/log", "contains credentials, which every run would copy; remove them"),
        ("s3://bucket/log?region=eu&secret_key=hunter2", "has the unknown options ['secret_key']; the options are"),
    ],
)
def test_a_path_with_a_secret_is_rejected_without_repeating_the_secret(uri: str, message: str) -> None:
    with pytest.raises(ValidationError) as error_info:
        TypeAdapter(FilePath).validate_python(uri)
    (error_details,) = error_info.value.errors()
    assert error_details["type"] == "value_error" and message in error_details["msg"] and "hunter2" not in error_details["msg"]


@pytest.mark.parametrize("uri", ["gs://anonymous@bucket/log", "s3://bucket/log?region=eu", "/data/a@b?c=d"])
def test_a_path_without_a_secret_is_accepted(uri: str) -> None:
    assert TypeAdapter(FilePath).validate_python(uri) == uri


@pytest.mark.parametrize(
    ("variable", "value", "is_secret"),
    [
        ("AWS_SECRET_ACCESS_KEY", "x", True),
        ("HF_TOKEN", "x", True),
        ("MLFLOW_TRACKING_URI", "http://ada:x@host", True),
        ("TOKENIZERS_PARALLELISM", "true", False),
        ("NCCL_SOCKET_IFNAME", "ib0", False),
    ],
)
def test_a_secret_among_the_environment_variables_of_the_hosts_is_rejected(variable: str, value: str, is_secret: bool) -> None:
    settings = {"scheduler": "slurm", "env": {variable: value}}
    if is_secret:
        with pytest.raises(ValidationError, match=f"env.{variable} is a secret, which every run would copy"):
            TorchxLauncher.model_validate(settings)
    else:
        assert TorchxLauncher.model_validate(settings).env == {variable: value}
