"""What a client of a finished run sent last, made again from its model and data, and the images behind it.

The method's own `upload` makes it, from the personal model of the run folder and the client's part of the recipe's
data, and what the run does to uploads on their way is done again, so that it is what went up in that round: the same
rows, and at the run's own level the same noise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.message import Message, copied, group, tensor
from polyfed.core.method import Method, Trained
from polyfed.core.modules import split
from polyfed.data.samples import Samples
from polyfed.data.transforms import Prepare
from polyfed.errors import RequestError
from polyfed.experiments.data_cache import DataCache
from polyfed.experiments.prediction import ClientModel, load_model
from polyfed.functional.noise import add_noise
from polyfed.methods.building_blocks.prototype_averaging import Prototypes
from polyfed.methods.fedgh import FedGH
from polyfed.methods.fedin import FedIN
from polyfed.models.split import SplitModel
from polyfed.plugins.compression import UploadCompression, restored_upload
from polyfed.plugins.upload_privacy import UploadPrivacy
from polyfed.registry import METHODS, nearest
from polyfed.report.run_records import RunRecord, find_runs, show_value

Kind = Literal["features", "prototypes"]
_PARTS = ("s_in", "s_out")
_PAPER_LEVEL = 0.8  # of FedIN+Noise
_CHUNK = 500  # rows per pass


@dataclass(frozen=True, eq=False)
class Sent:
    """One thing to aim at. name: "s_in", "s_out" or "prototypes". function: network inputs to it, row by row.

    values: noise level -> what was sent, (N, ...), one row per target.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    values: dict[float, Tensor]


@dataclass(frozen=True, eq=False)
class Exposure:
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
    sent: tuple[Sent, ...]
    behind: tuple[Tensor, ...]
    labels: tuple[int, ...]
    guess: Tensor
    mean: Tensor
    std: Tensor

    @property
    def treated(self) -> str:
        """What the run does to uploads on their way, `[privacy]` and `[compression]`; "" where nothing."""
        return treatment(self.run)

    @property
    def targets(self) -> Tensor:
        """(N, C, H, W): the private images, or the mean images of the classes."""
        return torch.stack([group.mean(dim=0) for group in self.behind])

    @property
    def class_names(self) -> tuple[str, ...]:
        """Of the targets' classes; their numbers where they have no names."""
        names = self.model.form.class_names
        return tuple(names[label] if label < len(names) else str(label) for label in self.labels)

    def first(self, count: int) -> Exposure:
        """The same with the first `count` targets alone; all where there are no more."""
        sent = tuple(Sent(s.name, s.function, {at: v[:count] for at, v in s.values.items()}) for s in self.sent)
        return dataclasses.replace(self, sent=sent, behind=self.behind[:count], labels=self.labels[:count])

    def shown(self, x: Tensor) -> Tensor:
        """Network inputs (..., C, H, W) as images in [0, 1]."""
        return (x * self.std + self.mean).clamp(0, 1)


def treatment(run: RunRecord) -> str:
    """What a run does to uploads on their way: "clip 1, noise 0.5"; "" where nothing."""
    settings = [*run.recipe.get("privacy", {}).items(), *run.recipe.get("compression", {}).items()]
    return ", ".join(f"{key} {show_value(value)}" for key, value in settings)


