"""The envelopes of server and nodes: plain facts, and a message of tensors as bytes (`engine.wire`)."""

from __future__ import annotations

import hashlib
import json
import math
import re
import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from polyfed.config.recipe import Recipe
from polyfed.core.message import Message, State, flatten, to_bytes
from polyfed.core.method import Method
from polyfed.core.settings import Settings
from polyfed.engine.executors.jobs import TrainJob
from polyfed.engine.scoring import COUNTS, Score, score_from_json
from polyfed.engine.wire import decode
from polyfed.errors import RunError
from polyfed.functional.fixed_point import MOST_CLIENTS
from polyfed.records.main_score import ACCURACY, RMSE, MainScore

Kind = Literal["hello", "train", "score", "finish", "keys", "shares", "unmask"]
OF_SUMS: tuple[Kind, ...] = ("keys", "shares", "unmask")  # beside the masked upload that comes with training
_AGREED = ("method", "training", "evaluation", "privacy", "secure_sums", "plugins")  # sections on which both sides act
_OF_ALL = ("class_names", "categories", "features", "task", "mean", "std")  # of [data], for all clients' rows
# what the server cannot know of a shared model's entry in the list of models
SHARED = ("table", "target", "label_column")
_TENSORS = 2**14  # and groups, that a message may have at most
_HEADER = 2**22  # bytes of their names at most: read, JSON takes twenty times as much

Count = Annotated[int, Field(ge=0, le=2**40)]
_Rows = Annotated[int, Field(ge=0, le=2**31)]
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Numbers = Annotated[list[_Number], Field(max_length=2**16)]
_Text = Annotated[str, Field(max_length=1000)]
_Name = Annotated[str, Field(max_length=200)]
_Names = Annotated[list[_Name], Field(max_length=2**16)]
_Classes = Annotated[list[_Name], Field(max_length=2**11)]  # of whose pairs the server may have counts
_Part = Annotated[str, Field(pattern="^(test|validation)$")]  # of a client's data, which are scored
_Mark = Annotated[str, Field(pattern=r"^(\d{6}-\d{2})?$")]


_Few = Annotated[list[Count], Field(max_length=MOST_CLIENTS)]
_Hex = Annotated[str, Field(pattern=r"^([0-9a-f]{2}){1,64}$")]
_Keys = Annotated[str, Field(pattern=r"^([0-9a-f]{128})?$")]


class SumRequest(Settings):
    """Of a sum with masks (`masked_sums`), what a node has to know for its next answer.

    name: of the sum, "" without one. all_rows: of all clients of the federation. clients, keys: of the sum. sharers,
    shares: who has shared, and what each of them has encrypted for the node. survivors: whose uploads are there.
    """

    name: Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")] = ""
    all_rows: Count = 0
    clients: _Few = Field(default_factory=list)
    keys: Annotated[list[_Keys], Field(max_length=MOST_CLIENTS)] = Field(default_factory=list)
    sharers: _Few = Field(default_factory=list)
    shares: Annotated[list[_Hex], Field(max_length=MOST_CLIENTS)] = Field(default_factory=list)
    survivors: _Few = Field(default_factory=list)

    def digest(self, method: Method, message: Message) -> bytes:
        """Of what all who mask have to know alike. message: that the method's server has sent to one of them."""
        known = self.model_dump(include={"name", "all_rows", "clients", "keys", "sharers"})
        common = to_bytes({name: message[name] for name in method.common_entries if name in message})
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode() + common).digest()


class SumAnswer(Settings):
    """A node's keys; or shares, of "shares" for each of the sum's clients, of "unmask" of each of the sharers."""

    keys: _Keys = ""
    shares: Annotated[list[_Hex], Field(max_length=MOST_CLIENTS)] = Field(default_factory=list)


class TaskRequest(Settings):
    """A request to a node, beside what its own recipe says; the fields that count depend on the kind of envelope.

    experiment: of the run, "" before it is known. settings: see `shared_config`. auxiliary_model: its network, ""
    without one. base: mark of the client's state when it last counted, "" at its beginning; best: of the one to be kept
    beside it. parts: of its data, to be scored. sum: that the upload is to be part of. The others: see
    `executors.TrainJob`.
    """

    experiment: Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")] = ""
    settings: dict[str, Any] = Field(default_factory=dict)
    auxiliary_model: str = ""
    round: Count = 0
    exchange_index: Count = 0
    is_final: bool = False
    variant: str = ""
    base: _Mark = ""
    best: _Mark = ""
    parts: Annotated[list[_Part], Field(max_length=2)] = Field(default_factory=list)
    sum: SumRequest = Field(default_factory=SumRequest)


JOB_FACTS = {*TaskRequest.model_fields} & {field.name for field in fields(TrainJob)}  # for `make_job`


class ClientHello(Settings):
    """A node's introduction: its client's number, its data (counts, classes, form of inputs), its network.

    token: identifies the node under any registration. shape, dtype: of one stored input. mean, std, table: see
    `Prepare`. words: ids of texts; 0: no texts; -1: fixed vectors. categories: of a table's features. feature_dim:
    width of the head's input. linear: whether the head is one linear layer. columns: of its table among those of
    data.features.
    """

    client: Count
    token: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    dataset: _Text
    train: Annotated[int, Field(ge=1, le=2**31)]
    validation: _Rows
    test: _Rows
    class_names: _Classes
    feature_names: _Names
    shape: Annotated[list[Count], Field(max_length=16)]
    dtype: Annotated[str, Field(pattern="^(uint8|float32|int64)$")]
    mean: _Numbers
    std: _Numbers
    table: bool
    words: Annotated[int, Field(ge=-1, le=2**22)]
    categories: Annotated[list[Annotated[int, Field(ge=0, le=2**22)]], Field(max_length=2**16)] = Field(
        default_factory=list
    )
    architecture: _Text
    feature_dim: Annotated[int, Field(ge=1, le=2**20)]
    linear: bool
    columns: Annotated[list[Count], Field(max_length=2**16)] = Field(default_factory=list)


