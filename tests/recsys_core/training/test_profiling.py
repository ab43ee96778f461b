"""Marks cost nothing while nobody looks, and are there when somebody does."""

from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from recsys_core.training.profiling import mark_for_profilers_alone


@pytest.fixture(autouse=True)
def marks_as_in_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__init__", "__enter__", "__exit__"):
        monkeypatch.setattr(record_function, name, getattr(record_function, name))  # put back afterwards
    mark_for_profilers_alone()


def looking() -> profile:
    return profile(activities=[ProfilerActivity.CPU])


def marks(seen: profile) -> list[str]:
    """Names of the marks that are not torch's own."""
    return [event.name for event in seen.events() if event.name.startswith("my ")]


def test_while_no_profiler_runs_a_mark_never_reaches_torch() -> None:
    with mock.patch.object(torch.ops.profiler, "_record_function_enter_new", side_effect=AssertionError):
        with record_function("my step"), record_function("my lookup", "with words"):
            pass
        with pytest.raises(AssertionError), looking(), record_function("my step"):
            pass


def test_a_profiler_sees_the_marks_of_its_time() -> None:
    with record_function("my early one"):
        pass
    with looking() as seen, record_function("my step"), record_function("my lookup"):
        torch.ones(3).sum()
    with record_function("my late one"):
        pass
    assert marks(seen) == ["my step", "my lookup"]


def test_an_error_passes_through_a_mark_with_and_without_a_profiler() -> None:
    with pytest.raises(KeyError, match="7"), record_function("my step"):
        raise KeyError(7)
    with looking() as seen, pytest.raises(KeyError, match="7"), record_function("my step"):
        raise KeyError(7)
    assert marks(seen) == ["my step"]


def test_a_mark_that_a_profiler_comes_or_goes_in_ends_as_it_began() -> None:
    early = record_function("my early one")
    with early:
        seen = looking()
        seen.start()
    late = record_function("my late one")
    with late:
        seen.stop()
    assert "my early one" not in marks(seen)
    with late:  # used again: nothing is left of the first time
        assert late.record is None


def test_calling_it_twice_changes_nothing() -> None:
    mark_for_profilers_alone()
    with looking() as seen, record_function("my step"):
        pass
    assert marks(seen) == ["my step"]
