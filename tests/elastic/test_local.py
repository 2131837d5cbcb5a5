"""What an agent and its workers tell each other: every message there and back, and nothing else."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_hieravg.membership.frames import Decoder, FrameError, encode
from elastic_hieravg.membership.local import (
    Broken,
    Bye,
    Drain,
    Drained,
    Entered,
    Fence,
    Follow,
    FromAgent,
    FromWorker,
    Hello,
    Progress,
    Raised,
    Ready,
    Stop,
    from_message,
    to_message,
)

KINDS = (Hello, Ready, Entered, Broken, Progress, Drained, Raised, Bye, Follow, Fence, Drain, Stop)
messages = st.one_of([st.builds(kind) for kind in KINDS])


@given(message=messages)
def test_every_message_goes_there_and_back(message: FromWorker | FromAgent) -> None:
    (arrived,) = Decoder().feed(encode(to_message(message)))
    assert from_message(arrived) == message


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"kind": "Shout"},
        {"kind": None},
        {"kind": ["Ready"]},
        {"kind": "Ready", "more": 1},
        {"kind": "Entered"},
        {"kind": "Entered", "number": "7"},
        {"kind": "Entered", "number": 7.0},
        {"kind": "Entered", "number": True},
        {"kind": "Progress", "step": 1, "is_excused": 1},
        {"kind": "Hello", "token": "x", "local_rank": None, "process_id": 1},
    ],
)
def test_everything_else_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(FrameError):
        from_message(message)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists, max_leaves=3
)


@given(message=st.dictionaries(st.sampled_from(["kind", "number", "step", "text"]) | st.text(), values))
def test_whatever_arrives_is_a_message_or_an_error(message: dict[str, Any]) -> None:
    try:
        assert isinstance(from_message(message), KINDS)
    except FrameError:
        return
