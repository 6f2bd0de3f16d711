"""`stages`: cuts a model into the stages that a plan gives to this rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipewright_pp.torch import versions
from pipewright_pp.torch.errors import PlanMismatch
from pipewright_pp.torch.placed import Placed, placed


def stages(
    plan: Any,
    modules: Any,
    *,
    boundaries: Sequence[int] | None = None,
    device: Any = "cpu",
    group: Any = None,
    allow_untested: bool = False,
) -> list[Any]:
    """Returns this rank's stages (`PipelineStage`), in the order of their index, for `schedule`.

    `modules` are the layers of the model in order: a `torch.nn.Sequential` or a list. Each gets the output of the one before it;
    a tuple becomes several arguments. Only the layers of this rank are moved to `device`. `boundaries` are the first layers of
    all stages except the first; by default, the plan's, so a schedule without a cut needs them. `group` is the
    process group of the pipeline, by default all processes. Stages that the plan recomputes keep their inputs only, and
    run their forward again in the backward.

    Raises `PlanMismatch` if the plan does not fit the layers or the group, and `UntestedVersion`.
    """
    torch, _ = versions.load(allow_untested=allow_untested)
    from torch.distributed.pipelining import PipelineStage

    from pipewright_pp.torch.chain import Chain

    layers = layers_of(modules)
    plan_of_stages = placed(plan)
    cut = ranges(boundaries_of(plan, boundaries, plan_of_stages), len(layers), plan_of_stages.stages)
    rank = plan_of_stages.check_group(torch.distributed, group)
    recomputed = recomputed_stages(plan, plan_of_stages.stages)
    made = []
    for stage in plan_of_stages.of_rank(rank):
        of_stage = cut[stage]
        chain = Chain([layers[layer] for layer in of_stage], recompute=recomputed[stage], first=of_stage.start)
        module = chain.to(device)
        made.append(PipelineStage(module, stage, plan_of_stages.stages, torch.device(device), group=group))
    return made


def layers_of(modules: Any) -> list[Any]:
    """Returns the layers of a `Sequential`, or of a sequence of modules."""
    layers = list(modules)
    for index, layer in enumerate(layers):
        if not callable(layer) or not hasattr(layer, "parameters"):
            raise PlanMismatch(f"layer {index} is {layer!r}; a torch.nn.Module was expected")
    return layers


def boundaries_of(plan: Any, boundaries: Sequence[int] | None, plan_of_stages: Placed) -> list[int]:
    """Returns the first layers of all stages except the first."""
    found = getattr(plan, "boundaries", None) if boundaries is None else boundaries
    if found is None:
        if plan_of_stages.stages == 1:
            return []
        raise PlanMismatch(f"a {type(plan).__name__} has no cut; pass the first layers of all stages but the first as boundaries")
    return list(found)


def ranges(boundaries: Sequence[int], layers: int, stages: int) -> list[range]:
    """Returns the layers of each stage.

    Raises `PlanMismatch` if a stage has no layer, or the cut is for another number of layers or stages.
    """
    if len(boundaries) != stages - 1:
        raise PlanMismatch(f"{len(boundaries)} boundaries make {len(boundaries) + 1} stages; the schedule has {stages}")
    edges = [0, *boundaries, layers]
    cut = [range(first, end) for first, end in zip(edges, edges[1:])]
    for stage, of_stage in enumerate(cut):
        if not of_stage:
            raise PlanMismatch(
                f"stage {stage} has no layer: the boundaries are {list(boundaries)}, and the model has {layers} layers; "
                "plan with the profile of this model"
            )
    return cut


def recomputed_stages(plan: Any, stages: int) -> list[bool]:
    """Returns for each stage whether the plan recomputes it."""
    recompute = getattr(plan, "recompute", ())
    return [stage in recompute for stage in range(stages)]
