"""Reports without plots: `pytestmark = usefixtures("no_plots")`."""

from collections.abc import Iterator

import pytest

from recsys_core.data_report import page


@pytest.fixture(scope="module")
def no_plots() -> Iterator[None]:
    """Leave out the plots, because they take most of the time of a report. test_page.py tests pages with plots."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("plot_days", "plot_popularity", "plot_histories"):
            patch.setattr(page, name, lambda _: None)
        yield
