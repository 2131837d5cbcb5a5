"""How the workers of one attempt meet at torchrun's store, whoever used it before them.

torchrun's store may outlive an attempt, and what is in it may be another attempt's. So rank 0 writes a fresh
word; everybody who reads it answers with a word of its own under that key; and rank 0 publishes all answers. A
rank believes only what has its own word in it. Invariant: nothing that an earlier attempt wrote is ever taken
for this one's, and all further keys stand under a name that no other attempt has.
"""

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from elastic_hieravg.config import Asked
from elastic_hieravg.errors import MembershipError, Problem, TopologyError, UsageError
from elastic_hieravg.plan import Hierarchy, Misfit, Node, Plan, Topology, fit

# Workers start together, but one may import for longer than another.
MEET_TIMEOUT_S = 600.0
POLL_S = 0.01
POLL_MAX_S = 0.2
BEGIN = "hieravg/begin"


@dataclass(frozen=True, slots=True)
class Attendant:
    """What a worker says of itself. `seen`: the highest generation that its node remembers.

    `local_rank`: its place in its group, which is known once all have met. LOCAL_RANK need not say it: with
    torchrun's virtual local ranks that is 0 for everybody.
    """

    rank: int
    group_rank: int
    local_rank: int
    slots: int
    node_name: str
    labels: dict[str, str]
    address: str
    seen: int


@dataclass(frozen=True, slots=True)
class Meeting:
    """Everybody of an attempt, in the order of torchrun's ranks. `name` is this attempt's alone."""

    name: str
    attendants: tuple[Attendant, ...]

    @property
    def generation(self) -> int:
        """One more than anybody has seen."""
        return 1 + max(attendant.seen for attendant in self.attendants)

    def node_ids(self) -> dict[int, str]:
        """A name for each of torchrun's groups; agents of one host that say the same get their number too."""
        firsts = {each.group_rank: each.node_name for each in self.attendants if each.local_rank == 0}
        names = list(firsts.values())
        return {group: name if names.count(name) == 1 else f"{name}-{group}" for group, name in firsts.items()}

    def plan(self, asked: Asked) -> Plan:
        """The plan of this attempt. A node's first worker speaks for it."""
        node_ids = self.node_ids()
        nodes = [
            Node(node_ids[each.group_rank], each.slots, each.labels, self.name)
            for each in self.attendants
            if each.local_rank == 0
        ]
        plan = fit(
            Hierarchy.parse(asked.hierarchy),
            Topology(nodes),
            generation=self.generation,
            warmup_steps=asked.warmup_steps,
            on_misfit=asked.on_misfit,
        )
        if isinstance(plan, Misfit):
            raise TopologyError(Problem(plan.reason, plan.hint))
        return plan

    def addresses(self) -> dict[str, str]:
        node_ids = self.node_ids()
        return {node_ids[each.group_rank]: each.address for each in self.attendants if each.local_rank == 0}

    def rank_in(self, plan: Plan, *, group_rank: int, local_rank: int) -> int:
        """The rank in the plan, whose order may be another than torchrun's."""
        return plan.topology.ranks_of(self.node_ids()[group_rank])[local_rank]


def meet(store: Store, me: Attendant, *, world_size: int, timeout_s: float = MEET_TIMEOUT_S) -> Meeting:
    """Wait for everybody of this attempt; `MembershipError` if somebody does not come."""
    deadline_s = time.monotonic() + timeout_s
    word = secrets.token_hex(16)
    answer = json.dumps({"word": word, **asdict(me)})
    try:
        if me.rank == 0:
            return _call(store, answer, world_size=world_size, deadline_s=deadline_s)
        return _follow(store, me.rank, word, answer, deadline_s=deadline_s)
    except RuntimeError as exc:
        raise did_not_meet(str(exc)) from exc


def did_not_meet(why: str) -> MembershipError:
    return MembershipError(
        Problem(
            f"the workers of this attempt did not meet: {why.splitlines()[0] if why else 'no reason given'}",
            "with --rdzv-backend=c10d set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, else a restart "
            "may look for the store of a lost node; --rdzv-backend=etcd3 and `hieravg run` need no setting",
        )
    )


def exchange(
    store: Store, meeting: Meeting, key: str, text: str, *, rank: int, timeout_s: float = MEET_TIMEOUT_S
) -> list[str]:
    """Everybody's text, by torchrun's rank."""
    own = attempt_store(store, meeting)
    keys = [f"{key}/{each.rank}" for each in meeting.attendants]
    try:
        own.set(f"{key}/{rank}", text)
        own.wait(keys, timedelta(seconds=timeout_s))
        return [bytes(value).decode() for value in own.multi_get(keys)]
    except RuntimeError as exc:
        raise did_not_meet(str(exc)) from exc


def attempt_store(store: Store, meeting: Meeting) -> PrefixStore:
    """Keys that no other attempt has."""
    return PrefixStore(f"hieravg/{meeting.name}", store)


def check_alike(asked: Sequence[str]) -> None:
    """All ranks have to ask for the same."""
    for rank, other in enumerate(asked):
        if other != asked[0]:
            raise UsageError(
                Problem(
                    f"rank 0 asks for {asked[0]} and rank {rank} for {other}",
                    "give every node the same --hierarchy, --warmup-steps and --on-misfit, "
                    "or the same HIERAVG_ variables",
                )
            )


def _call(store: Store, answer: str, *, world_size: int, deadline_s: float) -> Meeting:
    """Rank 0: write a fresh word, and publish what everybody answers to it."""
    name = secrets.token_hex(16)
    keys = [f"hieravg/{name}/answer/{rank}" for rank in range(world_size)]
    store.set(keys[0], answer)
    store.set(BEGIN, name)
    store.wait(keys, timedelta(seconds=max(0.001, deadline_s - time.monotonic())))
    answers = [bytes(value).decode() for value in store.multi_get(keys)]
    store.set(f"hieravg/{name}/agreed", json.dumps(answers))
    return _read(name, answers)


def _follow(store: Store, rank: int, word: str, answer: str, *, deadline_s: float) -> Meeting:
    """Answer to every word of rank 0 until one was heard: the first that is found may be an old one."""
    answered, nap_s = "", POLL_S
    while True:
        left = timedelta(seconds=max(0.001, deadline_s - time.monotonic()))
        store.wait([BEGIN], left)
        name = bytes(store.get(BEGIN)).decode()
        if name != answered:
            store.set(f"hieravg/{name}/answer/{rank}", answer)
            answered = name
        if store.check([f"hieravg/{name}/agreed"]):
            answers = json.loads(bytes(store.get(f"hieravg/{name}/agreed")).decode())
            if rank < len(answers) and json.loads(answers[rank])["word"] == word:
                return _read(name, answers)
        if time.monotonic() > deadline_s:
            raise RuntimeError("rank 0 did not answer in time")
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, POLL_MAX_S)


def _read(name: str, answers: Sequence[str]) -> Meeting:
    attendants: list[Attendant] = []
    for rank, text in enumerate(answers):
        said = json.loads(text)
        del said["word"]
        before = [each for each in attendants if each.group_rank == said["group_rank"]]
        attendant = Attendant(**{**said, "local_rank": len(before)})
        assert attendant.rank == rank, "a rank answers for itself"
        attendants.append(attendant)
    return Meeting(name, tuple(attendants))
