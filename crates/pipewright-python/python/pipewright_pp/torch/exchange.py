"""Exchanges objects between the ranks through the store of the process group. Every wait has a deadline.

The store works with any back end, and a rank that has died is known by the key that it did not write. A collective
operation would hang instead.
"""

from __future__ import annotations

import pickle
import time
from datetime import timedelta
from typing import Any

from .errors import VerifyError, sentence_of
from .ranks import raise_first

#: The bytes of one entry of the store.
CHUNK = 1 << 22

#: The longest time in seconds that rank 0, whose process may host the store, stays until the others have read everything.
STAY_S = 30.0


class Exchange:
    """The messages of one call among the ranks. All ranks count their calls, so messages of two calls are apart.

    The step may use the store at the same time, and a store has one request at a time. So this is a connection of its own.
    """

    def __init__(self, store: Any, rank: int, ranks: int, name: str, deadline_s: float):
        self._store, self._name = store.clone() if hasattr(store, "clone") else store, name
        self.rank, self.ranks, self.deadline_s = rank, ranks, deadline_s
        self._own: dict[str, bytes] = {}
        self._silent: set[int] = set()

    def agree(self, kind: str, error: VerifyError | None) -> None:
        """Raises an error on all ranks if one rank has one, and if a rank does not respond in time."""
        self.publish(kind, error)
        if error is not None:
            raise error
        until = time.monotonic() + self.deadline_s
        errors = (self.receive(kind, rank, until) for rank in range(self.ranks))
        raise_first((None if error is None else str(error) for error in errors), VerifyError)

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
            if isinstance(value, VerifyError) and not value.timed_out:
                self._store.set(self._key("failed", 0), str(self.rank))
        except Exception as error:
            raise VerifyError(f"the store of the process group does not respond: {sentence_of(error)}") from error

    def receive(self, kind: str, rank: int, until: float) -> Any:
        """Returns the value of a rank. `until` is the end of the wait by `time.monotonic`.

        Raises `VerifyError` if the rank has not written it by then, or if the store does not respond.
        """
        if self._store is None:
            return pickle.loads(self._own[kind])
        try:
            self._wait(self._key(kind, rank, "count"), until)
            return pickle.loads(b"".join(self._store.get(key) for key in self._pieces(kind, rank)))
        except Exception as error:
            self._silent.add(rank)
            raise VerifyError(
                f"rank {rank} has not sent its {kind} in time: its process has ended, it hangs, or it does not call verify "
                f"({sentence_of(error)})",
                rank=rank,
                timed_out=True,
            ) from error

    def has(self, kind: str, rank: int) -> bool:
        """Returns whether a rank has written its value. Raises the store's error if it does not respond."""
        return bool(self._store.check([self._key(kind, rank, "count")]))

    def failed(self) -> int | None:
        """Returns a rank that has published an error of its own; None if there is none."""
        key = self._key("failed", 0)
        try:
            return int(self._store.get(key)) if self._store is not None and self._store.check([key]) else None
        except Exception:
            return None  # The next message says that the store does not respond.

    def close(self) -> None:
        """Removes the messages when all ranks have read them. Rank 0 waits for the other ranks, at most `STAY_S` seconds."""
        if self._store is None:
            return
        until = time.monotonic() + min(STAY_S, self.deadline_s)
        ranks = [rank for rank in range(self.ranks) if rank not in self._silent]
        try:
            self._store.set(self._key("done", self.rank), "")
            if self.rank != 0:
                return
            for rank in ranks:
                self._wait(self._key("done", rank), until)
            for rank in range(self.ranks):
                for kind in ("check", "record", "report"):
                    for key in (*self._pieces(kind, rank), self._key(kind, rank, "count")):
                        self._store.delete_key(key)
                self._store.delete_key(self._key("done", rank))
            self._store.delete_key(self._key("failed", 0))
        except Exception:
            return  # A rank is late or lost. The result of this rank does not depend on it.

    def _wait(self, key: str, until: float) -> None:
        self._store.wait([key], timedelta(seconds=max(until - time.monotonic(), 0.01)))

    def _pieces(self, kind: str, rank: int) -> list[str]:
        """Returns the keys of the pieces of a value; none if it has not been written."""
        count = self._key(kind, rank, "count")
        written = int(self._store.get(count)) if self._store.check([count]) else 0
        return [self._key(kind, rank, index) for index in range(written)]

    def _key(self, kind: str, rank: int, part: object = "") -> str:
        return f"pipewright/{self._name}/{kind}/{rank}/{part}"
