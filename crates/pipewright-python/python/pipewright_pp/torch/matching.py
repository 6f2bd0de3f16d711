"""Finds for each parameter and buffer of a stage its name in the uncut model.

Stages keep the names of the model (as torchtitan's), or have names of their own (a slice of a `Sequential`). So a value of
the stage is searched among the model's values first. If several of these are equal, such as biases of zeros or layers that
start as copies, the name follows from the module that it belongs to, or from the order of the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .errors import VerifyError
from .records import StageRecord
from .sketches import Sketch

#: For each stage, the model's name of each of its names.
Names = dict[int, dict[str, str]]


def match(
    records: Sequence[StageRecord], model: Mapping[str, Sketch], names: Callable[[int, str], str] | None = None
) -> Names:
    """Returns the names in the model of the parameters and buffers of each stage.

    `model` has the model's values at the start of the step. `names(stage, name)` returns the model's name, if given.

    Raises `VerifyError` if a parameter has no counterpart.
    """
    stages: dict[int, StageRecord] = {}
    for record in sorted(records, key=lambda record: (record.stage, record.replica)):
        stages.setdefault(record.stage, record)
    if names is None:
        matched = _Matches(stages, model).found
    else:
        matched = {stage: {name: names(stage, name) for name in _values_of(record)} for stage, record in stages.items()}
    for stage, record in stages.items():
        for name, parameter in record.parameters.items():
            counterpart = matched[stage].get(name)
            if counterpart is None or counterpart not in model or model[counterpart].shape != parameter.before.shape:
                raise VerifyError(
                    f"the parameter {name} of stage {stage}, of shape {list(parameter.before.shape)}, has no counterpart in the "
                    "uncut model; give both the same values before the step, or pass names=lambda stage, name: ... with the "
                    "model's name of each parameter"
                )
    return {stage: {name: other for name, other in of_stage.items() if other in model} for stage, of_stage in matched.items()}


def _values_of(record: StageRecord) -> dict[str, Sketch]:
    """Returns the parameters and buffers of a stage before the step."""
    own = {name: parameter.before for name, parameter in record.parameters.items()}
    return own | {name: buffer.before for name, buffer in record.buffers.items()}


class _Matches:
    """The names of the model's values by stage and name.

    First come the values that only one value of the model equals, then equal values in modules whose place is known, and then
    the others in the order of the stages. So layers that start with equal values get the names in their order, and a value of
    the model gets a second name only if it is shared.
    """

    def __init__(self, stages: Mapping[int, StageRecord], model: Mapping[str, Sketch]):
        self.found: Names = {stage: {} for stage in stages}
        self._model = model
        self._places: dict[int, dict[str, str]] = {stage: {} for stage in stages}
        self._used: set[str] = set()
        equal: dict[object, list[str]] = {}
        for name, value in model.items():
            equal.setdefault(_key(value), []).append(name)
        own = {(stage, name): value for stage, record in stages.items() for name, value in _values_of(record).items()}
        candidates = {place: equal.get(_key(value), []) for place, value in own.items()}
        for (stage, name), names in candidates.items():
            if len(names) == 1:
                self._add(stage, name, names[0])
        for (stage, name), names in candidates.items():
            guess = _moved(name, self._places[stage])
            if name not in self.found[stage] and guess in names and guess not in self._used:
                self._add(stage, name, guess)
        for (stage, name), names in candidates.items():
            if name not in self.found[stage]:
                other = self._of_equal(stage, name, names) if names else self._of_shape(stage, name, own[stage, name])
                if other is not None:
                    self._add(stage, name, other)

    def _add(self, stage: int, name: str, other: str) -> None:
        self.found[stage][name] = other
        self._used.add(other)
        for key, value in _places(name, other).items():
            self._places[stage].setdefault(key, value)

    def _of_equal(self, stage: int, name: str, names: Sequence[str]) -> str:
        """Returns one of several values of the model that are equal to the stage's, or else the one at its place."""
        free = [other for other in names if other not in self._used]
        guess = _moved(name, self._places[stage])
        if guess is not None and (guess in free or not free and self._has(guess, self._model[names[0]])):
            return guess
        return name if name in (free or names) else (free or names)[0]

    def _has(self, name: str, value: Sketch) -> bool:
        return name in self._model and self._model[name].shape == value.shape

    def _of_shape(self, stage: int, name: str, value: Sketch) -> str | None:
        """Returns a value of the model for one that differs from all of them."""
        fits = [other for other, of_model in self._model.items() if of_model.shape == value.shape]
        guess = _moved(name, self._places[stage])
        if guess in fits:
            return guess
        if not self._places[stage]:
            # The stage has other values everywhere, so its names may mean layers of other stages.
            free = [other for other in fits if other not in self._used]
            alike = [other for other in free if other.rpartition(".")[2] == name.rpartition(".")[2]]
            if alike and name not in free:
                return alike[0]
        return name if name in fits else None


def _key(value: Sketch) -> object:
    infinite = b"" if value.infinite is None else value.infinite.numpy().tobytes()
    return value.shape, value.numbers.numpy().tobytes(), infinite


def _places(name: str, other: str) -> dict[str, str]:
    """Returns the modules of the model by the modules of the stage, from two names that end alike."""
    places: dict[str, str] = {}
    own, whole = name.split("."), other.split(".")
    while own and whole and own.pop() == whole.pop():
        places[".".join(own)] = ".".join(whole)
    return places


def _moved(name: str, places: Mapping[str, str]) -> str | None:
    """Returns the model's name of a stage's name by the nearest module whose place is known; None if there is none."""
    parts = name.split(".")
    for length in range(len(parts) - 1, -1, -1):
        place = places.get(".".join(parts[:length]))
        if place is not None:
            return ".".join([*([place] if place else []), *parts[length:]])
    return None
