"""Finds for each parameter and buffer of a stage its name in the uncut model.

Stages keep the names of the model (as torchtitan's), or have names of their own (a slice of a `Sequential`). So a value of
the stage is searched among the model's values first. Equal values, such as biases of zeros, follow the names of the module
that they belong to.
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
    used: set[str] = set()
    found: Names = {}
    for record in sorted(records, key=lambda record: (record.stage, record.replica)):
        if record.stage in found:
            continue
        own = {name: parameter.before for name, parameter in record.parameters.items()}
        own |= {name: buffer.before for name, buffer in record.buffers.items()}
        if names is not None:
            matched = {name: names(record.stage, name) for name in own}
        else:
            matched = _of_stage(own, model, used)
        for name in record.parameters:
            counterpart = matched.get(name)
            if counterpart is None or counterpart not in model or model[counterpart].shape != own[name].shape:
                raise VerifyError(
                    f"the parameter {name} of stage {record.stage}, of shape {list(own[name].shape)}, has no counterpart in the "
                    "uncut model; give both the same values before the step, or pass names=lambda stage, name: ... with the "
                    "model's name of each parameter"
                )
        found[record.stage] = {name: other for name, other in matched.items() if other in model}
        used |= set(found[record.stage].values())
    return found


def _of_stage(own: Mapping[str, Sketch], model: Mapping[str, Sketch], used: set[str]) -> dict[str, str]:
    equal: dict[object, list[str]] = {}
    for name, value in model.items():
        equal.setdefault(_key(value), []).append(name)
    candidates = {name: equal.get(_key(value), []) for name, value in own.items()}
    matched = {name: of_name[0] for name, of_name in candidates.items() if len(of_name) == 1}
    places = _places(matched)
    for name in own:
        if name in matched:
            continue
        of_name = candidates[name]
        guess = _moved(name, places)
        fits = [other for other in (guess, name) if other in model and model[other].shape == own[name].shape]
        free = [other for other in of_name if other not in used]
        if guess in fits and places:
            matched[name] = guess
        elif name in free or (fits and not of_name):
            matched[name] = name if name in free else fits[0]
        elif of_name:
            matched[name] = (free or of_name)[0]
        if name in matched:
            places |= {key: value for key, value in _places({name: matched[name]}).items() if key not in places}
    return matched


def _key(value: Sketch) -> object:
    return value.shape, value.numbers.numpy().tobytes()


def _places(matched: Mapping[str, str]) -> dict[str, str]:
    """Returns the modules of the model by the modules of the stage, from names that end alike."""
    places: dict[str, str] = {}
    for name, other in matched.items():
        own, whole = name.split("."), other.split(".")
        while own and whole and own.pop() == whole.pop():
            places.setdefault(".".join(own), ".".join(whole))
    return places


def _moved(name: str, places: Mapping[str, str]) -> str:
    """Returns the model's name of a stage's name by the nearest module whose place is known."""
    parts = name.split(".")
    for length in range(len(parts) - 1, -1, -1):
        place = places.get(".".join(parts[:length]))
        if place is not None:
            return ".".join([*([place] if place else []), *parts[length:]])
    return name
