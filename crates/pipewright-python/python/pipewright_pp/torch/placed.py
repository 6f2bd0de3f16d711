"""The schedule of a plan, and the stages of each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pipewright_pp
from pipewright_pp.torch.errors import PlanMismatch


@dataclass(frozen=True)
class Placed:
    """The number of ranks and of microbatches, and the rank of each stage."""

    ranks: int
    microbatches: int
    rank_of_stage: tuple[int, ...]

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.rank_of_stage)

    def of_rank(self, rank: int) -> list[int]:
        """Returns the stages of a rank."""
        return [stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank]

    def check_group(self, distributed: Any, group: Any) -> int:
        """Returns this process's rank in a group.

        Raises `PlanMismatch` if the process group is not initialized, or has another number of processes.
        """
        if not distributed.is_initialized():
            raise PlanMismatch("there is no process group; call torch.distributed.init_process_group in each process first")
        size = distributed.get_world_size(group)
        if size != self.ranks:
            raise PlanMismatch(
                f"the process group has {size} processes, and the plan has {self.ranks} ranks; plan for {size} ranks, or pass "
                "the group of one pipeline"
            )
        rank: int = distributed.get_rank(group)
        return rank


def source_of(plan: Any) -> Any:
    """Returns the schedule of a plan, or the schedule or program itself.

    Raises `PlanMismatch` if it is something else, or if the plan has a part that PyTorch's stages cannot have.
    """
    if isinstance(plan, pipewright_pp.Plan):
        for key in ("tensor_parallel", "head_parts"):
            if (found := getattr(plan, key)) != 1:
                raise PlanMismatch(f"the plan has {key} {found}; stages are cut between layers only, so plan with {key}=1")
        return plan.schedule
    if isinstance(plan, (pipewright_pp.Schedule, pipewright_pp.Program)):
        return plan
    raise PlanMismatch(
        f"read a {type(plan).__name__}; a plan was expected (pipewright_pp.plan), a schedule (pipewright_pp.schedule), or its program"
    )


def placed(plan: Any) -> Placed:
    """Returns the placement of a plan, a schedule or a program. Raises `PlanMismatch` as `source_of`."""
    source = source_of(plan)
    if source.slices != 1:
        raise PlanMismatch(f"the schedule cuts each microbatch into {source.slices} slices, which PyTorch's runtime cannot run")
    return Placed(source.ranks, source.microbatches, tuple(source.stage_to_rank))
