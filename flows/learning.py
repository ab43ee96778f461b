"""The chain from the ingested data to a registered version: the part of a night that needs torch, FAISS and MLflow."""

from collections.abc import Iterator

from flows.config import PipelineConfig
from flows.nightly import Ingested, Stage
from recsys_core.manifests import Dataset
from recsys_core.models.spec import ModelSpec
from tasks.data_report import check_data
from tasks.evaluate import evaluate
from tasks.export import export_vectors
from tasks.index import build_index
from tasks.package import build_package
from tasks.plan import plan_sharding
from tasks.register import register
from tasks.run import Run
from tasks.train import train


def learn(config: PipelineConfig, run: Run, *, ingested: Ingested) -> Iterator[Stage]:
    """The stages after the ingests, in order; after each its name and manifest."""
    embeddings, interactions, features = ingested
    checked = check_data(config.data_report, split=config.interactions.split, interactions=interactions, run=run)
    yield "check_data", checked
    model = ModelSpec.of(
        config.model, dataset=Dataset(interactions, embeddings, features), tables=config.tables,
        loss=config.loss,
    )  # fmt: skip
    plan = plan_sharding(
        config.sharding, model=model, training=config.training, loss=config.loss, interactions=interactions, features=features,
        run=run,
    )  # fmt: skip
    yield "plan_sharding", plan
    trained = train(
        config.training, model=model, loss=config.loss, interactions=interactions, embeddings=embeddings, features=features,
        plan=plan, sharding=config.sharding, model_name=config.registry.model_name, launcher=config.launcher, run=run,
    )  # fmt: skip
    yield "train", trained
    export = export_vectors(
        config.training, model=model, loss=config.loss, interactions=interactions, features=features, train=trained,
        launcher=config.launcher, run=run,
    )  # fmt: skip
    yield "export", export
    evaluation = evaluate(config.evaluation, export=export, interactions=interactions, embeddings=embeddings, run=run)
    yield "evaluate", evaluation
    index = build_index(config.index, export=export, run=run)
    yield "build_index", index
    package = build_package(
        config.package, export=export, index=index, interactions=interactions, features=features, evaluation=evaluation,
        run=run,
    )  # fmt: skip
    yield "package", package
    registration = register(
        config.registry, embeddings=embeddings, interactions=interactions, data_report=checked, plan=plan, train=trained,
        evaluation=evaluation, index=index, package=package, run=run,
    )  # fmt: skip
    yield "register", registration
