"""Tests that `verify` says nothing of sound pipelines: PyTorch's schedules with random models, on Gloo."""

import os

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from verified import sound_runs


def check(run_ranks, ranks, seeds):
    """Verifies a random pipeline for each seed."""
    for of_rank in run_ranks(ranks, sound_runs, ranks, seeds):
        assert len(of_rank) == len(seeds)
        for name, report in of_rank:
            assert report.is_sound, f"{name}\n{report}"
            assert report.values > 10, name


@pytest.mark.parametrize("ranks", [2, 3])
def test_random_pipelines_are_sound(run_ranks, ranks):
    check(run_ranks, ranks, list(range(ranks * 100, ranks * 100 + 12)))


@pytest.mark.skipif("PIPEWRIGHT_LONG_TESTS" not in os.environ, reason="takes minutes; set PIPEWRIGHT_LONG_TESTS=1")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_300_random_pipelines_are_sound(run_ranks, ranks):
    check(run_ranks, ranks, list(range(ranks * 1000, ranks * 1000 + 100)))
