"""Compares the gradients of a pipeline's parameters with the uncut model's, and names the kind of fault.

The gradient of the uncut model is a sum over microbatches. If a pipeline's gradient is another sum of the same parts, its
weights say what has happened: a weight of 0 is a missing microbatch, and equal weights are another scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .comparison import Comparison
from .findings import Fault, Finding
from .records import StageRecord
from .sketches import Sketch, add, difference, parts_of_sum, ratio


@dataclass(frozen=True)
class _Wrong:
    """A gradient that differs: the parameter, its value (None if it is missing) and the parts that it should have."""

    record: StageRecord
    name: str
    canonical: str
    value: Sketch
    parts: list[Sketch]
    relative: float

    @property
    def right(self) -> Sketch:
        return add(self.parts)


def judge_gradients(compared: Comparison) -> None:
    """Compares the gradients of all parameters, after clipping."""
    wrong: list[_Wrong] = []
    for record in compared.stages:
        # Some gradients are zero but for rounding, such as those of the biases of keys.
        names = {compared.canonical(record, name) for name in record.parameters} & set(compared.uncut.norms)
        floor = 1e-3 * compared.clip * math.hypot(*(compared.uncut.norms[name] for name in names))
        for name, parameter in record.parameters.items():
            canonical = compared.canonical(record, name)
            if canonical not in compared.uncut.gradients:
                continue
            parts = [part.times(compared.clip) for part in compared.uncut.gradients[canonical]]
            value = parameter.gradient if parameter.gradient is not None else parts[0].times(0.0)
            fine, relative = compared.close(value, add(parts), max(floor, 1e-3 * sum(part.norm for part in parts)))
            if not fine:
                wrong.append(_Wrong(record, name, canonical, value, parts, relative))
    if wrong:
        compared.judged.findings += _judge(compared, wrong)


def _judge(compared: Comparison, wrong: Sequence[_Wrong]) -> list[Finding]:
    findings: list[Finding] = []
    explained: set[str] = set()
    for entry in wrong:
        if entry.canonical in explained:
            continue
        copies = {
            record.stage: parameter.gradient
            for record in compared.stages
            if record.replica == entry.record.replica
            for name, parameter in record.parameters.items()
            if parameter.gradient is not None and compared.canonical(record, name) == entry.canonical
        }
        if len(copies) > 1 and difference(add(list(copies.values())), entry.right) <= compared.limit(entry.value):
            explained.add(entry.canonical)
            advice = f"the stages {sorted(copies)} have copies, and their sum is right"
            findings.append(_finding(entry, Fault.SHARED_SUM, advice))
    rest = [entry for entry in wrong if entry.canonical not in explained]
    by_stage: dict[tuple[int, int], list[_Wrong]] = {}
    for entry in rest:
        by_stage.setdefault((entry.record.stage, entry.record.replica), []).append(entry)
    verdicts = {stage: _stage_verdict(entries, compared) for stage, entries in by_stage.items()}
    all_stages = {(record.stage, record.replica) for record in compared.stages}
    scales = {stage: verdict.scale for stage, verdict in verdicts.items() if verdict.scale is not None}
    if len(scales) == len(all_stages) and _are_clipped_apart(compared, scales):
        advice = "each stage is clipped by another norm, as if each took the norm of its own gradients"
        return [*findings, _finding(by_stage[min(scales)][0], Fault.NORM, advice)]
    is_global = len(scales) == len(all_stages) and _spread(list(scales.values())) <= 1e-3
    # Another gradient of one stage changes the norm, by which all stages are clipped.
    for stage in sorted(verdicts, key=lambda stage: (compared.setting.max_norm is not None and stage in scales, stage)):
        verdict = verdicts[stage]
        findings.append(_finding(verdict.entry, verdict.fault, verdict.advice, verdict.microbatch))
        if is_global:
            break
    return findings


def _are_clipped_apart(compared: Comparison, scales: Mapping[tuple[int, int], float]) -> bool:
    """Returns whether the scales follow if each stage, or each rank, is clipped by the norm of its own gradients."""
    if compared.setting.max_norm is None or _spread(list(scales.values())) <= 1e-3:
        return False
    owned: dict[tuple[str, int], set[str]] = {}
    for record in compared.stages:
        names = {compared.canonical(record, name) for name in record.parameters} & set(compared.uncut.norms)
        for place in (("stage", record.stage), ("rank", record.rank)):
            owned.setdefault(place, set()).update(names)

    def follow(place: str) -> bool:
        for record in compared.stages:
            norm = math.hypot(*(compared.uncut.norms[name] for name in owned[place, getattr(record, place)]))
            scale = scales[record.stage, record.replica] * compared.clip
            if abs(scale / compared.clip_by(norm) - 1) > 1e-3:
                return False
        return True

    return follow("stage") or follow("rank")


@dataclass(frozen=True)
class _Verdict:
    entry: _Wrong
    fault: Fault
    advice: str
    microbatch: int | None = None
    scale: float | None = None


def _stage_verdict(entries: Sequence[_Wrong], compared: Comparison) -> _Verdict:
    """Returns the kind of fault of the wrong gradients of one stage."""
    first = entries[0]
    tolerance = max(10 * compared.limit(first.value), 1e-6)
    missing = [entry for entry in entries if entry.value.norm == 0]
    if missing:
        others = len(first.record.parameters) - len(missing)
        advice = f"{len(missing)} gradients of the stage are zero or missing, {others} are not"
        if not others:
            advice += "; they are read before the first step of an optimizer of torch.optim, or else at the end of the step"
        return _Verdict(missing[0], Fault.MISSING, advice)
    count = len(first.parts)
    weights, left = parts_of_sum([entry.value for entry in entries],
                                 [[entry.parts[index] for entry in entries] for index in range(count)])
    if left <= tolerance:
        return _of_weights(first, weights, compared, tolerance)
    factors = [ratio(entry.value, entry.right) for entry in entries]
    if all(rest <= tolerance for _, rest in factors):
        factor = factors[0][0]
        if _spread([factor for factor, _ in factors]) <= tolerance:
            return _of_scale(first, factor, compared)
        return _Verdict(first, Fault.TWICE if factor > 1 else Fault.SCALE, f"it is {factor:.3g} times the right gradient")
    several = [entry for entry in entries if compared.uncut.uses.get(entry.canonical, 1) > 1]
    if several and len(several) == len(entries):
        uses = compared.uncut.uses[several[0].canonical]
        return _Verdict(several[0], Fault.TWICE, f"a forward uses the parameter {uses} times, and other gradients are right")
    return _Verdict(first, Fault.GRADIENT, "other values are right, so the stage adds or loses a part, such as an auxiliary loss")


def _of_weights(first: _Wrong, weights: Sequence[float], compared: Comparison, tolerance: float) -> _Verdict:
    """Returns the kind of fault if the gradient is a sum of the microbatches' gradients with these weights."""
    shown = ", ".join(f"{weight:.3g}" for weight in weights[:16])
    advice = f"it has the microbatches' gradients with the weights {shown}"
    start = compared.number_of(first.record, 0)
    own = range(start, start + compared.setting.microbatches)
    others = [weight for index, weight in enumerate(weights) if index not in own]
    if others and max(map(abs, others)) <= tolerance:
        return _Verdict(first, Fault.REPLICAS, f"{advice}: the gradients of the other replicas are not added")
    near_zero = [index for index, weight in enumerate(weights) if abs(weight) <= tolerance]
    if near_zero:
        return _Verdict(first, Fault.MISSING, f"{advice}: some are not added", near_zero[0])
    if _spread(weights) <= tolerance:
        return _of_scale(first, sum(weights) / len(weights), compared)
    odd = [index for index, weight in enumerate(weights) if abs(weight - 1) > tolerance]
    if len(odd) < len(weights):
        twice = all(abs(weights[index] - 2) <= tolerance for index in odd)
        smaller = all(0 < weights[index] < 1 for index in odd)
        fault = Fault.TWICE if twice else Fault.DIVIDED if smaller else Fault.MEAN_OF_MEANS
        return _Verdict(first, fault, advice, odd[0])
    levels = sorted({round(weight, 3) for weight in weights})
    if len(levels) <= len(weights) // 2 and levels[0] > 0 and _is_whole(levels[-1] / levels[0], 1e-2):
        return _Verdict(first, Fault.DIVIDED, f"{advice}: some are divided more often", weights.index(min(weights)))
    return _Verdict(first, Fault.MEAN_OF_MEANS, advice, odd[0])


