"""`gradwatch demo`: see it work."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from gradwatch.cli.command import OK, complain, help_text


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="see it work: a healthy and an unhealthy network learn to read digits",
        **help_text(
            "Train two small networks on real images, on the CPU, within seconds: a healthy one, and one with "
            "sigmoids in place of ReLU and batch norm, whose first layers learn nothing. GradWatch watches both; what "
            "it says of each is printed, beside how many held-out digits each can read, and where its report is.",
            examples={"gradwatch demo": "logs and reports go to demo_runs", "gradwatch demo --epochs 10": "for longer"},
            exits={"0": "it ran", "2": "it cannot write there, or scikit-learn is missing, which brings the images"},
        ),
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("demo_runs"), help="where the logs go (default: %(default)s)"
    )
    parser.add_argument(
        "--epochs", metavar="N", type=_count, default=5, help="passes over the digits (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return complain("demo", f"cannot write to {options.out}: {error.strerror}")
    print("Loading torch and Lightning ...", file=sys.stderr)
    try:
        from gradwatch.cli.demo_training import demo
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "sklearn":
            raise
        what = "the images come with scikit-learn, which is not installed. Try: pip install scikit-learn"
        return complain("demo", what)
    demo(options.out, epochs=options.epochs)
    return OK


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of epochs; give 1 or more")
    return int(text)
