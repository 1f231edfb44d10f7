"""`gradwatch demo`: see it work."""

from __future__ import annotations

import argparse
import io
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradwatch.cli.command import OK, complain, help_text

CASES = (
    *("act_blowup", "bad_head", "collapse", "dead", "disconnected", "divergence", "exploding", "frozen", "input_scale"),
    *("nonfinite", "saturation", "spike", "stale_grad", "stalled", "tampered", "underflow", "vanishing"),
    *("vanishing_rnn", "nan"),
)
"""What `--case` shows: programs of the folder `examples`; nan is `nonfinite.py`."""


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="see it work: a healthy and an unhealthy network learn to read digits",
        **help_text(
            "Train two small networks on real images, on the CPU, within seconds: a healthy one, and one with "
            "sigmoids in place of ReLU and batch norm, whose first layers learn nothing. GradWatch watches both; what "
            "it says of each is printed, beside how many held-out digits each can read, and where its report is. "
            "With --case, another fault and its fix: a program of the folder examples.",
            examples={
                "gradwatch demo": "logs and reports go to demo_runs",
                "gradwatch demo --epochs 10": "for longer",
                "gradwatch demo --case nan": "a NaN, and the line of code that makes it",
            },
            exits={
                "0": "it ran",
                "2": "misuse; it cannot write there; or scikit-learn is missing, which brings the images",
            },
        ),
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("demo_runs"), help="where the logs go (default: %(default)s)"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--epochs", metavar="N", type=_count, default=5, help="passes over the digits (default: 5)")
    what.add_argument(
        "--case", metavar="FAULT", choices=CASES, help=f"show another fault and its fix: {', '.join(CASES)}"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return complain("demo", f"cannot write to {options.out}: {error.strerror}")
    print("Loading torch, Lightning and TensorBoard: some seconds ...", file=sys.stderr, flush=True)
    try:
        from gradwatch.cli import demo_training
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "sklearn":
            raise
        what = "the images come with scikit-learn, which is not installed. Try: pip install scikit-learn"
        return complain("demo", what)
    with _silent_when_interrupted():
        if options.case is None:
            demo_training.demo(options.out, epochs=options.epochs)
        else:
            demo_training.show_case(options.out, options.case)
    return OK


@contextmanager
def _silent_when_interrupted() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt out of it, and what Lightning and the sinks say on their way out is dropped."""
    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield
        return

    interrupted, stdout = False, sys.stdout

    def interrupt(number: int, frame: object) -> None:
        nonlocal interrupted
        interrupted = True
        sys.stdout = io.StringIO()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except SystemExit:  # how a Trainer ends that was interrupted
        if interrupted:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, before)
        sys.stdout = stdout


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of epochs; give 1 or more")
    return int(text)
