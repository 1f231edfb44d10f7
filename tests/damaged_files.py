"""Damaged records and incident files, as good as at random, and what readers make of them.

`make fuzz` runs this file as a script, at length; `tests/runs/test_damaged_files.py` tries a hundred or more of each.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import logging
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError
from werkzeug.test import Client

from gradwatch import load_incident
from gradwatch.cli import main
from gradwatch.core.alert import Verdict, alert_to_dict
from gradwatch.core.history import History
from gradwatch.core.record import Missing, Run
from gradwatch.measure.random_states import RngState
from gradwatch.sinks import incident_file
from gradwatch.sinks.record.recorder import Recorder
from gradwatch.sinks.record.tfrecord import framed, frames
from gradwatch.tensorboard_plugin.plugin import GradWatchPlugin
from gradwatch.toolbox.incident import Incident
from sink_inputs import alert_of, feed_together, layout_of, record_of
from synthetic_records import block_of

SECONDS = 20.0
"""That a command may take for a file of a few kB, on a busy machine."""

NUMBERS = (
    "1e999",
    "-1e999",
    "NaN",
    "1e300",
    "-1e300",
    "-1",
    "0",
    "1.5",
    "255",
    "9007199254740993",
    "9223372036854775808",
)
NUMBERS += ("1e19", "-9223372036854775809", "1" * 400, "1" * 5000, "253402300800", "true", "null")
TEXTS = ('""', '"nan"', '"inf"', '"\\ud800"', '"\\u0000\\u001b[2J"', '"' + "x" * 100_000 + '"', '"<script>"', '"total"')
NESTS = ("[]", "{}", "[[]]", '{"a":{}}', "[" * 200_000, '{"a":' * 100_000, "[" * 500 + "]" * 500, "[0]" + " " * 99)
NESTS += (json.dumps([0] * 5000), json.dumps({str(i): i for i in range(5000)}), json.dumps(["a"] * 70_000))
MOMENTS = (float("nan"), float("inf"), -float("inf"), 1e300, -1e300, -1.0, 253402300800.0, 0.0)


def small_run(folder: Path, *, seed: int = 0) -> None:
    """One with everything that a file may hold."""
    rng = np.random.default_rng(seed)
    names = ("encoder.0", "head", "tap[x]")
    layout = layout_of(*names)
    open_, closed = alert_of("dead", "head", step=3), alert_of("spike", names[0], step=5, closed_step=6)
    sink = Recorder(folder=folder, every_n_steps=1)
    sink.open(Run(layout, "a run", {"grad_norm": "unscaled"}, about={"precision": "32-true"}))
    for first in range(0, 12, 4):
        records = []
        for step in range(first, first + 4):
            norms = 10 ** rng.normal(-1, 1, 3)
            norms[1] = {4: np.nan, 5: np.inf, 6: 0.0}.get(step, norms[1])
            more = {"weight_norm": rng.random(3), "update_ratio": rng.random(3)} if step % 3 == 0 else {}
            more |= {"zero_fraction": rng.random(3), "signal_rms": rng.random(3)} if step % 4 == 0 else {}
            codes = [0, 0, Missing.FROZEN if step > 6 else 0]
            records.append(record_of(layout, step, norms, codes=codes, loss=1.0, lr=0.1, overhead=0.01, **more))
        feed_together(sink, *records)
        for alert in (open_, closed):
            if first <= alert.step < first + 4:
                sink.alert(alert)
    sink.close(Verdict((open_, closed), 12, 3, 0.01, {"head.bias": "unused"}, ("a note",), ("Clip(1) shortened 3",)))


def pieces_of(file: Path) -> list[bytes]:
    """The data of its events."""
    with open(file, "rb") as opened:
        return [data for data in frames(opened) if data is not None]


def damaged_pieces(folder: Path, tag: str, change: Callable[[dict[str, Any]], str]) -> Path:
    """The file in `folder`, in which now the JSON of every event of a tag that begins with `tag` is `change` of it."""
    (file,) = folder.glob("*tfevents*")
    pieces = []
    for data in pieces_of(file):
        event = parsed(data)
        for value in event.summary.value:
            if value.tag.startswith(tag):
                value.tensor.string_val[0] = change(json.loads(value.tensor.string_val[0])).encode()
        pieces.append(framed(event.SerializeToString()))
    file.write_bytes(b"".join(pieces))
    return file


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """`content` with some bytes changed, taken out or put in, or some of it twice."""
    found = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5, 30))):
        place, size = rng.randrange(len(found) + 1), rng.choice((1, 1, 2, 8, 100, 1000))
        kind = rng.randrange(5)
        if kind == 0 and place < len(found):
            found[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            found[place : place + size] = rng.choice((b"", b"\0", b"\xff")) * size
        elif kind == 2:
            del found[place : place + size]
        elif kind == 3:
            found[place:place] = found[rng.randrange(len(found) + 1) :][:size]
        else:
            del found[max(1, place) :]
        if not found:
            found[:] = b"\0"
    return bytes(found)


def damaged_json(text: bytes, rng: random.Random) -> bytes:
    """`text` with one of its values, names or members another one."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return damaged_bytes(text, rng)
    places: list[tuple[Any, Any]] = []

    def collect(node: Any) -> None:
        for key, inner in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
            places.append((node, key))
            collect(inner)

    collect(tree)
    raw = rng.choice(rng.choice((NUMBERS, TEXTS, NESTS)))
    if not places or rng.random() < 0.03:
        return raw.encode()
    node, key = rng.choice(places)
    kind = rng.randrange(6)
    if kind == 0:
        del node[key]
    elif kind == 1 and isinstance(node, list):
        node[key:key] = [node[key]] * rng.choice((1, 3, 1000))
    elif kind == 2 and isinstance(node, dict):
        node[rng.choice(("", "total", "parameter_norm", "x" * 5000, "grad_norm"))] = node.pop(key)
    else:
        node[key] = "@RAW@"
    return json.dumps(tree).replace('"@RAW@"', raw).encode()