def expose(
    folder: str | Path,
    client: int,
    images: int,
    noise: Sequence[float] | None,
    sources: Sequence[str] | None,
    device: str,
    trust: bool = False,
) -> Exposure:
    """What a client of a finished run sent last.

    Args:
        folder: the run's. client: number. images: N, how many images, or prototypes, are aimed at.
        noise: levels; features are sent as if the method had them, prototypes get as much noise although their methods
            send none. None: without noise, the run's own level, and the paper's where the run has none.
        sources: of features "s_in" and "s_out" (None: s_in), of prototypes "prototypes". device: of the network.
        trust: whether code that the folder names may be imported.

    Raises:
        RequestError: no finished run, no such client, a method that sends neither, images that are not there.
    """
    model = load_model(folder, client, device, trust)
    kind = _kind(model.method)
    asked = _sources(sources, kind)
    network = split(model.network).requires_grad_(False)
    record = find_runs(folder)[0]
    at = _last_round(record, client)
    recipe = Recipe.of_run(folder, trust)
    train, classes = _images(recipe, record, client)
    own = Client(model.architecture, train=train, prepare=model.prepare)
    own.id, own.seed, own.round, own.classes = client, recipe.run.seed, at, classes
    own.training, own.bound = recipe.training, network
    own.privacy = recipe.privacy
    own.plugins = [UploadPrivacy(recipe.privacy), UploadCompression(recipe.compression)]
    make = _features if kind == "features" else _prototypes
    level = noise_level(model.method)
    levels = list(dict.fromkeys(noise if noise is not None else (0.0, level or _PAPER_LEVEL)))
    values, groups, rows = make(own, model.method, levels, images)
    functions = {**_sent_as(own, model.method), "prototypes": network.represent}
    sent = tuple(
        Sent(name, functions[name], {at: parts[name].to(model.device) for at, parts in values.items()})
        for name in asked
    )
    pictures = train.x.float() / 255
    assert isinstance(model.prepare, Prepare)
    return Exposure(
        record, model, kind, at, rows, level, sent,
        behind=tuple(pictures[g].to(model.device) for g in groups),
        labels=tuple(int(train.y[g[0]]) for g in groups),
        guess=pictures.mean(dim=0).to(model.device),
        mean=torch.tensor(model.prepare.mean, device=model.device).view(-1, 1, 1),
        std=torch.tensor(model.prepare.std, device=model.device).view(-1, 1, 1),
    )  # fmt: skip


# what is asked for ------------------------------------------------------------------------------------------------


def _kind(method: Method) -> Kind:
    """What the method uploads.

    Raises:
        RequestError: neither features nor prototypes, or not with these knobs.
    """
    silent = ""
    if isinstance(method, FedIN):
        if method.train_in and method.projection != "trained":  # whose matrices stay with the clients
            return "features"
        silent = " with projection = 'trained'" if method.train_in else " with train_in = false"
    elif isinstance(method, FedGH | Prototypes):
        if not (isinstance(method, FedGH) and not method.share):
            return "prototypes"
        silent = " with share = false"
    known = {what: ", ".join(_names(kinds)) for what, kinds in {"f": (FedIN,), "p": (FedGH, Prototypes)}.items()}
    raise RequestError(
        f"expected a run of a method that uploads features ({known['f']}) or prototypes ({known['p']}), "
        f"came {method.name}{silent}"
    )


def _names(kinds: tuple[type[Method], ...]) -> list[str]:
    return [name for name, kind in METHODS.items() if issubclass(kind, kinds)]


def noise_level(method: Method) -> float:
    """The level of the noise on what the method sends."""
    sends = isinstance(method, FedIN) and method.noise_where != "forward"
    return method.noise if isinstance(method, FedIN) and sends else 0.0


def _sources(asked: Sequence[str] | None, kind: Kind) -> list[str]:
    known = _PARTS if kind == "features" else ("prototypes",)
    for name in asked or ():
        if name not in known:
            raise RequestError(
                f"--from: expected what this run uploads ({', '.join(known)}), came '{name}'{nearest(name, known)}"
            )
    return list(dict.fromkeys(asked or known[:1]))


def _last_round(record: RunRecord, client: int) -> int:
    """The last round in which the client worked, and was not refused."""
    upto = record.result.get("models_of_round", len(record.rounds))  # whose network is at hand
    for line in reversed(record.rounds[:upto]):
        refused = {entry["client"] for entry in line.get("refused") or ()}
        if client in (line.get("clients") or ()) and client not in refused:
            return int(line["round"])
    raise RequestError(f"client {client} took part in no round of {record.path}, and sent nothing; choose another")


def _images(recipe: Recipe, record: RunRecord, client: int) -> tuple[Samples, int]:
    """The client's training samples, dealt again as the recipe says, and the number of classes."""
    dealt = DataCache().federated(recipe)
    train = dealt.clients[client].train if client < len(dealt.clients) else None
    counted = {int(row["id"]): row["samples"] for row in record.result.get("clients_table") or ()}
    if train is None or counted.get(client, len(train)) != len(train):
        came = "none" if train is None else f"{len(train)}"
        raise RequestError(
            f"expected the data of the run, in which client {client} had {counted.get(client, 'some')} training "
            f"images, came '{recipe.data.name}' that gives it {came}"
        )
    if train.x.dtype != torch.uint8 or train.x.dim() != 4:
        raise RequestError(
            f"expected a run on images of bytes (N, C, H, W), came inputs of shape {tuple(train.x.shape)} and type "
            f"{train.x.dtype}"
        )
    return train, dealt.classes


