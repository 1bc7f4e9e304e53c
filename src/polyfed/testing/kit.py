"""What the properties have in common: the method, the options, and runs that several of them look at."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from torch import Tensor, nn

from polyfed.core.message import Message, first_nonfinite
from polyfed.core.method import Batch, Context, Method
from polyfed.core.randomness import keep_global_rng
from polyfed.core.server import Server
from polyfed.core.settings import Stage, Training
from polyfed.engine.federation import Federation
from polyfed.errors import PolyfedError
from polyfed.testing import fixtures
from polyfed.testing.fixtures import SHORT, TinyFederation
from polyfed.testing.observation import AggregationScene, ConformanceError, Observation, Spy
from polyfed.validation.settings import flat_fields, flat_settings


class NotApplicable(Exception):
    """A property cannot be asked of this method; says why."""


@dataclass(frozen=True)
class ChangedValue:
    """Another value for a hyperparameter, and the hyperparameters that must be set for it to matter."""

    value: Any
    given: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reduction:
    """`method` must give the same weights as `to`, bit for bit.

    Args:
        method: the hyperparameters that switch the tested method off, or a method. to: the simpler method.
        stage: which weights: "personal" (what the clients keep) or "received" (what they would be sent).
        same_architecture: all clients share a network. equal_sizes: and have equally many samples.
        part: prefix of the tensors of `method`'s network that make up the other's ("private.").
    """

    method: Method | Mapping[str, Any]
    to: Method
    stage: Stage = "personal"
    same_architecture: bool = False
    equal_sizes: bool = False
    part: str = ""


@dataclass(frozen=True, kw_only=True)
class ConformanceKit:
    """A method, and what the properties may take for granted.

    Args:
        method: with the hyperparameters that are tested.
        changed_values: hyperparameter -> another value (or `ChangedValue`) that must change something; default:
            made from the hyperparameter's type.
        no_effect: hyperparameter -> why it may change nothing at all; then it must change nothing.
        reductions: what the method must equal.
        expected_bytes: (server, client's number) -> bytes (down, up) of the last of two rounds, by the paper's formula.
        reference_loss: the loss of a step again by independent means: (model, batch, context) -> number.
        counted: the server counts every sample once, however the samples lie among the clients: "statistics" where
            clients send means of their data, "updates" where they send weights.
        models: networks for 1 x 6 x 6 images and 3 classes, in place of the kit's own.
        skip: property -> why it does not apply.
        device: where the networks compute. "cuda" is held to equal bits as well, for which a GPU needs
            `torch.use_deterministic_algorithms`.
    """

    method: Method
    changed_values: Mapping[str, Any] = field(default_factory=dict)
    no_effect: Mapping[str, str] = field(default_factory=dict)
    reductions: Sequence[Reduction] = ()
    expected_bytes: Callable[[Server, int], tuple[int, int]] | None = None
    reference_loss: Callable[[Any, Batch, Context], Any] | None = None
    counted: Literal["statistics", "updates"] | None = None
    models: Sequence[Callable[[], nn.Module]] | None = None
    skip: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"

    @property
    def name(self) -> str:
        """The method's."""
        return self.method.name

    @property
    def hyperparameters(self) -> tuple[str, ...]:
        """The method's settings; those of a table by their dotted names."""
        return tuple(flat_settings(self.method)) if dataclasses.is_dataclass(self.method) else ()

    def fail(self, text: str) -> typing.NoReturn:
        """Say that a property does not hold."""
        raise ConformanceError(f"{self.name}: {text}")

    def same(self, a: Mapping[str, Tensor], b: Mapping[str, Tensor], text: str, tolerance: float = 0.0) -> None:
        """Both must agree; `text` says what it means if they do not."""
        if found := fixtures.difference(a, b, tolerance):
            self.fail(f"{text}: {found}")

    def all_finite(self, federation: Federation, when: str) -> None:
        """Weights and states must be finite after a run; `when` says in which."""
        if bad := first_nonfinite({"all": fixtures.state(federation)}):
            self.fail(f"'{bad}' is not finite {when}")

    def needs_training(self) -> None:
        """Raises NotApplicable where nobody has trained in the plain run."""
        if all(record["train_loss"] is None for record in self.base.history):
            raise NotApplicable("nobody trains a network")

    @functools.cached_property
    def has_frozen_weights(self) -> bool:
        """Whether some weights of the networks stay as they are."""
        with keep_global_rng():
            networks = [build() for build in self.usual.builders.values()]
        return not all(p.requires_grad for network in networks for p in network.parameters())

    def no_offense(self, asked: str) -> None:
        """Nothing of this kind may have been seen in the plain run."""
        assert self.base
        for kind, text in self.observed.offenses:
            if kind == asked:
                self.fail(text.removeprefix(f"{self.name}: "))

    # federations ----------------------------------------------------------------------------------------------------

    def world(self, *others: Method, one: bool = False, norm: bool = False, **options: Any) -> TinyFederation:
        """Clients that fit the method (and others): `one` architecture, networks with BatchNorm (`norm`)."""
        needs = [m.requirements for m in (self.method, *others)]
        builds = self.models if self.models and not norm else fixtures.model_family(needs, one, norm)
        return fixtures.world(
            builds[:1] if one else builds, max(24, *(2 * n.public for n in needs)), device=self.device, **options
        )

    @functools.cached_property
    def usual(self) -> TinyFederation:
        """The clients of most properties."""
        return self.world()

    def run(self, method: Method | None = None, training: Training = SHORT, **options: Any) -> Federation:
        """A run of the usual clients; errors of the method are nonconformance."""
        return self.runs(self.usual, method, training, **options)

    def runs(
        self, tiny: TinyFederation, method: Method | None = None, training: Training = SHORT, **options: Any
    ) -> Federation:
        """A run of the given clients."""
        try:
            return tiny.run(self.method if method is None else method, training, **options)
        except PolyfedError as error:
            raise ConformanceError(f"{self.name}: {error}") from error

    @functools.cached_property
    def observed(self) -> Observation:
        """The plain run, made once."""
        observation = Observation(self.method, self.usual, self.reference_loss)
        observation.run()
        return observation

    @property
    def base(self) -> Federation:
        """The plain run that others are compared with."""
        if self.observed.error is not None or self.observed.federation is None:
            raise ConformanceError(f"{self.name}: {self.observed.error}") from self.observed.error
        return self.observed.federation

    @property
    def scenes(self) -> list[AggregationScene]:
        """The aggregations of the plain run, as they were before each."""
        assert self.base
        return self.observed.scenes

    def aggregations(
        self, tiny: TinyFederation, training: Training, look: Callable[[AggregationScene], None], **options: Any
    ) -> None:
        """Run, and let somebody look at each aggregation before it happens."""

        def aggregate(call: Callable[..., None], server: Server, uploads: Mapping[int, Message]) -> None:
            look(AggregationScene(self.method, server, dict(uploads), federation))
            call(server, uploads)

        federation = tiny.federation(Spy(self.method, aggregate=aggregate), training, **options)
        try:
            federation.run()
        except PolyfedError as error:
            cause = error.__cause__
            if isinstance(cause, ConformanceError):
                raise cause from None
            raise ConformanceError(f"{self.name}: {error}") from error


# hyperparameters -----------------------------------------------------------------------------------------------------


def is_fixed(method: Method, hyperparameter: str) -> bool:
    """Whether the class of the method leaves this hyperparameter one value only."""
    choices, kinds = _choices(method, hyperparameter)
    return len(choices) == len(kinds) == 1


def others(method: Method, hyperparameter: str) -> tuple[list[Any], bool]:
    """Other values of a hyperparameter, made from its type and value; and whether each of them must make a
    difference.
    """
    value = flat_settings(method)[hyperparameter]
    choices, kinds = _choices(method, hyperparameter)
    if value in choices:
        return [choice for choice in choices if choice != value], True
    if isinstance(value, bool):
        return [not value], True
    if isinstance(value, int):
        return [value + 1, 2 * value + 3, value - 1], False
    if isinstance(value, float):
        return [3 * value + 0.5, 0.0, value / 2, 0.05, 0.9], False
    if value is None:
        tried: dict[type, list[Any]] = {float: [0.05, 0.5], int: [1, 2], bool: [True]}
        return next((values for kind, values in tried.items() if kind in kinds), []), False
    return [], False


def _choices(method: Method, hyperparameter: str) -> tuple[list[Any], list[Any]]:
    """The values that a hyperparameter's type lists, and the types that it is a union of."""
    hint = flat_fields(type(method))[hyperparameter].annotation
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    members = typing.get_args(hint) if union else (hint,)
    kinds = [member.__origin__ if typing.get_origin(member) is Annotated else member for member in members]
    return [choice for kind in kinds if typing.get_origin(kind) is Literal for choice in typing.get_args(kind)], kinds


def replaced(method: Method, **hyperparameters: Any) -> Method | None:
    """The method with other hyperparameters, by their dotted names; None where it does not take these values."""
    given: dict[str, Any] = {}
    try:
        for hyperparameter, value in hyperparameters.items():
            table, _, inner = hyperparameter.partition(".")
            if inner:
                before: Any = given.get(table, getattr(method, table, None))
                given[table] = dataclasses.replace(before, **{inner: value})
            else:
                given[table] = value
        return dataclasses.replace(method, **given)  # type: ignore[type-var]
    except (ValueError, TypeError, PolyfedError):
        return None


def subsets(numbers: Sequence[int]) -> Iterator[list[int]]:
    """No answer, one, the last, every other, all but the first."""
    yield []
    for chosen in (numbers[:1], numbers[-1:], numbers[::2], numbers[1:]):
        if chosen:
            yield list(chosen)
