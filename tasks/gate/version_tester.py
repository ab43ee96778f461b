"""Tests of registered versions on one sample of users. Each version is loaded in a fresh process, as it is served."""

from dataclasses import dataclass, field
from pathlib import Path

from mlflow.entities.model_registry import ModelVersion

from recsys_core.evaluation.metrics import write_user_metrics
from tasks.gate.sample import Answers, ServedMetrics, UserSample, answer_problems, measure_answers
from tasks.gate.smoke_test import (
    ModelProcess,
    NotFetchedError,
    UnusableVersionError,
    predict_in_subprocess,
)
from tasks.registry.registry import Registry
from tasks.registry.releases import LOAD_ERROR_TAG, SMOKE_TAG

_MAX_TAG_LENGTH = 500


@dataclass(frozen=True)
class VersionTester:
    """Tester of versions, all on the same sample of users.

    Attributes:
        metrics_by_version: metrics of the versions that were tested, by version number.
    """

    registry: Registry
    sample: UserSample
    workspace: Path
    process: ModelProcess
    metrics_by_version: dict[str, ServedMetrics] = field(default_factory=dict)

    def smoke_test(self, version: ModelVersion, *, is_own_log: bool = True) -> ServedMetrics:
        """Validate the answers of a version, record the result in SMOKE_TAG, and return the metrics.

        Args:
            is_own_log: whether the version was trained on the log of the sample. Otherwise, the version may recommend items
                that are not in this log.

        Raises:
            UnusableVersionError: the version does not load, or an answer is invalid.
        """
        try:
            answers = self._predict(version)
            problems = answer_problems(answers, sample=self.sample, rejects_unknown_items=is_own_log)
            if problems:
                uri = f"models:/{version.name}/{version.version}"
                raise UnusableVersionError(f"{uri}: the smoke test found {'; '.join(problems)}")
        except UnusableVersionError as error:
            self.registry.set_tag(version, SMOKE_TAG, f"failed: {error}"[:_MAX_TAG_LENGTH])
            raise
        self.registry.set_tag(version, SMOKE_TAG, "passed")
        self.registry.remove_tag(version, LOAD_ERROR_TAG)
        return self._measure_and_save(version, answers)

    def measure(self, version: ModelVersion, *, control_version: ModelVersion | None = None) -> ServedMetrics:
        """Return the metrics of a version without validating its answers.

        If the version does not load, set LOAD_ERROR_TAG and raise UnusableVersionError. If it loads, remove the tag.

        Args:
            control_version: a version whose files exist. If it can be downloaded and `version` cannot, the files of `version`
                are missing, so `version` is unusable. None: a failed download of `version` raises NotFetchedError.
        """
        saved_metrics = self.metrics_by_version.get(str(version.version))
        if saved_metrics is not None:
            return saved_metrics
        try:
            answers = self._predict_or_raise_unusable(version, control_version)
        except UnusableVersionError as error:
            self.registry.set_tag(version, LOAD_ERROR_TAG, str(error)[:_MAX_TAG_LENGTH])
            raise
        self.registry.remove_tag(version, LOAD_ERROR_TAG)
        return self._measure_and_save(version, answers)

    def _measure_and_save(self, version: ModelVersion, answers: Answers) -> ServedMetrics:
        """Return the metrics of the answers. Save them in `metrics_by_version`, and in a file next to the answers."""
        metrics = measure_answers(answers, sample=self.sample)
        write_user_metrics(
            {"served": metrics.user_metrics}, self.sample.histories_file.with_name(f"metrics-{version.version}.parquet")
        )
        self.metrics_by_version[str(version.version)] = metrics
        return metrics

    def _predict_or_raise_unusable(self, version: ModelVersion, control_version: ModelVersion | None) -> Answers:
        try:
            return self._predict(version)
        except NotFetchedError as error:
            if control_version is None:
                raise
            self._predict(control_version)  # raises NotFetchedError if MLflow does not work
            raise UnusableVersionError(str(error)) from None

    def _predict(self, version: ModelVersion) -> Answers:
        return self.registry.call(
            predict_in_subprocess,
            self.sample,
            model_uri=f"models:/{version.name}/{version.version}",
            client=self.registry.client,
            workspace=self.workspace,
            process=self.process,
            output_file=self.sample.histories_file.with_name(f"answers-{version.version}.parquet"),
        )
