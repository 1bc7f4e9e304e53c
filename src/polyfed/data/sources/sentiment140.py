"""Sentiment140's tweets."""

from __future__ import annotations

from polyfed.data import arrow_tables
from polyfed.data.dataset import DatasetSource
from polyfed.data.options import SourceOptions
from polyfed.data.sources import folder_of, source
from polyfed.data.text import OF_PAPER


@source("sentiment140", files=True)
def sentiment140(options: SourceOptions) -> DatasetSource:
    """Sentiment140's tweets (Go et al. 2009) from ``<root>/sentiment140/{train,test}*.parquet``: classes 0 and 4.

    Its columns are text, date, user, sentiment and query; `text` and `sentiment` are read unless others are named.
    Texts are cut as FedRep cuts them, unless other tokens are asked for.
    """
    defaults = {"text_column": "text", "label_column": "sentiment", "tokens": OF_PAPER}
    asked = options.model_copy(update={key: getattr(options, key) or value for key, value in defaults.items()})
    return arrow_tables.read_source(asked, lambda: [folder_of(options)])
