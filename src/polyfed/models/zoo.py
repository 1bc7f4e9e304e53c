"""Builds registered models by name, and describes them."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from polyfed.errors import ConfigError, PolyfedError, kind_and_line
from polyfed.models import third_party
from polyfed.models.networks import HOMES, Home
from polyfed.models.split import HiddenHead, SequentialSplit, SplitModel, check_plain, with_projection
from polyfed.registry import MODELS, import_object


def build(
    name: str,
    in_shape: tuple[int, ...],
    classes: int,
    feature_dim: int | None = None,
    words: int | Tensor | None = None,
    fetch: bool = True,
    beside: Sequence[str] = (),
    categories: Sequence[int] = (),
    feature_pool: bool = False,
    frozen: bool = False,
) -> SplitModel:
    """A fresh model with its architecture's name set; weights are drawn from torch's current generator.

    Args:
        name: a registered model; ``"timm:resnet10t"``, ``"torchvision:resnet18"``, and with
            ``"?pretrained"`` behind it all but the head has been trained; or
            ``"package.module:function"`` for a builder of your own, called as ``function(in_shape, classes)`` and
            returning a `SplitModel` (`polyfed.models.adapt.split` makes one) or an ``nn.Module``. What is no
            `SplitModel` is cut before its classifier and after its first block, or after ``layer2`` where the name
            ends with ``"@layer2"`` (see `polyfed.models.third_party.auto_split`). ``"#512-256"`` behind the name of a
            network whose head is linear gives the head two hidden layers.
        in_shape: shape of one sample; (channels, height, width) for the zoo.
        classes: C.
        feature_dim: adds a projection to this width (see `with_projection`); None leaves the network as it is.
        words: of texts: how many ids there are, or their fixed vectors (V, E); goes to builders with a parameter of
            this name, and to no others.
        fetch: whether ``"timm:resnet10t?pretrained"`` gets its weights; False: drawn ones, as others will be loaded.
        beside: folders in which ``package.module`` is looked for where Python does not find it by itself.
        categories: of a table with categories: per feature, how many there are, 0 for a number; goes to a builder's
            parameter of this name.
        feature_pool: averages the representation to `feature_dim` in place of the projection.
        frozen: nobody trains the network, of which the representation alone is wanted: the output, if it has no head.

    Raises:
        ConfigError: no such model or builder, or one without the parameter `categories` for a table with some; the data
            do not fit the network; the builder failed or returned something else.

    >>> build("digits-cnn1", (1, 8, 8), 10).feature_dim
    64
    """
    plain, _, end = name.partition("@")
    called, mark, hidden = plain.partition("#")
    if frozen and (end or mark):
        raise ConfigError(
            f"the map '{name}': what stands behind '@' or '#' changes nothing before the head; leave it out"
        )
    builder = third_party.builder_for(called, fetch)
    if builder is None:
        builder = import_object("model", called, beside) if ":" in called else MODELS[called]
    made = _call(name, builder, in_shape, classes, {"words": words, "categories": tuple(categories) or None})
    if frozen and not isinstance(made, SplitModel) and third_party.head_of(made, classes) is None:
        made = SequentialSplit(made, nn.Flatten(), nn.Identity(), feature_dim=0)
    if end and isinstance(made, SplitModel):
        raise ConfigError(f"model '{called}' is a SplitModel already; expected no '@{end}' behind its name")
    model = made if isinstance(made, SplitModel) else third_party.auto_split(made, name, classes, end or None)
    model.architecture = name
    if feature_dim is not None:
        try:
            model = with_projection(model, feature_dim, feature_pool)
        except (RuntimeError, MemoryError, TypeError) as error:  # no memory for so many weights, or no such number
            why = kind_and_line(error)
            raise ConfigError(f"expected a feature_dim for which there is memory, got {feature_dim}: {why}") from error
    return _with_hidden_layers(model, hidden) if mark else model


def _with_hidden_layers(model: SplitModel, hidden: str) -> SplitModel:
    """The model with layers of these widths in its head: "512-256"."""
    if not isinstance(model.head, nn.Linear) or not re.fullmatch(r"[1-9]\d{0,5}(-[1-9]\d{0,5})*", hidden):
        raise ConfigError(
            f"model '{model.architecture}': expected the widths of hidden layers behind '#', such as '#512-256', of a "
            "network whose head is an nn.Linear"
        )
    place = next(name for name, module in model.named_modules() if module is model.head)
    return model.with_layers({place: HiddenHead(model.head, [int(width) for width in hidden.split("-")])})


def page(name: str) -> dict[str, Any]:
    """Describe one model: name, in_shape, classes, parameters and feature_dim on its home data, paper.

    Counted on a network built `without_memory`. A network of timm or torchvision is at home on images of 3 x 32 x
    32, a model of your own nowhere: its counts are None.

    Raises:
        ConfigError: there is no such model, or its package is not installed.
    """
    plain = name.partition("#")[0]
    is_of_others = third_party.builder_for(plain) is not None
    home = Home((3, 32, 32), 10, plain.partition(":")[0]) if is_of_others else HOMES.get(plain)
    row: dict[str, Any] = {"name": name, **dict.fromkeys(("in_shape", "classes", "parameters", "feature_dim"))}
    row["paper"] = ""
    if home is None:
        assert MODELS[plain] is not None  # an unknown name is an error
        return row
    with without_memory():
        model = build(name, home.in_shape, home.classes)
    row |= {"in_shape": home.in_shape, "classes": home.classes, "paper": home.paper}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return row | {"parameters": parameters, "feature_dim": model.feature_dim}


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Networks made within the block have shapes and no values (device "meta"): they can be counted, nothing else."""
    with torch.device("meta"), _Undrawn():
        yield


class _Undrawn(TorchFunctionMode):
    """Skips the drawing of weights, for which PyTorch would load its compiler where tensors have no memory."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        named = named or {}
        if getattr(function, "__name__", "").endswith(("normal_", "uniform_")):
            return named["tensor"] if "tensor" in named else arguments[0]
        return function(*arguments, **named)


def _call(
    name: str, builder: Callable[..., Any], in_shape: tuple[int, ...], classes: int, further: Mapping[str, Any]
) -> nn.Module:
    """What a builder makes. further: what it also gets where it has a parameter of the name; None: there is none."""
    if not callable(builder):
        raise ConfigError(f"model '{name}' should be a function (in_shape, classes), got a {type(builder).__name__}")
    try:
        takes = inspect.signature(builder).parameters
        more = {what: value for what, value in further.items() if value is not None and what in takes}
        if further["categories"] is not None and "categories" not in more:
            raise ConfigError(
                f"'{name}' cannot embed the categories of a table; expected a network with a parameter 'categories', "
                "such as mlp-64-32"
            )
        model = builder(tuple(in_shape), classes, **more)
    except PolyfedError:
        raise
    except Exception as error:  # the builder may be the user's
        shape = " x ".join(map(str, in_shape))
        raise ConfigError(
            f"building '{name}' for {shape} inputs, {classes} classes failed: {kind_and_line(error)}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model '{name}' should return a SplitModel or an nn.Module, got a {type(model).__name__}")
    check_plain(model)
    return model
