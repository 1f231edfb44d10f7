"""The `gradwatch` command: a file beside this one for each of its words."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from gradwatch import __version__
from gradwatch.cli import compare, demo, export, ls, report, run, top
from gradwatch.cli.command import INTERRUPTED, MISUSE, OK, complain, help_text

COMMANDS = (demo, run, report, compare, ls, top, export)
"""Each adds its parser and has `run(options)`, which returns the exit code; what it imports, it imports there. `main`
says why a run cannot be read."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = _parser()
    options, unknown = parser.parse_known_args(run.separated(sys.argv[1:] if arguments is None else arguments))
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.command is None:
        parser.print_help()
        return MISUSE
    if isinstance(sys.stdout, TextIOWrapper):  # a redirected one may know few characters
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code: int = options.run(options)
        print(end="", flush=True)
    except BrokenPipeError:  # `| head`: files are written before anything is said, so all that was asked for is done
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
        return OK
    except ValueError as error:
        from gradwatch.runs.files import Unreadable

        if isinstance(error, Unreadable):
            return complain(options.command, error)
        raise
    except OSError as error:  # a folder that may not be looked into, say
        return complain(options.command, f"{error.filename}: {error.strerror}" if error.filename else error)
    except KeyboardInterrupt:
        complain(options.command, "interrupted")
        return INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradwatch",
        **help_text(
            "GradWatch watches the gradients of a PyTorch Lightning training and says which layers' gradients vanish, "
            "explode, die or turn non-finite: since when, why, and what to change. In your own training: "
            "from gradwatch import GradWatch; Trainer(callbacks=[GradWatch()]).",
            examples={
                "gradwatch demo": "see it work",
                "gradwatch run train.py": "watch a script without editing it",
                "gradwatch report lightning_logs/version_3": "the report of a run",
            },
            exits={"0": "it ran", "1": "alerts, with `gradwatch run --fail-on`", "2": "misuse"},
            more="`gradwatch COMMAND --help` says more of one command.",
        ),
    )
    parser.add_argument("--version", action="version", version=f"gradwatch {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for command in COMMANDS:
        command.add(commands)
    for own in (parser, *commands.choices.values()):
        own.set_defaults(parser=own)  # it says what is wrong with its arguments
    return parser
