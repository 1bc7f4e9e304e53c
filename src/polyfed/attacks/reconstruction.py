"""`polyfed audit attack RUN`: a client's images, reconstructed from what it sent last in a finished run.

FedIN's figure 10; the class means of other methods likewise. The method's own `upload` makes the message again, from
the personal model of the run folder and the client's part of the recipe's data, and what the run does to uploads on
their way is done again: it is what the client sent in that round, with the same rows and, at the run's own level, the
same noise. The attacker knows the client's network, its weights and its BatchNorm statistics (white box).
"""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from polyfed.attacks.inversion import invert_features, sums_as_features
from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.message import Message, clone, get_group, get_tensor
from polyfed.core.method import Exposed, Method, TrainingResult
from polyfed.core.modules import as_split_model
from polyfed.core.randomness import generator
from polyfed.data.samples import LabeledSamples
from polyfed.data.transforms import Prepare
from polyfed.errors import ConfigError, RunError
from polyfed.experiments.data_cache import load_run_data
from polyfed.experiments.prediction import ClientModel, load_model
from polyfed.functional.image_quality import psnr, ssim
from polyfed.functional.noise import add_noise
from polyfed.plugins.compression import UploadCompression, restore_upload
from polyfed.plugins.privacy import UploadPrivacy
from polyfed.registry import METHODS, suggest
from polyfed.report.plot_style import canvas
from polyfed.report.run_records import RunRecord, format_setting, load_runs
from polyfed.report.statistics import finite, mean_of
from polyfed.report.text_tables import columns_of, render_text, wrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind = Literal["features", "prototypes", "rows"]
LR = 0.1  # of the attacker's Adam
_LEVEL = 0.8  # of noise where a run adds none: that of the paper that inverts features, FedIN+Noise
_CHUNK = 500  # rows per pass
_ATTACKER = "white box: knows the client's network, its weights and its BatchNorm statistics; knows none of its images"
_ANYBODY = "knows the map of features, as everybody does; knows none of the client's images"
_AGAINST: dict[Kind, str] = {
    "features": "the image itself",
    "prototypes": "the mean of the client's images of the class",
    "rows": "the image itself",
}
_NOUNS: dict[Kind, str] = {"features": "pairs", "prototypes": "prototypes", "rows": "rows"}
_CELL = 0.95  # inches, of one image in the grid
_TEXT_ROW = 0.2  # inches, of the line of numbers below it
_LETTERS = 14  # of a class's name, in a line as wide as an image
_NAMES = 1.45  # inches, left of the images
_ACROSS = 8  # images across; the rest are in attack.json alone


