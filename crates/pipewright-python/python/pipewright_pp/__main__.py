"""The commands that need no training, such as ``python -m pipewright_pp plan --help``."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

from pipewright_pp._native import run_command

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command with these arguments, or with the arguments of the process, and returns its exit code.

    >>> from pipewright_pp.__main__ import main
    >>> main(["vpp", "--ranks", "2", "--chunks", "2", "--microbatches", "4", "--output", "/dev/null"])
    0
    """
    return run_command(list(sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    # A command does not return to the interpreter before it ends, so Python's own handler would not run.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main())
