"""How a data set is read, and how it is assigned to clients: what a recipe's ``[data]`` says, as one object each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from polyfed.data.samples import CellFormat
from polyfed.data.text import TextConfig
from polyfed.errors import ConfigError, described

OF_TABLES = ("feature_columns", "category_columns", "categories", "missing_values", "decimal", "missing_words")
_OF_ANY = ("image_size", "task", "beside")  # what no data set refuses as such


@dataclass(frozen=True)
class SourceOptions:
    """How a data set is read; names and defaults are those of a recipe's ``[data]``.

    Attributes:
        image_column: the column with images, when it cannot be found.
        label_column: the column with labels, when it cannot be found or is not the usual one.
        feature_columns: of a table, which columns to learn from; default: all that hold numbers.
        category_columns: of a table, columns of categories to learn from. categories: further ones, with all that they
            may hold, in order; other words are errors.
        missing_values: of a table, "error", or "client_mean": empty cells, NA, N/A, NaN and ? stand for numbers, too.
        decimal: of a table, what stands before decimals, "." or ",".
        missing_words: of a table, what stands for a missing value, too, in upper or lower case.
        text_column, vocab_size, max_length, word_vectors, tokens: how texts are read, see `TextConfig`; with a column,
            Parquet files, CSV files and data sets of the Hub hold texts.
        task: "regression": the labels of a table are numbers to predict; None: classes.
        train_splits: what is stored as which split makes the training side: ``("train", "validation")``.
        config: which configuration, of a Hub data set with several.
        revision: branch, tag or commit on the Hub; default: the newest.
        image_size: of image folders, pixels a side; needed where images differ in size.
        columns: further columns of whole numbers or strings, for `DatasetSource.train_columns` and `test_columns`.
        beside: folders in which ``package.module`` is looked for where Python does not find it by itself.

    Raises:
        ConfigError: another word for missing_values or task.
    """

    image_column: str | None = None
    label_column: str | None = None
    feature_columns: Sequence[str] | None = None
    category_columns: Sequence[str] | None = None
    categories: Mapping[str, Sequence[str]] | None = None
    missing_values: str = "error"
    decimal: str = "."
    missing_words: Sequence[str] | None = None
    text_column: str | None = None
    vocab_size: int | None = None
    max_length: int | None = None
    word_vectors: str | None = None
    tokens: str | None = None
    task: str | None = None
    train_splits: Sequence[str] = ("train",)
    config: str | None = None
    revision: str | None = None
    image_size: int | None = None
    columns: Sequence[str] = ()
    beside: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.missing_values not in ("error", "client_mean"):
            raise ConfigError(
                f"missing_values: expected 'error' or 'client_mean', got {described(self.missing_values)}"
            )
        if self.task not in (None, "regression"):
            raise ConfigError(f"task: expected 'regression' or None, got {described(self.task)}")

    @property
    def cells(self) -> CellFormat:
        """Of a table, how its cells are spelt."""
        return CellFormat(self.decimal, tuple(self.missing_words or ()))

    @property
    def words(self) -> TextConfig:
        """How texts are read."""
        return TextConfig(self.text_column, self.vocab_size, self.max_length, self.word_vectors, self.tokens)

    @property
    def given(self) -> dict[str, object]:
        """What is set of all that only some data sets have a use for."""
        found = {}
        for field in fields(self):
            value = getattr(self, field.name)
            value = tuple(value) if isinstance(value, list) else value
            if field.name not in _OF_ANY and value and value != field.default:
                found[field.name] = value
        return found


AS_USUAL = SourceOptions()


@dataclass(frozen=True)
class PartitionOptions:
    """How a data set is assigned to clients.

    * ``split="a:b:c"``, ``test="local"``: both sides of the source are pooled and assigned; each client's rows are
      split train : validation : test, at random within each class, each class's parts within one row of the ratio.
    * ``split="official"``, ``test="local"``: the training side is assigned, the test side alike (same class shares;
      with "by_group", each row to the client that holds its value, to nobody where none does). ``"official:9:1"`` also
      splits each client's training rows into train : validation.
    * ``test="global"``: one test set for all. It is the official test side if there is one, and then the training side
      alone is assigned and split a : b; otherwise a class-stratified c part of the pool is set aside before dealing.

    Attributes:
        num_clients: K; None with "by_group": one per value.
        partition: a name in `polyfed.registry.PARTITIONS`; or a function (one of your own is called with labels (N,),
            clients and generator, and returns the row numbers of every client, or a `Partition`); or a ready
            `Partition` of the rows to deal: training rows first, then, where they are pooled, test rows. A ready one
            needs ``holdout=0``, and with ``test="global"`` an official test side.
        dirichlet_alpha: of "dirichlet" and "quantity".
        min_samples: of "dirichlet" and "quantity": smallest number of rows per client, before the split; None: 10.
            Of "by_group": values with fewer assigned rows are left out; None: none is.
        classes_per_client, class_assignment: of "by_class".
        split, test: see above.
        holdout: rows of the training side that are set aside first for the server, equally many of each class as far
            as they go, drawn at random.
        max_train_per_client: at most this many training rows per client, drawn at random, classes in the proportions
            that the client has; those of a smaller cap are among those of a larger one. Several caps: client k has the
            (k mod M)th of M.
        max_test_per_client: likewise for each client's test rows, or for the common test set.
        halved_client_fraction: share of the clients, drawn at random, that keep half of their training rows (FedHeNN's
            Figure 3), each class in proportion; those of a smaller share are among those of a larger one.
        group_by: of "by_group": which of the source's columns to deal by. num_groups: its values are put into so many
            groups by their hash (`hash_groups`), and whole groups are assigned, also of an official test side.
        label_space: "own": a client's classes are those that it has training rows of, numbered from 0; its validation
            and test rows of other classes are left out. Needs ``test="local"``.
        private: what is made of a row depends on no other row: sides and caps are drawn without labels, and missing
            values become the data set's mean. A recipe sets it where noise hides rows (`Privacy.hides_rows`).
    """

    num_clients: int | None = 10
    partition: Any = "iid"
    dirichlet_alpha: float = 0.5
    min_samples: int | None = None
    classes_per_client: int = 2
    class_assignment: str = "round_robin"
    split: str = "8:1:1"
    test: str = "local"
    holdout: int = 0
    max_train_per_client: int | Sequence[int] | None = None
    max_test_per_client: int | None = None
    halved_client_fraction: float = 0.0
    group_by: str | None = None
    num_groups: int | None = None
    label_space: str = "shared"
    private: bool = False
