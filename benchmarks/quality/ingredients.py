"""Ablation: the effect of single ingredients, measured on pairs of variants that differ in one ingredient."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

ResultBySeed = dict[int, dict[str, Any]]
Runs = dict[str, ResultBySeed]
"""Results of each seed by variant."""


class Ingredient(NamedTuple):
    """A difference between two variants of a part of the benchmark.

    Attributes:
        part_before: part with the variant `before`. None: the same part as `after`.
    """

    name: str
    before: str
    after: str
    part_before: str | None = None


METRIC_BY_PART = {
    "beauty": "test/ndcg@10",
    "all_events": "test/ndcg@10",
    "sequence": "test/ndcg@10",
    "warm": "test/recall@20",
    "cold": "test/cold/recall@20",
    "ml1m": "test/ndcg@20",
}
TITLE_BY_PART = {
    "beauty": "Amazon Beauty",
    "all_events": "Amazon Beauty",
    "sequence": "Amazon Beauty, decaying rates",
    "warm": "citeulike_t, all articles",
    "cold": "citeulike_t, cold articles",
    "ml1m": "ml1m",
}
INGREDIENTS_BY_PART: Mapping[str, tuple[Ingredient, ...]] = {
    "beauty": (
        Ingredient("vectors from the log", "random", "log vectors, full"),
        Ingredient("text vectors, all rows trained", "random", "pretrained, full"),
        Ingredient("text vectors, not trained, below candidate layers", "random", "pretrained, frozen"),
        Ingredient("text vectors with learned offsets", "random", "pretrained, residual"),
        Ingredient("text vectors, trained step by step, below candidate layers", "random", "pretrained, gradual"),
        Ingredient("attributes and words", "random", "random, features"),
        Ingredient("attributes and words, next to text vectors", "pretrained, full", "pretrained, full, features"),
        Ingredient("text vectors, next to attributes and words", "random, features", "pretrained, full, features"),
        Ingredient("learning rates that fall to 0", "pretrained, full, features", "pretrained, full, features, decay"),
        Ingredient("no dropout, 512 negatives and a higher learning rate, ids alone", "random", "random, for ids"),
        Ingredient("128 numbers and layers, ids alone", "random, for ids", "random, for ids, wide"),
        Ingredient("three members, ids alone", "random, for ids", "random, for ids, 3 members"),
        Ingredient(
            "128 numbers and layers, three members, ids alone",
            "random, for ids, 3 members",
            "random, for ids, 3 members, wide",
        ),
        Ingredient("three members, next to vectors from the log", "log vectors, full", "log vectors, full, 3 members"),
        Ingredient("three members", "pretrained, full, features, decay", "pretrained, full, features, decay, 3 members"),
        Ingredient(
            "average over epochs instead of learning rates that fall to 0, three members",
            "pretrained, full, features, decay, 3 members",
            "pretrained, full, features, average, 3 members",
        ),
        Ingredient("offsets in histories", "pretrained, full, features, decay", "pretrained, full, features, decay, offsets"),
        Ingredient(
            "128 numbers and layers",
            "pretrained, full, features, decay, offsets",
            "pretrained, full, features, decay, offsets, wide",
        ),
        Ingredient(
            "offsets in histories, three members",
            "pretrained, full, features, decay, 3 members",
            "pretrained, full, features, decay, 3 members, offsets",
        ),
    ),
    "all_events": tuple(
        Ingredient(f"training on the validation events, {kind}", variant, variant, part_before="beauty")
        for kind, variant in (
            ("vectors and attributes", "pretrained, full, features, decay, 3 members"),
            ("vectors, attributes and offsets", "pretrained, full, features, decay, 3 members, offsets"),
            ("ids", "log vectors, full, 3 members"),
        )
    ),
    "sequence": (
        Ingredient("text vectors and attributes", "recency, ids", "recency, vectors and attributes"),
        Ingredient("self-attention instead of recency, ids", "recency, ids", "self-attention, ids"),
        Ingredient(
            "self-attention instead of recency", "recency, vectors and attributes", "self-attention, vectors and attributes"
        ),
    ),
    "warm": (
        Ingredient("text vectors with learned offsets", "without text", "with text"),
        Ingredient("vectors from the log", "without text", "without text, log vectors"),
        Ingredient("popularity term, training on all pairs", "with text", "with text, popularity, all pairs"),
        Ingredient("popularity term, training on all pairs, ids", "without text", "without text, popularity, all pairs"),
    ),
    "cold": (Ingredient("training on all articles", "text, residual", "text, residual, all articles"),),
    "ml1m": (
        Ingredient("exponents of negatives and users, temperature 0.18 instead of 0.2", "plain", "exponents"),
        Ingredient("spectral block", "exponents", "exponents, block"),
        Ingredient("training on all pairs", "exponents", "exponents, all pairs"),
    ),
}


def ingredient_table(runs_by_part: Mapping[str, Runs]) -> list[str]:
    """Return the lines of the table. Each change is the mean over the seeds that both variants have."""
    lines = [
        "| data | ingredient | metric | seeds | before | after | change |",
        "|:---|:---|:---|---:|---:|---:|---:|",
    ]
    for part, ingredients in INGREDIENTS_BY_PART.items():
        for ingredient in ingredients:
            before = runs_by_part.get(ingredient.part_before or part, {}).get(ingredient.before, {})
            after = runs_by_part.get(part, {}).get(ingredient.after, {})
            if before.keys() & after.keys():
                lines.append(_line(part, ingredient, before, after))
    return lines


def _line(part: str, ingredient: Ingredient, before: ResultBySeed, after: ResultBySeed) -> str:
    metric = METRIC_BY_PART[part]
    seeds = sorted(before.keys() & after.keys())
    before_S, after_S = (np.array([results[seed]["metrics"][metric] for seed in seeds]) for results in (before, after))
    cells = (
        TITLE_BY_PART[part],
        ingredient.name,
        metric.removeprefix("test/"),
        str(len(seeds)),
        *(f"{value_S.mean():.4f}".lstrip("0") for value_S in (before_S, after_S)),
        change(before_S, after_S),
    )
    return f"| {' | '.join(cells)} |"


def change(before_S: np.ndarray, after_S: np.ndarray) -> str:
    """Format the relative change of the mean, and with several seeds the standard deviation of the paired changes.

    >>> change(np.array([0.2, 0.2]), np.array([0.21, 0.23]))
    '+10.0 ± 7.1 %'
    """
    changes_S = 100 * (after_S - before_S) / before_S.mean()
    spread = f" ± {changes_S.std(ddof=1):.1f}" if len(changes_S) > 1 else ""
    return f"{changes_S.mean():+.1f}{spread} %"
