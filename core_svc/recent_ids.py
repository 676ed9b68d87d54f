"""A bounded memory of request keys that expire."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Generic, TypeVar

from core_svc.request import RequestKey

T = TypeVar("T")


class RecentIds(Generic[T]):
    """Request keys seen lately, each with a value; the oldest go when there are too many, and all after ttl_s."""

    def __init__(self, ttl_s: float, capacity: int) -> None:
        self._ttl_s = ttl_s
        self._capacity = capacity
        self._entries: OrderedDict[RequestKey, tuple[float, T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: RequestKey) -> bool:
        self._expire()
        return key in self._entries

    def add(self, key: RequestKey, value: T) -> None:
        """Remembers a key; a key that is known already keeps its first value and time."""
        self._expire()
        self._entries.setdefault(key, (time.monotonic() + self._ttl_s, value))
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def pop(self, key: RequestKey) -> T | None:
        """Forgets a key; its value, or None."""
        self._expire()
        entry = self._entries.pop(key, None)
        return None if entry is None else entry[1]

    def forget_frontend(self, frontend_incarnation: str) -> None:
        """Forgets all keys of a frontend."""
        for key in [key for key in self._entries if key[0] == frontend_incarnation]:
            del self._entries[key]

    def _expire(self) -> None:
        now = time.monotonic()
        while self._entries:
            key, (expiry, _) = next(iter(self._entries.items()))
            if expiry > now:
                return
            del self._entries[key]
