"""Tables with labels, from CSV files or a frame in memory; new rows for models that were trained on one.

pandas reads them, every cell as text. A side is one frame of cells whose index says where each row stands (its file,
and its line there), so that all that is wrong with any file is listed at once; NaN marks a column that a file lacks.

Shapes: N rows, F features.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.data.classes import encode_labels
from polyfed.data.column_schema import TEXT_NAMES, Columns, column_values, pick_column
from polyfed.data.dataset import DatasetSource
from polyfed.data.federation_columns import Feature, align
from polyfed.data.files import check_file, check_sides, find_split_files
from polyfed.data.labeled_texts import RawTexts, encode_texts
from polyfed.data.options import CLIENT, OF_FILES, OF_TABLES, OF_TEXTS, SourceOptions
from polyfed.data.samples import (
    LABEL_NAMES,
    ONE_LABEL,
    SEVERAL,
    LabeledSamples,
    TableColumns,
    as_number,
    as_whole_numbers,
    fill_missing,
    is_missing,
    of_so_many,
)
from polyfed.errors import ConfigError, ConfigErrors, described, first_line, gathered, suggest
from polyfed.escaping import one_line

Frame = Any  # a pandas.DataFrame of cells, see above

_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
FLAG = "{} is missing"  # name of the column that says so
_ANOTHER_CATEGORY = "correct the cell, or name the category in every recipe of the federation"
_NAMED = 5  # files in a message
_CORRECT = "correct or drop such rows"
_LIKE_THE_RUNS = "write such rows as those of the run, or drop them"
_ADVICE = f"{_CORRECT}, name other feature_columns, or set missing_values"
_LEAST_SPREAD = 1e-4  # a column's deviation over its largest value: float32 keeps 7 digits, so 3 are left


def from_frame(
    frame: Any,
    label: Any,
    client: Any = None,
    test: Any = None,
    *,
    feature_columns: Sequence[Any] | None = None,
    category_columns: Sequence[Any] | None = None,
    features: Mapping[str, Any] | None = None,
    missing_values: str = "error",
    regression: bool = False,
    name: str = "frame",
) -> DatasetSource:
    """A source from a pandas DataFrame, read as a CSV file with the same cells.

    Names of columns that are numbers are read as text, those of the frame as those that are given: 2 is "2".

    Args:
        frame: the training rows.
        label: the column with labels: whole numbers or words; with `regression` numbers to predict.
        client: the column that says whose a row is; ``pf.federate(source)`` then makes one client of each value.
        test: a frame of test rows, or None.
        feature_columns: what to learn from; default: all columns that hold numbers or truth values.
        category_columns: columns of categories to learn from; default: those of the type "category".
        features: where clients have different columns, all of them, as a recipe's ``[data.features]`` has them; a
            client lacks a column in which none of its rows has a value.
        missing_values: "error", or "client_mean", each client's own mean and a feature that says where.
        regression: whether labels are numbers to predict.
        name: for messages and results.

    Raises:
        ConfigError: no frame, columns that it lacks, missing values or cells that are no numbers.
    """
    import pandas as pd

    sides = {side: given for side, given in (("train", frame), ("test", test)) if given is not None}
    for side, given in sides.items():
        if not isinstance(given, pd.DataFrame):
            raise ConfigError(f"expected a pandas DataFrame as {side} side of '{name}', got {described(given)}")
        if given.columns.nlevels > 1:
            raise ConfigError(
                f"expected columns with one name each in '{name}', got {given.columns.nlevels} levels of names; write "
                "frame.columns = ['_'.join(map(str, names)) for names in frame.columns]"
            )
        sides[side] = given.set_axis([str(column) for column in given.columns], axis=1)
        _check_names([*sides[side]], f"'{name}'")
    label = _column_name("label", label)
    client = None if client is None else _column_name("client", client)
    feature_columns = None if feature_columns is None else [*map(str, feature_columns)]
    for given in sides.values():
        _refuse_several(given, label, name)
    if category_columns is None and features is None:
        found = [*sides["train"].select_dtypes("category")]
        wanted = found if feature_columns is None else feature_columns
        category_columns = [column for column in found if column in wanted and column not in (label, client)]
    options = SourceOptions(
        dataset=name,
        label_column=label,
        feature_columns=feature_columns,
        columns=[] if client is None else [client],
        category_columns=[*map(str, category_columns or ())] or None,
        features=None if features is None else {key: dict(value) for key, value in features.items()},  # type: ignore[misc]
        missing_values=missing_values,  # type: ignore[arg-type]  # checked by it
        task="regression" if regression else None,
    )
    cells = {
        side: as_cells(
            given.astype(object).map(lambda cell: int(cell) if isinstance(cell, bool | np.bool_) else cell), name
        )
        for side, given in sides.items()
    }
    cells = {side: align(frame, options.features or {}, name) for side, frame in cells.items()}
    source = encode(name, cells, name, options)
    return dataclasses.replace(source, client_column=client)


def _column_name(what: str, given: Any) -> str:
    if isinstance(given, SEVERAL):
        hint = ONE_LABEL if what == "label" else ""
        raise ConfigError(f"{what}: expected the name of one column, got {described(given)}{hint}")
    return str(given)


def _refuse_several(frame: Any, label: str, name: str) -> None:
    cells = frame.get(label, ())
    rows = [row for row, cell in enumerate(cells) if isinstance(cell, SEVERAL)]
    if rows:
        got = f"the {type(cells.iloc[rows[0]]).__name__} {str(cells.iloc[rows[0]])[:40]}"
        raise ConfigError(
            f"expected a label in every row of column '{label}' of '{name}', got {got} in row {rows[0]}"
            f"{of_so_many(len(rows))}{ONE_LABEL}"
        )


# frames of cells -----------------------------------------------------------------------------------------------------


def as_cells(frame: Any, name: str) -> Frame:
    """A frame's values as text, missing ones as ""."""
    import pandas as pd

    if frame.empty:
        raise ConfigError(f"expected at least one row in '{name}', got none")
    values = frame.astype(object).where(frame.notna(), "")
    rows = pd.MultiIndex.from_product([[name], range(len(frame))], names=["file", "row"])
    return values.map(lambda cell: str(cell).strip()).set_axis(rows, axis=0)


