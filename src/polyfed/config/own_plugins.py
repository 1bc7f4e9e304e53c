"""Plugins of the user's own, as a recipe names them: ``[[plugins]]`` with ``name = "package.module:Class"``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from polyfed.core.settings import Settings
from polyfed.engine.plugin import Plugin
from polyfed.errors import ConfigError
from polyfed.registry import PLUGINS, import_object
from polyfed.validation.error_lines import one_line


@dataclass(frozen=True)
class OwnPlugin:
    """A plugin of the user's own as a recipe asks for it: its class, and its settings if it has any."""

    kind: type[Plugin]
    settings: Settings | None

    def build(self) -> Plugin:
        """A new object, as a plugin may change during a run."""
        return self.kind() if self.settings is None else self.kind(self.settings)


def read_plugin(name: str, settings: Mapping[str, Any], beside: Sequence[str]) -> OwnPlugin:
    """Find the class, and check the settings.

    Args:
        name: ``"package.module:Class"``. settings: its keys. beside: folders in which the module is looked for, too.

    Raises:
        ConfigError: no such class; it extends no `polyfed.Plugin`, or is called like another; or the settings are not
            its own.
    """
    if not name:
        raise ConfigError("plugins: expected name = 'package.module:Class' in every [[plugins]], got none")
    kind = import_object("plugin", name, beside)
    if not isinstance(kind, type) or not issubclass(kind, Plugin):
        raise ConfigError(f"plugin '{name}': expected a class that extends polyfed.Plugin, got {kind!r}")
    if not kind.name or kind.name in PLUGINS:
        raise ConfigError(f"plugin '{name}': expected a name of its own as its class's `name`, got '{kind.name}'")
    if kind.settings_class is None:
        if settings:
            raise ConfigError(f"plugin '{name}': expected no settings, as its class has no settings_class, got some")
        return OwnPlugin(kind, None)
    try:
        return OwnPlugin(kind, kind.settings_class.model_validate(dict(settings)))
    except ValidationError as error:
        raise ConfigError(one_line(error, kind.settings_class, ("plugins", name))) from None
