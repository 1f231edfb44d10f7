"""The `gradwatch` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gradwatch import __version__

OK, MISUSE = 0, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return MISUSE
    return _demo(options.out, options.epochs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradwatch",
        description=(
            "GradWatch watches the gradients of a PyTorch Lightning training and says which layers' gradients vanish, "
            "explode, die or turn non-finite: since when, why, and what to change. "
            "In your own training: from gradwatch import GradWatch; Trainer(callbacks=[GradWatch()])."
        ),
        epilog="`gradwatch COMMAND --help` says more of one command.",
    )
    parser.add_argument("--version", action="version", version=f"gradwatch {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    demo = commands.add_parser(
        "demo",
        help="see it work: a healthy network and its sick twin learn to read digits",
        description=(
            "Train two small networks on real images, on the CPU, within seconds: a healthy one, and its twin with "
            "sigmoids in place of ReLU and batch norm, whose first layers learn nothing. GradWatch watches both; what "
            "it says of each is printed, beside how many held-out digits each can read."
        ),
        epilog="Needs scikit-learn, which brings the images. Exit codes: 0 it ran, 2 misuse.",
    )
    demo.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("demo_runs"), help="where the logs go (default: %(default)s)"
    )
    demo.add_argument(
        "--epochs", metavar="N", type=_count, default=5, help="passes over the digits (default: %(default)s)"
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of epochs; give 1 or more")
    return int(text)


def _demo(out: Path, epochs: int) -> int:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return _misuse(f"cannot write to {out}: {error.strerror}")
    print("Loading torch and Lightning ...", file=sys.stderr)
    try:
        from gradwatch.demo import demo
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "sklearn":
            raise
        return _misuse("the images come with scikit-learn, which is not installed. Try: pip install scikit-learn")
    demo(out, epochs=epochs)
    return OK


def _misuse(message: str) -> int:
    print(f"gradwatch demo: {message}", file=sys.stderr)
    return MISUSE
