"""The nightly run: parquet goes in, a registered, gated retriever comes out."""

from collections.abc import Generator, Iterator

from prefect import flow, runtime
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.config import PipelineConfig
from flows.config_file import dump_config
from recsys_core.manifests import (
    EmbeddingsManifest,
    FeaturesManifest,
    InteractionsManifest,
    Manifest,
    RegistrationManifest,
)
from tasks.ingest import ingest_embeddings, ingest_features, ingest_interactions
from tasks.run import Run, StageName

Stage = tuple[StageName, Manifest | None]
Ingested = tuple[EmbeddingsManifest | None, InteractionsManifest, FeaturesManifest | None]


def _run_id() -> str:
    parameters = runtime.flow_run.parameters
    # Made from the flow run, so that Prefect's own retry of it goes on in the same folder.
    return parameters.get("run_id") or f"{runtime.flow_run.scheduled_start_time:%Y%m%d-%H%M%S}-{runtime.flow_run.id[:4]}"


def _flow_run_name() -> str:
    return f"{runtime.flow_run.parameters['config'].name} {_run_id()}"


@flow(name="nightly-retrain", flow_run_name=_flow_run_name, validate_parameters=True)
def nightly_retrain(config: PipelineConfig, run_id: str | None = None, until: StageName | None = None) -> State:
    """Retrains the retriever from the newest data and registers the result.

    Args:
        config: what to read, how to train, when to promote.
        run_id: a run to go on with; empty: a new one. Stages that are still valid are kept.
        until: the last stage to do; empty: all.
    """
    run = Run(run_id or _run_id(), workspace=config.workspace.absolute(), experiment=config.registry.experiment)
    with run.lock():
        dump_config(config, run.config_file)
        manifest: Manifest | None = None
        for stage, manifest in night(config, run):  # noqa: B007  the last one is the outcome
            if stage == until:
                return Completed(name="StoppedEarly", message=f"stopped after {stage}, as asked")
    assert isinstance(manifest, RegistrationManifest)
    outcome = f"{manifest.model_name} version {manifest.version} is {manifest.alias}: {'; '.join(manifest.reasons)}"
    if manifest.alarm is not None:
        return Completed(name="BrokenChampion", message=f"{manifest.alarm}; {outcome}")
    return Completed(message=outcome) if manifest.promoted else Completed(name="NotPromoted", message=outcome)


def ingest(config: PipelineConfig, run: Run) -> Generator[Stage, None, Ingested]:
    """From parquet to vectors, events and features; after each stage its name and manifest."""
    embeddings = ingest_embeddings(config.embeddings, data_root=config.data_root, run=run) if config.embeddings else None
    yield "ingest_embeddings", embeddings
    interactions = ingest_interactions(config.log, embeddings=embeddings, data_root=config.data_root, run=run)
    yield "ingest_interactions", interactions
    features = None
    if config.features is not None:
        features = ingest_features(
            config.features, log=config.log, interactions=interactions, embeddings=embeddings,
            data_root=config.data_root, run=run,
        )  # fmt: skip
    yield "ingest_features", features
    return embeddings, interactions, features


def night(config: PipelineConfig, run: Run) -> Iterator[Stage]:
    """The chain, in order; after each stage its name and manifest."""
    ingested = yield from ingest(config, run)
    # Their imports (torch, MLflow, FAISS) take seconds, which ingests need not wait for.
    from flows.learning import learn

    yield from learn(config, run, ingested=ingested)
