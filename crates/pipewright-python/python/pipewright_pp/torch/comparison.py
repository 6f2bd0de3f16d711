"""The values of a step side by side: the records of the ranks, and the uncut model's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .findings import Fault, Finding
from .matching import Names
from .records import RankRecord, StageRecord
from .sketches import TOLERANCES, Sketch, difference, tolerance_of
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


class Comparison:
    """The values of one step, and the differences that are known of it. Microbatches are counted over all replicas."""

    def __init__(self, records: Sequence[RankRecord], uncut: Uncut, names: Names, setting: Setting, model: Mapping[str, Sketch]):
        self.judged = Judged()
        self.uncut, self.names, self.setting, self.model = uncut, names, setting, model
        self.ranks = records
        self.stages = sorted((stage for rank in records for stage in rank.stages), key=lambda stage: (stage.stage, stage.replica))
        self.last = max(stage.stage for stage in self.stages)
        lower = [dtype for stage in self.stages for _, dtype in stage.autocast]
        self._lowest = max((TOLERANCES.get(dtype, 0.0) for dtype in {*lower, *uncut.precisions}), default=0.0)
        norms = [norm for rank in records for norm in rank.figures.get("grad_norm", [])]
        is_one = bool(norms) and max(norms) - min(norms) <= 1e-4 * max(norms)
        #: The factor of clipping. A wrong gradient changes the norm, and the norm changes all gradients.
        self.clip = self.clip_by(norms[0] if is_one else uncut.grad_norm)
        #: For each stage but the last one, the candidate that is nearest to each output.
        self.nearest = {stage: self._boundary(stage) for stage in range(self.last)}
        #: The same without the outputs that equal no value of the model: the stage may end between two modules.
        self.behind = {
            stage: {position: candidate for position, (candidate, equal) in of_stage.items() if equal}
            for stage, of_stage in self.nearest.items()
        }
        self.scale = 1.0

    def clip_by(self, norm: float) -> float:
        """Returns the factor of clipping by a norm."""
        return 1.0 if self.setting.max_norm is None else min(1.0, self.setting.max_norm / (norm + 1e-6))

    def equal(self, value: Sketch, expected: Sketch) -> tuple[bool, float]:
        """Returns whether a value is a copy of the expected one, and the relative difference. Counts the comparison."""
        return self._within(value, expected, self._of_type(value), 0.0)

    def close(self, value: Sketch, expected: Sketch, floor: float = 0.0) -> tuple[bool, float]:
        """Returns whether a value is computed as the expected one, and the relative difference. Counts the comparison."""
        return self._within(value, expected, self.limit(value), floor)

    def _within(self, value: Sketch, expected: Sketch, limit: float, floor: float) -> tuple[bool, float]:
        relative = difference(value, expected, floor)
        self.judged.values += 1
        if relative <= limit:
            self.judged.largest = max(self.judged.largest, relative)
        return relative <= limit, relative

    def same(self, value: Sketch, expected: Sketch) -> bool:
        """Returns whether two values are equal, without counting."""
        return value.shape == expected.shape and difference(value, expected) <= self.limit(value)

    def near(self, value: float, right: float) -> bool:
        """Returns whether two figures are equal, with the tolerance of the stages' outputs. Counts the comparison."""
        outputs = [call.outputs[0] for stage in self.stages for call in stage.calls.values() if call.outputs]
        limit = max((self.limit(output) for output in outputs), default=1e-4)
        self.judged.values += 1
        return abs(value - right) <= max(limit, 1e-6) * max(abs(right), 1e-12)

    def find(
        self,
        fault: Fault,
        text: str,
        relative: float | None = None,
        stage: StageRecord | None = None,
        microbatch: int | None = None,
        action: str | None = None,
        advice: str = "",
    ) -> None:
        """Adds a difference."""
        number = stage.stage if stage else None
        rank = stage.rank if stage else None
        self.judged.findings.append(Finding(fault, text, relative, number, microbatch, action, rank, advice))

    def limit(self, value: Sketch) -> float:
        """Returns the largest relative difference of equal computed values: by the lowest precision of the computation."""
        is_exact = self.setting.tolerance is not None or not value.dtype.is_floating_point
        return self._of_type(value) if is_exact else max(self._of_type(value), self._lowest)

    def _of_type(self, value: Sketch) -> float:
        return self.setting.tolerance if self.setting.tolerance is not None else tolerance_of(value)

    def trainable(self) -> set[str]:
        """Returns the trainable parameters by their first names in the model."""
        return {self.uncut.shared[name] for name in self.uncut.trainable}

    def canonical(self, record: StageRecord, name: str) -> str:
        """Returns the first name in the model of a stage's parameter."""
        return self.uncut.shared[self.names[record.stage][name]]

    def number_of(self, record: StageRecord, index: int) -> int:
        """Returns the number of a microbatch over all replicas."""
        return record.replica * self.setting.microbatches + index

    def neighbour(self, record: StageRecord, distance: int) -> StageRecord | None:
        """Returns the stage before (-1) or behind (1) another one in the same replica."""
        place = (record.stage + distance, record.replica)
        return next((other for other in self.stages if (other.stage, other.replica) == place), None)

    def output(self, stage: int, position: int, microbatch: int) -> Sketch | None:
        """Returns the uncut model's value of an output of a stage; None if no value of the model is known to be it."""
        if stage == self.last:
            outputs = self.uncut.outputs[microbatch]
            return outputs[position] if position < len(outputs) else None
        candidate = self.behind[stage].get(position)
        return candidate.values.get(microbatch) if candidate is not None else None

    def is_known(self, stage: int) -> bool:
        """Returns whether all outputs of a stage that have candidates are values of the model."""
        return stage == self.last or len(self.behind[stage]) == len(self.nearest[stage])

    def accept_nearest(self, stage: int) -> None:
        """Compares the outputs of a stage with the nearest candidates from here on."""
        self.behind[stage] = {position: candidate for position, (candidate, _) in self.nearest[stage].items()}

    def _boundary(self, stage: int) -> dict[int, tuple[Candidate, int]]:
        """Returns for each output of a stage the candidate that equals it most often, or else the nearest one.

        The number is how many microbatches are equal.
        """
        chosen: dict[int, tuple[Candidate, int]] = {}
        calls = [
            (self.number_of(record, index), call)
            for record in self.stages
            if record.stage == stage
            for index, call in record.calls.items()
        ]
        outputs = len(calls[0][1].outputs) if calls else 0
        for position in range(outputs):
            values = {microbatch: call.outputs[position] for microbatch, call in calls if position < len(call.outputs)}
            fitting = [
                candidate
                for candidate in self.uncut.boundaries.get(stage, [])
                if all(candidate.values.get(index, value).shape == value.shape for index, value in values.items())
            ]
            if fitting:
                best = max(fitting, key=lambda candidate: _fit(candidate, values, self.same))
                chosen[position] = (best, _fit(best, values, self.same)[0])
        return chosen


def _fit(
    candidate: Candidate, values: Mapping[int, Sketch], same: Callable[[Sketch, Sketch], bool]
) -> tuple[int, int, float]:
    """Returns how well a candidate fits: equal microbatches, whether it has gradients, and minus the differences."""
    pairs = [(value, candidate.values[index]) for index, value in values.items() if index in candidate.values]
    equal = sum(same(value, right) for value, right in pairs)
    return equal, int(bool(candidate.gradients)), -sum(difference(value, right) for value, right in pairs)


def buffer_fault(name: str) -> Fault:
    """Returns the kind of fault of a buffer that differs."""
    is_norm = name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")
    return Fault.BATCH_NORM if is_norm else Fault.STALE_BUFFER
