"""The contract of a method: the messages between server and clients, aggregation, and local training.

All hooks have defaults, which amount to local training; a method overrides what its paper changes. A method object
holds its hyperparameters only. State that outlives a call is in `Server.state` or `Client.state`: named tensors, which
are replaced and never modified in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from types import FunctionType, MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import Group, Message, State, nbytes
from polyfed.core.model_factory import AuxiliaryModel
from polyfed.core.modules import trainable_parameters
from polyfed.core.releases import Release
from polyfed.core.server import Server
from polyfed.core.settings import AdapterSettings, Stage, Training
from polyfed.core.upload_forms import Form
from polyfed.errors import ConfigError
from polyfed.functional.losses import task_loss
from polyfed.models.split import Part
from polyfed.validation.settings import hyperparameters as hyperparameters
from polyfed.validation.settings import repr_of_changes
from polyfed.validation.settings import table as table

Context = Mapping[str, Any]  # tensors and groups of tensors for the loss
PER_SAMPLE_GRAD = "gradient by row"  # in a context: computes per-sample gradients, see `engine.dp_sgd`


def not_a_hyperparameter(kind: type[Any]) -> str | None:
    """The first field that is no hyperparameter, as its class lacks the decorator `hyperparameters`; else None."""
    for base in reversed(kind.__mro__):
        fields = [name for name, hint in inspect.get_annotations(base).items() if "ClassVar" not in str(hint)]
        if fields and issubclass(base, Method) and "__pydantic_validator__" not in vars(base):
            return fields[0]
    return None


class Batch(NamedTuple):
    """One minibatch: x (B, ...) as the model takes it, y (B,) classes, or floats where numbers are predicted (with
    `functional.losses.task_loss`), w (B,) row weights (1 except for padding).

    rows: (B,) int64, indices of the samples in the data of the phase, for targets per sample.
    """

    x: Tensor
    y: Tensor
    w: Tensor
    rows: Tensor | None = None


class StepResult(NamedTuple):
    """Gradients of one step for the optimizer. grads: parameter name -> gradient (None: no update).

    sums: tensors, summed over all steps: those that are 0-d for the record, the others for the method's `upload`. raw:
    likewise gradients by name, such as uncorrected gradients of the loss.
    """

    grads: Mapping[str, Tensor | None]
    loss: Tensor
    sums: Mapping[str, Tensor]
    raw: Mapping[str, Tensor] = MappingProxyType({})


class NotVectorizable(Exception):
    """The steps of several clients cannot be vectorized; the message gives the reason."""


@dataclass(frozen=True)
class PrecomputedGradients:
    """Replaces the model in `gradients` when the gradient of `loss` is already known (vectorized clients).

    weights: the parameters that take a gradient, by name; the rest of the network is not there.
    """

    found: StepResult
    context: Context
    weights: Mapping[str, Tensor]

    def __getattr__(self, name: str) -> NoReturn:
        raise NotVectorizable(f"its `gradients` wants more of the network ('{name}') than the gradient of its loss")

    def check_context(self, context: Context) -> StepResult:
        """The gradient of `loss`; `context` must be that of the step."""
        if context is not self.context:
            raise NotVectorizable("it takes the gradient of its loss under another context than the step's own")
        return self.found


def trained_tensors(model: Any) -> Mapping[str, Tensor]:
    """The parameters that take a gradient, by name, of what `gradients` gets as its model."""
    if isinstance(model, PrecomputedGradients):
        return model.weights
    return {name: p.detach() for name, p in zip(*trainable_parameters(model), strict=True)}


@dataclass
class TrainingResult:
    """Result of local training. sums, raw: those of `StepResult`, summed over the steps."""

    steps: int = 0
    samples: int = 0  # training samples processed, over all epochs
    loss: float = 0.0  # mean over samples
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    raw: Mapping[str, Tensor] = field(default_factory=dict)
    is_finite: bool = False  # whether it is known that no weight is NaN or infinite


@dataclass(frozen=True)
class Requirements:
    """Requirements on models and data, checked before round 1. By default none."""

    split_model: bool = False  # models split into extractor, intermediate layers and head
    same_feature_dim: bool = False  # all representations have the same width
    same_head: bool = False  # all heads have the same tensors
    linear_head: bool = False  # the head is one linear layer
    same_architecture: bool = False
    shared_shapes: bool = False  # tensors of the same name have the same shape everywhere
    shared_parts: tuple[Part, ...] | None = None  # parts of split models for which this holds; None: all
    more_than_head: bool = False  # with `shared_shapes`: architectures share more than the head
    same_cut_shapes: bool = False  # inputs and outputs of the intermediate layers have the same shapes
    gridlike_cuts: bool = False  # their inputs are a vector, a map, or tokens of a square (functional.feature_pooling)
    public: int = 0  # public rows (data.holdout, data.public_dataset)
    public_origin: Literal["", "holdout", "other"] = ""  # their origin; "": any
    same_input_shape: bool = False  # all stored inputs, public rows included, have the same shape and type
    same_columns: bool = False  # of tables, as networks share what reads inputs; so it is with several of the above
    validation: bool = False  # every client has validation rows
    # why labels have to be classes, the same for all clients: "its prototypes are means of classes"; "": they need not
    classes: str = ""
    # why outputs have to mean the same for all clients: "it averages heads"; "": they need not
    shared_outputs: str = ""
    hint: str = ""  # advice for error messages about models


@dataclass(frozen=True)
class Phase:
    """A phase of local training; `client.phase` is its name.

    trains: parameters to train, by name or by part of a split model (None: all). Other parameters get no gradient, and
        layers without trained parameters run in eval mode, so that their BatchNorm statistics do not change.
    lr: learning rate; None: that of the training settings.
    follows_schedule: whether the schedule changes it from round to round. What trains once, after the last round, does
        not: a schedule that ends at 0 would leave it nothing to train with.
    data: training data: a part of the client's own data, or public data.
    rows: name of a tensor in the context, (M,) int64, with the rows to use; None: all.
    mask: name of a group in the context, parameter name -> 0/1 tensor; entries with 0 do not change, bit for bit.
    """

    epochs: int
    trains: Callable[[str], bool] | tuple[Part, ...] | None = None
    lr: float | None = None
    data: Literal["train", "validation", "public"] = "train"
    rows: str | None = None
    mask: str | None = None
    name: str = ""
    follows_schedule: bool = True

    def rate(self, training: Training, round: int) -> float:
        """The learning rate of this phase in a round."""
        if self.follows_schedule:
            return training.lr_at(round, self.lr)
        return training.lr if self.lr is None else self.lr


@dataclass(frozen=True)
class Exchange:
    """One download and upload within a round; `server.exchange` and `client.exchange` hold its name.

    phases: phases of local training, if `trains`; None: those of `Method.phases`.
    """

    name: str = "train"
    who: Literal["selected", "all"] = "selected"
    trains: bool = True
    phases: Sequence[Phase] | None = None


@dataclass(frozen=True)
class Exposed:
    """Parts of an upload from which an attacker may reconstruct single inputs.

    Attributes:
        kind: "features", one row per training sample; "prototypes", one row per entry of "labels"; or "sums", as
            `class_statistics.sum_rows` gives them, of a function that everybody knows. The functions of the others are
            known to those who have the client's network.
        entry: its name in the upload; of features, of the group whose "s_in" they are.
        function: for a client at work, from network inputs to the rows.
        without_noise: the method without noise of its own on features; None: it has none.
        sums: the sums, from an upload.
    """

    kind: Literal["features", "prototypes", "sums"]
    entry: str
    function: Callable[[Client], Callable[[Tensor], Tensor]]
    without_noise: Method | None = None
    sums: Callable[[Message], Mapping[str, Tensor]] | None = None


Receive = TypeVar("Receive", bound=Callable[..., Any])


def loads_message(receive: Receive) -> Receive:
    """Mark a `receive` that loads tensors of the message into the network, and nothing of the client's own.

    With `Method.ignores_initial_weights`, who is sent the same holds the same then, and is scored together where
    the message's "model" has all of the network.
    """
    receive.loads_message = True  # type: ignore[attr-defined]
    return receive


Aggregate = TypeVar("Aggregate", bound=Callable[..., Any])


def follows_device(aggregate: Aggregate) -> Aggregate:
    """Mark an `aggregate` that works where uploads and the server's state lie (`Server.device`), on a GPU, too.

    Holds as long as no further class changes what the server does.
    """
    aggregate.follows_device = True  # type: ignore[attr-defined]
    return aggregate


def server_follows_device(method: Method) -> bool:
    """Whether the server's half of a method works where uploads lie."""
    kind = type(method)
    hooks = ("init_server", "start_round", "broadcast", "aggregate")
    owners = [next(base for base in kind.__mro__ if hook in vars(base)) for hook in hooks]
    return hasattr(kind.aggregate, "follows_device") and all(issubclass(owners[-1], owner) for owner in owners)