def damaged_event(data: bytes, rng: random.Random) -> bytes:
    """An event with one of its parts another one, still an event."""
    from tensorboard.compat.proto import event_pb2

    event = event_pb2.Event.FromString(data)
    if not event.summary.value or rng.random() < 0.1:
        event.wall_time = rng.choice(MOMENTS)
        event.step = rng.choice((-1, 2**62, -(2**62), 0))
        return event.SerializeToString()
    value = event.summary.value[0]
    strings = value.tensor.string_val
    kind = rng.randrange(8)
    if kind <= 2 and strings:
        place = 0 if rng.random() < 0.6 else rng.randrange(len(strings))
        strings[place] = damaged_json(strings[place], rng) if place == 0 else damaged_array(strings[place], rng)
    elif kind == 3:
        value.metadata.plugin_data.content = damaged_json(value.metadata.plugin_data.content, rng)
    elif kind == 4 and strings:
        del strings[rng.randrange(len(strings))]
    elif kind == 5:
        strings.extend([b""] * rng.choice((1, 3, 400)))
    elif kind == 6:
        value.tag = rng.choice(
            ("gradwatch/record/", "gradwatch/run/", "gradwatch/run/meta", "gradwatch/run/verdict", "x")
        )
        value.tag += rng.choice(("", "/1", "x" * 300))
    else:
        value.tensor.tensor_shape.Clear()
        value.tensor.tensor_shape.dim.add(size=rng.choice((0, -1, 3, 2**40)))
    for _ in range(rng.choice((0, 0, 0, 1, 50))):
        event.summary.value.add().CopyFrom(value)
    return event.SerializeToString()


