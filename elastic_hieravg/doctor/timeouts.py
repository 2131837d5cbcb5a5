"""Whether what a job is told contradicts itself: times against times, variables that nobody reads. Pure."""

import difflib
import re
from collections.abc import Collection, Iterator, Mapping

from elastic_hieravg.doctor.findings import Finding, absent, note, ok, warning

# What an agent needs of its grace to leave and to end its workers: LEAVE_S and STOP_TIMEOUT_S of the agent.
LEAVING_S = 5.0
LEASE_LONG_S = 60.0
# A hang is ten times the slowest step, where nobody says otherwise.
HANG_STEPS = 10.0
JOIN_MIN_S = 60.0
PREFIXES = ("HIERAVG_", "PET_")
# Kubernetes adds these for every service of a namespace, under the service's name.
_SERVICE = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")


def check_timeouts(
    *,
    lease_ttl_s: float,
    grace_s: float,
    hang_timeout_s: float | None,
    join_timeout_s: float,
    step_s: float | None,
) -> Iterator[Finding]:
    """`step_s`: how long a step takes, if that is known."""
    yield _lease(lease_ttl_s)
    yield _grace(grace_s, lease_ttl_s=lease_ttl_s)
    yield _hang(hang_timeout_s, lease_ttl_s=lease_ttl_s, step_s=step_s)
    yield _join(join_timeout_s, lease_ttl_s=lease_ttl_s)


def _lease(lease_ttl_s: float) -> Finding:
    found = f"{lease_ttl_s:g} s: so long the others wait for a node that is frozen or cut off"
    if lease_ttl_s > LEASE_LONG_S:
        return warning("lease", found, "take 3 to 10 s for --lease-ttl-s")
    return ok("lease", found)


def _grace(grace_s: float, *, lease_ttl_s: float) -> Finding:
    left_s = grace_s - LEAVING_S
    if left_s <= 0:
        found = f"{grace_s:g} s, and {LEAVING_S:g} s of it go into leaving: no round is waited for"
        return warning("grace", found, "take 25 s for --grace-s, so that the others get this node's last steps")
    found = f"{grace_s:g} s, {left_s:g} s of it for a last round"
    if left_s < lease_ttl_s:
        advice = f"take more than {lease_ttl_s + LEAVING_S:g} s for --grace-s"
        return warning("grace", f"{found}; a lost node alone holds a round up for {lease_ttl_s:g} s", advice)
    return ok("grace", found)


def _hang(hang_timeout_s: float | None, *, lease_ttl_s: float, step_s: float | None) -> Finding:
    if hang_timeout_s is None:
        return ok("hang timeout", "follows the worker's own steps, at least 30 s")
    found = f"{hang_timeout_s:g} s"
    if step_s is not None and hang_timeout_s < HANG_STEPS * step_s:
        advice = (
            f"take {max(HANG_STEPS * step_s, lease_ttl_s):.3g} s or more for --hang-timeout-s, or leave it out"
        )
        return warning("hang timeout", f"{found}, with steps of {step_s:.3g} s: a slow one is killed", advice)
    if hang_timeout_s < lease_ttl_s:
        advice = (
            f"take more than {lease_ttl_s:g} s for --hang-timeout-s: workers are killed for less than nodes"
        )
        return warning("hang timeout", f"{found}, below the lease of {lease_ttl_s:g} s", advice)
    return ok("hang timeout", found)


def _join(join_timeout_s: float, *, lease_ttl_s: float) -> Finding:
    found = f"{join_timeout_s:g} s: so long a job waits that has too few nodes"
    if join_timeout_s < max(JOIN_MIN_S, 2 * lease_ttl_s):
        advice = "take 600 for join_timeout in --rdzv-conf: a machine that starts anew takes minutes"
        return warning("join timeout", found, advice)
    return ok("join timeout", found)


def check_bounds(*, nodes_min: int, nodes_max: int, num_endpoints: int | None) -> Finding:
    """`num_endpoints`: where the embedded store may be asked for; None for etcd."""
    found = f"{nodes_min} to {nodes_max}" if nodes_min != nodes_max else f"{nodes_min}"
    if nodes_max == 1:
        return ok("nodes", found)
    if nodes_min == nodes_max:
        return note("nodes", found, "one that is lost holds the job up: give --nnodes MIN:MAX")
    if num_endpoints == 1:
        advice = "name two or three nodes in --rdzv-endpoint, so that a node that comes later finds the job"
        return note("nodes", f"{found}, and one endpoint", advice)
    return ok("nodes", found)


def check_variables(environment: Mapping[str, str], *, known: Collection[str]) -> Iterator[Finding]:
    """Variables with our prefixes that nothing reads. `known`: those that something does."""
    ours = sorted(name for name in environment if name.startswith(PREFIXES))
    strange = [name for name in ours if name not in known and not _SERVICE.fullmatch(name)]
    for name in strange:
        nearest = difflib.get_close_matches(name, sorted(known), n=1)
        advice = f"is it {nearest[0]}?" if nearest else "take it away, or correct its name"
        yield warning("variables", f"{name} is set, and nothing reads it", advice)
    if not ours:
        yield absent("variables", "none")
    elif not strange:
        yield ok("variables", f"{', '.join(ours)}")