def has_addends(method: Method) -> bool:
    """Whether uploads add up: no class that changes what goes up, or what becomes of it, is below that of `addends`."""

    def owner(hook: str) -> type:
        return next(base for base in type(method).__mro__ if hook in vars(base))

    return owner("addends") is not Method and all(
        issubclass(owner("addends"), owner(hook)) for hook in ("upload", "aggregate")
    )


class Method:
    """Base class of all methods: local training without communication.

    A first method overrides some of five hooks: `broadcast`, `receive`, `loss`, `upload` and `aggregate`, in the order
    of a round. The others are for papers that need more.

    A class declares what others have to know of it as attributes, at its end. Those beside `requirements`,
    `evaluation_stage` and further properties are:

    Attributes:
        name: in tables and folders; where a class states none, its own name in small letters.
        upload_form: names, types and sizes of an upload (`core.upload_forms`); the server rejects others. None: not
            checked, as in a class that overrides `upload` without stating it.
        delta_entries: groups of an upload that are trained weights; the download of the same name is their initial
            value. Clipping and noise apply to the difference (`engine.uploads`).
        aligned_entries: entries whose numbers are comparable between clients, such as outputs on common inputs: robust
            aggregation compares them, like `delta_entries` and rows by "labels" (`plugins.robust_aggregation`).
        unaligned_entries: entries with a row per label that are features of the clients' own networks, so that numbers
            are not comparable between clients: coordinate-wise aggregators do not apply.
        common_entries: of a message to clients whose addends are summed, which all of them get alike.
        same_addends: whether a client's `addends` in an exchange are the same in every round, as its rows are.
        ignores_initial_weights: for a client without weights of its own, `receive` overwrites the whole network without
            reading it, so that the engine need not draw initial weights. Not inherited by a class that overrides
            `receive` or `broadcast`.
        common_start: what starts with the same weights on all clients, a function of the seed that need not be sent:
            "head", heads with the same layers; "all", the networks of an architecture.
        trains_alone: why several clients cannot be trained as one (executor "vectorized"), where that is known of the
            method: "it takes the gradient of a second loss". "": it is tried.
        is_alone, adapters, personalize: how `polyfed.alone` and a recipe's `method.adapters` and `method.personalize`
            extend the method (`engine.method_wrappers`).
    """

    name: ClassVar[str] = "method"
    upload_form: ClassVar[Form | None] = None
    delta_entries: ClassVar[tuple[str, ...]] = ()
    aligned_entries: ClassVar[tuple[str, ...]] = ()
    unaligned_entries: ClassVar[tuple[str, ...]] = ()
    common_entries: ClassVar[tuple[str, ...]] = ()
    same_addends: ClassVar[bool] = False
    ignores_initial_weights: ClassVar[bool] = False
    common_start: ClassVar[Literal["nothing", "head", "all"]] = "nothing"
    trains_alone: ClassVar[str] = ""

    is_alone: ClassVar[bool] = False
    adapters: ClassVar[AdapterSettings | None] = None
    personalize: ClassVar[Literal["", "tuned", "shares"]] = ""

    def __repr__(self) -> str:
        """Hyperparameters that differ from their defaults."""
        return repr_of_changes(self) if is_dataclass(self) else f"{type(self).__name__}()"

    def __init_subclass__(cls, **options: Any) -> None:
        """Set the name, and what is not inherited by a class that overrides certain hooks.

        Raises:
            ConfigError: a property or class variable is written as a method, or the reverse; or a hyperparameter has
                the name of one.
        """
        super().__init_subclass__(**options)
        _check_kinds_of_hooks(cls)
        own = vars(cls)
        if "name" not in own:
            cls.name = cls.__name__.lower()
        if "upload" in own and "upload_form" not in own and cls.upload_form is not None:
            cls.upload_form = None
        if (
            own.keys() & {"receive", "broadcast"}
            and "ignores_initial_weights" not in own
            and cls.ignores_initial_weights
        ):
            cls.ignores_initial_weights = False

    # the five hooks of a first method, in the order of a round -----------------------------------------------
    def broadcast(self, server: Server, client_id: int) -> Message:
        """Message to one client. No side effects: may be called again, for retries and evaluation."""
        return {}

    def receive(self, client: Client, message: Message) -> Context:
        """Copy the message into `client.model` and `client.state`; return the context for the loss."""
        return {}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        """Loss of a batch, a pure function of parameters, batch and context, or (loss, sums). Here `task_loss`."""
        return task_loss(model(batch.x), batch.y, batch.w)

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        """Message to the server after local training."""
        return {}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """Aggregate uploads from any subset of the selected clients, including the empty one, ordered by client number.

        By `staleness_weighting` they may also be of clients selected in an earlier round.
        """

    # the same, where the server sees the total of the uploads alone ([secure_sums]) --------------------------
    def check_addends(self, server: Server) -> None:
        """Whether uploads add up with these settings and networks; asked before round 1.

        Raises:
            ConfigError: they do not.
        """

    def sends_addends(self, server: Server, client_id: int) -> bool:
        """Whether a client that is asked in the present exchange has something to be added up."""
        return True

    def addends(self, client: Client, upload: Message) -> tuple[Group, Message]:
        """What of an upload is added up over clients, in float32 or float64, and the rest, which the server sees.

        A number may be at most `functional.fixed_point.LARGEST` times the client's rows.

        Raises:
            ValueError: these numbers cannot be added up in fixed point; the upload is then refused.
        """
        return {}, upload

    def aggregate_sum(
        self, server: Server, total: Group, summed: Collection[int], others: Mapping[int, Message]
    ) -> None:
        """Aggregate the total of the addends, in the place of `aggregate`.

        Args:
            total: its tensors have the names, shapes and types of the addends. {}: there is none.
            summed: the clients whose addends it has. others: the rest of every upload, by number of client.
        """

    # what it needs, and what is evaluated --------------------------------------------------------------------
    @property
    def requirements(self) -> Requirements:
        """Requirements on models and data, checked before round 1."""
        return Requirements()

    @property
    def evaluation_stage(self) -> Stage:
        """The stage whose models the paper evaluates."""
        return "personal"

    def predict(self, model: Any, x: Tensor, context: Context) -> Tensor:
        """Scores (B, C) of a batch, (B, 1) where numbers are predicted; `context` is the client's state."""
        scores: Tensor = model(x)
        return scores

    @property
    def alternative_predictors(self) -> Mapping[str, Method]:
        """Further predictors to evaluate: name -> this method with another `predict`, otherwise equal."""
        return {}

    # more of the server --------------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        """Initialize `server.state`, before round 1."""

    def start_round(self, server: Server, selected: Sequence[int]) -> None:
        """Prepare a round, before any message: draw or compute what is common to all clients."""

    def exchanges(self, round: int) -> Sequence[Exchange]:
        """Exchanges of a round; more than one only if the paper has several."""
        return (Exchange(),)

    def final_exchanges(self) -> Sequence[Exchange]:
        """Exchanges after the last round, if any. All available clients are selected.

        Before them `start_round` is called, with `server.round` one more than in the last round. Evaluation follows.
        """
        return ()

    # the network that a client trains, where it is not its own -----------------------------------------------
    def variant(self, server: Server, client_id: int) -> str:
        """Present variant of the client's architecture, if there are several; "": the architecture itself.

        A function of the clients' numbers, the seed and the round, not of the server's state: a node of a deployment
        works it out for itself, and trains no other.
        """
        return ""

    def build(self, model: Any, variant: str) -> nn.Module:
        """Build the network that a client trains from its own; may draw from PyTorch's (scoped) global generator."""
        module: nn.Module = model
        return module

    @property
    def auxiliary_model(self) -> AuxiliaryModel | None:
        """An auxiliary model, common to all clients; `server.auxiliary_model` is its architecture."""
        return None

    def join_models(self, own: Any, auxiliary: Any) -> nn.Module:
        """Join a client's own network (as built) and the auxiliary model into one module to train; may draw weights."""
        module: nn.Module = own
        return module

    def personal_model(self, module: Any) -> nn.Module:
        """The part of the trained module that is evaluated and exported."""
        scored: nn.Module = module
        return scored

    # more of local training ----------------------------------------------------------------------------------
    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        """Random or additional inputs of one step, merged into the context. Use `generator` for all draws.

        Tensors may lie in main memory: they are brought to the network's device, those of many steps together.
        """
        return {}

    def gradients(self, model: Any, batch: Batch, context: Context) -> StepResult:
        """Gradient of `loss`. Override only if the paper's update is not the gradient of a scalar."""
        if isinstance(model, PrecomputedGradients):
            return model.check_context(context)
        if (bounded := context.get(PER_SAMPLE_GRAD)) is not None:
            found: StepResult = bounded(self.loss, model, batch, context)
            return found
        names, parameters = trainable_parameters(model)
        outcome = self.loss(model, batch, context)
        loss, sums = outcome if isinstance(outcome, tuple) else (outcome, {})
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        return StepResult(dict(zip(names, grads, strict=True)), loss.detach(), {k: v.detach() for k, v in sums.items()})

    def phases(self, training: Training) -> Sequence[Phase]:
        """Phases of local training, in order, for exchanges without phases of their own."""
        return (Phase(training.local_epochs),)

    # what options of a run may do with it --------------------------------------------------------------------
    @property
    def staleness_weighting(self) -> Literal["none", "alike", "changes", "uploads"]:
        """How uploads of earlier rounds count where the server does not wait (`devices.buffer_size`).

        "changes": uploads are `delta_entries`, beside counts; the engine scales the change and adds it to the present
        weights. "uploads": `aggregate` multiplies each upload by `server.upload_weight`. "alike": as those of the
        present round. "none": they cannot be aggregated in a later round.
        """
        return "none"

    @property
    def fixed_entries(self) -> Mapping[str, str]:
        """Entries of an upload that cannot be clipped, noised or replaced: name -> reason, for errors."""
        return {}

    @property
    def supports_dp_sgd(self) -> bool:
        """Whether per-sample gradients of `loss`, clipped, can replace its gradient.

        This requires that the loss is the mean of per-sample losses, without context, and that `gradients` accesses the
        batch only through `Method.gradients`.
        """
        return (type(self).loss, type(self).gradients) == (Method.loss, Method.gradients)

    @property
    def bounds_rows(self) -> bool:
        """Whether a row changes an upload by 1 at most, and `upload` adds noise of `client.privacy.noise_multiplier`,
        the same whenever it is sent (`releases.Release`, "sums").
        """
        return False

    def privacy_releases(self, training: Training, rows: int) -> Sequence[Release]:
        """Differentially private releases by the method itself, in an upload of a client with `rows` training rows."""
        return ()

    def remembered(self, state: State) -> Collection[int]:
        """The clients whose rows the server's state has, by themselves, so that they can be taken out.

        Raises:
            ConfigError: the method, or this setting of it, cannot take them out.
        """
        raise ConfigError(
            f"expected a method that can take out a client's rows, such as closed-form, got '{self.name}'"
        )

    def forget(self, state: State, client_id: int) -> State:
        """The server's state as if the client had never sent anything, but for a note not to take anything from it.

        `state` itself where that is so already.
        """
        return state

    def forget_upload(self, message: Message) -> Message:
        """An upload without what is made of the client's rows; `message` itself where there is nothing."""
        return message

    def forget_at_client(self, state: State, server: State) -> State:
        """A client's state with the server's, from which another client was taken out, in the place of what it had."""
        return state

    @property
    def exposed(self) -> Exposed | None:
        """Target of reconstruction attacks in an upload; None if it has none."""
        return None

    @property
    def entries_of_rows(self) -> Sequence[str]:
        """Entries of an upload that are computed from a client's rows beside its training, whose noise hides none."""
        return () if self.exposed is None else (self.exposed.entry,)

    # records and tables --------------------------------------------------------------------------------------
    def remarks(self, server: Server) -> Sequence[str]:
        """What a user should know before round 1 of this federation, a line each."""
        return ()

    @property
    def is_control(self) -> bool:
        """Whether clients get something else in the place of what the others know, to show what that is worth.

        Here whether there is a hyperparameter `control` that is not "none".
        """
        return getattr(self, "control", "none") != "none"

    @property
    def planned(self) -> str:
        """What depends on the planned number of rounds, in words; "": nothing, so a finished run can be extended."""
        return ""

    def nbytes_in_paper(self, message: Message) -> int:
        """Bytes of a message as the paper counts them; by default all."""
        return nbytes(message)


def _check_kinds_of_hooks(kind: type[Method]) -> None:
    """Whether what is overridden is called where `Method` has a method, and read where it has something else."""
    for name, hint in inspect.get_annotations(kind).items():
        if name in vars(Method) and "ClassVar" not in str(hint):
            raise ConfigError(f"{kind.__name__}.{name}: a hyperparameter needs another name, as methods have a {name}")
    functions = (FunctionType, staticmethod, classmethod)
    for name, base in vars(Method).items():
        called = isinstance(base, functions)
        own = inspect.getattr_static(kind, name)
        if name.startswith("_") or isinstance(own, functions) == called:
            continue
        if not called:
            write = f"@property above def {name}(self)" if isinstance(base, property) else f"{name} = ... in its class"
            raise ConfigError(f"{kind.__name__}.{name} is read, not called; write {write}")
        hint = f"write def {name}(self, ...) without @property"
        if not isinstance(own, property):
            hint = "a hyperparameter or class variable needs another name"
        raise ConfigError(f"{kind.__name__}.{name} is called, not read; {hint}")
