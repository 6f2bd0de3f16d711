"""Compares the records of a pipeline with the uncut model, in the order of a step, and names the kind of each fault.

A difference goes on to everything that is computed from it. So a stage is judged by its inputs: if they are right and its
output is wrong, the stage computes something else; if its input is wrong and the sender's output is right, the message is.
"""

from __future__ import annotations

from .after_step import judge_figures, judge_state
from .backwards import judge_backwards
from .comparison import Comparison, Judged, buffer_fault
from .findings import Fault
from .gradients import judge_gradients
from .records import Call, StageRecord
from .sketches import Sketch


UNSENT = "no stage has sent this value"


def judge(compared: Comparison) -> Judged:
    """Compares everything, in the order of a step. Later parts are left out where an earlier fault explains them."""
    _start(compared)
    _complete(compared)
    if not compared.judged.findings:
        _forwards(compared)
    if not compared.judged.findings:
        judge_backwards(compared)
    is_explained = bool(compared.judged.findings)
    if not is_explained:
        judge_gradients(compared)
    judge_figures(compared, is_explained)
    judge_state(compared)
    return compared.judged


def _start(compared: Comparison) -> None:
    """Compares the parameters and buffers before the step. The first one of each stage that differs is enough."""
    owners: dict[str, set[int]] = {}
    for record in compared.stages:
        for name in record.parameters:
            owners.setdefault(compared.canonical(record, name), set()).add(record.stage)
    for record in compared.stages:
        differing: list[tuple[str, float]] = []
        for name, parameter in record.parameters.items():
            fine, relative = compared.equal(parameter.before, compared.model[compared.names[record.stage][name]])
            if not fine:
                differing.append((name, relative))
        for name, relative in differing[:1]:
            is_all = len(differing) == len(record.parameters) > 1
            is_shared = len(owners[compared.canonical(record, name)]) > 1 and not is_all
            fault = Fault.SHARED_COPY if is_shared else Fault.VALUES
            text = f"before the step, {name} differs from {compared.names[record.stage][name]} of the uncut model"
            advice = "and all others of the stage: give both the same seed or checkpoint" if is_all else ""
            compared.find(fault, text, relative, record, advice=advice)
        for name, buffer in record.buffers.items():
            buffer_name = compared.names[record.stage].get(name)
            if buffer_name is None:
                continue
            fine, relative = compared.equal(buffer.before, compared.model[buffer_name])
            if not fine:
                text = f"before the step, the buffer {name} differs from {buffer_name} of the uncut model"
                compared.find(buffer_fault(name), text, relative, record)
                break


def _complete(compared: Comparison) -> None:
    """Checks that each stage has computed each microbatch."""
    for record in compared.stages:
        missing = [index for index in range(compared.setting.microbatches) if index not in record.calls]
        if missing:
            text = f"the forwards of the microbatches {missing} are missing, and other stages run them"
            microbatch = compared.number_of(record, missing[0])
            compared.find(Fault.SKIPPED, text, None, record, microbatch, f"{record.stage}F{missing[0]}")


def _forwards(compared: Comparison) -> None:
    """Compares the inputs and outputs of the stages, from the first stage to the last one."""
    wrong: set[tuple[int, int]] = set()
    for record in compared.stages:
        # One finding for each stage: the other microbatches differ for the same reason.
        for index in range(compared.setting.microbatches):
            microbatch = compared.number_of(record, index)
            call = record.calls[index]
            if (record.stage - 1, microbatch) in wrong:
                wrong.add((record.stage, microbatch))
                continue
            if _input_differs(compared, record, index, microbatch, call) or _output_differs(compared, record, index, call):
                others = range(index, compared.setting.microbatches)
                wrong |= {(record.stage, compared.number_of(record, other)) for other in others}
                break
    if compared.uncut.by_microbatch and not wrong:
        compared.find(
            Fault.BATCH_NORM,
            "the output for the whole batch at once is another one, as batch norm takes the statistics of each microbatch",
            stage=_batch_norm_stage(compared),
        )


def _input_differs(compared: Comparison, record: StageRecord, index: int, microbatch: int, call: Call) -> bool:
    if record.stage == 0:
        expected = compared.uncut.inputs[microbatch]
    else:
        sender = compared.neighbour(record, -1)
        expected = sender.calls[index].outputs if sender is not None else []
    for position, (value, right) in enumerate(zip(call.inputs, expected)):
        fine, relative = compared.equal(value, right)
        if fine:
            continue
        action = f"{record.stage}F{index}" if record.stage == 0 else f"{record.stage}RECV_F{index}"
        fault, advice = _origin(compared, record, value, microbatch)
        if advice == UNSENT and relative < 0.02:
            advice = f"{UNSENT}, but nearly: it may have been sent in another precision"
        compared.find(fault, f"input {position} of the stage differs", relative, record, microbatch, action, advice)
        return True
    return False


