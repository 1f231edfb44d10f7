"""The text of a run in TensorBoard's Text tab: healthy or not, and where; where the GradWatch tab is; every alert."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from gradwatch.core.alert import Alert, Verdict
from gradwatch.sinks.run_health import status

TENSORBOARD = "http://localhost:6006/"
"""Where TensorBoard is, unless it has another port or host."""


def tab_address(folder: str | Path) -> str:
    """The address that opens the GradWatch tab on the run in `folder`, with TensorBoard on the folder above it."""
    return f"{TENSORBOARD}#gradwatch&p.gradwatch.run={quote(Path(folder).name, safe='')}"


def verdict_markdown(verdict: Verdict, folder: str) -> str:
    """Markdown. `folder`: of the run."""
    lines = [
        f"**{escaped(status(verdict))}**",
        "",
        "Every layer, and what to change: the tab **GRADWATCH** above, "
        f"or [{escaped(tab_address(folder))}]({tab_address(folder)})",
    ]
    return "\n".join([*lines, "", alerts_table(verdict.incidents)] if verdict.incidents else lines)


def alerts_table(alerts: Iterable[Alert]) -> str:
    """The alerts as a Markdown table, oldest first; few columns, because TensorBoard breaks words in narrow ones."""
    lines = ["| alert | evidence | try |", "|---|---|---|"]
    for alert in sorted(alerts, key=lambda alert: alert.step):
        what = f"{alert.severity}: {alert.rule} in {alert.where}, {alert.since}"
        if alert.closed_step != alert.step:
            what += ", still open" if alert.closed_step is None else f", until {alert.closed_step}"
        cells = map(escaped, (what, alert.message, alert.remedy))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def escaped(text: str) -> str:
    """`text` as one line with all Markdown, table and HTML characters escaped."""
    marked = re.sub(r"([\\`*_\[\]|])", r"\\\1", " ".join(text.split()))
    return marked.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