class TaskResult(Settings):
    """The result of a job: see `executors.JobResult`. new: whether the client has new weights."""

    steps: Count
    samples: Count
    loss: float
    sums: Annotated[dict[Annotated[str, Field(max_length=100)], _Number], Field(max_length=100)]
    refused: _Text | None
    new: bool
    score: dict[str, Any] | None


_Facts = TypeVar("_Facts", bound=Settings)


def parse(kind: type[_Facts], facts: Mapping[str, Any]) -> _Facts:
    """Received facts, checked; RunError: one is missing, unknown or of a wrong type."""
    try:
        return kind.model_validate(dict(facts))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        what = re.sub("(?<!^)(?=[A-Z])", " ", kind.__name__).lower()  # "client hello"
        raise RunError(f"expected the facts of an envelope ({what}), got others at '{where}': {first['msg']}") from None


@dataclass(frozen=True)
class Envelope:
    """A request or an answer. body: a message, see `read_message`; b"": none."""

    kind: Kind
    facts: Mapping[str, Any]
    body: bytes = b""


class NodeError(str):
    """Why a node gave no answer."""


def read_message(body: bytes) -> State:
    """The message that another party has sent in an envelope; RunError: there is none in it."""
    return checked_message(decode_body(body))


def decode_body(body: bytes) -> Any:
    """What another party has sent in an envelope, whatever it is; RunError: nothing, or too many tensors."""
    return decode(body, _HEADER, _TENSORS)


def checked_message(value: Any) -> State:
    """The value, which is a message; RunError: it is not."""
    if not isinstance(value, dict) or len(value) > _TENSORS:
        raise RunError(f"expected a message of at most {_TENSORS} tensors and groups, got something else")
    flatten(value)  # refuses names and values that a message cannot have
    return value


def read_score(
    facts: Mapping[str, Any], rows: int, classes: int, figures: Collection[str] = (), others: Collection[str] = ()
) -> Score:
    """The score that a node has sent (`engine.scoring.score_to_json`), of a client with so many rows.

    Args:
        classes: of the task; 0: numbers are predicted. figures: those asked for beside the accuracy; beside the RMSE
            all are there. others: the other predictors that there may be.

    Raises:
        RunError: no such score.
    """
    try:
        score = score_from_json(facts)
        main = ACCURACY if classes else RMSE
        beside = {*figures} - {COUNTS} if classes else {*main.metrics}
        _check_score(score, rows, main, beside, classes if COUNTS in figures else 0)
        if foreign := [name for name in score.others if name not in others]:
            raise ValueError(f"the predictor {foreign[0][:60]!r}")
        for other in score.others.values():
            _check_score(other, rows, main, set() if classes else beside, 0)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
        raise RunError(f"expected a score of {rows} rows, got something else: {error}") from None
    return replace(score, own=None, missing=None, rows=None)


def _check_score(score: Score, rows: int, main: MainScore, figures: set[str], classes: int) -> None:
    """Whether a score has these figures beside the main one, and counts of so many classes; 0: no counts.

    Figures beside an accuracy are shares like it; those beside an RMSE may be any number.
    """
    if score.total != rows or score.figures.keys() != {main.name, *figures}:
        raise ValueError(f"{', '.join(score.figures)[:60]} of {score.total} rows")
    for name, value in score.figures.items():
        least = 0.0 if main.is_share or name == main.name else -math.inf
        most = 1.0 if main.is_share else math.inf
        if not (math.isnan(value) or least <= value <= most) or math.isinf(value):
            raise ValueError(f"{name} of {value:g}")
    labels = score.pairs[:, :2]
    counts = score.pairs[:, 2]
    if score.classes != classes or bool(((labels < 0) | (labels >= classes)).any()):
        raise ValueError(f"counts of other than {classes} classes")
    if classes and (bool((counts < 0).any()) or int(counts.sum()) != rows or len(labels.unique(dim=0)) < len(labels)):
        raise ValueError(f"counts of another number of rows than {rows}")


def shared_config(recipe: Recipe) -> dict[str, Any]:
    """The settings that must be equal in the recipes of server and nodes, by section and key, as JSON has them."""
    settings = recipe.to_dict()
    shared = {section: settings[section] for section in _AGREED if section in settings}
    shared["run"] = {"seed": recipe.run.seed}
    shared["models"] = {"feature_dim": recipe.models.feature_dim, "feature_pool": recipe.models.feature_pool}
    data = {key: settings["data"][key] for key in _OF_ALL if key in settings["data"]}
    shared |= {"data": data} if data else {}
    return dict(json.loads(json.dumps(shared)))


def other_classes(expected: Sequence[str], found: Sequence[str]) -> str:
    """Why classes do not fit, with the first few of both; of a task with numbers to predict there are none."""
    wanted, got = (reprlib.repr(list(names)) for names in (expected, found))
    return f"expected the classes {wanted}, got {got}; data.class_names sets them in all recipes"
