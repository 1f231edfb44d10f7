"""`gradwatch run`: watch a Lightning script without editing it.

The script gets an interpreter of its own rather than `runpy` in this one. So it is `__main__` as if it had been started
by hand: the launcher of `ddp` starts it again, spawned workers import it again, pickles find its classes, and its exit
code is its own, also where it calls `os._exit` or is killed. This process waits, passes signals on, and reads what
the watches have reported.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from importlib.machinery import BuiltinImporter, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwatch.cli.command import ALERTS, MISUSE, OK, complain, help_text

if TYPE_CHECKING:
    from gradwatch.sinks.process_report import ProcessSummary

SEVERITIES = ("warning", "error")

FORWARDED_SIGNALS = [
    signal.Signals[name]
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    if name in signal.Signals.__members__
]
"""Signals of schedulers and users. Slurm announces the end of a job with SIGUSR1, which Lightning handles."""

SIGNAL_EXIT = 128
"""Added to the number of the signal that ended the script, as in a shell."""


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        usage="gradwatch run [--every N] [--fail-on {warning,error}] (SCRIPT.py | -m MODULE) [ARGUMENT ...]",
        help="watch a Lightning script without editing it",
        **help_text(
            "Run a script as `python SCRIPT.py ARGUMENT ...` would, with a GradWatch in every Trainer it makes, of "
            "lightning or pytorch_lightning. Its output and its exit code stay its own. A Trainer that has a GradWatch "
            "already is watched by that one alone, with the options it was given.",
            examples={
                "gradwatch run train.py --lr 0.1": "what follows the script is the script's",
                "gradwatch run --every 10 -m project.train": "a module; measure every tenth step",
                "gradwatch run --fail-on error train.py": "for CI: fail where a run is lost",
            },
            exits={
                "any": "the script's own; 128 + n where signal n ended it",
                "1": "with --fail-on, if the script's was 0: there was such an alert",
                "2": "there is no such script; or with --fail-on, if the script's was 0: nothing was watched",
            },
        ),
    )
    parser.add_argument(
        "--every", metavar="N", type=_interval, help="steps between measurements, or auto: as the budget allows"
    )
    parser.add_argument(
        "--fail-on", choices=SEVERITIES, help="exit with 1 after an alert that is as bad as this, or worse"
    )
    parser.add_argument(
        "-m", dest="module", metavar="MODULE", nargs=argparse.REMAINDER, help="a module, as `python -m MODULE` would"
    )
    parser.add_argument("script", metavar="SCRIPT.py", nargs="?", type=Path, help="the script")
    parser.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="what it is given")
    parser.set_defaults(run=run)


def separated(arguments: Sequence[str]) -> list[str]:
    """`arguments` of the command line with a space after an `-m` of ours: of `-mproject.train --every 3` argparse would
    take `--every 3` from the module.
    """
    found = list(arguments)
    if found[:1] != ["run"]:
        return found
    for place, argument in enumerate(found[1:], 1):
        if argument.startswith("-m") and argument != "-m":
            return [*found[:place], "-m", argument[2:], *found[place + 1 :]]
        if not argument.startswith("-") and found[place - 1] not in ("--every", "--fail-on"):
            break  # the script; what follows is its own
    return found


def run(options: argparse.Namespace) -> int:
    from gradwatch.core.alert import Severity
    from gradwatch.lightning.autoload import EVERY_VARIABLE, WATCH_VARIABLE
    from gradwatch.sinks.process_report import REPORT_VARIABLE, summarize

    wrong = _misuse(options)
    if wrong:
        return complain("run", wrong)
    what = ["-m", *options.module] if options.module else [str(options.script), *options.arguments]
    name = options.module[0] if options.module else str(options.script)
    with tempfile.TemporaryDirectory(prefix="gradwatch-") as folder:
        path = Path(folder) / "processes"
        path.touch()
        ours = {WATCH_VARIABLE: "1", REPORT_VARIABLE: str(path), EVERY_VARIABLE: options.every or ""}
        code = launched([sys.executable, *what], {**os.environ, **ours})
        known = summarize(path)
    if not known.fits and code <= SIGNAL_EXIT:
        complain("run", f"{name} {_unwatched(known, code)}")
    if code or options.fail_on is None:
        return code
    if not known.fits:
        return MISUSE
    severity = Severity(options.fail_on)
    bad = known.at_least(severity)
    if not bad:
        return OK
    worse = " or worse" * (severity is Severity.WARNING)
    complain("run", f"{bad} alert{'s' * (bad > 1)} of severity {severity}{worse} in {name}")
    return ALERTS


def launched(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """The exit code of `command`, to which signals are passed on while it runs."""
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, _: object) -> None:
        if child is None:
            early.append(number)
        elif number != signal.SIGINT or not _in_front():  # the terminal has sent it Ctrl-C itself
            child.send_signal(number)

    main = threading.current_thread() is threading.main_thread()
    # what is ignored, as under nohup, is so in the script too
    passed = [number for number in FORWARDED_SIGNALS if main and signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in passed}
    try:
        child = subprocess.Popen(command, env=environment)
        for number in early:
            child.send_signal(number)
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else SIGNAL_EXIT - code


def _in_front() -> bool:
    """Whether this process is in the foreground of a terminal, whose keys then reach the script as well."""
    if sys.platform == "win32":
        return True
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _misuse(options: argparse.Namespace) -> str:
    """Why there is nothing to run; empty where there is."""
    script: Path | None = options.script
    if options.module is not None:
        if not options.module:
            return "-m wants the name of a module"
        top = options.module[0].partition(".")[0]
        if BuiltinImporter.find_spec(top) or PathFinder.find_spec(top, [os.getcwd(), *sys.path]):
            return ""
        return f"there is no module {top}, neither here nor installed"
    if script is None:
        return "give a script, or -m and a module; `gradwatch run --help` says more"
    if script.is_dir() and not (script / "__main__.py").is_file():
        return f"{script} is a folder, without a __main__.py"
    return "" if script.exists() else f"there is no script {script}"


def _unwatched(known: ProcessSummary, code: int) -> str:
    if known.failure:
        return f"was not watched: {known.failure}"
    if known.trainers:
        return "was not watched: its Trainer began no fit that can be"
    if code:  # what a script that did not fail would have made is not known
        return f"was not watched: it ended with exit code {code}, and made no Trainer"
    return (
        "was not watched: it made no Trainer of lightning or pytorch_lightning. A loop of your own is watched by "
        "`gradwatch.Watch`"
    )


def _interval(text: str) -> str:
    if text != "auto" and not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps; give 1 or more, or auto")
    return text
