"""A process group whose peer has died says so in our words, whichever call finds out."""

import os
import signal
import time

import pytest
import torch

from elastic_hieravg.averaging.groups import Group
from elastic_hieravg.errors import PeerLostError
from tests.averaging.ranks import Died, Rank, Ranks

NOTICE_TIMEOUT_S = 10.0


def use_after_peer_died(rank: Rank, operation: str) -> str:
    group = Group(rank.store(), index=rank.rank, peers=rank.peers("a", "b"), timeout_s=30.0)
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline_s = time.monotonic() + NOTICE_TIMEOUT_S
    try:
        # Until gloo has noticed, a call succeeds; from then on the call itself fails.
        while time.monotonic() < deadline_s:
            if operation == "send":
                group.send(torch.zeros(1), to=1, tag=0)
            else:
                group.receive(torch.zeros(1), of=1, tag=0)
            time.sleep(0.01)
    except PeerLostError as exc:
        return str(exc)
    finally:
        group.close()
    return "nothing was raised"


@pytest.mark.parametrize("operation", ["send", "receive"])
def test_a_call_to_a_dead_peer_is_a_lost_peer(ranks: Ranks, operation: str) -> None:
    survivor, victim = ranks.call(use_after_peer_died, operation, world_size=2)
    assert isinstance(victim, Died)
    assert "is lost to its group" in survivor
