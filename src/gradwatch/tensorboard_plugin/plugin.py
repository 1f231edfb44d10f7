"""The tab as TensorBoard sees it: its routes. Whatever goes wrong in one is an answer, never TensorBoard's end.

They are `static/*`, the page's modules and style sheet, and the questions of `Api`, each under its name. Bytes that it
answers are an envelope (`binary_response`), and all else is JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from importlib.resources import files
from typing import Any

from tensorboard import errors, plugin_util  # type: ignore[import-untyped]
from tensorboard.backend import http_util  # type: ignore[import-untyped]
from tensorboard.plugins import base_plugin  # type: ignore[import-untyped]
from tensorboard.util import tb_logging  # type: ignore[import-untyped]
from werkzeug import wrappers

from gradwatch.core.guard import error_text
from gradwatch.sinks.record.record_format import PLUGIN
from gradwatch.tensorboard_plugin.api import Api
from gradwatch.tensorboard_plugin.record_data import RecordCache
from gradwatch.tensorboard_plugin.runs import TensorBoardData

TYPES = {"js": "text/javascript", "css": "text/css"}

ENTRY = "/static/index.js"

QUESTIONS = (Api.runs, Api.health, Api.summary, Api.run, Api.map, Api.layer, Api.steps, Api.profile, Api.region)

Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class GradWatchPlugin(base_plugin.TBPlugin):  # type: ignore[misc]
    """The plugin `gradwatch`."""

    plugin_name = PLUGIN

    def __init__(self, context: Any) -> None:
        self._provider = context.data_provider
        self._cache = RecordCache()

    def is_active(self) -> bool:
        """TensorBoard knows by itself when there is data of ours."""
        return False

    def frontend_metadata(self) -> Any:
        return base_plugin.FrontendMetadata(es_module_path=ENTRY, tab_name="GradWatch")

    def get_plugin_apps(self) -> dict[str, Wsgi]:
        return {
            ENTRY: self._static,
            "/static/*": self._static,
            **{f"/{question.__name__}": self._answering(question) for question in QUESTIONS},
        }

    @cached_property
    def _files(self) -> Mapping[str, bytes]:
        """Name -> content; nothing else can be asked for."""
        folder = files(__package__) / "static"
        return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in TYPES}

    def _static(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        request = wrappers.Request(environ)
        name = request.path.rpartition("/")[2]
        if name not in self._files:
            return _respond(request, "no such file", "text/plain", 404)(environ, start_response)
        kind = TYPES[name.rpartition(".")[2]]
        return _respond(request, self._files[name], kind)(environ, start_response)

    def _answering(self, answer: Callable[[Api, Mapping[str, str]], bytes | dict[str, Any]]) -> Wsgi:
        def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            request = wrappers.Request(environ)
            try:
                experiment = plugin_util.experiment_id(environ)
                source = TensorBoardData(self._provider, plugin_util.context(environ), experiment)
                found = answer(Api(source, self._cache), request.args)
                kind = "application/octet-stream" if isinstance(found, bytes) else "application/json"
                response = _respond(request, found, kind)
            except errors.PublicError as error:
                response = _respond(request, {"error": str(error)}, "application/json", error.http_code)
            except Exception as error:
                tb_logging.get_logger().warning("GradWatch: %s failed", request.path, exc_info=True)
                said = f"GradWatch could not read this: {error_text(error)}"
                response = _respond(request, {"error": said}, "application/json", 500)
            return response(environ, start_response)

        return app


def _respond(request: Any, content: Any, kind: str, code: int = 200) -> Wsgi:
    return http_util.Respond(request, content, kind, code=code)  # type: ignore[no-any-return]
