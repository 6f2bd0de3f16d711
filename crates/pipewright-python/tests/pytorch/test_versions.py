"""Tests of the versions of PyTorch that are accepted."""

import pytest
from pipewright_pp.torch import TESTED, UntestedVersion, versions


@pytest.mark.parametrize("text", ["2.12.0", "2.13.1+cpu", "2.14.0a0+git1234", "2.15.0"])
def test_a_tested_version_is_accepted(text):
    assert versions.version_of(text).minor in TESTED


@pytest.mark.parametrize("text", ["2.11.0", "2.16.0.dev20261101", "3.0.0", "1.13.1"])
def test_another_version_says_what_was_read_and_expected(text):
    with pytest.raises(UntestedVersion, match=f"PyTorch {text} was never tried .*2.12 to 2.15.*allow_untested") as error:
        versions.version_of(text)
    assert (error.value.read, error.value.expected) == (text, "2.12 to 2.15")
    assert versions.version_of(text, allow_untested=True).text == text


def test_a_text_that_is_no_version_is_refused_always():
    with pytest.raises(UntestedVersion, match="`main`; a version such as 2.15.0 was expected"):
        versions.version_of("main", allow_untested=True)


def test_only_tables_of_2_15_have_waits():
    assert [versions.version_of(f"2.{minor}.0").has_waits for minor in (12, 13, 14, 15)] == [False] * 3 + [True]


def test_a_missing_pytorch_is_named(monkeypatch):
    def fail(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(versions.importlib, "import_module", fail)
    with pytest.raises(UntestedVersion, match="needs PyTorch 2.12 to 2.15, which cannot be imported") as error:
        versions.load()
    assert error.value.read is None