def damaged_array(content: bytes, rng: random.Random) -> bytes:
    """Numbers with some of them at the ends of what there is."""
    kind = rng.choice(("<i8", "<f4", "<f8", "i1", "bytes"))
    if kind == "bytes" or not content or len(content) % np.dtype(kind).itemsize:
        return damaged_bytes(content or b"\0", rng)
    numbers = np.frombuffer(content, dtype=kind).copy()
    if kind.startswith("<f"):
        ends = (np.nan, np.inf, -np.inf, -1.0, np.finfo(kind).max, -np.finfo(kind).max, 1e-45, -0.0)
    else:
        least, most = np.iinfo(kind).min, np.iinfo(kind).max
        ends = (least, most, -1, most // 2, 100, 0)  # type: ignore[assignment]
    for _ in range(rng.choice((1, 3, 20))):
        numbers[rng.randrange(len(numbers))] = rng.choice(ends)
    return numbers.tobytes()


def damaged_record(pieces: list[bytes], rng: random.Random) -> bytes:
    """An event file made of `pieces`, of which some are not what they should be."""
    if rng.random() < 0.15:
        return damaged_bytes(b"".join(map(framed, pieces)), rng)
    found = list(pieces)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        place = rng.randrange(len(found))
        kind = rng.random()
        if kind < 0.75:
            found[place] = damaged_event(found[place], rng) if found[place] else b"\0"
        elif kind < 0.9:
            found[place] = damaged_bytes(found[place] or b"\0", rng)
        elif kind < 0.95:
            found.insert(rng.randrange(len(found)), found[place])
        else:
            del found[place]
            found = found or [b""]
        try:
            parsed(found[min(place, len(found) - 1)])
        except Exception:
            break  # no event any more: it cannot be damaged further
    return b"".join(map(framed, found))


def parsed(data: bytes) -> Any:
    from tensorboard.compat.proto import event_pb2

    return event_pb2.Event.FromString(data)


class RecordTrial:
    """Damaged records beside a good one, and the commands that read them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.good = folder, folder / "good"
        small_run(self.good)
        (file,) = self.good.iterdir()
        self.pieces = pieces_of(file)

    def write(self, number: int) -> Path:
        """The damaged run of that number, the same in every process."""
        place = self.folder / f"run{number}"
        place.mkdir()
        (place / "events.gradwatch.tfevents.1").write_bytes(damaged_record(self.pieces, random.Random(number)))
        if number % 7 == 0:  # a resumed run, of which the other session is good
            small_run(place, seed=1)
        return place

    def try_one(self, number: int) -> None:
        """Raises where a command ends in anything but 0, or 2 and a line."""
        place = self.write(number)
        page = str(self.folder / "page.html")
        code, said = command("report", str(place), "-o", page)
        listed = command("ls", str(place))[1].splitlines()
        assert (code == 0) == (listed[0].startswith("run ")), (said, listed)
        for pair in (("good", place.name), (place.name, "good")):
            found, reported = command("compare", *(str(self.folder / name) for name in pair), "-o", page)
            assert code == 2 or found == 0 or "in common" in reported or "do not both" in reported, reported
            assert found == 2 or code == 0
        shutil.rmtree(place)


class TabTrial:
    """The tab beside a damaged record: it answers whatever is asked, and never with a failure of its own."""

    def __init__(self, folder: Path) -> None:
        self._records = RecordTrial(folder)

    def try_one(self, number: int) -> None:
        place = self._records.write(number)
        apps = GradWatchPlugin(SimpleNamespace(data_provider=provider_of(place))).get_plugin_apps()
        run = {"run": "."}

        def ask(question: str, **asked: str) -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)
                response = Client(apps[f"/{question}"]).get("/", query_string=asked)
            assert response.status_code in (200, 404), response.data
            return response

        for question in ("runs", "health"):
            json.loads(ask(question).data, parse_constant=int)
        about = ask("run", **run)
        ask("summary", **run)
        ask("profile", **run, step="5")
        if about.status_code == 200:
            json.loads(about.data, parse_constant=int)  # JavaScript's JSON has neither NaN nor Infinity
            for statistic in about.json["statistics"]:
                ask("map", **run, statistic=statistic["name"])
                ask(
                    "map",
                    **run,
                    statistic=statistic["name"],
                    columns="3",
                    **{"from": "-1" + "0" * 400, "to": "9" * 400},
                )
                ask("region", **run, statistic=statistic["name"], layers="0-9", to="9" * 400)
            for name in about.json["names"][:5]:
                ask("layer", **run, layer=name)
            ask("steps", **run)
        shutil.rmtree(place)


def provider_of(folder: Path) -> Any:
    """TensorBoard's data of the runs in `folder`, by its loader in Python."""
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer

    multiplexer = EventMultiplexer(tensor_size_guidance={"gradwatch": 4096})
    multiplexer.AddRunsFromDirectory(str(folder))
    logging.disable()  # it says what is damaged
    try:
        with contextlib.suppress(DecodeError):  # which ends the loading, and is TensorBoard's own
            multiplexer.Reload()
    finally:
        logging.disable(logging.NOTSET)
    return MultiplexerDataProvider(multiplexer, str(folder))


NASTY: tuple[Any, ...] = (
    None,
    -1,
    2**70,
    10**400,
    1e999,
    float("nan"),
    "",
    "x" * 10_000,
    "\x1b[2J",
    True,
    [],
    {},
    (),
    b"x",
)
NASTY += (
    torch.zeros(0),
    torch.zeros(3, 2),
    torch.tensor(1),
    torch.full((2,), float("nan")),
    torch.zeros(1, device="meta"),
)
NASTY += ({"a": {1: [2]}}, [[]], {1: 2}, ["x"] * 1000, complex(1, 2), torch.float32, torch.Size((1, 2)), {None: None})


def small_incident(path: Path) -> None:
    """One with everything that a file may hold."""
    layout = layout_of("encoder.0", "head")
    history = History(layout)
    history.extend(block_of([record_of(layout, step, [1.0, float("nan")], loss=float(step)) for step in range(5)]))
    alert = alert_to_dict(alert_of("nonfinite", "head"))
    batch = {"index": 4, "epoch": 0, "rng": RngState.now().state_dict(), "data": ({"x": [torch.ones(2), 3, "y"]}, None)}
    content = {
        "text": "GradWatch: 1 incident in 2 layers over 5 steps",
        "alert": alert,
        "alerts": [alert],
        "notes": ["a note"],
        "step": 4,
        "failing": {"batch": 4, "epoch": 0, "rank": 0},
        "batch": {**batch, "notes": {}},
        "checkpoint": {"path": "a.ckpt", "steps": 3, "saved_as": "a.ckpt"},
        "settings": {"learning_rates": [[0.1]], "notes": {}},
        "environment": incident_file.versions_and_platform(),
        "labels": {"grad_norm": "unscaled"},
        "records": incident_file.record_columns(history, 5),
    }
    incident_file.write_incident(content, path)


def damaged_content(content: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """`content` with one of its parts another one."""
    tree = copy.deepcopy(content)
    places: list[tuple[Any, Any]] = []

    def collect(node: Any) -> None:
        for key, inner in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
            places.append((node, key))
            if len(places) < 2000:
                collect(inner)

    collect(tree)
    node, key = rng.choice(places)
    kind, part = rng.randrange(8), node[key]
    if kind == 0:
        del node[key]
    elif kind == 1 and isinstance(part, torch.Tensor) and part.numel():
        node[key] = rng.choice((part[:-1] if part.dim() else part, part[None], part.to(torch.float16), part.flatten()))
    elif kind == 2 and isinstance(part, torch.Tensor) and part.numel() and part.dtype != torch.float32:
        part.flatten()[rng.randrange(part.numel())] = rng.choice((0, 1, 100)) if part.dtype == torch.int8 else 255
    elif kind == 3:
        for _ in range(rng.choice((10, 100, 100_000))):
            part = [part]
        node[key] = part
    elif kind == 4 and isinstance(part, list | dict):
        node[key] = loop = [part]
        loop.append(loop)
    else:
        node[key] = rng.choice(NASTY)
    return tree


class IncidentTrial:
    """Damaged incident files, and what is made of them."""

    def __init__(self, folder: Path) -> None:
        self.path, good = folder / "damaged.pt", folder / "good.pt"
        small_incident(good)
        self.bytes, self.content = good.read_bytes(), load_incident(good).content
        use(load_incident(good))

    def try_one(self, number: int) -> None:
        """Raises where a file is neither refused by one line nor usable as a whole."""
        rng = random.Random(number)
        if number % 4:
            self.path.write_bytes(pickled(damaged_content(dict(self.content), rng)))
        else:
            self.path.write_bytes(damaged_bytes(self.bytes, rng))
        try:
            incident = load_incident(self.path)
        except ValueError as error:
            said = str(error)
            assert said.startswith(str(self.path)), said
            assert len(said) < 500, said
            assert "\n" not in said, said
        else:
            use(incident)


def pickled(content: object) -> bytes:
    file = io.BytesIO()
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 20_000))
    try:
        torch.save(content, file)
    except (RecursionError, MemoryError):
        return b""
    finally:
        sys.setrecursionlimit(limit)
    return file.getvalue()


