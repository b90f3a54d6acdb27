"""An argparse parser for which wrong usage is a `UserError` with the closest right word, as anywhere else."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from vlmcompress.errors import UserError, closest, did_you_mean


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
        raise UserError(message if message.endswith("?") else f"{message}; see {self.prog} --help")

    def refuse(self, unknown: str, takers: Sequence[str] = (), other: str | None = None) -> NoReturn:
        """Raise `UserError` for an argument that the parser does not know, with what was probably meant.

        Args:
            takers: other verbs that have this flag.
            other: the program that flags behind `--` go to; None: there is none.
        """
        flag = unknown.partition("=")[0]
        flags = [name[2:] for action in self._actions for name in action.option_strings if name.startswith("--")]
        meant = self._meant.get(flag) or [f"--{name}" for name in [closest(flag.lstrip("-"), flags, 0.7)] if name]
        hints = [f"did you mean {' or '.join(repr(name) for name in meant)}?"] if meant else []
        if other:
            hints.append(f"{'Flags' if meant else 'flags'} of {other} go behind --, as in {self.prog} OUT -- {unknown}")
        elif takers and not meant:
            hints.append(f"{' and '.join(takers)} {'have' if len(takers) > 1 else 'has'} it")
        raise UserError(f"{self.prog} takes no '{flag}'; {' '.join(hints) or f'see {self.prog} --help'}")

    def has(self, flag: str) -> bool:
        """Whether a flag is one of the parser's, as shown in its help."""
        return any(flag in action.option_strings for action in self._actions)
