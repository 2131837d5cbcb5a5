"""The blocks of the README: snippets, commands, configuration, output. Found here, run in `test_readme.py`.

A block is fenced, or indented by four spaces after an empty line. A command may go on over several lines behind
a backslash, and may have a comment behind it.
"""

import re
from dataclasses import dataclass

import yaml

INDENT = "    "
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:\A|(?<=\n\n)) {4}.*\n(?:(?: {4}.*)?\n)*")
# Fences that are run as they are, and compared with what they print.
PLAYED = ("console", "python", "output")
CONFIGURATION = ("yaml", "json")
# What a run printed that takes long and prints other numbers each time; the test of that run compares the rest.
RECORDED = ("text",)
# What changes in a loop: its new side is Python, made of what the whole example below it has.
CHANGED = ("diff",)


@dataclass(frozen=True, slots=True)
class Block:
    """`kind`: the word behind the fence, empty if there is none; `indented` if there is no fence."""

    kind: str
    line: int
    text: str


def blocks_of(text: str) -> list[Block]:
    """In the order in which they stand."""
    found = [Block(match[1], _line_of(text, match.start()), match[2]) for match in FENCED.finditer(text)]
    # What is fenced is not indented, whatever it looks like; lines keep their numbers.
    rest = FENCED.sub(lambda match: "-" + "\n-" * match[0].count("\n"), text)
    assert "```" not in rest, "a fence does not end"
    for match in INDENTED.finditer(rest):
        lines = [line.removeprefix(INDENT) for line in match[0].rstrip("\n").split("\n")]
        found.append(Block("indented", _line_of(rest, match.start()), "\n".join(lines)))
    return sorted(found, key=lambda block: block.line)


def _line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def is_configuration(block: Block) -> bool:
    """Whether it is a document, not commands. A fence that says so has to hold one."""
    if block.kind not in (*CONFIGURATION, "indented"):
        return False
    try:
        document = yaml.safe_load(block.text)
    except yaml.YAMLError:
        assert block.kind == "indented", f"line {block.line}: this is no {block.kind}\n{block.text}"
        return False
    assert block.kind == "indented" or isinstance(document, dict | list), f"line {block.line}: nothing is in it"
    return isinstance(document, dict | list)


def commands_of(block: Block) -> list[str]:
    """Its commands, each on one line, without comments."""
    lines = block.text.replace("\\\n", " ").splitlines()
    bare = (re.sub(r"(^|\s+)#.*$", "", line) for line in lines)
    return [" ".join(line.split()) for line in bare if line.strip()]