def use(incident: Incident) -> None:
    """All that can be asked of it."""

    class Module(torch.nn.Module):
        def training_step(self, batch: Any, index: int) -> int:
            torch.rand(1), random.random(), np.random.random()
            return index

    assert isinstance(str(incident), str)
    assert incident.step >= 0
    assert incident.checkpoint is None or isinstance(incident.checkpoint, str)
    assert all(isinstance(part, str) for pair in incident.notes.items() for part in pair)
    with contextlib.ExitStack() as stack:
        if "rng" in incident.content["batch"]:
            stack.enter_context(incident.randomness())
    if incident.batch is not None and not incident.notes:
        assert incident.replay(Module()) == incident.content["batch"]["index"]


def command(*arguments: str) -> tuple[int, str]:
    """The exit code of a `gradwatch` command, and what it has said; it stays within its time."""
    out, began = io.StringIO(), time.monotonic()
    with warnings.catch_warnings(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        warnings.simplefilter("error")
        code = main(list(arguments))
    said = out.getvalue()
    assert time.monotonic() - began < SECONDS
    assert code in (0, 2)
    assert all(character.isprintable() or character == "\n" for character in said)
    if code == 2 and arguments[0] != "ls":
        assert said.count("\n") == 1
    return code, said


def failures(trial: Callable[[int], None], numbers: range) -> Iterator[tuple[int, BaseException]]:
    for number in numbers:
        try:
            trial(number)
        except Exception as error:
            yield number, error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Try damaged files of runs, at length.")
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory() as name:
        folders = {kind: Path(name) / kind.__name__ for kind in (IncidentTrial, RecordTrial, TabTrial)}
        for kind, folder in folders.items():
            folder.mkdir()
            trial = kind(folder)
            what = type(trial).__name__.removesuffix("Trial").lower()
            for number, error in failures(trial.try_one, range(options.first, options.first + options.count)):
                bad += 1
                print(f"{what} {number}: {''.join(traceback.format_exception(error))[-1500:]}", flush=True)
            print(f"{what}: {options.count} files; failures so far: {bad}", flush=True)
    raise SystemExit(bad > 0)
