"""Local training in which no row counts for more than a bound, with noise on top (DP-SGD), by Opacus.

Of every batch the gradient of each row is taken by itself, shortened to the L2 norm C = `privacy.max_grad_norm`, and
added; plus N(0, (z C)^2) on every number, z = `privacy.noise_multiplier`, from the client's own stream or by its
secret; over the number of rows of a batch (of `poisson` batches: on average). What a row that is left blank would give
is 0, so that the sensitivity is C. It is 0, too, where a row's gradient is not finite.

With batches made by chance a step is a Gaussian mechanism on rows drawn with probability q = B / n. With shuffled ones
a row is in one step of each epoch, and an epoch is one mechanism, about all rows: nothing is counted for the shuffling.

Source: Abadi et al., CCS 2016; Mironov, Talwar and Zhang, arXiv:1908.10530 (sampling).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import to_bytes
from polyfed.core.method import PER_SAMPLE_GRAD, Batch, Context, Method, Phase, StepResult
from polyfed.core.model_factory import ModelFactory
from polyfed.core.modules import trainable_parameters
from polyfed.core.releases import Release
from polyfed.core.settings import Privacy, Training
from polyfed.errors import ConfigError, MissingPackage
from polyfed.functional.clipping import Normals, clip_and_noise
from polyfed.functional.modes import channels_first, has_batchnorm
from polyfed.functional.noise import KeyedGaussian, KeyedUniforms

Loss = Callable[[Any, Batch, Context], Any]
_TRIED = 3  # rows of a trial
_NEAR = 1e-4  # how far a row's gradient may be from that of the row alone, over their length


def releases(settings: Privacy, training: Training, phases: Sequence[Phase], rows: int) -> list[Release]:
    """What training through these phases gives away of a client with so many rows."""
    epochs = sum(phase.epochs for phase in phases)
    batches = math.ceil(rows / training.batch_size)
    if not settings.max_grad_norm or not settings.noise_multiplier or not epochs:
        return []
    if not settings.poisson:
        return [Release("training", "sample", settings.noise_multiplier, times=epochs)]
    drawn = min(training.batch_size, rows)
    return [Release("training", "sample", settings.noise_multiplier, drawn, rows, True, epochs * batches)]


class Draws(NamedTuple):
    """Where noise and batches come from: the client's streams, or its secret. chance: (N,) numbers in (0, 1)."""

    noise: torch.Generator | Normals
    chance: torch.Generator | KeyedUniforms


def draws_of(client: Client, order: torch.Generator) -> Draws:
    """Those of a client at work, before its training.

    By a secret they are a function of all that the training is: the same training once more has the same draws, so that
    nothing is gained by asking again, and no other has them, of two with one noise the difference being bare.

    Args:
        order: deals batches where there is no secret.
    """
    if client.secret is None or not client.privacy.max_grad_norm:
        return Draws(client.generator("sgd noise"), order)
    train = client.data.train
    settings = [client.training.model_dump_json(), client.privacy.model_dump_json()]
    place = json.dumps([client.id, client.exchange, client.round, *settings]).encode()
    weights = {"weights": {name: tensor.detach() for name, tensor in client.model.state_dict().items()}}
    parts = (place, to_bytes(weights), to_bytes({"x": train.x, "y": train.y}))
    whole = b"".join(hashlib.sha256(part).digest() for part in parts)
    noise, chance = (hmac.digest(client.secret, what + whole, "sha256") for what in (b"sgd noise", b"batches"))
    return Draws(KeyedGaussian(noise), KeyedUniforms(chance))


@contextlib.contextmanager
def per_sample_gradients(client: Client, draws: torch.Generator | Normals) -> Iterator[dict[str, Any]]:
    """What the contexts of a client at work have within the block, so that gradients are bounded; {} where none are.

    draws: where the noise comes from, on the CPU.
    """
    settings = client.privacy
    if not settings.max_grad_norm or not trainable_parameters(client.model)[0]:
        yield {}
        return
    with _PerSampleModel(client.model, settings, draws) as rows:
        expected = min(client.training.batch_size, client.n) if settings.poisson else None
        yield {PER_SAMPLE_GRAD: lambda loss, model, batch, context: rows.gradients(loss, batch, context, expected)}


