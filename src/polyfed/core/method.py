"""The contract of a method: what the server and the clients say to each other, and how a client learns.

Everything has a default, which is plain local training: a method overrides what its paper changes. A method object
holds its hyperparameters and nothing else; whatever outlives a call is in `Server.state` or `Client.state`, named
tensors that are replaced and never written into.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import Message, flatten, nbytes
from polyfed.core.model_factory import AuxiliaryModel
from polyfed.core.modules import trainable
from polyfed.core.releases import Release
from polyfed.core.server import Server
from polyfed.core.settings import Stage, Training
from polyfed.core.upload_forms import Form
from polyfed.functional.losses import cross_entropy
from polyfed.models.split import Part
from polyfed.validation.hyperparameters import hyperparameters as hyperparameters
from polyfed.validation.hyperparameters import repr_of_changes
from polyfed.validation.hyperparameters import table as table

Context = Mapping[str, Any]  # tensors and groups of tensors that the loss needs
BY_ROW = "gradient by row"  # in a context: takes the gradient of the loss in its own way, see `engine.dp_sgd`


def not_a_hyperparameter(kind: type[Any]) -> str | None:
    """The first field of a method's class that `hyperparameters` does not stand above, so that it is none; None: all
    are.
    """
    for base in reversed(kind.__mro__):
        fields = [name for name, said in inspect.get_annotations(base).items() if "ClassVar" not in str(said)]
        if fields and issubclass(base, Method) and "__pydantic_validator__" not in vars(base):
            return fields[0]
    return None


class Batch(NamedTuple):
    """One minibatch: x (B, ...) as the model takes it, y (B,) classes, w (B,) row weights, all ones but for padding.

    rows: (B,) int64, where the samples stand in the data of the phase; for targets that belong to samples.
    """

    x: Tensor
    y: Tensor
    w: Tensor
    rows: Tensor | None = None


class StepResult(NamedTuple):
    """What one step hands to the optimizer. grads: parameter name -> gradient (None leaves it alone).

    sums: numbers of the step, 0-d, which are summed over all steps for the record. raw: gradients by name that a method
    wants summed over all steps for its own `upload`, such as those of the loss before they were corrected.
    """

    grads: Mapping[str, Tensor | None]
    loss: Tensor
    sums: Mapping[str, Tensor]
    raw: Mapping[str, Tensor] = MappingProxyType({})


class NotVectorizable(Exception):
    """The steps of several clients cannot be taken as one; says why."""


@dataclass(frozen=True)
class PrecomputedGradients:
    """Stands in for the model in `gradients` where the gradient of `loss` is there already: of many clients as one."""

    found: StepResult
    context: Context

    def __getattr__(self, name: str) -> NoReturn:
        raise NotVectorizable(f"its `gradients` wants more of the network ('{name}') than the gradient of its loss")

    def under(self, context: Context) -> StepResult:
        """The gradient of `loss` under this context, which must be the step's own."""
        if context is not self.context:
            raise NotVectorizable("it takes the gradient of its loss under another context than the step's own")
        return self.found


@dataclass
class TrainingResult:
    """What local training left behind. sums, raw: those of `StepResult`, summed over the steps."""

    steps: int = 0
    samples: int = 0  # training samples processed, all epochs counted
    loss: float = 0.0  # mean over samples
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    raw: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Requirements:
    """What must hold before round 1. Everything off: any model, any data."""

    split_model: bool = False  # extract, transform and head
    same_feature_dim: bool = False  # the representation is equally wide everywhere
    same_head: bool = False  # the heads have the same tensors
    linear_head: bool = False  # the head is one linear layer
    same_architecture: bool = False
    shared_shapes: bool = False  # tensors of one name have one shape everywhere
    shared_parts: tuple[Part, ...] | None = None  # only those of these parts of split models; None: all
    more_than_head: bool = False  # beside `nested`: no architecture has just a head in common with all others
    same_cut_shapes: bool = False  # what enters and leaves the intermediate part is equally shaped everywhere
    gridlike_cuts: bool = False  # what enters it is a vector, a map or the tokens of a square (functional.projections)
    public: int = 0  # rows of data that everybody may see (data.holdout, data.public_dataset)
    public_origin: Literal["", "holdout", "other"] = ""  # of what kind; "" is any
    same_input_shape: bool = False  # stored inputs have one shape and type everywhere, also in those rows
    validation: bool = False  # every client has validation rows
    twice_differentiable: bool = False  # every network has second derivatives
    warmup: int = 0  # first rounds in which nobody trains; a run has more rounds
    hint: str = ""  # what to do when the models do not fit


