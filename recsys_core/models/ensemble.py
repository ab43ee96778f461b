"""Towers of a model with several members, whose vectors are concatenated.

A row of a table has the vectors of all members, one after the other. The results of the towers are concatenated in the
same way, and divided by the square root of the number of members. The inner product of two results is then the mean of the
members' inner products, and unit vectors stay unit vectors.

Shapes: B queries, V items, H entries of all histories, D width of a vector of all members.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.table_config import OFFSET_TABLE
from recsys_core.models.towers import CandidateTower, QueryTower


def split_members(vector_BD: Tensor, num_members: int) -> Sequence[Tensor]:
    """Split concatenated results of the towers into the vector of each member, as the member's tower returned it.

    >>> [vector.tolist() for vector in split_members(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), 4)]
    [[[2.0]], [[4.0]], [[6.0]], [[8.0]]]
    """
    return [vector_BD] if num_members == 1 else (vector_BD * math.sqrt(num_members)).chunk(num_members, dim=-1)


def join_members(vectors: Sequence[Tensor]) -> Tensor:
    """Concatenate the results of the members' towers, and divide them by the square root of the number of members."""
    return torch.cat(list(vectors), dim=1) / math.sqrt(len(vectors))


def _split_features(feature_by_table: Mapping[str, Tensor], num_members: int) -> list[dict[str, Tensor]]:
    """Return the features that each member reads: a part of the columns of each feature."""
    chunks_by_table = {table: feature_BD.chunk(num_members, dim=1) for table, feature_BD in feature_by_table.items()}
    return [{table: chunks[member] for table, chunks in chunks_by_table.items()} for member in range(num_members)]


class QueryEnsemble(nn.Module):
    """The query towers of all members."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.members = nn.ModuleList(QueryTower(spec) for _ in range(spec.config.num_members))
        self.histories_use_tower = spec.config.history.item_representation == "candidate_tower"
        self.feature_names = self.query_towers[0].feature_names

    @property
    def query_towers(self) -> list[QueryTower]:
        """The towers of the members."""
        return [member for member in self.members if isinstance(member, QueryTower)]

    def split_items(self, item_VD: Tensor) -> Sequence[Tensor]:
        """Return the item vectors in each member's histories: parts of the embeddings, or results of its candidate tower."""
        num_members = len(self.members)
        return split_members(item_VD, num_members) if self.histories_use_tower else item_VD.chunk(num_members, dim=-1)

    def forward(self, item_VD: Tensor, history_H: Tensor, offset: Tensor, *, features: Mapping[str, Tensor]) -> Tensor:
        """Return query vectors [B, D]; see QueryTower.forward."""
        return encode_by_member(
            self,
            item_VD,
            features,
            lambda tower, member_item_VD, member_features: tower(member_item_VD, history_H, offset, features=member_features),
        )


class CandidateEnsemble(nn.Module):
    """The candidate towers of all members."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.members = nn.ModuleList(CandidateTower(spec) for _ in range(spec.config.num_members))
        self.feature_names = self.candidate_towers[0].feature_names

    @property
    def candidate_towers(self) -> list[CandidateTower]:
        """The towers of the members."""
        return [member for member in self.members if isinstance(member, CandidateTower)]

    def embed(self, output_by_table: Mapping[str, Tensor]) -> Tensor:
        """Return the concatenated item embeddings [V, D]; see CandidateTower.embed."""
        tables = [table for table in ("item", OFFSET_TABLE) if table in output_by_table]
        outputs_of_members = _split_features({table: output_by_table[table] for table in tables}, len(self.members))
        members = zip(self.candidate_towers, outputs_of_members, strict=True)
        return torch.cat([tower.embed(member_output_by_table) for tower, member_output_by_table in members], dim=1)

    def forward(self, item_VD: Tensor, *, features: Mapping[str, Tensor]) -> Tensor:
        """Return candidate vectors [V, D]; see CandidateTower.forward. item_VD: result of `embed`."""
        num_members = len(self.members)
        members = zip(
            self.candidate_towers, item_VD.chunk(num_members, dim=1), _split_features(features, num_members), strict=True
        )
        return join_members(
            [tower(member_item_VD, features=member_features) for tower, member_item_VD, member_features in members]
        )


AnyQueryTower = QueryTower | QueryEnsemble
AnyCandidateTower = CandidateTower | CandidateEnsemble


def make_query_tower(spec: ModelSpec) -> AnyQueryTower:
    """Return the query tower of a model. With one member, the parameter names have no member prefix."""
    return QueryTower(spec) if spec.config.num_members == 1 else QueryEnsemble(spec)


def make_candidate_tower(spec: ModelSpec) -> AnyCandidateTower:
    """Return the candidate tower of a model; see `make_query_tower`."""
    return CandidateTower(spec) if spec.config.num_members == 1 else CandidateEnsemble(spec)


def encode_by_member(
    tower: AnyQueryTower,
    item_VD: Tensor | None,
    features: Mapping[str, Tensor],
    encode: Callable[[QueryTower, Tensor | None, dict[str, Tensor]], Tensor],
) -> Tensor:
    """Call `encode` with the tower of each member and its parts of the inputs; return the joined results [B, D]."""
    if isinstance(tower, QueryTower):
        return encode(tower, item_VD, dict(features))
    num_members = len(tower.members)
    items_of_members = [None] * num_members if item_VD is None else tower.split_items(item_VD)
    arguments_of_members = zip(tower.query_towers, items_of_members, _split_features(features, num_members), strict=True)
    return join_members([encode(*arguments) for arguments in arguments_of_members])


def query_towers(tower: AnyQueryTower) -> list[QueryTower]:
    """Return the query towers of the members."""
    return [tower] if isinstance(tower, QueryTower) else tower.query_towers


def candidate_towers(tower: AnyCandidateTower) -> list[CandidateTower]:
    """Return the candidate towers of the members."""
    return [tower] if isinstance(tower, CandidateTower) else tower.candidate_towers
