"""Tests that `verify` says nothing of sound pipelines and finds a fault of one stage: PyTorch's schedules with random models."""

import os

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from verified import FAULTS, random_runs


def check(run_ranks, ranks, seeds, faults=(None,)):
    """Verifies a random pipeline for each seed, with the faults in turn."""
    for of_rank in run_ranks(ranks, random_runs, ranks, seeds, list(faults)):
        assert len(of_rank) == len(seeds)
        for index, run in enumerate(of_rank):
            fault, report = faults[index % len(faults)], run.report
            assert report.is_sound == (fault is None), f"{fault}, {run.name}\n{report}"
            assert report.values > 10, run.name
            assert fault is None or report.first.stage == run.stage, f"{fault} in stage {run.stage}, {run.name}\n{report}"


@pytest.mark.parametrize("ranks", [2, 3])
def test_random_pipelines_are_sound(run_ranks, ranks):
    check(run_ranks, ranks, list(range(ranks * 100, ranks * 100 + 8)))


def test_a_fault_of_a_random_stage_is_found(run_ranks):
    check(run_ranks, 2, list(range(10)), list(FAULTS))


long = pytest.mark.skipif("PIPEWRIGHT_LONG_TESTS" not in os.environ, reason="takes minutes; set PIPEWRIGHT_LONG_TESTS=1")


@long
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_300_random_pipelines_are_sound(run_ranks, ranks):
    check(run_ranks, ranks, list(range(ranks * 1000, ranks * 1000 + 100)))


@long
@pytest.mark.parametrize("ranks", [3, 4])
def test_faults_of_random_stages_are_found(run_ranks, ranks):
    check(run_ranks, ranks, list(range(ranks * 500, ranks * 500 + 50)), list(FAULTS))