def read_csv(path: Path) -> Frame:
    """The cells of a file whose first line names the columns; commas, semicolons or tabs stand between them.

    Blank lines do not count; cells that a line lacks are empty.
    """
    import pandas as pd

    check_file(path)
    try:
        with path.open(encoding="utf-8-sig") as stream:
            head = stream.readline()
        cells = pd.read_csv(
            path,
            sep=max(",;\t", key=head.count),
            header=None,
            dtype=str,
            keep_default_na=False,
            skipinitialspace=True,
            skip_blank_lines=False,
            encoding="utf-8-sig",
        )
    except pd.errors.EmptyDataError:
        cells = pd.DataFrame([[""]])
    except (OSError, ValueError) as error:  # pandas' own are ValueErrors, as is one of the encoding
        raise ConfigError(f"expected a CSV file in UTF-8, got {path}: {first_line(error)}") from error
    breaks = cells.apply(lambda column: column.str.count("\n")).sum(axis=1).cumsum().shift(fill_value=0)
    cells = cells.apply(lambda column: column.str.strip())
    names = cells.iloc[0].tolist()
    rows = cells.iloc[1:]
    if all(as_number(cell) is not None for cell in names):
        raise ConfigError(f"expected a name for every column in the first line of {path}, got '{','.join(names)[:40]}'")
    _check_names(names, f"the first line of {path}")
    rows = rows[(rows != "").any(axis=1)]
    if rows.empty:
        raise ConfigError(f"expected at least one row below the columns' names in {path}, got none")
    lines = 1 + rows.index + breaks[rows.index]
    rows.index = pd.MultiIndex.from_arrays([[str(path)] * len(rows), lines.tolist()], names=["file", "line"])
    return rows.set_axis(names, axis=1)


