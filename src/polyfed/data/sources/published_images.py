"""Published data sets of images, in Parquet files below ``data.root`` as the Hugging Face Hub has them."""

from __future__ import annotations

from polyfed.data.dataset import DatasetSource
from polyfed.data.files import has_parquet
from polyfed.data.options import SourceOptions
from polyfed.data.sources import folder_of, source

Statistics = tuple[tuple[float, ...], tuple[float, ...]]  # mean and deviation per channel, of the training side in 0..1


def _published(
    name: str, about: str, statistics: Statistics, *, inner: str = "", label_column: str | None = None
) -> None:
    """Declare a data set.

    Args:
        about: what it is, see `Source.read`. inner: a folder in its own that is read where it is there.
        label_column: where none is asked for.
    """

    def read(options: SourceOptions) -> DatasetSource:
        from polyfed.data import arrow_tables

        options.check_used("label_column", "columns", "image_column")
        place = folder_of(options)
        place = place / inner if has_parquet(place / inner) else place
        mean, std = statistics
        return arrow_tables.read_images(arrow_tables.parquet_sides([place]), options, label_column, mean=mean, std=std)

    read.__doc__ = about
    source(name, files=True)(read)


_published(
    "cifar10",
    "CIFAR-10 (Krizhevsky 2009) from ``<root>/cifar10/{train,test}*.parquet``: 50 000 + 10 000 of (3, 32, 32).",
    ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),  # the values usually quoted, also by FedIN's code
)

_published(
    "cifar100",
    """CIFAR-100's 100 fine classes from ``<root>/cifar100/{train,test}*.parquet``: 50 000 + 10 000 of (3, 32, 32).

    Its 20 coarse classes with label_column "coarse_label".
    """,
    ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),  # FedGH's code; FedHeNN's are these to 3 digits
    label_column="fine_label",
)

_published(
    "cinic10",
    """CINIC-10 (Darlow et al. 2018) from ``<root>/cinic10/{train,validation,test}*.parquet``: 90 000 (3, 32, 32) each.

    Its validation split is not read; for a training side with it, call its files train-2.parquet or the like.
    """,
    ((0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587)),  # Darlow et al. 2018, also FedIN's code
)

_published(
    "fashion_mnist",
    "Fashion-MNIST (Zalando) from ``<root>/fashion_mnist/{train,test}*.parquet``: 60 000 + 10 000 of (1, 28, 28).",
    ((0.2860,), (0.3530,)),  # the values usually quoted
)

_published(
    "svhn",
    """SVHN (Netzer et al. 2011), cropped, from ``<root>/svhn/{train,test}*.parquet``: 73 257 + 26 032 of (3, 32, 32).

    The folder may be a copy of the Hub's, of which `cropped_digits` is read. Its 531 131 rows in extra*.parquet are not
    read.
    """,
    ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),  # no statistics: FedIN's code maps the pixels to -1..1, so we do
    inner="cropped_digits",
)