class _PerSampleModel:
    """A network whose gradients are taken row by row; within the block only."""

    def __init__(self, model: nn.Module, settings: Privacy, draws: torch.Generator | Normals) -> None:
        sampler, optimizer = _package()
        self._names, self._parameters = trainable_parameters(model)
        noise = None
        self._own: Normals | None = None  # draws of noise, where it is not Opacus's
        if isinstance(draws, torch.Generator):
            seed = int(torch.randint(2**62, (), generator=draws))
            noise = torch.Generator(self._parameters[0].device).manual_seed(seed)
        elif settings.noise_multiplier:
            self._own = draws
        self._std = settings.noise_multiplier * settings.max_grad_norm
        self._model = model
        self._hooks = sampler(model)
        self._layout = channels_first(model)
        self._hooks.disable_hooks()  # what else a step does with the network is no business of theirs
        self._steps = optimizer(
            torch.optim.SGD(self._parameters, lr=1.0),  # an optimizer that never takes a step of its own
            noise_multiplier=settings.noise_multiplier if self._own is None else 0.0,
            max_grad_norm=settings.max_grad_norm,
            expected_batch_size=1,
            generator=noise,
        )

    def __enter__(self) -> _PerSampleModel:
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        self._layout.__enter__()
        warnings.filterwarnings("ignore", "Full backward hook is firing")  # a first layer's input has no gradient
        return self

    def __exit__(self, *error: object) -> None:
        self._steps.zero_grad(set_to_none=True)
        self._hooks.to_standard_module()
        self._layout.__exit__(None, None, None)
        self._warnings.__exit__(None, None, None)

    def gradients(self, loss: Loss, batch: Batch, context: Context, expected: int | None) -> StepResult:
        """The noisy sum of the bounded gradients, over `expected` rows; None: over the batch's.

        A loss that is not finite is told as 0: a client that were refused for it would tell of the row.
        """
        value, sums = self.taken(loss, batch, context)
        self._drop_nonfinite()
        self._steps.expected_batch_size = expected or len(batch.y)
        if self._own is not None:
            self._steps.expected_batch_size = 1  # the plain sum
        self._steps.pre_step()
        found = {name: p.grad for name, p in zip(self._names, self._parameters, strict=True)}
        if self._own is not None:
            noisy = clip_and_noise({name: g for name, g in found.items() if g is not None}, 0.0, self._std, self._own)
            found |= {name: tensor / (expected or len(batch.y)) for name, tensor in noisy.items()}
        self._steps.zero_grad(set_to_none=True)
        return StepResult(found, torch.nan_to_num(value, 0.0, 0.0, 0.0), sums)

    def taken(self, loss: Loss, batch: Batch, context: Context) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and sums of a batch; the gradients of its rows lie in the parameters' `grad_sample`."""
        if not len(batch.y):
            for parameter in self._parameters:
                parameter.grad_sample = parameter.new_zeros((0, *parameter.shape))  # type: ignore[attr-defined]
            return torch.zeros((), device=self._parameters[0].device), {}
        self._hooks.enable_hooks()
        try:
            outcome = loss(self._model, batch, context)
            value, sums = outcome if isinstance(outcome, tuple) else (outcome, {})
            value.backward()
        finally:
            self._hooks.disable_hooks()
        return value.detach(), {name: one.detach() for name, one in sums.items()}

    def _drop_nonfinite(self) -> None:
        """Rows of which a gradient is not finite have none: one would hide all others, and no noise would hide it."""
        every = (getattr(p, "grad_sample", None) for p in self._parameters)
        found = [rows for rows in every if rows is not None]
        if found and len(found[0]):
            lengths = torch.stack([rows.flatten(1).norm(dim=1) for rows in found]).norm(dim=0)
            for rows in found:
                rows[~lengths.isfinite()] = 0.0

    def each(self, loss: Loss, batch: Batch) -> list[Tensor | None]:
        """The gradients of the rows, (B, ...) for each parameter; None of one that has none."""
        self.taken(loss, batch, {})
        found = [getattr(p, "grad_sample", None) for p in self._parameters]
        self._steps.zero_grad(set_to_none=True)
        return found


