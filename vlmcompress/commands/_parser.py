"""An argparse parser for which wrong usage is a `UserError` with the closest right word, as anywhere else."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from vlmcompress.errors import UserError, did_you_mean


class Parser(argparse.ArgumentParser):
    """Raises `UserError` instead of printing usage and leaving."""

    def __init__(self, **settings: Any):
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **settings)
        self._meant: dict[str, list[str]] = {}

    def add_argument(
        self, *names: Any, aliases: Iterable[str] = (), mistaken_for: Iterable[str] = (), **settings: Any
    ) -> argparse.Action:
        """Add a flag as argparse does.

        Args:
            aliases: other spellings that are taken and not shown: those of other tools, and those that the flag had before.
            mistaken_for: flags of other tools for which messages name this one.
        """
        action = super().add_argument(*names, **settings)
        for alias in aliases:
            self._option_string_actions[alias] = action
        for foreign in mistaken_for:
            self._meant.setdefault(foreign, []).append(action.option_strings[-1])
        return action

    def error(self, message: str) -> NoReturn:
        if found := re.match(r"argument (\S+): invalid choice: '(.*?)' \(choose from (.*)\)", message):
            choices = [choice.strip(" '") for choice in found[3].split(",")]
            where = found[1] if found[1].startswith("-") else self.prog  # a flag has a name that users know
            message = f"{where}: no '{found[2]}'{did_you_mean(found[2], choices)}"
        elif found := re.match(r"argument (\S+): expected one argument", message):
            flag = found[1].rpartition("/")[2]
            message = f"{self.prog}: {flag} needs a value; one that begins with '-' is written {flag}=-..."
        elif found := re.match(r"the following arguments are required: (.*)", message):
            message = f"{self.prog}: missing {found[1]}"
        raise UserError(f"{message}; see {self.prog} --help")

    def refuse(self, unknown: str) -> NoReturn:
        """Raise `UserError` for an argument that the parser does not know, with the flag that is most like it."""
        flag = unknown.partition("=")[0]
        flags = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
        close = difflib.get_close_matches(flag, flags, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"see {self.prog} --help"
        raise UserError(f"{self.prog} takes no '{flag}'; {hint}")
