"""What the ranks of a pipeline compare before PyTorch executes a plan: all of them raise an error, or none."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pipewright_pp
from pipewright_pp.torch.errors import PlanMismatch
from pipewright_pp.torch.tables import Rows


@dataclass(frozen=True)
class Part:
    """The facts that a rank tells the others about what it would execute."""

    #: Names the table of all ranks.
    table: str = ""
    #: The cut and the recomputation of a plan; None for a schedule.
    cut: tuple[Any, ...] | None = None
    #: The layers of each stage of this rank, for stages that `pipewright_pp.torch.stages` has made.
    layers: dict[int, range] = field(default_factory=dict)


def part_of(plan: Any, rows: Rows, stages: Sequence[Any]) -> Part:
    """Returns what this rank tells the others of the rows of all ranks, and of its plan and stages.

    The gathering of parameters is left out, because each rank decides alone whether its stages are sharded.
    """
    kept = (cell for row in rows for cell in (*row, "end") if not cell.endswith("SHARD"))
    table = hashlib.sha256(",".join(kept).encode()).hexdigest()
    cut = (plan.boundaries, plan.recompute) if isinstance(plan, pipewright_pp.Plan) else None
    layers = {stage.stage_index: of_model for stage in stages if (of_model := _layers_of(stage)) is not None}
    return Part(table=table, cut=cut, layers=layers)


def compare(parts: Sequence[Part]) -> None:
    """Checks that the parts of all ranks fit together. Raises `PlanMismatch` if they do not."""
    advice = "plan on one rank, and give its plan to all of them"
    if different := [rank for rank, part in enumerate(parts) if part.table != parts[0].table]:
        raise PlanMismatch(f"the ranks {different} execute another program than rank 0; {advice}")
    if different := [rank for rank, part in enumerate(parts) if part.cut != parts[0].cut]:
        raise PlanMismatch(f"the plans of the ranks {different} have another cut or recomputation than rank 0's; {advice}")
    layers = {stage: of_stage for part in parts for stage, of_stage in part.layers.items()}
    if 0 in layers and layers[0].start != 0:
        raise PlanMismatch(f"stage 0 begins with layer {layers[0].start}; layer 0 was expected")
    for (stage, before), (following, after) in pairwise(sorted(layers.items())):
        if following == stage + 1 and before.stop != after.start:
            raise PlanMismatch(
                f"stage {stage} ends before layer {before.stop}, and stage {following} begins with layer {after.start}, because "
                f"ranks have different cuts; {advice}"
            )


def _layers_of(stage: Any) -> range | None:
    """Returns the layers of a stage; None if they are not known. DDP keeps the module that it wraps in `module`."""
    module = stage.submod
    found = getattr(module, "of_model", None) or getattr(getattr(module, "module", None), "of_model", None)
    return found if isinstance(found, range) else None
