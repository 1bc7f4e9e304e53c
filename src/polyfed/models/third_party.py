"""Networks of timm and torchvision by name, and where a network without cuts is cut.

    timm:resnet10t   torchvision:resnet18   package.module:function   any of them with @layer1 behind

The part behind ``@`` names the submodule that ends the extractor; ``@none`` leaves the intermediate part empty. Weights
are drawn, unless ``?pretrained`` stands behind the name of another package's network: then all but the head are those
that the package fetches (and keeps on this machine).
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.errors import ConfigError, MissingPackage, kind_and_line
from polyfed.models.adapt import split
from polyfed.models.networks import check_request
from polyfed.models.split import SplitModel

FIRST_BLOCKS = (  # what ends the extractor unless the name says otherwise: the first of these that can be cut after
    "layer1", "stages.0", "trunk_output.block1", "denseblock1", "encoder_layer_0", "blocks.0", "layers.0", "layer.0",
    "features.1",
)  # fmt: skip
_PRETRAINED = "?pretrained"
_WITH_AUXILIARY_HEADS = ("googlenet", "inception_v3")  # a split network has no place for such heads


def builder_for(name: str, fetch: bool = True) -> Callable[[tuple[int, ...], int], nn.Module] | None:
    """The builder of ``timm:resnet10t`` and its like, (image shape, classes) -> network; None for other names.

    fetch: load the weights of ``?pretrained``; False: leave them as drawn, where others will be loaded.
    """
    plain, mark, wanted = name.partition("?")
    package, _, called = plain.partition(":")
    if mark and (mark + wanted != _PRETRAINED or package not in _MAKERS):
        raise ConfigError(
            f"model '{name}': expected '{_PRETRAINED}' behind the name of a network of timm or torchvision, "
            f"got '{mark}{wanted}' behind '{plain}'"
        )
    if package not in _MAKERS:
        return None

    def build(in_shape: tuple[int, ...], classes: int) -> nn.Module:
        module = _MAKERS[package](called, check_request(plain, in_shape, classes), classes)
        if mark and fetch:
            load_weights(module, fetch_weights(package, called, tuple(in_shape), classes), name, classes)
        return module

    return build


def pretrained_normalization(name: str) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and std per channel, in 0..1, of the images that the weights of ``...?pretrained`` were trained with.

    None for networks whose weights are drawn, and where the package does not tell.
    """
    plain, mark, _ = re.split("[@#]", name)[0].partition("?")
    package, _, called = plain.partition(":")
    found = read_normalization(package, called) if mark else None
    return None if found is None else (tuple(map(float, found[0])), tuple(map(float, found[1])))


def auto_split(module: nn.Module, name: str, classes: int, end: str | None) -> SplitModel:
    """A network as a split model, its head being its last ``nn.Linear`` with as many outputs as there are classes.

    Args:
        module: returns logits (N x C), or has them as the ``logits`` of what it returns.
        name: for messages. classes: C.
        end: dotted name of the submodule that ends the extractor, "none" for an empty intermediate part; None: the
            first of `FIRST_BLOCKS` after which the network can be cut, and an empty intermediate part without any.
    """
    head = head_of(module, classes)
    if head is None:
        raise ConfigError(
            f"model '{name}' should return a SplitModel, or a module with an nn.Linear of {classes} outputs for its "
            f"head, got a {type(module).__name__} without one: wrap it with polyfed.split(module, head=..., "
            "extractor=...)"
        )
    if end is not None:
        return split(module, head, None if end == "none" else end, architecture=name)
    names = [found for found, _ in module.named_modules() if found]
    for block in FIRST_BLOCKS:
        for found in (n for n in names if f".{n}".endswith(f".{block}")):
            with contextlib.suppress(ConfigError):
                return split(module, head, found, architecture=name)
    return split(module, head, None, architecture=name)


def head_of(module: nn.Module, classes: int) -> str | None:
    """The name of the layer that gives the scores, if there is one."""
    found = [name for name, part in module.named_modules() if name and getattr(part, "out_features", None) == classes]
    return found[-1] if found else None


# pre-trained weights ------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)  # one network per architecture is fetched, not one per client
def fetch_weights(package: str, called: str, in_shape: tuple[int, ...], classes: int) -> Mapping[str, Tensor]:
    """What the package has been trained to, by name; of timm already made for these images and classes."""
    fetched: Mapping[str, Tensor]
    with _fetching(package, called), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # weights that the package lacks are drawn, alike in every process
        if package == "timm":
            options = timm_options(called, in_shape, classes)
            fetched = _package("timm").create_model(called, pretrained=True, **options).state_dict()
        else:
            entries = _package("torchvision").models.get_model_weights(called).DEFAULT
            fetched = entries.get_state_dict(progress=False, check_hash=True, weights_only=True)
    return {name: tensor.detach() for name, tensor in fetched.items()}


