"""Models by name: `worker/models/<kind>.py` with a function `build`. Nothing else imports them."""

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from typing import cast

from protocol.errors import ConfigError
from worker.api.model import BuildContext, LoadedModel
from worker.api.nearest import nearest

PACKAGE = "worker.models"

Builder = Callable[[BuildContext], LoadedModel]


def load_builder(kind: str) -> Builder:
    """The `build` of a model kind. ConfigError names the nearest kind where there is none."""
    name = f"{PACKAGE}.{kind}"
    if not kind.isidentifier() or importlib.util.find_spec(name) is None:
        raise ConfigError(f"no model kind {kind!r}{_nearest(kind)}", kind=kind)
    build = getattr(importlib.import_module(name), "build", None)
    if not callable(build):
        raise ConfigError(f"{name} is not a model: it has no build(){_nearest(kind)}", kind=kind)
    return cast(Builder, build)


def _nearest(kind: str) -> str:
    spec = importlib.util.find_spec(PACKAGE)
    places = spec.submodule_search_locations if spec else None
    return nearest(kind, (m.name for m in pkgutil.iter_modules(places or []) if m.name != kind))