def _check_names(names: Sequence[str], where: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if "" in names or twice:
        got = f"'{twice[0]}' twice" if twice and twice[0] else f"'{','.join(names)[:40]}'"
        raise ConfigError(f"expected a name of its own for every column in {where}, got {got}")


def read_sides(
    places: Sequence[Path], of_clients: bool = False, features: Mapping[str, Feature] | None = None
) -> dict[str, Frame]:
    """The sides in some places: a file, which is a training side, or a folder with train*.csv and test*.csv.

    of_clients: `places` are a folder of each client, whose rows get the column "client". features: the columns of the
    federation, of which each file has some.
    """
    import pandas as pd

    files = gathered(functools.partial(_files_of, place) for place in places)
    check_sides({place.name: "test" in sides for place, sides in zip(places, files, strict=True)})
    every = [
        (side, place, path)
        for place, sides in zip(places, files, strict=True)
        for side in sides
        for path in sides[side]
    ]
    read = gathered(functools.partial(_read_aligned, path, features or {}) for _, _, path in every)
    frames: dict[str, list[Frame]] = {side: [] for side in files[0]}
    for (side, place, _), frame in zip(every, read, strict=True):
        frames[side].append(frame.assign(**{CLIENT: place.name}) if of_clients else frame)
    return {side: pd.concat(parts) for side, parts in frames.items()}


def _read_aligned(path: Path, features: Mapping[str, Feature]) -> Frame:
    frame = align(read_csv(path), features, path)
    if features and not {*features} & {*frame}:
        raise ConfigError(f"expected one of the columns of data.features in {path}, got none of {', '.join(features)}")
    return frame


def read_source(options: SourceOptions, place: Path, homes: Sequence[Path] | None = None) -> DatasetSource:
    """A table, or texts where their column is named.

    Args:
        place: a file, or a folder of files. homes: instead of it one of each client, all in `place`.
    """
    is_text = options.text_column is not None
    options.check_used(*OF_FILES, *(OF_TEXTS if is_text else OF_TABLES))
    sides = read_sides([place] if homes is None else homes, homes is not None, options.features)
    if homes is not None:
        options = options.model_copy(update={"columns": [*options.columns, CLIENT]})
    if is_text:
        return encode_texts(*read_texts(sides, place, options), options)
    return encode(options.dataset, sides, place, options)


def _files_of(place: Path) -> dict[str, list[Path]]:
    if place.is_dir():
        return find_split_files(place, "csv")
    if not place.exists():
        raise ConfigError(f"expected a CSV file, or a folder with train*.csv and test*.csv, at {place}, got neither")
    return {"train": [place]}


def _refuse(cells: Any, wrong: Any, expected: str, hint: Callable[[str], str]) -> None:
    """Refuse some cells of a column, in each file by the first. wrong: (N,) bool. hint: of a cell, what to do."""
    problems = []
    for file, rows in cells[wrong].groupby(level="file", sort=False):
        where = f"{cells.index.names[1]} {rows.index[0][1]} of column '{cells.name}' of {file}"
        got = f"'{rows.iloc[0][:40]}'{of_so_many(len(rows))}"
        problems.append(f"expected {expected} in {where}, got {got}; {hint(rows.iloc[0])}")
    if problems:
        raise ConfigErrors(problems)


# a table as numbers --------------------------------------------------------------------------------------------------


def encode(name: str, sides: Mapping[str, Frame], where: object, options: SourceOptions) -> DatasetSource:
    """Both sides' cells as numbers.

    Labels are whole numbers or words; those that do not fill 0..C-1 are numbered in sorted order, and their spelling
    names the classes. Means and deviations are of the training side.

    Args:
        name: of the source.
        sides: "train" and, if there is one, "test".
        where: they are from, for messages.
        options: of it label_column, feature_columns, category_columns (numbered by the training side's values),
            categories (numbered as they stand there), columns, missing_values (each number may get a feature that says
            where it is) and task.
    """
    train = sides["train"]
    label = find_label(train, options.label_column)
    differs = options.features is not None  # between clients: a file may lack columns
    if differs:
        complete = functools.partial(_with_all_columns, options=options)
        sides = dict(zip(sides, gathered(functools.partial(complete, frame) for frame in sides.values()), strict=True))
        train = sides["train"]
        options = _as_stated(options)
    fixed = options.categories or {}
    found = {
        column: sorted(cell for cell in _different(train, column) if not is_missing(cell))
        for column in options.category_columns or ()
        if column not in fixed
    }
    found |= {column: list(names) for column, names in fixed.items()}
    known = {column: _numbered(values) for column, values in found.items()}
    features = _features(train, label, options, known)
    may_miss = differs or options.missing_values != "error"
    flags = [column for column in features if column not in known] if may_miss else []
    flags_at = tuple((features.index(column), len(features) + number) for number, column in enumerate(flags))

    def inputs() -> dict[str, NDArray[np.float64]]:
        read = gathered(functools.partial(_matrix, frame, features, known, flags, _ADVICE) for frame in sides.values())
        return dict(zip(sides, read, strict=True))

    attempts: list[Callable[[], Any]] = [
        lambda: check_columns(sides, label, () if differs else features, known),
        lambda: gathered(functools.partial(_check_categories, frame, fixed) for frame in sides.values()),
        lambda: _labels(sides, label, where, options),
        inputs,
        lambda: {side: extra_columns(frame, options, side == "train") for side, frame in sides.items()},
    ]
    _, _, (numbers, names), x, further = gathered(attempts)
    every = (*features, *map(FLAG.format, flags))
    categories = tuple(tuple(found.get(column, ())) for column in every) if known else ()
    columns = TableColumns(categories, flags_at)
    if len(names) == 1:
        raise ConfigError(f"expected labels of two or more classes in {where}, got '{names[0]}' alone")
    mean, std = _statistics(x["train"], every, columns, where)
    stored = {}
    for side, x_NF in x.items():
        samples = LabeledSamples(torch.from_numpy(x_NF).float(), torch.from_numpy(numbers[side]))
        stored[side] = fill_missing(samples, columns, columns.means(mean))
    used = {*features, label, *options.columns}
    may_leave_out = differs or options.feature_columns is None
    left_out = [column for column in train if column not in used] if may_leave_out else []
    remarks: tuple[str, ...] = ()
    if left_out:
        more = f" and {len(left_out) - _NAMED} more" if len(left_out) > _NAMED else ""
        listed = ", ".join(f"'{one_line(column)}'" for column in left_out[:_NAMED])
        why = "data.features does not name them" if differs else "they hold no numbers (category_columns takes words)"
        remarks = (f"columns left out, as {why}: {listed}{more}",)
    return DatasetSource.of(
        name,
        stored,
        names,
        further,
        mean=mean,
        std=std,
        feature_names=every,
        columns=columns,
        label_column=label,
        remarks=remarks,
        columns_differ=differs,
    )


def _with_all_columns(frame: Frame, options: SourceOptions) -> Frame:
    """The cells with all columns of the federation, a missing value in those that a file lacks."""
    features = options.features or {}
    every = frame.reindex(columns=[*frame, *(name for name in features if name not in frame)])
    if options.missing_values == "error":
        numbers = [name for name, feature in features.items() if feature.categories is None]
        gathered(functools.partial(_refuse_missing, every[name]) for name in numbers)
    return every.assign(**{name: every[name].fillna("") for name in features})


def _refuse_missing(cells: Any) -> None:
    _refuse(cells, cells.map(lambda cell: isinstance(cell, str) and is_missing(cell)), "a number", lambda _: _ADVICE)


def _as_stated(options: SourceOptions) -> SourceOptions:
    """The options of a table that has all columns of the federation."""
    features = options.features or {}
    categories = {name: feature.categories for name, feature in features.items() if feature.categories is not None}
    return options.model_copy(update={"feature_columns": [*features], "categories": categories})


def _check_categories(frame: Frame, fixed: Mapping[str, Sequence[str]]) -> None:
    for column in [name for name in fixed if name in frame]:
        names = list(fixed[column])
        cells = frame[column].dropna()
        wrong = ~(cells.isin(names) | cells.map(is_missing).astype(bool))
        shown = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
        _refuse(cells, wrong, f"one of data.categories ({shown})", lambda _: _ANOTHER_CATEGORY)


def _holds_numbers(cells: Collection[str]) -> bool:
    """Whether a column has a number, or nothing but numbers with decimal commas, which are then refused."""
    present = [cell for cell in cells if not is_missing(cell)]
    if any(as_number(cell) is not None for cell in present):
        return True
    return bool(present) and all(map(_DECIMAL_COMMA.fullmatch, present))


def _different(frame: Frame, column: str) -> set[str]:
    return set(frame[column].dropna()) if column in frame else set()


def _numbered(names: Sequence[str]) -> dict[str, int]:
    return {name: 1 + place for place, name in enumerate(names)}


def find_label(frame: Frame, named: str | None) -> str:
    """The named column, else the only one of a usual name."""
    usual = [name for name in LABEL_NAMES if name in frame]
    return pick_column("label", named, usual, [*frame.columns], frame.index[0][0])


def _features(frame: Frame, label: str, options: SourceOptions, known: Collection[str]) -> tuple[str, ...]:
    """The columns to learn from: those asked for, else all with a number in them, so that a stray word is noticed.

    known: those of categories, which come last where they are not asked for.
    """
    asked = list(options.feature_columns or ())
    if options.feature_columns is None:
        others = [name for name in frame if name != label and name not in options.columns and name not in known]
        asked = [name for name in others if _holds_numbers(_different(frame, name))]
    asked = [*asked, *(name for name in known if name not in asked)]
    if not asked:
        raise ConfigError(
            f"expected columns of numbers besides '{label}' in {frame.index[0][0]}, got none; text_column names a "
            "column of texts"
        )
    if label in asked or len(set(asked)) < len(asked):
        raise ConfigError(f"expected different feature_columns, without the label '{label}', got {asked}")
    return tuple(asked)


def check_columns(
    sides: Mapping[str, Frame], label: str | None, features: Sequence[str] = (), known: Collection[str] = ()
) -> None:
    """Refuse columns that some files lack. known: the features that are categories."""
    kinds = {} if label is None else {label: "label"}
    kinds |= {name: "category" if name in known else "feature" for name in features}
    gathered(functools.partial(_check_column, kind, name, [*sides.values()]) for name, kind in kinds.items())


def _check_column(kind: str, name: str, frames: Sequence[Frame]) -> None:
    files = {file: part for frame in frames for file, part in frame.groupby(level="file", sort=False)}
    lacking = [file for file, part in files.items() if name not in part or part[name].isna().all()]
    if not lacking:
        return
    having = [file for file in files if file not in lacking]
    where = ", ".join(lacking[:_NAMED]) + (f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else "")
    others = ""
    if having:
        others = f"; {having[0]} has it" if len(having) == 1 else f"; {len(having)} others have it"
        others += ", and feature_columns may name others" if kind == "feature" else ""
    near = suggest(name, files[lacking[0]].dropna(axis=1, how="all").columns)
    raise ConfigError(f"expected the {kind} column '{name}' in {where}, got no such{near}{others}")


def _matrix(
    frame: Frame,
    features: Sequence[str],
    known: Mapping[str, Mapping[str, int]],
    flags: Sequence[str],
    advice: str,
) -> NDArray[np.float64]:
    """(N, F) finite numbers; 0 where a file lacks the column, of which `check_columns` tells.

    known: the numbers of categories by feature. flags: features that may be missing. advice: on cells that are wrong.
    """
    cells = frame.reindex(columns=[*features]).fillna("0")
    values = []
    problems: list[str] = []
    for name in features:
        if name in known:
            values.append(cells[name].map(known[name]).fillna(0))
            continue
        present = cells[name].mask(cells[name].map(is_missing), "0") if name in flags else cells[name]
        numbers = present.map(as_number).astype(float)
        try:
            _refuse(cells[name], _not_finite(numbers), "a finite number", functools.partial(_hint, advice))
        except ConfigErrors as error:
            problems += error.problems
        values.append(numbers)
    if problems:
        raise ConfigErrors(problems)
    values += [cells[name].map(is_missing) for name in flags]
    return np.array(values, dtype=np.float64).T


def _not_finite(numbers: Any) -> Any:
    """Which are no numbers, or not finite in float32."""
    with np.errstate(over="ignore"):
        return ~np.isfinite(numbers.to_numpy().astype(np.float32))


def _hint(advice: str, cell: str) -> str:
    if _DECIMAL_COMMA.fullmatch(cell) and advice != _LIKE_THE_RUNS:
        return "write decimals with a point: pandas.read_csv(..., decimal=',').to_csv(...) does so"
    return advice


def _statistics(
    x_NF: NDArray[np.float64], names: Sequence[str], columns: TableColumns, where: object
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and (population) deviation of each feature over the rows where it is there; 1 for one that never varies.

    Categories, and what says whether a number is missing, are not standardized.
    """
    mean = x_NF.mean(axis=0)
    std = x_NF.std(axis=0)
    varies = (x_NF != x_NF[0]).any(axis=0)
    for place, flag in columns.flags:
        present = x_NF[x_NF[:, flag] == 0, place]
        mean[place] = present.mean() if len(present) else 0.0
        std[place] = present.std() if len(present) else 1.0
        varies[place] = len(present) and bool((present != present[0]).any())
    std = np.where(varies, std, 1.0)
    flat = varies & (std < _LEAST_SPREAD * np.abs(x_NF).max(axis=0))
    if flat.any():
        raise ConfigError(
            f"column '{names[int(flat.argmax())]}' of {where} varies too little beside its size to be kept in float32; "
            "subtract a constant from it first"
        )
    as_they_are = [place for place, found in enumerate(columns.categories) if found] + [
        flag for _, flag in columns.flags
    ]
    mean[as_they_are] = 0.0
    std[as_they_are] = 1.0
    return tuple(mean.tolist()), tuple(std.tolist())


def extra_columns(frame: Frame, options: SourceOptions, needed: bool) -> dict[str, NDArray[Any]]:
    """Columns to deal by: whole numbers where all cells are, else words. needed: whether each must be there."""
    found = {}
    for name in dict.fromkeys(options.columns):
        if not needed and name not in frame:
            continue
        _check_column("further", name, [frame])
        cells = frame[name]
        _refuse(cells, cells == "", "a value", lambda _: _CORRECT)
        spelt = cells.tolist()
        found[name] = column_values(as_whole_numbers(spelt) or spelt, f"column '{name}' of {frame.index[0][0]}")
    return found


# labels and texts ----------------------------------------------------------------------------------------------------


def _spelt_labels(frame: Frame, label: str) -> Any:
    """Labels as they are spelt; none is missing. None of files without such a column, of which others tell."""
    cells = frame.reindex(columns=[label])[label].dropna()
    _refuse(cells, cells.map(is_missing).astype(bool), "a label", lambda _: _CORRECT)
    return cells


def _labels(
    sides: Mapping[str, Frame], label: str, where: object, options: SourceOptions
) -> tuple[Mapping[str, NDArray[Any]], tuple[str, ...]]:
    if options.task is not None:
        targets = gathered(functools.partial(_targets, frame, label) for frame in sides.values())
        return dict(zip(sides, targets, strict=True)), ()
    raw = raw_labels(sides, label, where)
    return encode_labels(raw, label)


def raw_labels(sides: Mapping[str, Frame], label: str, where: object) -> dict[str, NDArray[Any]]:
    """Labels as int64 where all of both sides are whole numbers, else as words."""
    read = gathered(functools.partial(_spelt_labels, frame, label) for frame in sides.values())
    raw = {side: cells.tolist() for side, cells in zip(sides, read, strict=True)}
    every = [cell for cells in raw.values() for cell in cells]
    if as_whole_numbers(every) is not None:
        return {side: np.array(as_whole_numbers(cells), dtype=np.int64) for side, cells in raw.items()}
    if all(as_number(cell) is not None for cell in every):
        wrong = next(cell for cell in every if as_whole_numbers([cell]) is None)
        raise ConfigError(
            f"expected classes, whole numbers or words, in label column '{label}' of {where}, got '{wrong[:40]}'; "
            "data.task = 'regression' predicts numbers"
        )
    return {side: np.array(cells, dtype=np.str_) for side, cells in raw.items()}


def _targets(frame: Frame, label: str) -> NDArray[np.float32]:
    cells = _spelt_labels(frame, label)
    numbers = cells.map(as_number).astype(float)
    _refuse(cells, _not_finite(numbers), "a finite number to predict", functools.partial(_hint, _CORRECT))
    targets: NDArray[np.float32] = numbers.to_numpy().astype(np.float32)
    return targets


def read_texts(
    sides: Mapping[str, Frame], where: object, options: SourceOptions
) -> tuple[dict[str, RawTexts], Columns]:
    """Texts with labels, and the columns in which both stand; a cell without anything but blanks is a missing text."""
    train = sides["train"]
    text = _text_column(train, options.text_column)
    label = find_label(train, options.label_column)
    attempts: list[Callable[[], Any]] = [
        lambda: check_columns(sides, label),
        lambda: raw_labels(sides, label, where),
        lambda: gathered(functools.partial(_texts, frame, text) for frame in sides.values()),
    ]
    _, labels, read = gathered(attempts)
    found = {}
    for (side, frame), texts in zip(sides.items(), read, strict=True):
        found[side] = RawTexts(texts, labels[side], extra_columns(frame, options, side == "train"))
    return found, Columns(text, label)


def _text_column(frame: Frame, named: str | None) -> str:
    usual = [name for name in frame if name in TEXT_NAMES]
    return pick_column("text", named, usual, [*frame.columns], frame.index[0][0])


def _texts(frame: Frame, column: str) -> list[str]:
    _check_column("text", column, [frame])
    _refuse(frame[column], frame[column] == "", "a text", lambda _: "drop such rows")
    texts: list[str] = frame[column].tolist()
    return texts


# new rows ------------------------------------------------------------------------------------------------------------


def read_new_rows(
    path: Path,
    features: Sequence[str],
    usual_label: str | None,
    columns: TableColumns,
    spelling: Mapping[str, Feature],
    class_names: Sequence[str],
) -> tuple[NDArray[np.float64], NDArray[Any] | None]:
    """Rows of a CSV file for a trained model, (N, F), and their labels, or None; the file may hold other columns.

    Args:
        features: the columns to take, in this order.
        usual_label: the label column of the files that the model was trained on; if it is not there, a column of a
            usual name holds labels where that was one.
        columns: which of the features are categories, or say where another is missing.
        spelling: what the file may call the features and in which units they are; {}: as they are named.
        class_names: the classes' names, by which, or by whose numbers, labels are called; (): these are numbers.
    """
    frame = align(read_csv(path), spelling, path)
    flagged = {flag for _, flag in columns.flags}
    stored = [name for place, name in enumerate(features) if place not in flagged]
    named = zip(features, columns.categories, strict=False)
    known = {name: _numbered(found) for name, found in named if found}
    flags = [features[place] for place, _ in columns.flags]
    attempts: list[Callable[[], Any]] = [
        lambda: check_columns({"": frame}, None, stored, known),
        lambda: _matrix(frame, stored, known, flags, _LIKE_THE_RUNS),
        lambda: _new_labels(frame, stored, usual_label, class_names),
    ]
    _, x_NF, labels = gathered(attempts, "predict")
    return x_NF, labels


def read_new_texts(
    path: Path, usual_text: str | None, usual_label: str | None, class_names: Sequence[str]
) -> tuple[list[str], NDArray[Any] | None]:
    """Texts of a CSV file for a trained model, and their labels, or None; see `read_new_rows`.

    usual_text: the column of the run's texts; if it is not there, a column of a usual name holds them.
    """
    frame = read_csv(path)
    column = _text_column(frame, usual_text if usual_text in frame else None)
    return _texts(frame, column), _new_labels(frame, (column,), usual_label, class_names)


def _new_labels(
    frame: Frame, inputs: Sequence[str], usual_label: str | None, class_names: Sequence[str]
) -> NDArray[Any] | None:
    """The labels of new rows. inputs: the columns that are none."""
    likely: Sequence[str] = ()
    if usual_label is not None and usual_label in frame:
        likely = (usual_label,)
    elif usual_label is None or usual_label in LABEL_NAMES:
        likely = LABEL_NAMES
    there = [name for name in likely if name in frame and name not in inputs]
    if len(there) != 1:
        return None
    check_columns({"": frame}, there[0])
    if not class_names:
        return _targets(frame, there[0])
    cells = _spelt_labels(frame, there[0])
    called = {str(number): number for number in range(len(class_names))}
    called |= {name: number for number, name in enumerate(class_names)}
    numbers = cells.map(_without_fraction).map(called)
    shown = ", ".join(class_names[:_NAMED]) + (", ..." if len(class_names) > _NAMED else "")
    _refuse(cells, numbers.isna(), f"one of the run's classes ({shown})", lambda _: _LIKE_THE_RUNS)
    labels: NDArray[Any] = numbers.to_numpy().astype(np.int64)
    return labels


def _without_fraction(cell: str) -> str:
    """3 for 3.0; a cell that is no whole number stays."""
    whole = as_whole_numbers([cell])
    return cell if whole is None else str(whole[0])
