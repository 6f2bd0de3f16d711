"""The versions of PyTorch that this package was tried with, and what differs between them.

The pipeline runtime of PyTorch is private (`_PipelineScheduleRuntime`), and its tables change between minor versions.
So a version outside of `TESTED` is an error unless the caller asks to try it.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from types import ModuleType

from pipewright_pp.torch.errors import UntestedVersion

#: The minor versions with which the tests have passed, the oldest first.
TESTED = ((2, 12), (2, 13), (2, 14), (2, 15))

EXPECTED = f"{TESTED[0][0]}.{TESTED[0][1]} to {TESTED[-1][0]}.{TESTED[-1][1]}"

#: The first version whose tables wait for each send and for each reduction of gradients. Its runtime refuses tables
#: without these waits, and older ones do not know them.
FIRST_WITH_WAITS = (2, 15)


@dataclass(frozen=True)
class Version:
    """A version of PyTorch."""

    text: str
    minor: tuple[int, int]

    @property
    def has_waits(self) -> bool:
        """Whether its tables have `WAIT_SEND_F`, `WAIT_SEND_B` and `WAIT_REDUCE_GRAD`."""
        return self.minor >= FIRST_WITH_WAITS


def version_of(text: str, *, allow_untested: bool = False) -> Version:
    """Reads a version such as `2.15.0+cpu`.

    Raises `UntestedVersion` if it is not one of `TESTED` and `allow_untested` is false.
    """
    numbers = re.match(r"(\d+)\.(\d+)", text)
    if numbers is None:
        raise UntestedVersion(
            f"the version of PyTorch is `{text}`; a version such as 2.15.0 was expected", read=text, expected=EXPECTED
        )
    minor = (int(numbers[1]), int(numbers[2]))
    if minor not in TESTED and not allow_untested:
        raise UntestedVersion(
            f"PyTorch {text} was never tried with this package, which is tested with {EXPECTED}; install one of these, "
            "or pass allow_untested=True and compare the gradients of a step with the gradients of the model without a pipeline",
            read=text,
            expected=EXPECTED,
        )
    return Version(text, minor)


def load(*, allow_untested: bool = False) -> tuple[ModuleType, Version]:
    """Imports PyTorch and checks its version.

    Raises `UntestedVersion` if PyTorch cannot be imported, or as `version_of`.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise UntestedVersion(
            f"this function needs PyTorch {EXPECTED}, which cannot be imported ({error}); install it into the environment "
            "of this Python",
            read=None,
            expected=EXPECTED,
        ) from error
    return torch, version_of(torch.__version__, allow_untested=allow_untested)
