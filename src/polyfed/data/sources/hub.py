"""Data sets of the Hugging Face Hub, fetched and kept by the package huggingface_hub (the extra "hub")."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from polyfed.data import arrow_tables
from polyfed.data.dataset import DatasetSource
from polyfed.data.files import has_parquet, split_of
from polyfed.data.options import SourceOptions
from polyfed.data.sources import source
from polyfed.errors import ConfigError, kind_and_line

_REPOSITORY = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@source("hub:owner/name")
def hub(options: SourceOptions) -> DatasetSource:
    """A data set of the Hugging Face Hub, which is downloaded."""
    return arrow_tables.read_source(options, functools.partial(_fetched, options), "config", "revision")


def _fetched(options: SourceOptions) -> list[Path]:
    """The folder of a data set's Parquet files, fetched, or as they were fetched before.

    Without a revision it is the newest, or the Hub's own conversion where that has no Parquet files.
    """
    repository = options.dataset.removeprefix("hub:")
    config, revision = options.config, options.revision
    if not _REPOSITORY.fullmatch(repository):
        raise ConfigError(f"expected a data set of the Hub as 'hub:owner/name', got 'hub:{repository}'")
    try:
        import huggingface_hub
    except ImportError:
        raise ConfigError(
            f"dataset 'hub:{repository}' needs the package huggingface_hub; install it with: pip install 'polyfed[hub]'"
        ) from None
    fetch = functools.partial(
        huggingface_hub.snapshot_download, repository, repo_type="dataset", allow_patterns="*.parquet"
    )
    try:
        folder = Path(fetch(revision=revision))
        if revision is None and not any(folder.rglob("*.parquet")):
            folder = Path(fetch(revision="refs/convert/parquet"))
    except Exception as error:  # from huggingface_hub, the HTTP client, the disk
        at = f" at revision '{revision}'" if revision is not None else ""
        raise ConfigError(f"cannot fetch 'hub:{repository}'{at}: {kind_and_line(error)}") from error
    homes = {path.parent.parent if split_of(path.parent.name) else path.parent for path in folder.rglob("*.parquet")}
    place = next(iter(homes)) if config is None and len(homes) == 1 else folder / (config or "")
    if not has_parquet(place):
        known = sorted(str(home.relative_to(folder)) for home in homes)
        got = "none" if config is None else f"'{config}'"
        raise ConfigError(
            f"expected data.config to name a folder of Parquet files of 'hub:{repository}' ({', '.join(known[:8])}), "
            f"got {got}"
        )
    return [place]