@dataclass(frozen=True)
class Phase:
    """A stretch of local training; `client.phase` holds its name.

    trains: which parameters move, by name, or by their part of a split model (None: all). The others get no gradient,
        and layers of which nothing moves run in eval mode, so that their BatchNorm statistics stay too.
    lr: None for the training setting's; the schedule applies to either.
    data: what is trained on, a part of the client's own data or what everybody may see.
    rows: name of a tensor in the context, (M,) int64: which rows of it; None: all.
    mask: name of a group in the context: parameter name -> 0/1 tensor; where it is 0, the entry stays bit for bit.
    """

    epochs: int
    trains: Callable[[str], bool] | tuple[Part, ...] | None = None
    lr: float | None = None
    data: Literal["train", "validation", "public"] = "train"
    rows: str | None = None
    mask: str | None = None
    name: str = ""


@dataclass(frozen=True)
class Exchange:
    """One passage down and up within a round. The halves see its name in `server.exchange` and `client.exchange`.

    phases: how clients train in it, where it trains; None: as the method's `phases` say.
    """

    name: str = "train"
    who: Literal["selected", "all"] = "selected"
    trains: bool = True
    phases: Sequence[Phase] | None = None


@dataclass(frozen=True)
class Exposed:
    """What an upload tells of single inputs, which an attacker may try to make again from it.

    Attributes:
        kind: "features", a row for each of some training rows, or "prototypes", a row for the mean of each of "labels".
        entry: where they are in an upload: name of a group whose tensors have a row each, or of a tensor.
        functions: of a client at work, tensor -> what makes a row of it out of a row of network inputs; the kind itself
            stands for a tensor that is no member of a group.
        noise: the level of what the method adds to it. with_noise: the method that adds another level and is else the
            same; None: it has no noise of its own.
    """

    kind: Literal["features", "prototypes"]
    entry: str
    functions: Callable[[Client], Mapping[str, Callable[[Tensor], Tensor]]]
    noise: float = 0.0
    with_noise: Callable[[float], Method] | None = None


