"""The values of the key-value seam as JSON messages, and back. Used by the embedded store's two ends.

Invariant: what does not read as the value it should be raises, and never passes for something else.
"""

import math
from collections.abc import Mapping
from typing import Any

from elastic_hieravg.errors import Problem, StoreAwayError
from elastic_hieravg.membership.frames import FrameError
from elastic_hieravg.membership.kv import Changes, Entry, Put, Snapshot, Write


def write_message(write: Write) -> dict[str, Any]:
    return {
        "guards": dict(write.guards),
        "puts": [[put.key, put.value, put.lease_id] for put in write.puts],
        "deletes": list(write.deletes),
    }


def read_write(message: Mapping[str, Any]) -> Write:
    return Write(
        {str(key): int(revision) for key, revision in message["guards"].items()},
        tuple(Put(str(key), str(value), int(lease_id)) for key, value, lease_id in message["puts"]),
        tuple(map(str, message["deletes"])),
    )


def read_ttl_s(message: Mapping[str, Any]) -> float:
    ttl_s = float(message["ttl_s"])
    if not 0 < ttl_s < math.inf:
        raise FrameError(f"a lease of {ttl_s} s is none")
    return ttl_s


def entry_message(entry: Entry | None) -> list[Any] | None:
    return None if entry is None else [entry.value, entry.revision, entry.lease_id]


def read_entry(value: Any) -> Entry:
    text, revision, lease_id = value
    return Entry(str(text), int(revision), int(lease_id))


def snapshot_message(snapshot: Snapshot) -> dict[str, Any]:
    entries = {key: entry_message(entry) for key, entry in snapshot.entries.items()}
    return {"entries": entries, "revision": snapshot.revision}


def read_snapshot(message: Mapping[str, Any]) -> Snapshot:
    entries = {str(key): read_entry(entry) for key, entry in message["entries"].items()}
    return Snapshot(entries, int(message["revision"]))


def changes_message(changes: Changes) -> dict[str, Any]:
    told = [[key, entry_message(entry)] for key, entry in changes.changes]
    return {"changes": told, "revision": changes.revision}


def read_update(message: Mapping[str, Any]) -> Snapshot | Changes:
    if "entries" in message:
        return read_snapshot(message)
    changes = tuple(
        (str(key), None if entry is None else read_entry(entry)) for key, entry in message["changes"]
    )
    return Changes(changes, int(message["revision"]))


def raise_if_away(answer: Mapping[str, Any]) -> None:
    if "away" in answer:
        raise StoreAwayError(Problem(str(answer["away"]), "training goes on; the membership waits"))
