"""The store through which the ranks of a generation find each other, as a torch store over our own.

It is served by a member's agent. torch's own TCPStore is not used: where no name server answers, 12 of 150 of
its connections took 5 s, as long as a failed reverse lookup takes there.
Invariant: every call ends at its deadline, or as soon as `is_over` says that nobody needs it any more.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from os.path import commonprefix

from torch.distributed import Store

from elastic_hieravg.errors import StoreError
from elastic_hieravg.membership.kv import ABSENT, Entry, KeyValue, Put, Write

TIMEOUT_S = 30.0
# Keys are needed while groups are built and everybody says where it stands, and are gone some time after.
KEYS_TTL_S = 1800.0
# How often a key is looked for that is not there yet: soon at first, then less often.
POLL_S = 0.002
POLL_MAX_S = 0.02


class GroupStore(Store):
    """`kv` reaches the agent that serves; `prefix` is one generation's own."""

    def __init__(self, kv: KeyValue, prefix: str, *, is_over: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self._kv = kv
        self._prefix = prefix
        self._is_over = is_over
        self._lease_id = kv.grant(KEYS_TTL_S)

    def set(self, key: str, value: str | bytes) -> None:
        text = value if isinstance(value, str) else bytes(value).hex()
        # The first letter tells text from bytes: torch hands over either.
        self._put(key, f"{'t' if isinstance(value, str) else 'x'}{text}")

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self.await_all(list(keys), timeout_s=TIMEOUT_S)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self.await_all(list(keys), timeout_s=TIMEOUT_S if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        return len(self._look_for(list(keys))) == len(set(keys))

    def add(self, key: str, amount: int) -> int:
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            name = self._prefix + key
            entry = self._entries(name).get(name)
            number = (int(entry.value[1:]) if entry else 0) + amount
            put = Put(name, f"t{number}", self._lease_id)
            if self._kv.write(Write({name: entry.revision if entry else ABSENT}, (put,))) is not None:
                return number
        raise RuntimeError(f"{key} was not counted in time")

    def _put(self, key: str, value: str) -> None:
        try:
            self._kv.write(Write({}, (Put(self._prefix + key, value, self._lease_id),)))
        except StoreError as exc:
            raise RuntimeError(str(exc)) from exc

    def await_all(self, keys: list[str], *, timeout_s: float) -> list[bytes]:
        """What these keys hold, once all are there. torch expects a `RuntimeError` if they are not."""
        deadline_s, nap_s = time.monotonic() + timeout_s, POLL_S
        found: dict[str, bytes] = {}
        while True:
            found |= self._look_for([each for each in keys if each not in found])
            if len(found) == len(set(keys)):
                return [found[key] for key in keys]
            if self._is_over():
                raise RuntimeError("nobody needs this any more")
            if time.monotonic() >= deadline_s:
                raise RuntimeError(f"{next(key for key in keys if key not in found)} was not there in time")
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, POLL_MAX_S)

    def _look_for(self, keys: Sequence[str]) -> dict[str, bytes]:
        """What is there of these keys, read at once."""
        names = {key: self._prefix + key for key in keys}
        # Letter by letter: a prefix of keys is no path.
        entries = self._entries(commonprefix(list(names.values())))  # noqa: RUF071
        return {key: _value(entries[name].value) for key, name in names.items() if name in entries}

    def _entries(self, prefix: str) -> Mapping[str, Entry]:
        try:
            return self._kv.get(prefix).entries
        except StoreError as exc:
            raise RuntimeError(str(exc)) from exc


def _value(text: str) -> bytes:
    return text[1:].encode() if text[0] == "t" else bytes.fromhex(text[1:])
