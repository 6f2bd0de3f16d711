"""`schedule`: a runtime of PyTorch that executes a plan.

The plan's computations are lowered to the table that PyTorch's runtime (`_PipelineScheduleRuntime`) executes: messages,
reductions of gradients, and the waits for both. Before PyTorch gets the table, it is proved sound for the communicator
of the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import pipewright_pp
from pipewright_pp.torch import tables, versions
from pipewright_pp.torch.agreement import compare, part_of
from pipewright_pp.torch.backends import backends_of
from pipewright_pp.torch.errors import PlanMismatch
from pipewright_pp.torch.placed import Placed, placed, source_of
from pipewright_pp.torch.ranks import Ranks
from pipewright_pp.torch.tables import Rows
from pipewright_pp.torch.versions import Version

#: The names of communicators, as `Program.validate` takes them.
Transport = Literal["buffered", "edge", "pair", "rank", "all"]

#: The passes for a table that PyTorch 2.15 executes. `unshard` comes first if a stage is sharded.
PASSES = ("reduce-grad", "send-recv", "wait-send")


def schedule(
    plan: Any,
    stages: Sequence[Any],
    loss_fn: Callable[..., Any] | None,
    *,
    transport: Transport | None = None,
    allow_untested: bool = False,
    **options: Any,
) -> Any:
    """Returns a schedule of PyTorch (`_PipelineScheduleRuntime`) that executes a plan on this rank.

    `plan` is a plan, a schedule, or a program with messages, which is executed as it is. `stages` are this rank's
    `PipelineStage`s, as `pipewright_pp.torch.stages` makes them. `loss_fn(output, target)` returns the mean loss of a microbatch.
    `options` are keywords of PyTorch's multi-stage schedules, such as `scale_grads` and `args_chunk_spec`. `step` and `eval` of
    the result are PyTorch's. `transport` is the communicator for which the table is proved sound; by default,
    `edge` for Gloo and for one group per edge, and `rank` for others.

    All ranks of the pipeline call this function, because it compares their tables, cuts and recomputation: ranks with
    different tables would hang, and ranks with different cuts would train another model. An error that
    one rank finds in its plan is raised on all of them. A rank without stages has no group in which it could tell the others.

    Raises `PlanMismatch` if the plan does not fit the stages, differs between ranks, or PyTorch cannot run it, or if another
    rank has an error; `pipewright_pp.ValidationError` if the plan is not sound for the communicator; and `UntestedVersion`.
    """
    torch, version = versions.load(allow_untested=allow_untested)
    from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

    check_kinds(stages)
    ranks = Ranks(torch.distributed, stages[0].group, PlanMismatch)
    try:
        of_plan = placed(plan)
        check_stages(of_plan, stages)
        program = program_for(plan, unshard=any(_is_sharded(stage) for stage in stages))
        program.validate(transport=transport or transport_of(torch.distributed, stages[0]))
        rows = rows_for(program, version)
        check_losses(rows, of_plan.stages - 1)
        part = part_of(plan, actions_of(program), stages)
    except Exception as error:
        ranks.agree(error=error)
        raise
    compare(ranks.agree(part))
    make: Callable[..., Any] = _PipelineScheduleRuntime
    runtime = make(list(stages), of_plan.microbatches, loss_fn=loss_fn, **options)
    actions = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    runtime._prepare_schedule_with_comms(actions, format="compute_comms")
    return runtime


def program_for(plan: Any, *, unshard: bool = False) -> pipewright_pp.Program:
    """Returns the program that `schedule` executes, to simulate and view it; one that has messages is returned as it is.

    PyTorch before 2.15 executes it without the waits for sends and for reductions. `unshard` gathers the parameters of
    sharded stages (FSDP) before they compute.
    """
    source = source_of(plan)
    if isinstance(source, pipewright_pp.Program) and tables.communicates(actions_of(source)):
        return source
    program: pipewright_pp.Program = source.lower(passes=[*(["unshard"] if unshard else []), *PASSES])
    return program


def rows_for(program: pipewright_pp.Program, version: Version) -> Rows:
    """Returns the rows of a program for a version of PyTorch.

    Raises `PlanMismatch` if the program moves tensors out of memory, or if the version needs a wait for each send, and the
    program lacks one.
    """
    rows = actions_of(program)
    if moving := tables.offloads(rows):
        raise PlanMismatch(
            f"the program has {moving[0]}, and PyTorch's runtime does not move the tensors of a forward out of memory: make the "
            'program without the pass "offload"'
        )
    if not version.has_waits:
        return tables.without_waits(rows)
    if unwaited := tables.unwaited_sends(rows):
        raise PlanMismatch(
            f"the program has no wait for {len(unwaited)} of its sends, the first is {unwaited[0]}; PyTorch {version.text} needs "
            'one for each: add the pass "wait-send"'
        )
    return rows


def actions_of(program: pipewright_pp.Program) -> Rows:
    """Returns the rows of a program without bubbles."""
    return [[cell for cell in row if cell] for row in program.rows]


def check_kinds(stages: Sequence[Any]) -> None:
    """Checks that `stages` are one stage of PyTorch or more. Raises `PlanMismatch` if they are not."""
    if not stages:
        raise PlanMismatch("there is no stage; the stages of this rank were expected, as pipewright_pp.torch.stages makes them")
    for stage in stages:
        if not all(hasattr(stage, key) for key in ("stage_index", "num_stages", "group_rank", "group_size")):
            raise PlanMismatch(f"read a {type(stage).__name__}; a torch.distributed.pipelining.PipelineStage was expected")


def check_stages(of_plan: Placed, stages: Sequence[Any]) -> None:
    """Checks that `stages` are the stages that the plan gives to their rank.

    Raises `PlanMismatch` if they are not.
    """
    first = stages[0]
    if first.group_size != of_plan.ranks or first.num_stages != of_plan.stages:
        raise PlanMismatch(
            f"the stages are of {first.group_size} ranks with {first.num_stages} stages in total; the plan has "
            f"{of_plan.ranks} ranks with {of_plan.stages} stages"
        )
    found, expected = sorted(stage.stage_index for stage in stages), of_plan.of_rank(first.group_rank)
    if found != expected:
        raise PlanMismatch(f"rank {first.group_rank} has the stages {found}; the plan gives it {expected}")


def check_losses(rows: Rows, last_stage: int) -> None:
    """Checks that the last stage runs its forwards in the order of the microbatches.

    PyTorch looks the loss of a microbatch up by the number of losses before it. Raises `PlanMismatch` if the order differs.
    """
    forward = f"{last_stage}F"
    parts = (part for row in rows for cell in row for part in tables.parts_of(cell))
    order = [int(part.removeprefix(forward)) for part in parts if part.startswith(forward) and part != forward]
    if order != sorted(order):
        raise PlanMismatch(
            f"stage {last_stage} computes the microbatches in the order {order}; PyTorch assigns the losses by this order, so it "
            "must be ascending: choose another schedule"
        )


def transport_of(distributed: Any, stage: Any) -> Transport:
    """Returns the name of the communicator of a stage's group.

    Gloo has one connection for each pair of ranks and matches messages of one direction in their order, as one group
    per edge does. Other back ends run the operations of a group in order on each rank.
    """
    if getattr(stage, "p2p_per_edge", False) or backends_of(distributed, stage.group).get(stage.device.type) == "gloo":
        return "edge"
    return "rank"


def _is_sharded(stage: Any) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(stage.submod, FSDPModule)
