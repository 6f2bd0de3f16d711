"""Compares the gradients between the stages of a pipeline with the uncut model's, from the loss to the first stage."""

from __future__ import annotations

from .comparison import Comparison
from .findings import Fault
from .records import Call, StageRecord
from .sketches import Sketch, ratio


def judge_backwards(compared: Comparison) -> None:
    """Compares the gradients between stages. Schedules may divide by the microbatches later, so one factor is free."""
    if not _losses_gradient(compared):
        return
    for record in reversed(compared.stages):
        for index in range(compared.setting.microbatches):
            microbatch = compared.number_of(record, index)
            call = record.calls[index]
            if record.stage < compared.last and _received_differs(compared, record, index, microbatch, call):
                return
            if record.stage > 0 and _backward_differs(compared, record, index, microbatch, call):
                return


def _losses_gradient(compared: Comparison) -> bool:
    """Compares the gradient of the last output. Returns whether it is right up to one factor for all microbatches."""
    factors: dict[int, float] = {}
    last = [record for record in compared.stages if record.stage == compared.last]
    for record in last:
        for index in range(compared.setting.microbatches):
            microbatch, call = compared.number_of(record, index), record.calls[index]
            known = dict(enumerate(compared.uncut.output_gradients[microbatch]))
            pairs = [
                (value, right)
                for position, value in sorted(call.output_gradients.items())
                if (right := known.get(position)) is not None and (right.norm > 0 or value.norm != 0)
            ]
            fits = [ratio(value, right) for value, right in pairs]
            compared.judged.values += len(fits)
            action = f"{record.stage}B{index}"
            limit = max((compared.limit(value) for value, _ in pairs), default=0.0)
            for (_, rest), (value, _) in zip(fits, pairs):
                if rest > limit:
                    fault, advice = _loss_fault(compared, value, microbatch)
                    text = "the gradient of the loss with respect to the output differs"
                    compared.find(fault, text, rest, record, microbatch, action, advice)
                    return False
            if len(fits) > 1 and max(fit[0] for fit in fits) - min(fit[0] for fit in fits) > limit * abs(fits[0][0]):
                weights = ", ".join(f"{fit[0]:.3g}" for fit in fits)
                text = f"the parts of the loss have the weights {weights} relative to the uncut model's, so its gradient differs"
                compared.find(Fault.ONE_PART, text, abs(fits[-1][0] / fits[0][0] - 1), record, microbatch, action)
                return False
            if fits:
                factors[microbatch] = fits[0][0]
    if not factors:
        return True
    mean = sum(factors.values()) / len(factors)
    compared.scale = mean
    spread = max(abs(factor - mean) for factor in factors.values())
    limit = max(compared.limit(value) for record in last for call in record.calls.values() for value in call.outputs)
    if spread > limit * abs(mean):
        weights = ", ".join(f"{factor:.3g}" for factor in factors.values())
        worst = max(factors, key=lambda microbatch: abs(factors[microbatch] - mean))
        owner = next(record for record in last if compared.number_of(record, 0) <= worst)
        fault = Fault.MISSING if min(map(abs, factors.values())) == 0 else Fault.MEAN_OF_MEANS
        compared.find(
            fault,
            "the weight of the microbatch in the loss differs",
            abs(factors[worst] / mean - 1) if mean else 1.0,
            owner,
            worst,
            f"{compared.last}B{worst % compared.setting.microbatches}",
            f"the microbatches have the weights {weights}, as if each loss were divided by the tokens of its microbatch",
        )
        return False
    return True


def _loss_fault(compared: Comparison, value: Sketch, microbatch: int) -> tuple[Fault, str]:
    """Returns the kind of fault of a wrong gradient of the loss."""
    for other in range(len(compared.uncut.output_gradients)):
        parts = compared.uncut.with_target(microbatch, other) if other != microbatch else []
        if any(part is not None and ratio(value, part)[1] < 1e-3 for part in parts):
            return Fault.ORDER, f"it is the gradient for the target of microbatch {other}"
    return Fault.LOSS, "the outputs are right, so the loss has another target, mask or function"


def _received_differs(compared: Comparison, record: StageRecord, index: int, microbatch: int, call: Call) -> bool:
    receiver = compared.neighbour(record, 1)
    if receiver is None:
        return False
    for position, value in call.output_gradients.items():
        sent = receiver.calls[index].input_gradients.get(position)
        if sent is None:
            continue
        fine, relative = compared.equal(value, sent)
        if not fine:
            fault, advice = _gradient_origin(compared, record, value)
            text = f"the gradient of output {position} differs from the one that the next stage has computed"
            compared.find(fault, text, relative, record, microbatch, f"{record.stage}RECV_B{index}", advice)
            return True
    return False


def _gradient_origin(compared: Comparison, record: StageRecord, value: Sketch) -> tuple[Fault, str]:
    """Returns the kind of fault of a wrong gradient from the next stage, by where its value comes from."""
    for other in compared.stages:
        for index, call in other.calls.items():
            microbatch = compared.number_of(other, index)
            if other.stage == record.stage + 1 and any(compared.same(value, sent) for sent in call.input_gradients.values()):
                return Fault.ORDER, f"it is the gradient of microbatch {microbatch}"
            if any(compared.same(value, sent) for sent in call.outputs):
                return Fault.CROSSED, f"it is the output of stage {other.stage} for microbatch {microbatch}"
    factors = [
        ratio(value, sent)
        for other in compared.stages
        if other.stage == record.stage + 1
        for sent in other.calls[min(other.calls)].input_gradients.values()
    ]
    if factors and factors[0][1] < 1e-3:
        return Fault.DIVIDED, f"it is {factors[0][0]:.3g} times this gradient"
    return Fault.CROSSED, "no stage has sent this value"


def _backward_differs(compared: Comparison, record: StageRecord, index: int, microbatch: int, call: Call) -> bool:
    candidate = compared.behind.get(record.stage - 1)
    for position, value in call.input_gradients.items():
        right = candidate[position].gradients.get(microbatch) if candidate and position in candidate else None
        if right is None or right.shape != value.shape:
            continue
        fine, relative = compared.close(value, right.times(compared.scale), _gradient_floor(record))
        if fine:
            continue
        factor, rest = ratio(value, right.times(compared.scale))
        fault, advice = Fault.GRADIENT, "the gradient of its output is right, so its backward is another one"
        if call.draws:
            fault, advice = Fault.DROPOUT, "the backward takes other random numbers than the forward"
        elif rest <= compared.limit(value):
            fault = Fault.DIVIDED if factor < 1 else Fault.TWICE
            advice = f"it is {factor:.3g} times the right gradient, and the gradient of the stage's output is right"
        text = f"the gradient of input {position} differs"
        compared.find(fault, text, relative, record, microbatch, f"{record.stage}B{index}", advice)
        return True
    return False


def _gradient_floor(record: StageRecord) -> float:
    """Returns a size below which gradients of inputs count as zero."""
    norms = [value.norm for call in record.calls.values() for value in call.input_gradients.values()]
    return 1e-3 * max(norms, default=0.0)
