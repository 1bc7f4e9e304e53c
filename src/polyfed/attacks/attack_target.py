"""What a client of a finished run sent last, made again from its model and data, and the images behind it.

The method's own `upload` makes it, from the personal model of the run folder and the client's part of the recipe's
data, and what the run does to uploads on their way is done again, so that it is what went up in that round: the same
rows, and at the run's own level the same noise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.message import Message, clone, get_group, get_tensor
from polyfed.core.method import Exposed, Method, TrainingResult
from polyfed.core.modules import as_split_model
from polyfed.data.samples import LabeledSamples
from polyfed.data.transforms import Prepare
from polyfed.errors import ConfigError
from polyfed.experiments.data_cache import DataCache
from polyfed.experiments.prediction import ClientModel, load_model
from polyfed.functional.noise import add_noise
from polyfed.plugins.compression import UploadCompression, restore_upload
from polyfed.plugins.privacy import UploadPrivacy
from polyfed.registry import METHODS, suggest
from polyfed.report.run_records import RunRecord, format_setting, load_runs

Kind = Literal["features", "prototypes"]
_LEVEL = 0.8  # of noise where a run adds none: that of the paper that inverts features, FedIN+Noise
_CHUNK = 500  # rows per pass


@dataclass(frozen=True, eq=False)
class Target:
    """One thing to aim at. name: "s_in", "s_out" or "prototypes". function: network inputs to it, row by row.

    values: noise level -> what was sent, (N, ...), one row per target.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    values: dict[float, Tensor]


@dataclass(frozen=True, eq=False)
class AttackTarget:
    """What an attacker gets of one client, and what it is scored against.

    Attributes:
        run: the run's records. model: the client's, which the attacker is given. kind: what is uploaded.
        round: the last one in which the client took part.
        rows: how many rows the upload has; the first N of them are attacked (of prototypes, the rarest classes').
        noise_of_run: the level that the run itself added to what it sent.
        sent: what is aimed at.
        behind: for every target the private images (n, C, H, W) in [0, 1] that it was made of; one for features.
        labels: the class of each target.
        guess: (C, H, W), the mean of all the client's training images.
        mean, std: (C, 1, 1), from the network's units to brightness: x std + mean.
    """

    run: RunRecord
    model: ClientModel
    kind: Kind
    round: int
    rows: int
    noise_of_run: float
    sent: tuple[Target, ...]
    behind: tuple[Tensor, ...]
    labels: tuple[int, ...]
    guess: Tensor
    mean: Tensor
    std: Tensor

    @property
    def treated(self) -> str:
        """What the run does to uploads on their way, `[privacy]` and `[compression]`; "" where nothing."""
        return describe_transforms(self.run)

    @property
    def targets(self) -> Tensor:
        """(N, C, H, W): the private images, or the mean images of the classes."""
        return torch.stack([group.mean(dim=0) for group in self.behind])

    @property
    def class_names(self) -> tuple[str, ...]:
        """Of the targets' classes; their numbers where they have no names."""
        names = self.model.form.class_names
        return tuple(names[label] if label < len(names) else str(label) for label in self.labels)

    def first(self, count: int) -> AttackTarget:
        """The same with the first `count` targets alone; all where there are no more."""
        sent = tuple(Target(s.name, s.function, {at: v[:count] for at, v in s.values.items()}) for s in self.sent)
        return dataclasses.replace(self, sent=sent, behind=self.behind[:count], labels=self.labels[:count])

    def to_images(self, x: Tensor) -> Tensor:
        """Network inputs (..., C, H, W) as images in [0, 1]."""
        return (x * self.std + self.mean).clamp(0, 1)


def describe_transforms(run: RunRecord) -> str:
    """What a run does to uploads on their way: "clip 1, noise 0.5"; "" where nothing."""
    settings = [*run.recipe.privacy.items(), *run.recipe.compression.items()]
    return ", ".join(f"{key} {format_setting(value)}" for key, value in settings)


