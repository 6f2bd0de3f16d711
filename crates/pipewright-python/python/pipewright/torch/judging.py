"""Compares the records of a pipeline with the uncut model, in the order of a step, and names the kind of each fault.

A difference goes on to everything that is computed from it. So a stage is judged by its inputs: if they are right and its
output is wrong, the stage computes something else; if its input is wrong and the sender's output is right, the message is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .findings import Fault, Finding
from .gradients import Expected, judge_gradients
from .matching import Names
from .records import Call, RankRecord, StageRecord
from .sketches import Sketch, difference, ratio, tolerance_of
from .uncut import Candidate, Uncut


@dataclass
class Judged:
    """The differences that were found, and the values that were compared."""

    findings: list[Finding] = field(default_factory=list)
    values: int = 0
    largest: float = 0.0


@dataclass(frozen=True)
class Setting:
    """What the judge knows of the step: the microbatches of a replica, the replicas, and the limits."""

    microbatches: int
    replicas: int
    tolerance: float | None
    max_norm: float | None
    tokens: int | None


class Judge:
    """Compares the values of one step."""

    def __init__(self, records: Sequence[RankRecord], uncut: Uncut, names: Names, setting: Setting, model: Mapping[str, Sketch]):
        self.judged = Judged()
        self._uncut, self._names, self._setting, self._model = uncut, names, setting, model
        self._ranks = records
        self._stages = sorted((stage for rank in records for stage in rank.stages), key=lambda stage: (stage.stage, stage.replica))
        self._last = max(stage.stage for stage in self._stages)
        self._behind = {stage: self._boundary(stage) for stage in range(self._last)}
        self._scale = 1.0

    def run(self) -> Judged:
        """Compares everything, in the order of a step. Later parts are left out where an earlier fault explains them."""
        self._start()
        self._complete()
        if not self.judged.findings:
            self._forwards()
        if not self.judged.findings:
            self._backwards()
        is_explained = bool(self.judged.findings)
        if not is_explained:
            self._parameters()
        self._figures(is_explained)
        self._state()
        return self.judged

    def equal(self, value: Sketch, expected: Sketch, floor: float = 0.0) -> tuple[bool, float]:
        """Returns whether a value is the expected one, and the relative difference. Counts the comparison."""
        relative = difference(value, expected, floor)
        limit = self._setting.tolerance if self._setting.tolerance is not None else tolerance_of(value)
        self.judged.values += 1
        if relative <= limit:
            self.judged.largest = max(self.judged.largest, relative)
        return relative <= limit, relative

    def _same(self, value: Sketch, expected: Sketch) -> bool:
        """Returns whether two values are equal, without counting."""
        limit = self._setting.tolerance if self._setting.tolerance is not None else tolerance_of(value)
        return value.shape == expected.shape and difference(value, expected) <= limit

    def _find(
        self,
        fault: Fault,
        text: str,
        relative: float,
        stage: StageRecord | None = None,
        microbatch: int | None = None,
        action: str | None = None,
        advice: str = "",
    ) -> None:
        number = stage.stage if stage else None
        rank = stage.rank if stage else None
        self.judged.findings.append(Finding(fault, text, relative, number, microbatch, action, rank, advice))

    # Values at the start, and which microbatches are there.

    def _start(self) -> None:
        owners: dict[str, set[int]] = {}
        for record in self._stages:
            for name in record.parameters:
                owners.setdefault(self._canonical(record, name), set()).add(record.stage)
        for record in self._stages:
            for name, parameter in record.parameters.items():
                other = self._names[record.stage][name]
                fine, relative = self.equal(parameter.before, self._model[other])
                if not fine:
                    shared = len(owners[self._canonical(record, name)]) > 1
                    fault = Fault.SHARED_COPY if shared else Fault.VALUES
                    self._find(fault, f"before the step, {name} differs from {other} of the uncut model", relative, record)
                    break
            for name, buffer in record.buffers.items():
                buffer_name = self._names[record.stage].get(name)
                if buffer_name is None:
                    continue
                fine, relative = self.equal(buffer.before, self._model[buffer_name])
                if not fine:
                    text = f"before the step, the buffer {name} differs from {buffer_name} of the uncut model"
                    self._find(_buffer_fault(name), text, relative, record)
                    break

    def _complete(self) -> None:
        """Checks that each stage has computed each microbatch."""
        for record in self._stages:
            missing = [index for index in range(self._setting.microbatches) if index not in record.calls]
            if missing:
                text = f"stage {record.stage} does not compute the microbatches {missing}, which other stages compute, so it differs"
                self._find(Fault.MISSING, text, 1.0, record, self._global(record, missing[0]))

    # Forwards.

    def _forwards(self) -> None:
        wrong: set[tuple[int, int]] = set()
        for record in self._stages:
            # One finding for each stage: the other microbatches differ for the same reason.
            for index in range(self._setting.microbatches):
                microbatch = self._global(record, index)
                call = record.calls[index]
                if (record.stage - 1, microbatch) in wrong:
                    wrong.add((record.stage, microbatch))
                    continue
                if self._input_differs(record, index, microbatch, call) or self._output_differs(record, microbatch, call):
                    wrong |= {(record.stage, self._global(record, other)) for other in range(index, self._setting.microbatches)}
                    break
        if self._uncut.by_microbatch and not wrong:
            self._find(
                Fault.BATCH_NORM,
                "the output for the whole batch at once differs, as batch norm takes the statistics of each microbatch: it differs",
                1.0,
                self._batch_norm_stage(),
            )

    def _input_differs(self, record: StageRecord, index: int, microbatch: int, call: Call) -> bool:
        if record.stage == 0:
            expected = self._uncut.inputs[microbatch]
        else:
            sender = self._sender(record)
            expected = sender.calls[index].outputs if sender is not None else []
        for position, (value, right) in enumerate(zip(call.inputs, expected)):
            fine, relative = self.equal(value, right)
            if fine:
                continue
            action = f"{record.stage}F{index}" if record.stage == 0 else f"{record.stage}RECV_F{index}"
            fault, advice = self._origin(record, value, microbatch)
            self._find(fault, f"input {position} of the stage differs", relative, record, microbatch, action, advice)
            return True
        return False

    def _origin(self, record: StageRecord, value: Sketch, microbatch: int) -> tuple[Fault, str]:
        """Returns the kind of fault of a wrong input, by where its value comes from."""
        if record.stage == 0:
            for other, inputs in enumerate(self._uncut.inputs):
                if any(self._same(value, right) for right in inputs):
                    return Fault.ORDER, f"it is the input of microbatch {other}"
            return Fault.BATCH, "it is no part of the batch that verify got"
        for other in self._stages:
            for index, call in other.calls.items():
                if other.stage == record.stage - 1 and any(self._same(value, sent) for sent in call.outputs):
                    return Fault.ORDER, f"it is the output of stage {other.stage} for microbatch {self._global(other, index)}"
        for other in self._stages:
            for index, call in other.calls.items():
                place = f"of stage {other.stage} for microbatch {self._global(other, index)}"
                if any(self._same(value, sent) for sent in call.input_gradients.values()):
                    return Fault.CROSSED, f"it is the gradient of the input {place}"
                if any(self._same(value, sent) for sent in call.outputs):
                    return Fault.CROSSED, f"it is the output {place}"
        return Fault.CROSSED, "no stage has sent this value"

    def _output_differs(self, record: StageRecord, microbatch: int, call: Call) -> bool:
        for position, value in enumerate(call.outputs):
            right = self._output(record.stage, position, microbatch)
            if right is None:
                continue
            fine, relative = self.equal(value, right)
            if fine:
                continue
            fault, advice = self._computation(record, call, position, value, microbatch)
            action = f"{record.stage}F{microbatch % self._setting.microbatches}"
            self._find(fault, f"output {position} of the stage differs", relative, record, microbatch, action, advice)
            return True
        return False

    def _computation(
        self, record: StageRecord, call: Call, position: int, value: Sketch, microbatch: int
    ) -> tuple[Fault, str]:
        if call.draws:
            return Fault.DROPOUT, "the stage takes random numbers; set the rates of dropout to 0 to compare the rest"
        for other in range(self._setting.microbatches * self._setting.replicas):
            right = self._output(record.stage, position, other)
            if other != microbatch and right is not None and self._same(value, right):
                return Fault.ORDER, f"it is the output for microbatch {other}"
        if any("running_" in name for name in record.buffers):
            return Fault.BATCH_NORM, "the stage has batch norm, which depends on the rows of a microbatch"
        if microbatch > 0 and all(self._is_right(record, before) for before in range(microbatch)):
            return (
                Fault.MICROBATCH_SHARED,
                "earlier microbatches are right, as with a mask, positions or lengths that were made for the whole batch",
            )
        return Fault.COMPUTATION, "its inputs are right, so the stage has other layers, or lacks an argument such as a mask"

    def _is_right(self, record: StageRecord, microbatch: int) -> bool:
        call = record.calls.get(microbatch - record.replica * self._setting.microbatches)
        if call is None:
            return True
        pairs = [(value, self._output(record.stage, position, microbatch)) for position, value in enumerate(call.outputs)]
        return all(right is None or self._same(value, right) for value, right in pairs)

    # Backwards.

    def _backwards(self) -> None:
        """Compares the gradients between stages. Schedules may divide by the microbatches later, so one factor is free."""
        if not self._losses_gradient():
            return
        for record in reversed(self._stages):
            for index in range(self._setting.microbatches):
                microbatch = self._global(record, index)
                call = record.calls[index]
                if record.stage < self._last and self._received_differs(record, index, microbatch, call):
                    return
                if record.stage > 0 and self._backward_differs(record, index, microbatch, call):
                    return

    def _losses_gradient(self) -> bool:
        """Compares the gradient of the last output. Returns whether it is right up to one factor for all microbatches."""
        factors: dict[int, float] = {}
        last = [record for record in self._stages if record.stage == self._last]
        for record in last:
            for index in range(self._setting.microbatches):
                microbatch, call = self._global(record, index), record.calls[index]
                pairs = [
                    (value, right)
                    for position, value in sorted(call.output_gradients.items())
                    if position < len(self._uncut.output_gradients[microbatch])
                    and (right := self._uncut.output_gradients[microbatch][position]) is not None
                ]
                fits = [ratio(value, right) for value, right in pairs if right.norm > 0 or value.norm > 0]
                self.judged.values += len(fits)
                action = f"{record.stage}B{index}"
                limit = max((self._limit(value) for value, _ in pairs), default=0.0)
                for (factor, rest), (value, _) in zip(fits, pairs):
                    if rest > limit:
                        fault, advice = self._loss_fault(value, microbatch)
                        text = "the gradient of the loss with respect to the output differs"
                        self._find(fault, text, rest, record, microbatch, action, advice)
                        return False
                if len(fits) > 1 and max(fit[0] for fit in fits) - min(fit[0] for fit in fits) > limit * abs(fits[0][0]):
                    weights = ", ".join(f"{fit[0]:.3g}" for fit in fits)
                    text = f"the parts of the loss have the weights {weights} relative to the uncut model's, so its gradient differs"
                    self._find(Fault.ONE_PART, text, abs(fits[-1][0] / fits[0][0] - 1), record, microbatch, action)
                    return False
                if fits:
                    factors[microbatch] = fits[0][0]
        if not factors:
            return True
        mean = sum(factors.values()) / len(factors)
        self._scale = mean
        spread = max(abs(factor - mean) for factor in factors.values())
        if spread > max(self._limit(value) for record in last for call in record.calls.values() for value in call.outputs) * abs(mean):
            weights = ", ".join(f"{factor:.3g}" for factor in factors.values())
            worst = max(factors, key=lambda microbatch: abs(factors[microbatch] - mean))
            owner = next(record for record in last if self._global(record, 0) <= worst)
            fault = Fault.MISSING if min(map(abs, factors.values())) == 0 else Fault.MEAN_OF_MEANS
            self._find(
                fault,
                "the weight of the microbatch in the loss differs",
                abs(factors[worst] / mean - 1) if mean else 1.0,
                owner,
                worst,
                f"{self._last}B{worst % self._setting.microbatches}",
                f"the microbatches have the weights {weights}, as if each loss were divided by the tokens of its microbatch",
            )
            return False
        return True

    def _loss_fault(self, value: Sketch, microbatch: int) -> tuple[Fault, str]:
        for other in range(len(self._uncut.output_gradients)):
            parts = self._uncut.with_target(microbatch, other) if other != microbatch else []
            if any(part is not None and ratio(value, part)[1] < 1e-3 for part in parts):
                return Fault.ORDER, f"it is the gradient for the target of microbatch {other}"
        return Fault.LOSS, "the outputs are right, so the loss has another target, mask or function"

    def _received_differs(self, record: StageRecord, index: int, microbatch: int, call: Call) -> bool:
        receiver = next(
            (other for other in self._stages if (other.stage, other.replica) == (record.stage + 1, record.replica)), None
        )
        if receiver is None:
            return False
        for position, value in call.output_gradients.items():
            sent = receiver.calls[index].input_gradients.get(position)
            if sent is None:
                continue
            fine, relative = self.equal(value, sent)
            if not fine:
                fault, advice = self._gradient_origin(record, value)
                text = f"the gradient of output {position} differs from the one that the next stage has computed"
                self._find(fault, text, relative, record, microbatch, f"{record.stage}RECV_B{index}", advice)
                return True
        return False

    def _gradient_origin(self, record: StageRecord, value: Sketch) -> tuple[Fault, str]:
        for other in self._stages:
            for index, call in other.calls.items():
                microbatch = self._global(other, index)
                if other.stage == record.stage + 1 and any(self._same(value, sent) for sent in call.input_gradients.values()):
                    return Fault.ORDER, f"it is the gradient of microbatch {microbatch}"
                if any(self._same(value, sent) for sent in call.outputs):
                    return Fault.CROSSED, f"it is the output of stage {other.stage} for microbatch {microbatch}"
        factors = [
            ratio(value, sent)
            for other in self._stages
            if other.stage == record.stage + 1
            for sent in other.calls[min(other.calls)].input_gradients.values()
        ]
        if factors and factors[0][1] < 1e-3:
            return Fault.DIVIDED, f"it is {factors[0][0]:.3g} times this gradient"
        return Fault.CROSSED, "no stage has sent this value"

    def _backward_differs(self, record: StageRecord, index: int, microbatch: int, call: Call) -> bool:
        candidate = self._behind.get(record.stage - 1)
        for position, value in call.input_gradients.items():
            right = candidate[position].gradients.get(microbatch) if candidate and position in candidate else None
            if right is None or right.shape != value.shape:
                continue
            fine, relative = self.equal(value, right.times(self._scale), self._gradient_floor(record))
            if fine:
                continue
            factor, rest = ratio(value, right.times(self._scale))
            fault, advice = Fault.GRADIENT, "the gradient of its output is right, so its backward is another one"
            if call.draws:
                fault, advice = Fault.DROPOUT, "the backward takes other random numbers than the forward"
            elif rest <= self._limit(value):
                fault = Fault.DIVIDED if factor < 1 else Fault.TWICE
                advice = f"it is {factor:.3g} times the right gradient, and the gradient of the stage's output is right"
            text = f"the gradient of input {position} differs"
            self._find(fault, text, relative, record, microbatch, f"{record.stage}B{index}", advice)
            return True
        return False

    def _gradient_floor(self, record: StageRecord) -> float:
        norms = [value.norm for call in record.calls.values() for value in call.input_gradients.values()]
        return 1e-3 * max(norms, default=0.0)

    # Gradients of parameters, figures and the state after the step.

    def _parameters(self) -> None:
        expected = Expected(self._uncut, self._names, self._setting.microbatches, self._setting.replicas, self._setting.max_norm,
                            self._setting.tokens)
        findings, values, largest = judge_gradients(self._stages, expected, self._limit)
        self.judged.findings += findings
        self.judged.values += values
        self.judged.largest = max(self.judged.largest, largest)

    def _figures(self, is_explained: bool) -> None:
        uncut, count = self._uncut, self._setting.microbatches * self._setting.replicas
        for rank in self._ranks:
            stage = rank.stages[-1] if rank.stages else None
            known = (("tokens", self._setting.tokens), ("grad_norm", uncut.grad_norm), ("loss", uncut.loss))
            for name, right in known[: 1 if is_explained else None]:
                for value in rank.figures.get(name, []):
                    if right is None or self._near(value, right):
                        continue
                    fault, advice = {"grad_norm": Fault.NORM, "loss": Fault.LOSS, "tokens": Fault.TOKENS}[name], ""
                    if name == "grad_norm":
                        advice = self._norm_advice(rank, value)
                    elif name == "loss" and self._near(value * count, right):
                        fault, advice = Fault.DIVIDED, f"it is the loss over the {count} microbatches"
                    elif name == "loss" and self._near(value, right * count):
                        fault, advice = Fault.UNDIVIDED, f"it is the loss times the {count} microbatches"
                    label = {"grad_norm": "the norm of the gradients", "loss": "the loss", "tokens": "the number of tokens"}[name]
                    text = f"{label} is {value:.6g}, and the uncut model's is {right:.6g}: it differs"
                    self._find(fault, text, abs(value - right) / max(abs(right), 1e-30), stage, advice=advice)
            losses = rank.figures.get("losses", [])
            mean = sum(losses) / len(losses) if losses else 0.0
            if not losses or is_explained or self._setting.replicas > 1:
                continue
            if not self._near(mean, uncut.loss) and not self._near(sum(losses), uncut.loss):
                text = f"the mean of the losses is {mean:.6g}, and the uncut model's loss is {uncut.loss:.6g}: it differs"
                self._find(Fault.LOSS, text, abs(mean - uncut.loss) / max(abs(uncut.loss), 1e-30), stage)

    def _near(self, value: float, right: float) -> bool:
        dtypes = [call.outputs[0] for stage in self._stages for call in stage.calls.values() if call.outputs]
        limit = max((self._limit(output) for output in dtypes), default=1e-4)
        self.judged.values += 1
        return abs(value - right) <= max(limit, 1e-6) * max(abs(right), 1e-12)

    def _norm_advice(self, rank: RankRecord, value: float) -> str:
        squares = 0.0
        for record in rank.stages:
            squares += sum(parameter.gradient.norm**2 for parameter in record.parameters.values() if parameter.gradient is not None)
        if squares and abs(squares**0.5 / value - 1) < 0.1:
            return f"it is the norm of the gradients of rank {self._ranks.index(rank)} alone"
        return "it depends on how the model is cut"

    def _state(self) -> None:
        moved: dict[bool, list[tuple[StageRecord, str]]] = {True: [], False: []}
        for record in self._stages:
            for name, parameter in record.parameters.items():
                canonical = self._canonical(record, name)
                if parameter.after is None:
                    continue
                has_moved = difference(parameter.after, parameter.before) != 0
                if canonical not in self._trainable():
                    self.judged.values += 1
                    if has_moved:
                        relative = difference(parameter.after, parameter.before)
                        self._find(Fault.FROZEN, f"{name} is frozen in the uncut model, and the step changes it: it differs",
                                   relative, record)
                elif any(part.norm > 0 for part in self._uncut.gradients[canonical]):
                    moved[has_moved].append((record, name))
            for name, buffer in record.buffers.items():
                buffer_name = self._names[record.stage].get(name)
                if buffer_name is None or buffer.after is None or self._setting.replicas > 1:
                    continue
                fine, relative = self.equal(buffer.after, self._uncut.buffers[buffer_name])
                if not fine and not self.judged.findings:
                    advice = "the step does not change it" if difference(buffer.after, buffer.before) == 0 else ""
                    text = f"after the step, the buffer {name} differs"
                    self._find(_buffer_fault(name), text, relative, record, advice=advice)
            draws = [index for index, call in record.calls.items() if call.draws]
            if draws and not self._uncut.draws:
                text = f"the stage takes random numbers in {len(draws)} forwards, and the uncut model takes none: it differs"
                self._find(Fault.RANDOM, text, 1.0, record, self._global(record, draws[0]), f"{record.stage}F{draws[0]}")
        self.judged.values += len(moved[True]) + len(moved[False])
        if moved[True] and moved[False]:
            record, name = moved[False][0]
            others = f", and {len(moved[False]) - 1} more parameters" if len(moved[False]) > 1 else ""
            text = f"the step changes other parameters, and not {name}{others}: it differs"
            self._find(Fault.PARTIAL_STEP, text, 1.0, record, advice="the optimizer does not have these parameters")

    # Look-ups.

    def _limit(self, value: Sketch) -> float:
        return self._setting.tolerance if self._setting.tolerance is not None else tolerance_of(value)

    def _trainable(self) -> set[str]:
        return {self._uncut.shared[name] for name in self._uncut.trainable}

    def _canonical(self, record: StageRecord, name: str) -> str:
        other = self._names[record.stage][name]
        return self._uncut.shared[other]

    def _global(self, record: StageRecord, index: int) -> int:
        return record.replica * self._setting.microbatches + index

    def _sender(self, record: StageRecord) -> StageRecord | None:
        before = (record.stage - 1, record.replica)
        return next((other for other in self._stages if (other.stage, other.replica) == before), None)

    def _output(self, stage: int, position: int, microbatch: int) -> Sketch | None:
        """Returns the uncut model's value of an output of a stage; None if no value of the model is known to be it."""
        if stage == self._last:
            outputs = self._uncut.outputs[microbatch]
            return outputs[position] if position < len(outputs) else None
        candidate = self._behind[stage].get(position)
        return candidate.values.get(microbatch) if candidate is not None else None

    def _boundary(self, stage: int) -> dict[int, Candidate]:
        """Returns for each output of a stage the candidate that equals it most often, or else the nearest one."""
        chosen: dict[int, Candidate] = {}
        calls = [
            (self._global(record, index), call)
            for record in self._stages
            if record.stage == stage
            for index, call in record.calls.items()
        ]
        outputs = len(calls[0][1].outputs) if calls else 0
        for position in range(outputs):
            values = {microbatch: call.outputs[position] for microbatch, call in calls if position < len(call.outputs)}
            fitting = [
                candidate
                for candidate in self._uncut.boundaries.get(stage, [])
                if all(candidate.values[index].shape == value.shape for index, value in values.items() if index in candidate.values)
            ]
            if fitting:
                chosen[position] = max(fitting, key=lambda candidate: _fit(candidate, values, self._same))
        return chosen

    def _batch_norm_stage(self) -> StageRecord | None:
        return next((record for record in self._stages if any("running_" in name for name in record.buffers)), None)


def _fit(
    candidate: Candidate, values: Mapping[int, Sketch], same: Callable[[Sketch, Sketch], bool]
) -> tuple[int, int, float]:
    """Returns how well a candidate fits: equal microbatches, whether it has gradients, and minus the differences."""
    pairs = [(value, candidate.values[index]) for index, value in values.items() if index in candidate.values]
    equal = sum(same(value, right) for value, right in pairs)
    return equal, int(bool(candidate.gradients)), -sum(difference(value, right) for value, right in pairs)


def _buffer_fault(name: str) -> Fault:
    is_norm = name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")
    return Fault.BATCH_NORM if is_norm else Fault.STALE_BUFFER