@contextlib.contextmanager
def _fetching(package: str, called: str) -> Iterator[None]:
    """What a package prints meanwhile goes to standard error, without each of its attempts; failing is one line."""
    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    hub.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except ConfigError:
        raise
    except Exception as error:  # no network, no weights under this name, no space left
        raise ConfigError(
            f"cannot fetch the pre-trained weights of '{package}:{called}' ({kind_and_line(error)}); they are fetched "
            f"once, from the network, and kept by {package}; without '{_PRETRAINED}' weights are drawn"
        ) from error
    finally:
        hub.setLevel(level)


def load_weights(module: nn.Module, fetched: Mapping[str, Tensor], name: str, classes: int) -> None:
    """Put the fetched weights into all of a network but its head."""
    head = f"{head_of(module, classes)}."
    first = next((f"{name}.weight" for name, part in module.named_modules() if isinstance(part, nn.Conv2d)), None)
    wanted = {key: tensor for key, tensor in module.state_dict().items() if not key.startswith(head)}
    for key, tensor in wanted.items():
        given = fetched.get(key)
        if given is not None and key == first:
            given = adapt_channels(given, tensor.shape[1])
        if given is None or given.shape != tensor.shape:
            got = "nothing" if given is None else f"{tuple(given.shape)}"
            raise ConfigError(
                f"the weights of '{name}' do not fit: expected '{key}' of shape {tuple(tensor.shape)}, got {got}; "
                "set data.image_size to the size of the images that they were trained with (mostly 224)"
            )
        wanted[key] = given
    module.load_state_dict(wanted, strict=False)


def adapt_channels(weight: Tensor, channels: int) -> Tensor:
    """A first convolution for images of other channels: as many of its own in turn, scaled to the same sum.

    For gray images it gives what the original gives for them as RGB.
    """
    if weight.shape[1] == channels:
        return weight
    if channels == 1:
        return weight.sum(dim=1, keepdim=True)
    turns = [channel % weight.shape[1] for channel in range(channels)]
    return weight[:, turns] * (weight.shape[1] / channels)


@functools.lru_cache(maxsize=16)
def read_normalization(package: str, called: str) -> tuple[Any, Any] | None:
    """Mean and std as the package tells them."""
    with _fetching(package, called):
        if package == "timm":
            config = _package("timm").get_pretrained_cfg(called)
            return None if config is None else (config.mean, config.std)
        used = _package("torchvision").models.get_model_weights(called).DEFAULT.transforms()
        return used.mean, used.std


# the packages -------------------------------------------------------------------------------------------------------


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision's operators are another PyTorch's
        raise MissingPackage(
            f"{name} cannot be imported ({kind_and_line(error)}); install the extra 'vision': pip install "
            "'polyfed[vision]', with torch and torchvision of versions that belong together"
        ) from error


def _unknown(name: str, package: str, known: Iterable[str]) -> ConfigError:
    near = ", ".join(f"'{package}:{found}'" for found in difflib.get_close_matches(name, list(known), 3, 0.6))
    return ConfigError(
        f"unknown model '{package}:{name}'; "
        + (f"did you mean {near}?" if near else f"{package}.list_models() lists those that there are")
    )


def _timm(name: str, in_shape: tuple[int, ...], classes: int) -> nn.Module:
    timm = _package("timm")
    if not timm.is_model(name):
        raise _unknown(name, "timm", timm.list_models())
    module: nn.Module = timm.create_model(name, **timm_options(name, in_shape, classes))
    return module


def timm_options(name: str, in_shape: tuple[int, ...], classes: int) -> dict[str, Any]:
    config = _package("timm").get_pretrained_cfg(name)
    fixed = {"img_size": tuple(in_shape[1:])} if config is not None and config.fixed_input_size else {}
    return {"num_classes": classes, "in_chans": in_shape[0], **fixed}


def _torchvision(name: str, in_shape: tuple[int, ...], classes: int) -> nn.Module:
    models = _package("torchvision").models
    known = models.list_models(module=models)
    if name not in known:
        raise _unknown(name, "torchvision", known)
    sized = {"image_size": in_shape[1]} if name.startswith("vit_") else {}
    plain = {"aux_logits": False, "init_weights": True} if name in _WITH_AUXILIARY_HEADS else {}
    module: nn.Module = models.get_model(name, weights=None, num_classes=classes, **sized, **plain)
    if in_shape[0] != 3:
        first, conv = next((name, part) for name, part in module.named_modules() if isinstance(part, nn.Conv2d))
        kept = {key: getattr(conv, key) for key in ("kernel_size", "stride", "padding", "dilation")}
        module.set_submodule(first, nn.Conv2d(in_shape[0], conv.out_channels, **kept, bias=conv.bias is not None))
    return module


_MAKERS = {"timm": _timm, "torchvision": _torchvision}  # (name, image shape, classes) -> network
