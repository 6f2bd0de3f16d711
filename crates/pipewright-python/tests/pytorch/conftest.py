"""What the tests with PyTorch share: they are skipped where PyTorch is missing, and run ranks as processes."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

#: Longer than any test. A rank that waits longer for another one fails instead of hanging.
DEADLINE_S = 240


@pytest.fixture(scope="session")
def torch() -> Any:
    """PyTorch; a test that needs it is skipped where it is missing."""
    return pytest.importorskip(
        "torch", reason="PyTorch is not installed; bench/peer/setup.sh installs it into an environment for these tests"
    )


@pytest.fixture(scope="session")
def run_ranks(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """A function that runs `body(rank, *arguments)` in Gloo processes and returns the results by rank.

    An error of a rank is raised with its text. Starting processes takes seconds, so tests share a run where they can.
    """

    def run(ranks: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
        import torch.multiprocessing as mp

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ["OMP_NUM_THREADS"] = "1"
        folder = tmp_path_factory.mktemp("ranks")
        mp.spawn(_rank, args=(ranks, body, arguments, folder), nprocs=ranks)
        results = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
        for rank, (error, _) in enumerate(results):
            assert error is None, f"rank {rank}:\n{error}"
        return [result for _, result in results]

    return run


def _rank(rank: int, ranks: int, body: Callable[..., Any], arguments: tuple[Any, ...], folder: Path) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=(folder / "rendezvous").as_uri(),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=DEADLINE_S),
    )
    try:
        result = (None, body(rank, *arguments))
    except Exception:
        result = (traceback.format_exc(), None)
    torch.save(result, folder / f"{rank}.pt")
    dist.destroy_process_group()
