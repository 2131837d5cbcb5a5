"""How commands read their flags: one that is not known is told by its own command, with what was meant."""

import argparse
import difflib
from collections.abc import Iterable, Sequence


class Parser(argparse.ArgumentParser):
    """A command's own parser. argparse would leave what is not known to the parser above, which knows less."""

    def parse_known_args(  # type: ignore[override] # argparse overloads it by its namespace
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        # Before a flag that is misspelt is told as one that is missing.
        flags = [word for word in args or () if word.startswith("--") and word != "--"]
        strange = [word for word in flags if word.partition("=")[0] not in self._option_string_actions]
        if not strange:
            found, strange = super().parse_known_args(args, namespace)
        if strange:
            self.error(not_known(strange, self._option_string_actions))
        return found, []


def not_known(words: Sequence[str], flags: Iterable[str]) -> str:
    """What to say of words that are no arguments.

    >>> not_known(["--heirarchy"], ["--hierarchy", "--json"])
    'unrecognized arguments: --heirarchy; did you mean --hierarchy?'
    """
    names = [word.partition("=")[0] for word in words if word.startswith("--")]
    known = sorted(flags)
    meant = [each for name in names for each in difflib.get_close_matches(name, known, n=1)]
    asked = f"; did you mean {' and '.join(meant)}?" if meant else ""
    return f"unrecognized arguments: {' '.join(words)}{asked}"
