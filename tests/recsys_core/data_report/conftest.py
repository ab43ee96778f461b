"""Reports without plots: `pytestmark = usefixtures("no_plots")`."""

from collections.abc import Iterator

import pytest

from recsys_core.data_report import page


@pytest.fixture(scope="module")
def no_plots() -> Iterator[None]:
    """Leave the plots, which take nearly the whole time of a report, out of the pages. test_page.py tests pages with plots."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("plot_days", "plot_popularity", "plot_histories"):
            patch.setattr(page, name, lambda _: None)
        yield
