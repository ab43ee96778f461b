"""plan.html: the sharding plan as one HTML page."""

from pathlib import Path

from recsys_core.plots import render_page
from recsys_core.sharding.constraints import OFFLOADING_KERNELS
from recsys_core.sharding.plan_file import PlanFile, RankEstimate, RankMeasure, format_ranges
from recsys_core.units import format_bytes

_TEMPLATE = Path(__file__).with_name("plan.html")
TIME_FIELDS = (
    ("forward_compute_ms", "forward compute"),
    ("forward_comms_ms", "forward comms"),
    ("backward_compute_ms", "backward compute"),
    ("backward_comms_ms", "backward comms"),
    ("prefetch_ms", "prefetch"),
)


def to_html(plan: PlanFile) -> str:
    """Render plan.html."""
    memory_field = lookup_memory_field(plan)
    return render_page(
        _TEMPLATE,
        filters={"bytes": format_bytes, "ranges": format_ranges, "ms": format_milliseconds},
        plan=plan,
        groups=plan.rank_groups(),
        times=TIME_FIELDS,
        memory_name="HBM" if memory_field == "hbm_bytes" else "main memory",
        usable_bytes=plan.usable_hbm_bytes if memory_field == "hbm_bytes" else plan.usable_ddr_bytes,
        fullest_rank_bytes=max(getattr(rank, memory_field) for rank in plan.ranks),
        slowest_rank_ms=plan.step_ms,
        memory_imbalance=plan.imbalance(memory_field),
        time_imbalance=plan.imbalance("step_ms"),
        parts=_memory_parts,
    )


def lookup_memory_field(plan: PlanFile) -> RankMeasure:
    """Return the name of the field with the memory that lookups read: GPU memory, or main memory on a CPU."""
    return "hbm_bytes" if plan.device == "cuda" else "ddr_bytes"


def _memory_parts(plan: PlanFile, rank: RankEstimate, table_name: str) -> list[tuple[str, int, bool]]:
    """Return (name, bytes, whether the part is in the memory that lookups read) for each part of a table's memory on a rank."""
    memory = rank.tables[table_name]
    is_offloaded = plan.tables[table_name].compute_kernel in OFFLOADING_KERNELS
    memory_parts = [
        ("weights", memory.weights, not is_offloaded),
        ("optimizer", memory.optimizer, not is_offloaded),
        ("cache", memory.cache, True),
        ("buffers", memory.buffers, True),
    ]
    return [memory_part for memory_part in memory_parts if memory_part[1]]


def format_milliseconds(duration_ms: float | None) -> str:
    """Format milliseconds.

    >>> [format_milliseconds(duration_ms) for duration_ms in (None, 0, 0.1234, 12.34, 4321)]
    ['-', '0', '0.12', '12.3', '4,321']
    """
    if duration_ms is None or duration_ms == 0:
        return "-" if duration_ms is None else "0"
    return f"{duration_ms:,.0f}" if duration_ms >= 100 else f"{duration_ms:.1f}" if duration_ms >= 10 else f"{duration_ms:.2g}"
