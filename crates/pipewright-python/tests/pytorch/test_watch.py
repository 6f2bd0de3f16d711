"""Tests of `watch`: steps that hang in different ways, and steps that end."""

from __future__ import annotations

import multiprocessing
import pickle
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import hung  # noqa: E402
from pipewright_pp.torch import HangReport  # noqa: E402

#: Longer than any case.
LIMIT_S = 40

#: The cases that run at the same time. Their ranks wait most of the time.
AT_ONCE = 4


def run_case(name: str, folder: Path) -> HangReport | None:
    """Runs the ranks of a case, and returns the report of the one that collects."""
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=hung.run, args=(rank, name, folder)) for rank in range(hung.HUNG[name].ranks)]
    for process in ranks:
        process.start()
    until = time.monotonic() + LIMIT_S
    while not (folder / "report").exists() and time.monotonic() < until:
        time.sleep(0.05)
    for process in ranks:
        process.kill()
        process.join()
    return pickle.loads((folder / "report").read_bytes()) if (folder / "report").exists() else None


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[HangReport | None]]:
    """The reports of all cases, which run beside each other."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["hung"])
    pool = ThreadPoolExecutor(AT_ONCE)
    chosen = [item.callspec.params["name"] for item in request.session.items if item.fspath == request.fspath and hasattr(item, "callspec")]
    return {name: pool.submit(run_case, name, tmp_path_factory.mktemp("hung")) for name in chosen}


@pytest.mark.parametrize("name", hung.HUNG)
def test_a_step_that_hangs_is_reported(name, reports):
    case, report = hung.HUNG[name], reports[name].result()
    assert report is not None, "no report"
    text = str(report)
    assert set(report.culprits) == case.culprits, text
    assert report.cycle == case.cycle, text
    for expected in case.texts:
        assert expected in text, f"{expected!r} is missing in:\n{text}"
    assert len(text.splitlines()) <= 20, text