def _origin(compared: Comparison, record: StageRecord, value: Sketch, microbatch: int) -> tuple[Fault, str]:
    """Returns the kind of fault of a wrong input, by where its value comes from."""
    if record.stage == 0:
        for index, inputs in enumerate(compared.uncut.inputs):
            if any(compared.same(value, right) for right in inputs):
                return Fault.ORDER, f"it is the input of microbatch {index}"
        return Fault.BATCH, "it is not in the batch that verify got"
    for other in compared.stages:
        for index, call in other.calls.items():
            if other.stage == record.stage - 1 and any(compared.same(value, sent) for sent in call.outputs):
                return Fault.ORDER, f"it is the output of stage {other.stage} for microbatch {compared.number_of(other, index)}"
    for other in compared.stages:
        for index, call in other.calls.items():
            place = f"of stage {other.stage} for microbatch {compared.number_of(other, index)}"
            if any(compared.same(value, sent) for sent in call.input_gradients.values()):
                return Fault.CROSSED, f"it is the gradient of the input {place}"
            if any(compared.same(value, sent) for sent in call.outputs):
                return Fault.CROSSED, f"it is the output {place}"
    return Fault.CROSSED, UNSENT


def _output_differs(compared: Comparison, record: StageRecord, index: int, call: Call) -> bool:
    microbatch = compared.number_of(record, index)
    for position, value in enumerate(call.outputs):
        right = compared.output(record.stage, position, microbatch)
        if right is None:
            continue
        fine, relative = compared.close(value, right)
        if fine:
            continue
        suspect = _suspect(compared, record)
        if suspect is not record:
            compared.accept_nearest(suspect.stage)
            if _output_differs(compared, suspect, index, suspect.calls[index]):
                return True
        fault, advice = _computation(compared, record, call, position, value, microbatch)
        text, action = f"output {position} of the stage differs", f"{record.stage}F{index}"
        compared.find(fault, text, relative, record, microbatch, action, advice)
        return True
    return False


def _suspect(compared: Comparison, record: StageRecord) -> StageRecord:
    """Returns the stage whose output may be the first wrong one, if the output of `record` is wrong.

    These are the stages before it whose outputs equal no value of the model, unless a microbatch is right in the end.
    """
    first = record.replica * compared.setting.microbatches
    if any(_is_right(compared, record, first + index) for index in range(compared.setting.microbatches)):
        return record
    before = compared.neighbour(record, -1)
    while before is not None and not compared.is_known(before.stage):
        record, before = before, compared.neighbour(before, -1)
    return record


def _computation(compared: Comparison, record: StageRecord, call: Call, position: int, value: Sketch, microbatch: int
) -> tuple[Fault, str]:
    if call.draws:
        return Fault.DROPOUT, "the stage takes random numbers; set the rates of dropout to 0 to compare the rest"
    for other in range(compared.setting.microbatches * compared.setting.replicas):
        right = compared.output(record.stage, position, other)
        if other != microbatch and right is not None and compared.same(value, right):
            return Fault.ORDER, f"it is the output for microbatch {other}"
    if any("running_" in name for name in record.buffers):
        return Fault.BATCH_NORM, "the stage has batch norm, which depends on the rows of a microbatch"
    if microbatch > 0 and all(_is_right(compared, record, before) for before in range(microbatch)):
        return (
            Fault.MICROBATCH_SHARED,
            "earlier microbatches are right, as with a mask, positions or lengths that were made for the whole batch",
        )
    return Fault.COMPUTATION, "its inputs are right, so the stage has other layers, or lacks an argument such as a mask"


def _is_right(compared: Comparison, record: StageRecord, microbatch: int) -> bool:
    call = record.calls.get(microbatch - record.replica * compared.setting.microbatches)
    if call is None:
        return True
    pairs = [(value, compared.output(record.stage, position, microbatch)) for position, value in enumerate(call.outputs)]
    return all(right is None or compared.same(value, right) for value, right in pairs)


def _batch_norm_stage(compared: Comparison) -> StageRecord | None:
    return next((record for record in compared.stages if any("running_" in name for name in record.buffers)), None)
