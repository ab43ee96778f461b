"""The settings in `index`: their short forms, their names in earlier versions, and contradictions."""

from typing import Any

import pytest
from pydantic import ValidationError

from recsys_core.retrieval.auto import Auto
from recsys_core.retrieval.compressed import IvfPq, PqFastScan
from recsys_core.retrieval.config import IndexConfig
from recsys_core.retrieval.ivf import IvfFlat
from recsys_core.retrieval.kinds import Flat, Hnsw


@pytest.mark.parametrize(
    ("settings", "expected_config"),
    [
        ({}, IndexConfig(served=Hnsw())),
        ({"served": "flat"}, IndexConfig(served=Flat())),
        ({"served": {"ef_search": 64}}, IndexConfig(served=Hnsw(ef_search=64))),
        ({"served": {"kind": "ivf_flat", "nlist": 7}}, IndexConfig(served=IvfFlat(nlist=7))),
        ({"served": "auto"}, IndexConfig(served=Auto())),
        ({"served": {"kind": "auto", "max_bytes": 9}}, IndexConfig(served=Auto(max_bytes=9))),
        ({"served": {"kind": "pq_fastscan", "pq_m": 4}}, IndexConfig(served=PqFastScan(pq_m=4))),
        ({"compared": ["ivf_pq", {"kind": "hnsw"}]}, IndexConfig(compared=(IvfPq(), Hnsw()))),
    ],
)
def test_the_name_of_a_kind_is_short_for_its_default_settings(settings: dict[str, Any], expected_config: IndexConfig) -> None:
    assert IndexConfig(**settings) == expected_config
    assert IndexConfig.model_validate(expected_config.model_dump(mode="json")) == expected_config


def test_a_setting_in_its_earlier_form_applies_to_every_kind_that_has_it() -> None:
    settings = {"served_kind": "ivf_flat", "compared_kinds": ["ivf_pq", "hnsw"]}
    settings |= {"nlist": 10, "nprobe": 2, "pq_m": 4, "pq_nbits": 6, "hnsw_m": 16, "ef_construction": 40, "ef_search": 50}
    config = IndexConfig.model_validate(settings)
    assert config.served == IvfFlat(nlist=10, nprobe=2)
    assert config.compared == (
        IvfPq(nlist=10, nprobe=2, pq_m=4, pq_nbits=6),
        Hnsw(hnsw_m=16, ef_construction=40, ef_search=50),
    )
    assert IndexConfig(nlist=8) == IndexConfig()  # no IVF index is built


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"served_kind": "flat", "served": "hnsw"}, "served_kind is the earlier name of served, and both are set"),
        ({"served": {"hnsw_m": 16}, "compared": ["hnsw"]}, "two indexes have the kind hnsw, but different settings"),
        ({"served": {"kind": "hnsw", "nlist": 8}}, "Extra inputs are not permitted"),
        ({"served_kind": "ivf_flat", "nlist": True}, "nlist is true"),
        ({"served": "annoy"}, "does not match any of the expected tags: 'auto', 'flat'"),
        ({"compared": ["auto"]}, "does not match any of the expected tags: 'flat', 'ivf_flat'"),
        ({"served": {"kind": "ivf_flat", "rescore": 4}}, "Extra inputs are not permitted"),
        ({"served": 3}, "Input should be a valid dictionary"),
        ({"compared": 3}, "Input should be a valid tuple"),
    ],
)
def test_contradictory_and_invalid_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        IndexConfig(**settings)