# what is sent -----------------------------------------------------------------------------------------------------


def _features(
    client: Client, method: Method, levels: Sequence[float], images: int
) -> tuple[dict[float, dict[str, Tensor]], list[Tensor], int]:
    """The first `images` pairs of FedIN's upload per level, the row behind each, and how many pairs there are."""

    def changed(level: float, **knobs: Any) -> Method:
        made: Method = dataclasses.replace(method, noise=level, noise_where="message", **knobs)  # type: ignore[type-var]
        return made

    def upload(level: float) -> Message:
        return group(_as_read(client, changed(level)), "features")

    knobs = dataclasses.fields(method)  # type: ignore[arg-type]
    unprojected = {knob.name: knob.default for knob in knobs if knob.name.startswith("projection")}
    bare = changed(0.0, **unprojected).upload(client, Trained())
    plain = tensor(group(bare, "features"), "s_in")
    _enough(images, len(plain), f"client {client.id} sends {len(plain)} pairs, one per image")
    model = split(client.model)
    rows = _nearest(plain[:images].float(), model, client)
    found = {at: upload(at) for at in levels}
    values = {at: {part: tensor(m, part)[:images].float() for part in _PARTS} for at, m in found.items()}
    return values, [row.view(1) for row in rows], len(plain)


def _as_read(client: Client, method: Method) -> Message:
    """The client's upload as the server reads it: after `[privacy]` and `[compression]`, where the run has them.

    What weights have changed since they came down is not known here, and taken for nothing; of the stream that gives
    `[privacy]` its noise this uses as much as the round did, so that what else is sent is the same bit for bit.
    """
    message: Message = copied(method.upload(client, Trained()))
    received = {name: message[name] for name in method.changes if name in message}
    for plugin in client.plugins:
        message = plugin.encode(message, client, method, received)
    for plugin in client.plugins:
        if isinstance(plugin, UploadCompression):
            message = restored_upload(plugin.settings, message, received)
    return message


def _sent_as(client: Client, method: Method) -> dict[str, Callable[[Tensor], Tensor]]:
    """What becomes of the network's inputs in either part of FedIN's pairs."""
    network = split(client.model)
    common = method.common if isinstance(method, FedIN) else None
    if common is None:
        return {"s_in": network.extract, "s_out": lambda x: network.transform(network.extract(x))}
    matrices = common.matrices(client)

    def projected(x: Tensor) -> dict[str, Tensor]:
        s_in = network.extract(x)
        return common.project({"s_in": s_in, "s_out": network.transform(s_in)}, matrices)

    return {"s_in": lambda x: projected(x)["s_in"], "s_out": lambda x: projected(x)["s_out"]}


def _nearest(s_in: Tensor, model: SplitModel, client: Client) -> Tensor:
    """The client's training row behind each s_in: the one whose own is nearest (sent as float16 it is not equal)."""
    place, distances = next(model.parameters(), s_in).device, []
    with torch.no_grad():
        for x in client.data.train.x.split(_CHUNK):
            own = model.extract(client.prepare(x.to(place))).flatten(1).cpu()
            distances.append(torch.cdist(s_in.flatten(1), own, compute_mode="donot_use_mm_for_euclid_dist"))
    return torch.cat(distances, dim=1).argmin(dim=1)


def _prototypes(
    client: Client, method: Method, levels: Sequence[float], images: int
) -> tuple[dict[float, dict[str, Tensor]], list[Tensor], int]:
    """The prototypes of the `images` rarest classes per level, the rows behind each, and how many prototypes there are.

    Sigma of the noise is that of the whole upload, as for features.
    """
    message = _as_read(client, method)
    sent, labels = tensor(message, "lars" if "lars" in message else "prototypes").float(), tensor(message, "labels")
    _enough(images, len(labels), f"client {client.id} sends prototypes of {len(labels)} classes")
    y = client.data.train.y
    groups = [(y == label).nonzero().flatten() for label in labels.tolist()]
    rarest = sorted(range(len(groups)), key=lambda number: len(groups[number]))[:images]
    z = torch.randn(sent.shape, generator=client.generator("attack"))
    values = {at: {"prototypes": (add_noise(sent, at, z) if at else sent)[rarest]} for at in levels}
    return values, [groups[number] for number in rarest], len(labels)


def _enough(images: int, there: int, why: str) -> None:
    if images > there:
        raise RequestError(f"--images: expected at most {there}, as {why}, came {images}")
