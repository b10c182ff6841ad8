"""Defines the command-line flags of `halfstep train`, and their help."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from halfstep.train.config import MODES, SETTINGS, read_file

EPILOG = """\
--help-all lists every setting. A --config file is TOML: one setting per line, by its \
name; text is in quotes. Flags override it. Example:
  data = "posts.csv"
  batch_size = 16
  compile = true
"""


class _FullHelp(argparse.Action):
    """Prints the help with the settings that --help leaves out."""

    const: list[tuple[argparse.Action, str]]
    """Flag of each such setting, and its help."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        for action, text in self.const:
            action.help = text
        parser.print_help()
        parser.exit()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag per setting, in groups, --config, and the modes.

    A flag that is not typed sets no attribute, so that resuming can tell it apart from
    one typed with its default.
    """
    left_out: list[tuple[argparse.Action, str]] = []
    parser.add_argument(
        "--help-all",
        action=_FullHelp,
        nargs=0,
        const=left_out,
        default=argparse.SUPPRESS,
        help=f"show the help of all {len(SETTINGS)} settings and exit",
    )
    groups: dict[str, Any] = {}
    for setting in SETTINGS.values():
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.group)
        more: dict[str, Any] = {"action": "store_true"}
        if setting.type is not bool:
            default = "X" if setting.type is float else "N"
            metavar = setting.placeholder or default
            more = {"type": setting.parse, "metavar": metavar}
        action = groups[setting.group].add_argument(
            setting.flag, default=argparse.SUPPRESS, help=setting.help, **more
        )
        if not setting.everyday:
            left_out.append((action, setting.help))
            action.help = argparse.SUPPRESS
    groups["run"].add_argument(
        "--config",
        type=Path,
        default=argparse.SUPPRESS,
        help="take settings from a TOML file, see below (default: none)",
        metavar="FILE",
    )
    modes = parser.add_argument_group("mode, at most one of")
    mode = modes.add_mutually_exclusive_group()
    for name, text in MODES.items():
        mode.add_argument(f"--{name}", action="store_true", help=text)


def explicit_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings given as flags or in --config, with a policy file inlined."""
    words = vars(arguments)
    settings = read_file(words["config"]) if "config" in words else {}
    settings |= {name: value for name, value in words.items() if name in SETTINGS}
    if settings.get("policy", "").endswith(".toml"):
        from halfstep.policy.rules import Policy  # loads torch, unlike --help

        # The run must not change if the file does.
        settings["policy"] = str(Policy.load(settings["policy"]))
    return settings
