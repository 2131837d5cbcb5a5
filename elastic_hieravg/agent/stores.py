"""The store of `hieravg run`: etcd, or one that the agents serve among themselves."""

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from elastic_hieravg.agent.settings import Embedded
from elastic_hieravg.membership.etcd import EtcdKeyValue
from elastic_hieravg.membership.etcd_client import EtcdSettings
from elastic_hieravg.membership.failover import FailoverKeyValue
from elastic_hieravg.membership.kv import KeyValue
from elastic_hieravg.membership.messages import Candidate

_log = logging.getLogger(__name__)


@contextmanager
def open_store(
    store: Embedded | EtcdSettings, candidate: Candidate, *, run_id: str
) -> Iterator[tuple[KeyValue, Candidate]]:
    """The store, and the candidate as others have to know it."""
    if isinstance(store, EtcdSettings):
        _log.info("looking for run %s in etcd at %s", run_id, ", ".join(store.endpoints))
        with closing(EtcdKeyValue(store)) as etcd:
            yield etcd, candidate
        return
    endpoints = ((store.host, store.port), *store.others)
    if store.port:
        shown = ", ".join(f"{host}:{port}" for host, port in endpoints)
        _log.info("looking for run %s at %s; the first of these nodes begins it", run_id, shown)
    kv = FailoverKeyValue(endpoints, run_id=run_id, address=candidate.address, report=_frozen)
    with closing(kv):
        yield kv, replace(candidate, standby=kv.port)


def _frozen(why: str) -> None:
    _log.error("%s", why)