def collect_target(
    folder: str | Path,
    client: int,
    images: int,
    noise: Sequence[float] | None,
    sources: Sequence[str] | None,
    device: str,
    trust: bool = False,
) -> AttackTarget:
    """What a client of a finished run sent last.

    Args:
        folder: the run's. client: number. images: N, how many images, or prototypes, are aimed at.
        noise: levels, with which the method would send; where it has no noise of its own, as much is added. None:
            without noise, and the run's own level, or that of the paper where the run has none.
        sources: tensors of the upload, of prototypes "prototypes"; None: the first. device: of the network.
        trust: whether code that the folder names may be imported.

    Raises:
        ConfigError: no finished run, no such client, a method that sends neither, images that are not there.
    """
    model = load_model(folder, client, device, trust)
    exposed = exposed_by(model.method)
    network = as_split_model(model.network).requires_grad_(False)
    record = load_runs(folder)[0]
    at = _last_round(record, client)
    recipe = Recipe.of_run(folder, trust)
    train, classes = _images(recipe, record, client)
    own = Client(model.architecture, train=train, prepare=model.prepare)
    own.id = client
    own.seed = recipe.run.seed
    own.round = at
    own.classes = classes
    own.training, own.bound = recipe.training, network
    own.privacy = recipe.privacy
    own.plugins = [UploadPrivacy(recipe.privacy), UploadCompression(recipe.compression)]
    functions = exposed.functions(own)
    asked = _sources(sources, list(functions))
    levels = list(dict.fromkeys(noise if noise is not None else (0.0, exposed.noise or _LEVEL)))
    if exposed.kind == "features":
        values, groups, rows = _features(own, exposed, functions, levels, images)
    else:
        values, groups, rows = _prototypes(own, model.method, exposed, levels, images)
    sent = tuple(
        Target(name, functions[name], {at: parts[name].to(model.device) for at, parts in values.items()})
        for name in asked
    )
    pictures = train.x.float() / 255
    assert isinstance(model.prepare, Prepare)
    return AttackTarget(
        record, model, exposed.kind, at, rows, exposed.noise, sent,
        behind=tuple(pictures[g].to(model.device) for g in groups),
        labels=tuple(int(train.y[g[0]]) for g in groups),
        guess=pictures.mean(dim=0).to(model.device),
        mean=torch.tensor(model.prepare.mean, device=model.device).view(-1, 1, 1),
        std=torch.tensor(model.prepare.std, device=model.device).view(-1, 1, 1),
    )  # fmt: skip


# what is asked for ------------------------------------------------------------------------------------------------


def exposed_by(method: Method) -> Exposed:
    """What the method uploads of single inputs.

    Raises:
        ConfigError: neither features nor prototypes, or not with these settings.
    """
    if method.exposed is not None:
        return method.exposed
    known = {kind: ", ".join(_names(kind)) for kind in get_args(Kind)}
    usual = METHODS[method.name]().exposed if method.name in METHODS else None
    silent = "" if usual is None else ", which sends none with these settings"
    raise ConfigError(
        f"expected a run of a method that uploads features ({known['features']}) or prototypes "
        f"({known['prototypes']}), got {method.name}{silent}"
    )


def _names(kind: str) -> list[str]:
    """The methods that upload this."""
    found = {name: method().exposed for name, method in METHODS.items()}
    return [name for name, exposed in found.items() if exposed is not None and exposed.kind == kind]


