"""How much a client computes, and what it holds while it does: counted, so that it is the same on every machine.

Operations are those of matrix products, convolutions and attention, a multiplication and an addition being two of them,
as PyTorch's dispatcher sees them. They depend on shapes, not on numbers: a few steps stand for all of a phase.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from polyfed.core.client import Client
from polyfed.core.message import get_tensor, shallow_copy
from polyfed.core.method import Batch, Context, Method, Phase
from polyfed.core.modules import cache_trainable, copy_network
from polyfed.core.optimizers import Optimizer
from polyfed.core.randomness import derive_seed, seeded_global_rng
from polyfed.engine.executors.stacked_loss import structure
from polyfed.engine.local_training import phase_data, train_only
from polyfed.functional.losses import cross_entropy
from polyfed.functional.modes import eval_mode, has_batchnorm


def _lstm(x: Tensor, of_input: Tensor, of_state: Tensor, *_: Any, **__: Any) -> int:
    """One direction of one layer; x is (T, B, D), the weights (4 H, D) and (4 H, H)."""
    return int(2 * x.shape[0] * x.shape[1] * (of_input.numel() + of_state.numel()))


def _heads(
    query: Tensor, key: Tensor, value: Tensor, _: int, __: int, of_inputs: Tensor, *others: Any, **___: Any
) -> int:
    """Attention in one operation, with its projections of weights (3 D, D) and (D, D); query is (B, T, D)."""
    rows = query.shape[0] * query.shape[1]
    products = 2 * query.shape[1] * key.shape[1]
    return int(2 * rows * (of_inputs.numel() + others[1].numel()) + 2 * query.shape[0] * products * query.shape[2])


def _encoder_layer(x: Tensor, width: int, heads: int, of_inputs: Tensor, *others: Any, **_: Any) -> int:
    """A transformer's layer in one operation: attention, and two linear layers behind it; x is (B, T, D)."""
    rows = x.shape[0] * x.shape[1]
    linear = 2 * rows * (others[10].numel() + others[12].numel())
    return _heads(x, x, x, width, heads, of_inputs, *others) + int(linear)


_aten = torch.ops.aten
_OTHERS: dict[Any, Callable[..., int]] = {  # operations of a CPU that PyTorch's own counter does not know
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda *qkv, **_: sdpa_flop_count(*(t.shape for t in qkv[:3])),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *given, **_: sdpa_backward_flop_count(
        *(tensor.shape for tensor in given[:4])  # the gradient, q, k and v
    ),
    _aten._native_multi_head_attention: _heads,
    _aten._transformer_encoder_layer_fwd: _encoder_layer,
    _aten.mkldnn_rnn_layer: _lstm,
    _aten.mkldnn_rnn_layer_backward: lambda *args, **named: 2 * _lstm(*args, **named),
}


class Uncompiled(TorchDispatchMode):
    """Sees each operation. By default PyTorch would hide what it does from its compiler, and load that: 2 seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class OperationCounter(Uncompiled):
    """Counts the floating-point operations of what is done within the block, which gives what it gives without.

    But for `torch.linalg.eigvalsh` and `svdvals` (so `cond` and the nuclear norm): within a block like this PyTorch
    computes vectors, too, and the values' last bits differ. `eigh` and `svd` give the same.

    Attributes:
        count: so many until now.

    >>> with OperationCounter() as done:
    ...     product = torch.ones(2, 3) @ torch.ones(3, 5)
    >>> done.count
    60
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, in its parts where it is made of such that count."""
        named = kwargs or {}
        packet = func._overloadpacket
        if packet not in flop_registry and packet not in _OTHERS:
            with self:
                made = func.decompose(*args, **named)
            return func(*args, **named) if made is NotImplemented else made
        made = func(*args, **named)
        if packet in _OTHERS:
            self.count += int(_OTHERS[packet](*args, **named))
        else:
            self.count += int(flop_registry[packet](*args, **named, out_val=made))
        return made


def training_operations(client: Client, method: Method, context: Context, phases: Sequence[Phase]) -> int:
    """The operations of what `train` would do now; nothing is changed, and nobody's draws are.

    Of steps that have as many rows, and alike inputs from the method, one is taken.

    Args:
        client: at work. method: whose gradients. context: what `receive` returned. phases: those to be trained.
    """
    worker = copy.copy(client)
    worker.state = shallow_copy(client.state)
    buffers = [(buffer, buffer.clone()) for buffer in client.model.buffers()]
    worker.model.train()
    draws = client.generator("inputs")
    total = 0
    taken = 0
    with seeded_global_rng(derive_seed(client.seed, "operations", client.exchange, client.round, client.id)):
        for phase in phases:
            worker.phase = phase.name
            known: dict[Hashable, int] = {}
            with train_only(worker.model, phase), cache_trainable(worker.model) as (_, parameters):
                if not parameters:
                    continue
                for rows in batch_sizes(worker, phase, context):
                    inputs = method.step_inputs(worker, taken, draws)
                    kind = (rows, structure(inputs))
                    if kind not in known:
                        known[kind] = _one_step(worker, method, {**context, **inputs}, phase, rows)
                    total += known[kind]
                    taken += 1
    for buffer, before in buffers:
        buffer.copy_(before)
    return total


def batch_sizes(client: Client, phase: Phase, context: Context) -> list[int]:
    """Rows of each of a phase's minibatches, as `shuffled` deals them."""
    held = len(phase_data(client, phase)[0] if phase.rows is None else get_tensor(context, phase.rows))
    size = client.training.batch_size
    smallest = 2 if has_batchnorm(client.model) else 1
    whole, left = divmod(held, size)
    return phase.epochs * [rows for rows in [size] * whole + [left] if rows >= smallest]


