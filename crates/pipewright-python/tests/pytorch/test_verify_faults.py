"""Tests that `verify` names public faults of pipelines by their stage and kind."""

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from faults import FAULTS, all_faults


@pytest.fixture(scope="module")
def reports(run_ranks):
    """The reports of both ranks by the name of the fault."""
    return run_ranks(2, all_faults, list(FAULTS))


@pytest.mark.parametrize("name", FAULTS)
def test_a_public_fault_is_named(reports, name):
    case = FAULTS[name]
    for of_rank in reports:
        first = of_rank[name].first
        assert first is not None, "no difference"
        assert (first.fault, first.stage, first.microbatch) == (case.fault, case.stage, case.microbatch), str(of_rank[name])
