"""Exchanges objects between the ranks through the store of the process group. Every wait has a deadline.

The store works with any back end, and a rank that has died is known by the key that it did not write. A collective
operation would hang instead.
"""

from __future__ import annotations

import pickle
import time
from datetime import timedelta
from typing import Any

from .errors import VerifyError

#: The bytes of one entry of the store.
CHUNK = 1 << 22


class Exchange:
    """The messages of one call among the ranks. All ranks count their calls, so messages of two calls are apart."""

    def __init__(self, store: Any, rank: int, ranks: int, name: str, deadline_s: float):
        self._store, self._name = store, name
        self.rank, self.ranks, self.deadline_s = rank, ranks, deadline_s
        self._own: dict[str, bytes] = {}

    def agree(self, kind: str, error: VerifyError | None) -> None:
        """Raises an error on all ranks if one rank has one, and if a rank does not respond in time."""
        self.publish(kind, error)
        if error is not None:
            raise error
        until = time.monotonic() + self.deadline_s
        for rank in range(self.ranks):
            other = self.receive(kind, rank, until)
            if other is not None:
                raise VerifyError(f"rank {rank}: {other}", rank=rank)

    def publish(self, kind: str, value: object) -> None:
        """Writes the value of this rank. Raises `VerifyError` if the store does not respond."""
        data = pickle.dumps(value)
        if self._store is None:
            self._own[kind] = data
            return
        pieces = [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]
        try:
            for index, piece in enumerate(pieces):
                self._store.set(self._key(kind, self.rank, index), piece)
            self._store.set(self._key(kind, self.rank, "count"), str(len(pieces)))
        except Exception as error:
            raise VerifyError(f"the store of the process group does not respond: {_line(error)}") from error

    def receive(self, kind: str, rank: int, until: float, *, is_last: bool = False) -> Any:
        """Returns the value of a rank. `until` is the end of the wait by `time.monotonic`. The last reader removes the value.

        Raises `VerifyError` if the rank has not written it by then, or if the store does not respond.
        """
        if self._store is None:
            return pickle.loads(self._own[kind])
        count = self._key(kind, rank, "count")
        try:
            self._store.wait([count], timedelta(seconds=max(until - time.monotonic(), 0.01)))
            keys = [self._key(kind, rank, index) for index in range(int(self._store.get(count)))]
            pieces = [self._store.get(key) for key in keys]
            if is_last:
                for key in keys:
                    self._store.delete_key(key)
        except Exception as error:
            raise VerifyError(
                f"rank {rank} has not sent its {kind} in time: its process has ended, it hangs, or it does not call verify "
                f"({_line(error)})",
                rank=rank,
            ) from error
        return pickle.loads(b"".join(pieces))

    def _key(self, kind: str, rank: int, part: object) -> str:
        return f"pipewright/{self._name}/{kind}/{rank}/{part}"


def _line(error: BaseException) -> str:
    """Returns the first line of an error's text."""
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]