class Method:
    """Plain local training without a word to anybody; the base of every method."""

    name: ClassVar[str] = ""
    # for the table of methods, in plain words and formulas; the hyperparameters' explanations are the comments beside
    # the fields
    paper: ClassVar[str] = ""  # authors, venue, year
    differs: ClassVar[str] = "anything"  # what may differ between the clients' networks
    down: ClassVar[str] = "nothing"  # what a client is sent per round, in numbers: "P + C", P its parameters
    up: ClassVar[str] = "nothing"  # what it sends
    states: ClassVar[str] = "none"  # what outlives a round beside the clients' weights: "client: c_i; server: w, c"
    # groups of an upload that are trained weights, what came down under the same names being where they started: a
    # setting that clips, hides or thins out uploads treats their difference (engine/uploads.py)
    delta_entries: ClassVar[tuple[str, ...]] = ()
    # entries of an upload that mean the same, number by number, at every client (outputs on common inputs): a setting
    # that holds uploads to one another compares them (plugins/robust_aggregation.py), as it does `delta_entries` and
    # rows by "labels"
    aligned_entries: ClassVar[tuple[str, ...]] = ()
    # what an upload may hold, by name (core/upload_forms.py): a server refuses what is otherwise. None: it is not said
    form: ClassVar[Form | None] = None
    # entries with a row for each of "labels" that are features of the clients' own networks, of which a number means
    # something else at every client: no rule that goes number by number is made for them
    unaligned_entries: ClassVar[tuple[str, ...]] = ()
    # True: where a client has no weights of its own, `receive` writes all of its network and reads nothing of it, so
    # that the engine need not draw (and for every evaluation draw again) a start that nobody sees
    ignores_initial_weights: ClassVar[bool] = False

    # True: every client is a federation of its own (engine/alone.py), so that nothing crosses
    alone: ClassVar[bool] = False

    # True: the heads of clients' own networks begin alike wherever they have the same layers, not each as its client
    # draws it. Like all that clients begin with they are a function of the seed, so that nobody sends them
    common_head: ClassVar[bool] = False

    def __repr__(self) -> str:
        """The hyperparameters that are not at their defaults."""
        return repr_of_changes(self) if is_dataclass(self) else f"{type(self).__name__}()"

    def __init_subclass__(cls, **options: Any) -> None:
        """Who writes a `receive` says anew whether it `ignores_initial_weights`, who writes an `upload` what `form` it
        has.
        """
        super().__init_subclass__(**options)
        if "upload" in vars(cls):
            cls.form = vars(cls).get("form")
        if "receive" in vars(cls):
            cls.ignores_initial_weights = vars(cls).get("ignores_initial_weights", False)

    # what it needs and what is scored -----------------------------------------------------------------------
    @property
    def requirements(self) -> Requirements:
        """Checked against models and data before round 1."""
        return Requirements()

    @property
    def evaluation_stage(self) -> Stage:
        """The model that the paper scores."""
        return "personal"

    @property
    def alternative_predictors(self) -> Mapping[str, Method]:
        """Predictors to score beside `predict`: name -> this method with another `predict`, all else alike."""
        return {}

    @property
    def accepts_stale_uploads(self) -> bool:
        """Whether an upload may be aggregated in a later round than the one in which it was made."""
        return False

    @property
    def fixed_entries(self) -> Mapping[str, str]:
        """What of an upload cannot be clipped, noised, thinned out or replaced: name -> what it holds, for refusals."""
        return {}

    @property
    def planned(self) -> str:
        """What depends on how many rounds are planned, in words; "": nothing does, and a finished run can go on."""
        return ""

    @property
    def supports_dp_sgd(self) -> bool:
        """Whether the gradient bounded row by row can stand for that of `loss`: all that a step sees of the data.

        The loss is then the mean over the batch's rows of what each gives alone, and nothing else, as the context is
        empty too; `gradients` looks at the batch through `Method.gradients` only.
        """
        return (type(self).loss, type(self).gradients) == (Method.loss, Method.gradients)

    @property
    def auxiliary_model(self) -> AuxiliaryModel | None:
        """An auxiliary model, common to all clients; `server.auxiliary_model` is its architecture."""
        return None

    # server half --------------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        """Before round 1: fill `server.state`."""

    def start_round(self, server: Server, selected: Sequence[int]) -> None:
        """Once per round, before any message: what is drawn or computed for all."""

    def exchanges(self, round: int) -> Sequence[Exchange]:
        """The passages of a round; more than one only where the paper has more."""
        return (Exchange(),)

    def final_exchanges(self) -> Sequence[Exchange]:
        """The passages after the last round, if any: one closing round, in which all who are present count as selected.

        `plan` is called before them, `server.round` being one more than in the last round, and all are scored after.
        """
        return ()

    def broadcast(self, server: Server, client_id: int) -> Message:
        """What goes down to one client. No side effects: it may be called again, for a retry or for scoring."""
        return {}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """Take in what came up: any subset of those asked, also none; in order of client number.

        With `accepts_stale_uploads`, also from clients that were asked in an earlier round.
        """

    # which network a client trains ----------------------------------------------------------------------------
    def variant(self, server: Server, client_id: int) -> str:
        """Name of the client's present network, where one architecture has several; "" is the architecture itself."""
        return ""

    def build(self, model: Any, variant: str) -> nn.Module:
        """The network that a client trains, made from its own; may draw from PyTorch's (scoped) global generator."""
        module: nn.Module = model
        return module

    def join_models(self, own: Any, auxiliary: Any) -> nn.Module:
        """Join a client's own network (as built) and the auxiliary model into one module to train; may draw weights."""
        module: nn.Module = own
        return module

    def personal_model(self, module: Any) -> nn.Module:
        """The part of it that is scored and exported."""
        scored: nn.Module = module
        return scored

    # client half ----------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        """Load what came into `client.model` and `client.state` (copying it); return what the loss needs."""
        return {}

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        """Random or extra inputs of one step, merged into the context. All draws are made here, from `generator`."""
        return {}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        """The loss of one batch, a pure function of parameters, batch and context; or (loss, sums). Here CE."""
        return cross_entropy(model(batch.x), batch.y, batch.w)

    def gradients(self, model: Any, batch: Batch, context: Context) -> StepResult:
        """The gradient of `loss`. Overridden only where no scalar has the gradient that the paper wants."""
        if isinstance(model, PrecomputedGradients):
            return model.under(context)
        if (bounded := context.get(BY_ROW)) is not None:
            found: StepResult = bounded(self.loss, model, batch, context)
            return found
        names, parameters = trainable(model)
        outcome = self.loss(model, batch, context)
        loss, sums = outcome if isinstance(outcome, tuple) else (outcome, {})
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        return StepResult(dict(zip(names, grads, strict=True)), loss.detach(), {k: v.detach() for k, v in sums.items()})

    def phases(self, training: Training) -> Sequence[Phase]:
        """The stretches of local training, in order, of exchanges that bring none of their own."""
        return (Phase(training.local_epochs),)

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        """What goes up after local training."""
        return {}

    def privacy_releases(self, training: Training, rows: int) -> Sequence[Release]:
        """What an upload of a client with so many training rows holds that the method itself bounds and noises."""
        return ()

    @property
    def exposed(self) -> Exposed | None:
        """What attacks aim at in an upload; None where it holds nothing that is made of single inputs or classes."""
        return None

    def predict(self, model: Any, x: Tensor, context: Context) -> Tensor:
        """Scores (B, C) of a batch; `context` is the client's state."""
        scores: Tensor = model(x)
        return scores

    # the record -------------------------------------------------------------------------------------------------
    def remark(self, record: Mapping[str, Any]) -> str:
        """What a user should know about a round, in a line, from its line in `rounds.jsonl`; "" is nothing.

        The first remark of a run is told to those who watch it, and no other.
        """
        return ""

    def nbytes_in_paper(self, message: Message) -> int:
        """The message's bytes as the paper counts them; by default all of them."""
        return nbytes(message)


def uses_default_predict(method: Method) -> bool:
    """Whether the method predicts by the network's output alone, as `Method.predict` does."""
    return getattr(method.predict, "__func__", None) is Method.predict


def numbers(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Sums over the steps as plain numbers, for the record."""
    return {name: float(value) for name, value in flatten(dict(sums)).items() if value.dim() == 0}
