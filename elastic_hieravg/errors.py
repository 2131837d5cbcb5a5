"""Every error of ours, as a tree.

    HierAvgError
    ├── InputError            somebody wrote something we cannot use (exit code 2)
    │   ├── HierarchyError    a hierarchy that contradicts itself
    │   ├── TopologyError     nodes, labels and levels that do not go together
    │   └── UsageError        a flag, a file, or a package that is missing
    ├── DocumentError         a document or record this version does not understand
    ├── StoreError            the store that holds the membership
    │   ├── StoreAwayError    nobody answered in time; what became of a write is not known
    │   ├── StoreDeniedError  it answered no: credentials, certificates, permissions
    │   └── LeaseLostError    a lease is over
    ├── AgentAwayError        nobody who is asked for the status of a job answers
    ├── DemoError             the demo did not get to its end
    ├── MembershipError       this node cannot be in the job, or the job is over
    └── AveragingError        a round that did not happen; no parameter changed
        ├── ParametersError   the tensors of this rank cannot be averaged
        │   └── DifferentTensorsError   ranks bring different tensors; all of them are told
        └── PeerLostError     a rank died, cut the group or did not come; the group is over
            └── InDoubtError  the result is whole here; others may have taken it before the loss

An error carries everything found wrong, not only the first thing, each with its hint.
"""

from collections.abc import Sequence
from dataclasses import dataclass

PROBLEMS_SHOWN_MAX = 10


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing found wrong: what was asked and found, with values, and what to do about it."""

    message: str
    hint: str

    def __str__(self) -> str:
        return f"{self.message}\n\nhint: {self.hint}"


class HierAvgError(Exception):
    """Base of all our errors; `problems` holds everything that was found, in reading order."""

    def __init__(self, *problems: Problem) -> None:
        assert problems, "an error names at least one problem"
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        shown = self.problems[:PROBLEMS_SHOWN_MAX]
        texts = [f"{index}. {problem}" for index, problem in enumerate(shown, start=1)]
        hidden = len(self.problems) - len(shown)
        if hidden:
            texts.append(f"... and {hidden} more")
        return "\n\n".join([f"{len(self.problems)} problems", *texts])


class InputError(HierAvgError):
    """Somebody wrote something we cannot use."""


class HierarchyError(InputError):
    """A hierarchy that contradicts itself, whatever the nodes."""


class TopologyError(InputError):
    """Nodes that contradict each other, or that the hierarchy's levels do not apply to."""


class UsageError(InputError):
    """A flag or a file that cannot be read, or a package that is missing."""


class DocumentError(HierAvgError):
    """A document or record that this version does not understand, or that was altered."""


class StoreError(HierAvgError):
    """The store that holds the membership did not do what it was asked."""


class StoreAwayError(StoreError):
    """Nobody answered in time. A write may have been applied, or may be yet."""


class StoreDeniedError(StoreError):
    """The store answered no: credentials, certificates, permissions. Asking again does not help."""


class LeaseLostError(StoreError):
    """A lease is over, and every key with it."""


class AgentAwayError(HierAvgError):
    """Nobody answered at the address of an agent, or somebody who is none."""


class DemoError(HierAvgError):
    """The demo did not get to its end: a node fell, or something did not happen in time."""


class MembershipError(HierAvgError):
    """This node cannot be in the job as it is, or the job is over."""


class AveragingError(HierAvgError):
    """A round that did not happen; no parameter changed."""


class ParametersError(AveragingError):
    """The tensors of this rank cannot be averaged."""


class DifferentTensorsError(ParametersError):
    """Ranks bring different tensors to a round. Every rank of the group gets this error."""


class PeerLostError(AveragingError):
    """A rank died, cut the group, or did not come in time; the group is over."""


class InDoubtError(PeerLostError):
    """A rank was lost after this one had the whole result: others may have heard everybody's verdict."""


def raise_if_any(error: type[HierAvgError], problems: Sequence[Problem]) -> None:
    """Raise `error` with all `problems`, or return if there are none."""
    if problems:
        raise error(*problems)
