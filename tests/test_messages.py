"""Every error and warning a user can meet is listed in `messages.txt`, and follows the rules of the house.

To write the list anew after a change: `pytest tests/test_messages.py --regenerate`, then read the diff as
somebody would who has just met that message.
"""

import re
from pathlib import Path

import pytest

from tests.messages import HANDED_ON, VALUE, Message, listing, messages_of

PACKAGE = Path(__file__).parent.parent / "elastic_hieravg"
LIST = Path(__file__).with_name("messages.txt")
MESSAGES = messages_of(PACKAGE)
OWN = [message for message in MESSAGES if not HANDED_ON.fullmatch(message.text)]
PROBLEMS = [message for message in OWN if message.kind == "problem"]
TEXT_MAX, HINT_MAX = 220, 240
# A hint begins with what to do.
VERBS = {
    *(
        "add",
        "ask",
        "build",
        "call",
        "check",
        "choose",
        "connect",
        "convert",
        "correct",
        "create",
        "end",
        "give",
        "have",
    ),
    *("install", "keep", "leave", "let", "load", "look", "make", "map", "mount", "move", "name", "open", "put"),
    *(
        "raise",
        "read",
        "remove",
        "report",
        "run",
        "say",
        "see",
        "set",
        "start",
        "stop",
        "take",
        "tie",
        "use",
        "wait",
    ),
    "write",
}
# There is nothing to do: it is being done.
NOTHING_TO_DO = {
    "it goes on when the store is back",
    "it is begun again",
    "training goes on; the membership waits",
}
# These say all there is without a value.
WITHOUT_VALUES = {
    "a snapshot has another version",
    "an error in elastic_hieravg: metrics are not complete from here on; training goes on",
    (
        "something in this process loaded protobuf before elastic_hieravg could, and etcd3 needs protobuf's "
        "pure-Python implementation"
    ),
    "the generation's record has not one address for each member",
    "the hierarchy has no levels",
    "the hierarchy is empty",
    "job.averager() was called twice",
    "job.averager() was called outside of the job's `with` block",
    "the job's record has another on_misfit than this version knows",
    "the others' optimizer state could not be averaged: this rank begins without any",
    "the snapshots that this node kept are of another model or optimizer, and are not used",
    "the store answers again",
    "the store is new, and waits a moment to hear whether the job runs elsewhere",
    "the store was closed",
    "the store's client was closed",
    "an error in elastic_hieravg ended the thread that follows the membership",
    "there are no nodes",
    "--rdzv-conf has cert and no cacert",
    "the hierarchy has a comma without a level",
    "there is no --rdzv-endpoint",
    "there is no run id",
    "there is nothing to average",
    "this node was out of the job; its workers share a process group, so all start anew",
    "the others did not hear from this node in time and took it out of the job; it joins again",
    "this worker's agent is gone; the worker ends",
    "--nnodes-file cannot be used with --membership restart",
    "--no-python and --module are both given",
    "--nproc-per-node is 'gpu', and torch finds no GPU here",
}
# torch's own words, for whoever changes from its averagers to ours.
OF_TORCH = {"Loaded state dict does not contain a step counter for an averager. Setting step counter to 0."}
UNKIND = re.compile(
    r"\b(please|sorry|oops|simply|just|invalid|illegal|bad|unexpected|something went wrong|unknown error|"
    r"see (the )?inner|fatal|abort(ed)?|failed to)\b",
    re.IGNORECASE,
)


def test_the_list_of_messages_is_what_the_source_says(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--regenerate"):
        LIST.write_text(listing(MESSAGES))
    assert LIST.read_text() == listing(MESSAGES)


def test_most_messages_are_found_in_their_own_words() -> None:
    assert len(OWN) > 200
    assert len(MESSAGES) - len(OWN) < 20


def test_messages_and_hints_read_as_the_style_says() -> None:
    texts = {text for message in OWN for text in (message.text, message.hint)} - OF_TORCH
    for text in texts:
        words = VALUE.sub("", text)
        assert not text.endswith((".", "!", ":", " ", ",")), text
        assert "!" not in words, text
        assert not UNKIND.search(words), text
        assert "  " not in text, text
        assert text == text.strip(), text


def test_messages_and_hints_are_short() -> None:
    assert not [message for message in OWN if len(message.text) > TEXT_MAX or len(message.hint) > HINT_MAX]


def test_a_message_begins_small_or_with_a_name() -> None:
    """It stands in the middle of others: after a program's name, a time, a number."""
    for message in OWN:
        first = re.split(r"[\s:,.]", message.words, maxsplit=1)[0]
        assert message.text in OF_TORCH or not re.fullmatch(r"[A-Z][a-z]+", first), message.text


def test_a_message_says_what_was_found() -> None:
    silent = {message.text for message in OWN if not message.has_values}
    assert silent == WITHOUT_VALUES | OF_TORCH, "a message says the values, or is listed as one that has none"


def test_a_hint_says_what_to_do() -> None:
    for message in PROBLEMS:
        if HANDED_ON.fullmatch(message.hint) or message.hint in NOTHING_TO_DO:
            continue
        # A condition may come before it.
        first = message.hint.removeprefix("with --rdzv-backend=c10d ").split()[0]
        assert first in VERBS, message.hint
        assert "?" not in message.hint
    assert {message.hint for message in PROBLEMS} >= NOTHING_TO_DO


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('raise UsageError(Problem(f"{x!r} is not one", "take 1"))', ("problem", "{x} is not one", "take 1")),
        ('_log.warning("lost %s", name)', ("warning", "lost %s", "")),
        ('def f():\n    why = f"gone: {x}"\n    _log.error("%s", why)', ("error", "gone: {x}", "")),
        (
            'def _warn(self, text):\n    _log.warning("%s", text)\nself._warn("no room")',
            ("warning", "no room", ""),
        ),
        ('A = "a hint"\nProblem("x" if y else "z", A)', ("problem", "x", "a hint")),
        ('warnings.warn("slow", RuntimeWarning)', ("warning", "slow", "")),
    ],
)
def test_messages_are_found_however_they_are_written(
    tmp_path: Path, code: str, found: tuple[str, str, str]
) -> None:
    (tmp_path / "module.py").write_text(code)
    assert Message("module.py", *found) in messages_of(tmp_path)