@dataclass(frozen=True, eq=False)
class Target:
    """A part of the upload. name: "s_in", "s_out", "prototypes" or "rows". function: network inputs to it, row by row;
    of "rows" all of them, (1, N, C, H, W), to it.

    values: noise level -> what was sent, (N, ...), one row per target.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    values: dict[float, Tensor]


@dataclass(frozen=True, eq=False)
class AttackTarget:
    """What an attacker gets of one client, and what it is scored against.

    Attributes:
        run: the run's records. model: the client's, which the attacker is given. kind: of the upload.
        round: the last one in which the client took part.
        is_public: whether everybody knows how it was made.
        rows: how many rows the upload has; the first N of them are attacked (of prototypes, the rarest classes').
        noise_of_run: the level that the run itself added to the upload.
        sent: what is attacked.
        behind: for every target the private images (n, C, H, W) in [0, 1] that it was made of; one for features.
        labels: the class of each target.
        guess: (C, H, W), the mean of all the client's training images.
        mean, std: (C, 1, 1), from the network's units to brightness: x std + mean.
    """

    run: RunRecord
    model: ClientModel
    kind: Kind
    is_public: bool
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
        folder: the run's. client: number. images: N, how many images, or prototypes, are attacked.
        noise: levels, with which the method would send; where it has no noise of its own, as much is added. None:
            without noise, and the run's own level, or that of the paper where the run has none.
        sources: tensors of the upload, of prototypes "prototypes", of sums also "rows", which are all rows; None: the
            first. device: of the network.
        trust: whether code that the folder names may be imported.

    Raises:
        ConfigError: no finished run, no such client, a method that sends neither, images that are not there.
    """
    model = load_model(folder, client, device, trust, "personal")
    exposed = exposed_by(model.method)
    network = as_split_model(model.network).requires_grad_(False)
    record = load_runs(folder, trust)[0]
    at = _last_round(record, client)
    recipe = Recipe.of_run(folder, trust)
    train, classes = _images(record, client)
    own = Client(model.architecture, train=train, prepare=model.prepare)
    own.id = client
    own.seed = recipe.run.seed
    own.round = at
    own.classes = classes
    own.training, own.bound = recipe.training, network
    made = {key: value for key, value in record.result.privacy.items() if key.endswith("noise_multiplier")}
    own.privacy = recipe.privacy.model_copy(update=made)  # with the noise that a target has made
    own.plugins = [UploadPrivacy(own.privacy), UploadCompression(recipe.compression)]
    functions = exposed.functions(own)
    names = _sources(sources, list(functions))
    levels = list(dict.fromkeys(noise if noise is not None else (0.0, exposed.noise or _LEVEL)))
    kind: Kind = exposed.kind
    if "rows" in names:
        kind = "rows"
        _check_rows(names, noise)
        functions, values, groups, rows = _rows(own, model.method, exposed, functions["rows"])
    elif exposed.kind == "features":
        values, groups, rows = _features(own, exposed, functions, levels, images)
    else:
        values, groups, rows = _prototypes(own, model.method, exposed, levels, images)
    sent = tuple(
        Target(name, functions[name], {at: parts[name].to(model.device) for at, parts in values.items()})
        for name in names
    )
    pictures = train.x.float() / 255
    assert isinstance(model.prepare, Prepare)
    return AttackTarget(
        record, model, kind, exposed.is_public, at, rows, exposed.noise, sent,
        behind=tuple(pictures[g].to(model.device) for g in groups),
        labels=tuple(int(train.y[g[0]]) for g in groups),
        guess=pictures.mean(dim=0).to(model.device),
        mean=torch.tensor(model.prepare.mean, device=model.device).view(-1, 1, 1),
        std=torch.tensor(model.prepare.std, device=model.device).view(-1, 1, 1),
    )  # fmt: skip


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


def _sources(wanted: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    for name in wanted or ():
        if name not in known:
            raise ConfigError(
                f"--sources: expected what this run uploads ({', '.join(known)}), got '{name}'{suggest(name, known)}"
            )
    return list(dict.fromkeys(wanted or known[:1]))


def _last_round(record: RunRecord, client: int) -> int:
    """The last round in which the client worked, and was not refused."""
    last = None
    for line in record.read_rounds():
        is_at_hand = line.round <= (record.result.models_of_round or line.round)
        if is_at_hand and client in line.clients and client not in {upload.client for upload in line.refused}:
            last = line.round
    if last is not None:
        return last
    raise ConfigError(f"client {client} took part in no round of {record.path}, and sent nothing; choose another")


def _images(record: RunRecord, client: int) -> tuple[LabeledSamples, int]:
    """The client's training samples, partitioned again as in the recipe, and the number of classes."""
    data = load_run_data(record)
    if data.source.is_regression:
        raise ConfigError(f"expected a run on classes, got {record.path}, which predicts numbers")
    train = data.clients[client].train
    if train.x.dtype != torch.uint8 or train.x.dim() != 4:
        raise ConfigError(
            f"expected a run on images of bytes (N, C, H, W), got inputs of shape {tuple(train.x.shape)} and type "
            f"{train.x.dtype}"
        )
    return train, data.classes


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
    rows = _rows_behind(plain[:images].float(), functions[first], client)
    values = {}
    for level in levels:
        sent = get_group(_as_read(client, with_noise(level)), exposed.entry)
        values[level] = {part: get_tensor(sent, part)[:images].float() for part in functions}
    return values, [row.view(1) for row in rows], len(plain)


def _as_read(client: Client, method: Method) -> Message:
    """The client's upload as the server reads it: after `[privacy]` and `[compression]`, where the run has them.

    The change of weights since the broadcast is not known here, and taken for nothing; of the stream that gives
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


def _rows_behind(sent: Tensor, function: Callable[[Tensor], Tensor], client: Client) -> Tensor:
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
    sent, labels = _read_prototypes(message, exposed)
    y = client.data.train.y
    groups = [(y == label).nonzero().flatten() for label in labels.tolist()]
    held = [number for number, group in enumerate(groups) if len(group)]  # with noise there may be others
    _enough(images, len(held), f"client {client.id} sends prototypes of {len(held)} classes")
    rarest = sorted(held, key=lambda number: len(groups[number]))[:images]
    z = torch.randn(sent.shape, generator=client.generator("attack"))
    values = {at: {"prototypes": (add_noise(sent, at, z) if at else sent)[rarest]} for at in levels}
    return values, [groups[number] for number in rarest], len(held)


def _read_prototypes(message: Message, exposed: Exposed) -> tuple[Tensor, Tensor]:
    if exposed.sums is None:
        return get_tensor(message, exposed.entry).float(), get_tensor(message, "labels")
    sums = exposed.sums(message)
    means = sums["sums"] / sums["counts"].clamp(min=1).unsqueeze(1)
    return means.float(), torch.arange(len(means))


def _check_rows(names: Sequence[str], noise: Sequence[float] | None) -> None:
    if len(names) > 1:
        raise ConfigError(f"--sources: expected rows alone, as they are made all at once, got {', '.join(names)}")
    if noise is not None and any(noise):
        raise ConfigError("--noise: expected 0 with --sources rows, whose noise is that of the run, got another level")


def _rows(
    client: Client, method: Method, exposed: Exposed, function: Callable[[Tensor], Tensor]
) -> tuple[dict[str, Callable[[Tensor], Tensor]], dict[float, dict[str, Tensor]], list[Tensor], int]:
    """A function of all rows at once to what the sums say of them, what that is, each row, and how many there are.

    The attacker knows how many rows each class has, with noise on the counts, too.
    """
    assert exposed.sums is not None
    sums = exposed.sums(_as_read(client, method))
    y = client.data.train.y
    told, wanted = sums_as_features(sums, y, function)
    return {"rows": told}, {0.0: {"rows": wanted}}, list(torch.arange(len(y)).split(1)), len(y)


def _enough(images: int, there: int, why: str) -> None:
    if images > there:
        raise ConfigError(f"--images: expected at most {there}, as {why}, got {images}")


# the attack -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class AttackResult:
    """All reconstructions. content: `attack.json`. images: for each of its results (N, C, H, W) in [0, 1]."""

    target: AttackTarget
    content: dict[str, Any]
    images: tuple[Tensor, ...]


def run_attack(target: AttackTarget, steps: int, tv: Sequence[float] = (0.0, 1.0), seed: int = 0) -> AttackResult:
    """Attack what a client sent; nothing is written.

    Args:
        target: see there. steps: of Adam. tv: weights of the total variation, a reconstruction for each. seed: of the
            noise that reconstructions start from.

    Raises:
        RunError: the loss is not finite.
    """
    trials = [trial for sent in target.sent for trial in _trials(target, sent, steps, tv, seed)]
    run, model = target.run, target.model
    content = {
        "method": run.method,
        "label": run.result.label,
        "hyperparameters": run.result.hyperparameters,
        "dataset": run.result.dataset,
        "run_seed": run.seed,
        "client": model.client,
        "architecture": model.architecture,
        "round": target.round,
        "kind": target.kind,
        "sent": target.rows,
        "noise_of_run": target.noise_of_run,
        "on_the_way": describe_transforms(run) or None,
        "attacker": _ANYBODY if target.is_public else _ATTACKER,
        "against": _AGAINST[target.kind],
        "steps": steps,
        "tv": list(tv),
        "seed": seed,
        "targets": [
            {"class": label, "class_name": name, "images": len(group)}
            for label, name, group in zip(target.labels, target.class_names, target.behind, strict=True)
        ],
        "guess": quality(target.guess.expand_as(target.targets), target.behind),
        "results": [trial for trial, _ in trials],
    }
    return AttackResult(target, content, tuple(images for _, images in trials))


def _trials(
    target: AttackTarget, sent: Target, steps: int, tv: Sequence[float], seed: int
) -> list[tuple[dict[str, Any], Tensor]]:
    """All reconstructions from one part of the upload, side by side: (tv, noise) in order, N targets each."""
    if target.kind == "rows":
        return [_all_rows(target, sent, steps, seed)]
    kinds = list(itertools.product(tv, sent.values))
    count = len(target.behind)
    x, losses = invert_features(
        sent.function,
        torch.cat([sent.values[level] for _, level in kinds]),
        _start(target, seed).repeat(len(kinds), 1, 1, 1),
        steps=steps,
        lr=LR,
        tv=torch.tensor([weight for weight, _ in kinds], device=target.guess.device).repeat_interleave(count),
        pixel=target.std,
    )
    if not bool(torch.isfinite(losses).all()):
        raise RunError(f"the loss is not finite after {steps} steps")
    trials = []
    for (weight, level), made, loss in zip(kinds, x.split(count), losses.split(count), strict=True):
        images = target.to_images(made)
        which = {"from": sent.name, "tv": weight, "noise": level}
        trials.append(({**which, **quality(images, target.behind), "loss": loss.tolist()}, images))
    return trials


def _all_rows(target: AttackTarget, sent: Target, steps: int, seed: int) -> tuple[dict[str, Any], Tensor]:
    """All rows at once, each beside the private image of its class that it is."""
    start = _start(target, seed).unsqueeze(0)
    x, loss = invert_features(sent.function, sent.values[0.0], start, steps=steps, lr=LR, tv=torch.zeros(1))
    if not bool(torch.isfinite(loss).all()):
        raise RunError(f"the loss is not finite after {steps} steps")
    made = target.to_images(x.squeeze(0))
    images = made.clone()
    labels = torch.tensor(target.labels)
    for label in labels.unique():
        of_class = (labels == label).nonzero().flatten()
        images[of_class] = _matched(made[of_class], target.targets[of_class])
    which = {"from": sent.name, "tv": 0.0, "noise": 0.0}
    return {**which, **quality(images, target.behind), "loss": loss.tolist()}, images


def _matched(made: Tensor, real: Tensor) -> Tensor:
    """The made images in the order of the real ones, the nearest pairs first."""
    near = torch.stack([psnr(made, one.expand_as(made)) for one in real])
    order = torch.zeros(len(real), dtype=torch.int64)
    for _ in real:
        row, column = divmod(int(near.argmax()), len(made))
        order[row] = column
        near[row] = -torch.inf
        near[:, column] = -torch.inf
    return made[order]


def quality(images: Tensor, behind: Sequence[Tensor]) -> dict[str, Any]:
    """How near images (N, C, H, W) are to the private ones behind each, as JSON takes it.

    psnr [dB], ssim: against the mean of these. best_psnr, best_ssim: against the nearest of them (where there is one,
    the same numbers). Means over images, None where infinite, and per_image the single numbers.
    """
    others = {"": torch.stack([group.mean(dim=0) for group in behind]), "best_": nearest_of(images, behind)}
    measures = {"psnr": psnr, "ssim": ssim}
    singles = {f"{of}{name}": m(images, other).tolist() for of, other in others.items() for name, m in measures.items()}
    means = {name: finite(sum(values) / len(values)) for name, values in singles.items()}
    return {**means, "per_image": {name: list(map(finite, values)) for name, values in singles.items()}}


def _start(target: AttackTarget, seed: int) -> Tensor:
    """(N, C, H, W) standard normal noise, each target's of its own stream."""
    shape = tuple(target.guess.shape)
    draws = [generator(seed, "attack", target.model.client, number) for number in range(len(target.behind))]
    return torch.stack([torch.randn(shape, generator=each) for each in draws]).to(target.guess.device)


def nearest_of(images: Tensor, behind: Sequence[Tensor]) -> Tensor:
    """For images (N, C, H, W) the nearest, by PSNR, of the private ones behind each."""
    groups = zip(images, behind, strict=True)
    return torch.stack([group[int(psnr(one.expand_as(group), group).argmax())] for one, group in groups])


# the figure and the table ---------------------------------------------------------------------------------------------


def reconstruction_grid(result: AttackResult) -> Figure:
    """The private images, and below them a row of images for each reconstruction."""
    target = result.target
    features = target.kind != "prototypes"
    shown = min(len(target.behind), _ACROSS)
    trials = result.content["results"]
    counts = [f" ({len(group)})" for group in target.behind]
    classes = [f"{name}{'' if features else count}" for name, count in zip(target.class_names, counts, strict=True)]
    captions = ["\n".join(textwrap.wrap(name, _LETTERS)) for name in classes]
    rows = [("original" if features else "mean image\nof the class", target.targets, captions)]
    if not features:
        nearest = nearest_of(result.images[0], target.behind)
        rows.append(("its image nearest\nto the first below", nearest, _captions(trials[0], "best_")))
    for trial, images in zip(trials, result.images, strict=True):
        rows.append((_name(trial, target), images, _captions(trial)))
    title = f"What {_who(target.run)} uploads, turned back into images"
    left_out = f" The first {shown} of {len(target.behind)}." if shown < len(target.behind) else ""
    about = f"{_about(result)} Numbers: PSNR [dB] and SSIM, against {result.content['against']}.{left_out}"
    about += "" if features else " In brackets: the images behind a mean."
    height = len(rows) * (_CELL + _TEXT_ROW) + _TEXT_ROW * (1 + max(name.count("\n") for name in captions[:shown]))
    width = max(_NAMES + shown * (_CELL + 0.08), 4.6)
    figure, axes = canvas(title, about, height, len(rows), shown, width=width)
    for line, (name, images, texts) in zip(axes, rows, strict=True):
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8.5, labelpad=6)
        for cell, image, text in zip(line, images, texts, strict=False):
            pixels = image.detach().cpu() if len(image) == 3 else image.detach().cpu().mean(dim=0).expand(3, -1, -1)
            cell.imshow(pixels.permute(1, 2, 0).numpy(), interpolation="nearest")
            cell.set_xlabel(text, fontsize=8, labelpad=1.5, parse_math=False)
            cell.set_xticks([])
            cell.set_yticks([])
            for spine in cell.spines.values():
                spine.set_linewidth(0.5)
    return figure


def _captions(score: Mapping[str, Any], which: str = "") -> list[str]:
    pairs = zip(*(score["per_image"][f"{which}{name}"] for name in ("psnr", "ssim")), strict=True)
    return [f"{decimals(psnr, 1)}, {round(ssim, 2) + 0.0:.2f}" for psnr, ssim in pairs]  # never "-0.00"


def _name(trial: Mapping[str, Any], target: AttackTarget) -> str:
    """A row's: the part of the upload, the noise, the prior."""
    plain = "as sent" if describe_transforms(target.run) else "unprotected"
    level = plain if trial["noise"] == 0 else f"noise {trial['noise']:g}"
    source = f"{trial['from']}, " if len(target.sent) > 1 else ""
    prior = f"\ntotal variation {trial['tv']:g}" if trial["tv"] else ""
    return f"{source}{level}{prior}"


def to_text(result: AttackResult, width: int = 100) -> str:
    """Who was attacked and how, the table, and what its numbers are against."""
    content = result.content
    classes = content["kind"] == "prototypes"
    numbers = {"PSNR [dB]": ("psnr", 2), "SSIM": ("ssim", 3)}
    if classes:
        numbers |= {"best\nPSNR": ("best_psnr", 2), "best\nSSIM": ("best_ssim", 3)}
    rows = []
    for trial in [*content["results"], {"from": "guess", "loss": [], **content["guess"]}]:
        levels = {name: f"{trial[name]:g}" if name in trial else "" for name in ("tv", "noise")}
        scores = {heading: decimals(trial[key], digits) for heading, (key, digits) in numbers.items()}
        loss = mean_of(trial["loss"])
        rows.append({"from": trial["from"], **levels, **scores, "loss": "" if loss is None else f"{loss:.2g}"})
    count = len(content["targets"])
    singular, plural = ("class", "classes") if classes else ("image", "images")
    noun = singular if count == 1 else plural
    notes = [
        f"PSNR, SSIM: means over {count} {noun}, against {content['against']}.",
        *(["best: against the training image of that class that comes nearest, by PSNR."] if classes else []),
        "guess: the mean of all the client's training images, made without anything that was sent.",
    ]
    table = render_text(columns_of(rows, ("from",)), width)
    return "\n".join([wrapped(_about(result), width), "", table, "", *(wrapped(note, width) for note in notes)])


def decimals(value: float | None, digits: int) -> str:
    """A number with so many digits; "-" where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def _about(result: AttackResult) -> str:
    """One paragraph: method, data, noise, seeds, the attacker."""
    target, content = result.target, result.content
    run = target.run
    features = target.kind != "prototypes"
    own = f"; the run's own noise: {target.noise_of_run:g}" if target.kind == "features" else ""
    transforms = describe_transforms(run)
    on_the_way = f"; on their way {transforms}" if transforms else ""
    noisy = any(trial["noise"] for trial in content["results"])
    attacker = "Everybody knows the map" if target.is_public else "White box: the attacker knows the client's network"
    added = "; the noise is the attack's, the method sends none" if noisy and not features else ""
    return (
        f"{_who(run)} on {run.result.dataset}, run seed {run.seed}{own}{on_the_way}{added}. Client "
        f"{target.model.client} ({target.model.architecture}), its upload of round {target.round}: "
        f"{len(target.behind)} of {target.rows} {_NOUNS[target.kind]}. {attacker}. "
        f"Adam, {content['steps']} steps, lr {LR:g}, seed {content['seed']}."
    )


def _who(run: RunRecord) -> str:
    """The run's name, and its method's where that is another."""
    return run.name if run.name == run.method else f"{run.name} ({run.method})"