def _of_scale(first: _Wrong, factor: float, compared: Comparison) -> _Verdict:
    """Returns the kind of fault if all gradients of the stage have one factor."""
    microbatches, replicas, tokens = compared.setting.microbatches, compared.setting.replicas, compared.setting.tokens
    whole = microbatches * replicas
    known = [
        (float(replicas), Fault.REPLICAS, f"the {replicas} replicas are added and not divided"),
        (1 / replicas, Fault.REPLICAS, f"it is divided by the {replicas} replicas once more"),
        (float(microbatches), Fault.UNDIVIDED, f"it is not divided by the {microbatches} microbatches"),
        (1 / microbatches, Fault.DIVIDED, f"it is divided by the {microbatches} microbatches once more"),
        (float(whole), Fault.UNDIVIDED, f"it is not divided by the {whole} microbatches of all replicas"),
        (1 / whole, Fault.DIVIDED, f"it is divided by the {whole} microbatches of all replicas once more"),
    ]
    if tokens:
        known.append((float(tokens), Fault.UNDIVIDED, f"it is not divided by the {tokens} tokens of the loss"))
        known.append((1 / tokens, Fault.DIVIDED, f"it is divided by the {tokens} tokens of the loss once more"))
    for value, fault, advice in known:
        if value != 1 and abs(factor / value - 1) < 1e-3:
            return _Verdict(first, fault, advice, scale=factor)
    if abs(factor - 2) < 1e-3:
        return _Verdict(first, Fault.TWICE, "it is twice the right gradient", scale=factor)
    return _Verdict(first, Fault.SCALE, f"all gradients of the stage are {factor:.4g} times the right ones", scale=factor)


def _finding(entry: _Wrong, fault: Fault, advice: str, microbatch: int | None = None) -> Finding:
    record = entry.record
    action = None if microbatch is None else f"{record.stage}B{microbatch % max(len(record.calls), 1)}"
    text = f"the gradient of {entry.name} differs"
    return Finding(fault, text, entry.relative, record.stage, microbatch, action, record.rank, advice)


def _spread(values: Sequence[float]) -> float:
    """Returns the relative distance of the largest and the smallest value."""
    return (max(values) - min(values)) / max(max(map(abs, values)), 1e-30)


def _is_whole(value: float, tolerance: float) -> bool:
    return abs(value - round(value)) <= tolerance * value