def _sources(asked: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    for name in asked or ():
        if name not in known:
            raise ConfigError(
                f"--sources: expected what this run uploads ({', '.join(known)}), got '{name}'{suggest(name, known)}"
            )
    return list(dict.fromkeys(asked or known[:1]))


def _last_round(record: RunRecord, client: int) -> int:
    """The last round in which the client worked, and was not refused."""
    upto = record.result.models_of_round or len(record.rounds)  # whose network is at hand
    for line in reversed(record.rounds[:upto]):
        refused = {upload.client for upload in line.refused}
        if client in line.clients and client not in refused:
            return line.round
    raise ConfigError(f"client {client} took part in no round of {record.path}, and sent nothing; choose another")


def _images(recipe: Recipe, record: RunRecord, client: int) -> tuple[LabeledSamples, int]:
    """The client's training samples, dealt again as the recipe says, and the number of classes."""
    dealt = DataCache().federated(recipe)
    train = dealt.clients[client].train if client < len(dealt.clients) else None
    counted = {row.id: row.samples for row in record.result.clients_table or ()}
    if dealt.source.is_regression:
        raise ConfigError(f"expected a run on classes, got {record.path}, which predicts numbers")
    if train is None or counted.get(client, len(train)) != len(train):
        came = "none" if train is None else f"{len(train)}"
        raise ConfigError(
            f"expected the data of the run, in which client {client} had {counted.get(client, 'some')} training "
            f"images, got '{recipe.data.dataset}' that gives it {came}"
        )
    if train.x.dtype != torch.uint8 or train.x.dim() != 4:
        raise ConfigError(
            f"expected a run on images of bytes (N, C, H, W), got inputs of shape {tuple(train.x.shape)} and type "
            f"{train.x.dtype}"
        )
    return train, dealt.classes


# what is sent -----------------------------------------------------------------------------------------------------


def _features(
    client: Client,
    exposed: Exposed,
    functions: Mapping[str, Callable[[Tensor], Tensor]],
    levels: Sequence[float],
    images: int,
) -> tuple[dict[float, dict[str, Tensor]], list[Tensor], int]:
    """The first `images` rows of the features sent per level, the row behind each, and how many there are."""
    with_noise = exposed.with_noise
    assert with_noise is not None
    first = next(iter(functions))
    plain = get_tensor(get_group(clone(with_noise(0.0).upload(client, TrainingResult())), exposed.entry), first)
    _enough(images, len(plain), f"client {client.id} sends {len(plain)} pairs, one per image")
    rows = _nearest(plain[:images].float(), functions[first], client)
    values = {}
    for level in levels:
        sent = get_group(_as_read(client, with_noise(level)), exposed.entry)
        values[level] = {part: get_tensor(sent, part)[:images].float() for part in functions}
    return values, [row.view(1) for row in rows], len(plain)


def _as_read(client: Client, method: Method) -> Message:
    """The client's upload as the server reads it: after `[privacy]` and `[compression]`, where the run has them.

    What weights have changed since they came down is not known here, and taken for nothing; of the stream that gives
    `[privacy]` its noise this uses as much as the round did, so that what else is sent is the same bit for bit.
    """
    message: Message = clone(method.upload(client, TrainingResult()))
    received = {name: message[name] for name in method.card.delta_entries if name in message}
    for plugin in client.plugins:
        message = plugin.encode(message, client, method, received)
    for plugin in client.plugins:
        if isinstance(plugin, UploadCompression):
            message = restore_upload(plugin.settings, message, received)
    return message


def _nearest(sent: Tensor, function: Callable[[Tensor], Tensor], client: Client) -> Tensor:
    """The client's training row behind each row sent: the one whose own is nearest (as float16 it is not equal)."""
    place = next(client.model.parameters(), sent).device
    distances = []
    with torch.no_grad():
        for x in client.data.train.x.split(_CHUNK):
            own = function(client.prepare(x.to(place))).flatten(1).cpu()
            distances.append(torch.cdist(sent.flatten(1), own, compute_mode="donot_use_mm_for_euclid_dist"))
    return torch.cat(distances, dim=1).argmin(dim=1)


def _prototypes(
    client: Client, method: Method, exposed: Exposed, levels: Sequence[float], images: int
) -> tuple[dict[float, dict[str, Tensor]], list[Tensor], int]:
    """The prototypes of the `images` rarest classes per level, the rows behind each, and how many prototypes there are.

    Sigma of the noise is that of the whole upload, as for features.
    """
    message = _as_read(client, method)
    sent = get_tensor(message, exposed.entry).float()
    labels = get_tensor(message, "labels")
    _enough(images, len(labels), f"client {client.id} sends prototypes of {len(labels)} classes")
    y = client.data.train.y
    groups = [(y == label).nonzero().flatten() for label in labels.tolist()]
    rarest = sorted(range(len(groups)), key=lambda number: len(groups[number]))[:images]
    z = torch.randn(sent.shape, generator=client.generator("attack"))
    values = {at: {"prototypes": (add_noise(sent, at, z) if at else sent)[rarest]} for at in levels}
    return values, [groups[number] for number in rarest], len(labels)


def _enough(images: int, there: int, why: str) -> None:
    if images > there:
        raise ConfigError(f"--images: expected at most {there}, as {why}, got {images}")
