"""Tests that `verify` says nothing of sound pipelines of many forms."""

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from forms import FORMS, all_forms


@pytest.fixture(scope="module")
def reports(run_ranks):
    """The reports of both ranks by name."""
    return run_ranks(2, all_forms)


@pytest.mark.parametrize("name", FORMS)
def test_a_sound_form_is_sound(reports, name):
    for of_rank in reports:
        assert of_rank[name].is_sound, str(of_rank[name])
        assert of_rank[name].values >= 40