def _one_step(client: Client, method: Method, context: Context, phase: Phase, count: int) -> int:
    """The operations of one step with the first `count` rows of a phase's data."""
    samples, prepare = phase_data(client, phase)
    rows = torch.arange(len(samples)) if phase.rows is None else get_tensor(context, phase.rows).cpu()
    chosen = rows[:count]
    device = next(iter(client.model.parameters())).device
    ones = torch.ones(count, device=device)
    batch = Batch(prepare(samples.x[chosen].to(device)), samples.y[chosen].to(device), ones, chosen.to(device))
    with OperationCounter() as done:
        method.gradients(client.model, batch, context)
    return int(done.count)


def training_memory(client: Client, module: nn.Module) -> int:
    """Bytes that a network takes while it is trained plainly, by cross entropy: a batch, activations, gradients, the
    optimizer's state, and the network itself.

    Args:
        client: whose data and settings. module: stays as it is.
    """
    model = copy_network(module).train()
    rows = torch.arange(client.training.batch_size) % client.n
    with cache_trainable(model) as (_, parameters), AllocationTracker() as made:
        device = next(iter(model.parameters())).device
        optimizer = Optimizer(parameters, client.training, client.lr)
        for _ in range(2):  # in the second, the optimizer has its state
            x = client.prepare(client.data.train.x[rows].to(device))
            y = client.data.train.y[rows].to(device)
            loss = cross_entropy(model(x), y, torch.ones(len(y), device=device))
            optimizer.step(list(torch.autograd.grad(loss, parameters, allow_unused=True)))
            del x, y, loss
    held = sum(tensor.nbytes for tensor in module.state_dict().values())
    return int(held + made.peak)


def flops(module: nn.Module, x: Tensor) -> int:
    """Floating-point operations of a forward pass in eval mode; a training step takes about three times as many.

    Norms, activations and pooling are left out, as is usual.
    """
    with OperationCounter() as done, eval_mode(module), torch.no_grad():
        module(x)
    return int(done.count)


class AllocationTracker(Uncompiled):
    """Counts the bytes of tensors that are made within the block: activations, gradients, the optimizer's state.

    Not those that were there before (weights, data), nor what kernels need for themselves.

    Attributes:
        held: bytes of what was made and still is there. peak: the most that was there at a time.

    >>> with AllocationTracker() as made:
    ...     kept = torch.zeros(256) + 1
    >>> made.held, made.peak
    (1024, 2048)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = self.peak = 0
        self._known: dict[int, tuple[Any, int]] = {}  # identity of a storage -> its reference, its bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; what it takes and nobody has seen was there before, what it gives is new."""
        named = kwargs or {}
        for given in (*args, *named.values()):
            self._meet(given, before=True)
        made = func(*args, **named)
        self._meet(made)
        self.peak = max(self.peak, self.held)
        return made

    def _meet(self, value: Any, before: bool = False) -> None:
        """Take note of what an operation takes or gives: tensors, or lists of some; only a strided one has a storage to
        look at.
        """
        if isinstance(value, list | tuple):
            for one in value:
                self._meet(one, before)
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return
        storage = value.untyped_storage()
        key = id(storage)
        size = 0 if before else storage.nbytes()
        if key not in self._known:
            self._known[key] = (weakref.ref(storage, functools.partial(self._forget, key)), size)
            self.held += size

    def _forget(self, key: int, _: Any) -> None:
        self.held -= self._known.pop(key)[1]