def check_dp_sgd(method: Method, settings: Privacy, clients: Sequence[Client], model_factory: ModelFactory) -> None:
    """Whether these networks can be trained so, in this method.

    Args:
        clients: one for each architecture.

    Raises:
        ConfigError: they cannot; says which, and what would do.
    """
    if not settings.max_grad_norm:
        return
    name = method.name
    if not method.supports_dp_sgd:
        raise ConfigError(
            f"privacy.max_grad_norm: expected a method and hyperparameters whose loss is a mean over rows and of "
            f"nothing else, got {name}; see docs/privacy.md"
        )
    phases = [phase for exchange in method.exchanges(1) for phase in exchange.phases or ()]
    for phase in [*phases, *method.phases(clients[0].training)]:
        if phase.data != "train" or phase.rows is not None:
            raise ConfigError(
                f"privacy.max_grad_norm: expected training on all rows of a client, got {name}, on others"
            )
    _package()
    for client in clients:
        module = model_factory.module(client.architecture, alone=True)
        try:
            _try_rows(method, settings, client, module)
        except ConfigError as problem:
            who = client.title_with_network
            raise ConfigError(f"privacy.max_grad_norm: {who} cannot be trained row by row: {problem}") from None


def _try_rows(method: Method, settings: Privacy, client: Client, module: nn.Module) -> None:
    """Rows of the client's data have, together, the gradients that they have alone."""
    if has_batchnorm(module):
        raise ConfigError("BatchNorm mixes them; take a network with GroupNorm or LayerNorm, or without either")
    device, train = next(iter(module.parameters())).device, client.data.train
    x = client.prepare(train.x[:_TRIED].to(device))
    y = train.y[:_TRIED].to(device)
    with _training_without_dropout(module):
        try:
            with _PerSampleModel(module, settings, torch.Generator()) as rows:
                found = rows.each(method.loss, Batch(x, y, torch.ones(len(y), device=device)))
            for place in range(len(y)):
                row = slice(place, place + 1)
                _compare_row(method, module, Batch(x[row], y[row], torch.ones(1, device=device)), found, place)
        except ConfigError:
            raise
        except Exception as error:  # Opacus's own, of layers that it does not know
            reason = str(error).strip().splitlines()
            raise ConfigError(reason[0] if reason else type(error).__name__) from None


def _compare_row(method: Method, module: nn.Module, batch: Batch, found: Sequence[Tensor | None], place: int) -> None:
    """A row's gradients alone are those that it has among others."""
    names, parameters = trainable_parameters(module)
    alone = method.loss(module, batch, {})
    value = alone[0] if isinstance(alone, tuple) else alone
    gradients = torch.autograd.grad(value, parameters, allow_unused=True)
    for name, together, own in zip(names, found, gradients, strict=True):
        if together is None or own is None:
            raise ConfigError(f"'{name}' has no gradient by row")
        if (together[place] - own).norm() > _NEAR * (1 + own.norm()):
            raise ConfigError(f"the gradient of '{name}' for a row depends on the others, or is not known")


@contextlib.contextmanager
def _training_without_dropout(module: nn.Module) -> Iterator[None]:
    """Within the block the network is in training mode, but for its dropout."""
    before = {layer: layer.training for layer in module.modules()}
    module.train()
    for layer in module.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            layer.eval()
    try:
        yield
    finally:
        for layer, trains in before.items():
            layer.training = trains


def _package() -> tuple[Any, Any]:
    """Opacus's network that takes gradients row by row, and its optimizer that bounds them and adds noise."""
    try:
        from opacus.grad_sample import GradSampleModule
        from opacus.optimizers import DPOptimizer
    except ImportError:
        raise MissingPackage(
            "privacy.max_grad_norm: expected the package 'opacus', which takes gradients row by row, got none; install "
            "it with: pip install 'polyfed[privacy]'"
        ) from None
    return GradSampleModule, DPOptimizer
