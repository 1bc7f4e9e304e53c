"""A client's images, reconstructed from its last upload.

What is attacked is what the method's `exposed` names: features of single images, class means, or sums over all rows.
The attacker knows the function behind them. For features and class means that is the client's network after the round,
with its weights and BatchNorm statistics (white box); the map behind sums is known to everybody.
"""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyfed.attacks.replay import Replay, Transcript
from polyfed.core.client import Client
from polyfed.core.message import Message, get_group, get_tensor
from polyfed.core.method import Exposed, TrainingResult
from polyfed.core.randomness import generator
from polyfed.data.transforms import Prepare
from polyfed.functional import class_statistics
from polyfed.report.plot_style import canvas
from polyfed.report.statistics import finite

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SEED = 0  # of the attacker's draws
_LR = 0.1  # of the attacker's Adam
_TV = 1.0  # weight of the total variation; sums fix their rows without it
_CHUNK = 500  # rows per pass
_SMALLEST_TARGET = 1e-12  # below it a target counts as zero
_SMALLEST_SHARE = 1e-6  # of the largest eigenvalue: below it one tells nothing
_WHAT = {
    "features": "features (s_in)",
    "prototypes": "class means (worst case: the extractor is known)",
    "sums": "sums over all rows (the map is known)",
}
_CELL = 0.95  # inches, of one image in the figure
_TEXT_ROW = 0.2  # inches, of the line of numbers below it
_NAMES = 1.6  # inches, left of the images
_LETTERS = 22  # of a name, in a line of that width
_ACROSS = 8  # images across


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """Images reconstructed from one upload.

    what: was attacked. images: (N, C, H, W) in [0, 1]. nearest: of the private images behind each the nearest,
    by PSNR. summary: PSNR [dB] against these, the mean over the images, as JSON takes it; and the same for the mean of
    the client's training images, a guess that needs no upload.
    """

    what: str
    images: Tensor
    nearest: Tensor
    summary: dict[str, Any]


def reconstruct(
    replay: Replay, transcript: Transcript, count: int, steps: int
) -> tuple[Reconstruction | None, str | None]:
    """Images reconstructed from a client's upload, or the reason why there are none.

    Args:
        count: how many features, or class means of the rarest classes, are attacked; of sums all rows are. steps: of
            Adam.
    """
    exposed = replay.federation.method.exposed
    client = transcript.job.client
    x, y = client.data.train.x, client.data.train.y
    prepare = client.prepare
    if not transcript.up:
        return None, "nothing goes up"
    if exposed is None:
        return None, "no features, class means or sums go up, and weights are not inverted"
    if exposed.entry not in transcript.up:
        return None, f"its last upload holds no {exposed.entry}"
    if x.dtype != torch.uint8 or x.dim() != 4 or not isinstance(prepare, Prepare):
        return None, "its inputs are no images of bytes"
    client = _at_work(replay, transcript)
    function = exposed.function(client)
    mean, std = (torch.tensor(part).view(-1, 1, 1) for part in (prepare.mean, prepare.std))
    pictures = x.float() / 255
    groups: Sequence[Tensor]  # the rows behind each target
    if exposed.kind == "sums":
        assert exposed.sums is not None
        sums = exposed.sums(transcript.up)
        if "products" not in sums:
            return None, "sums by class alone do not determine the rows of a class with several"
        width = sums["sums"].shape[1]
        if client.n > width:
            return None, f"sums of {width} features over {client.n} rows do not determine the rows"
        groups = torch.arange(client.n).split(1)
        told, sent = sums_as_features(sums, y, function)
        made, loss = invert_features(told, sent, _start(client, client.n).unsqueeze(0), steps=steps, lr=_LR, tv=0.0)
        images = _matched((made.squeeze(0) * std + mean).clamp(0, 1), pictures, y)
    else:
        if exposed.kind == "features":
            sent = _features(transcript.up, exposed, count)
            method = exposed.without_noise or replay.federation.method
            plain = _features(method.upload(client, TrainingResult()), exposed, count)
            groups = _rows_behind(plain, function, client).split(1)
        else:
            rows = [(y == label).nonzero().flatten() for label in get_tensor(transcript.up, "labels").tolist()]
            rarest = sorted((k for k in range(len(rows)) if len(rows[k])), key=lambda k: len(rows[k]))[:count]
            sent = get_tensor(transcript.up, exposed.entry)[rarest].float().cpu()
            groups = [rows[k] for k in rarest]
        made, loss = invert_features(
            function, sent, _start(client, len(groups)), steps=steps, lr=_LR, tv=_TV, pixel=std
        )
        images = (made * std + mean).clamp(0, 1)
    if not bool(torch.isfinite(loss).all()):
        return None, f"the loss is not finite after {steps} steps"
    behind = [pictures[group] for group in groups]
    return _scored(_WHAT[exposed.kind], images, behind, pictures.mean(dim=0)), None


def _at_work(replay: Replay, transcript: Transcript) -> Client:
    """The client as it was when it made its upload, with a network of its own, in eval mode, on the CPU."""
    job, server = transcript.job, replay.federation.server
    client: Client = copy.copy(job.client)
    client.round, client.exchange = job.round, job.exchange.name
    weights = {**server.initial_state(client.architecture, job.variant), **(client.weights or {})}
    network = copy.deepcopy(server.model(client.architecture, weights, job.variant))
    client.bound = network.cpu().requires_grad_(False)
    return client


def _features(upload: Message, exposed: Exposed, count: int) -> Tensor:
    """The first features of an upload."""
    return get_group(upload, exposed.entry)["s_in"][:count].detach().float().cpu()


def _rows_behind(plain: Tensor, function: Callable[[Tensor], Tensor], client: Client) -> Tensor:
    """The client's training row behind each of its features: the one whose own are nearest."""
    with torch.no_grad():
        own = [function(client.prepare(x)).flatten(1) for x in client.data.train.x.split(_CHUNK)]
    far = torch.cdist(plain.flatten(1), torch.cat(own), compute_mode="donot_use_mm_for_euclid_dist")
    return far.argmin(dim=1)


def _start(client: Client, count: int) -> Tensor:
    """(N, C, H, W) standard normal noise, each image's of its own stream."""
    draws = [generator(_SEED, "attack", client.id, number) for number in range(count)]
    return torch.stack([torch.randn(client.data.train.x.shape[1:], generator=each) for each in draws])


def _matched(made: Tensor, real: Tensor, y: Tensor) -> Tensor:
    """The made images in the order of the real ones: within a class the nearest pairs first."""
    near = torch.stack([psnr(made, one.expand_as(made)) for one in real])
    near[y.unsqueeze(1) != y] = -torch.inf
    order = torch.zeros(len(real), dtype=torch.int64)
    for _ in real:
        row, column = divmod(int(near.argmax()), len(made))
        order[row] = column
        near[row] = -torch.inf
        near[:, column] = -torch.inf
    return made[order]


def _scored(what: str, images: Tensor, behind: Sequence[Tensor], guess: Tensor) -> Reconstruction:
    guesses = guess.expand_as(images)
    nearest = _nearest(images, behind)
    summary: dict[str, Any] = {"what": what, "images": len(images)}
    for of, made, private in (("", images, nearest), ("guess_", guesses, _nearest(guesses, behind))):
        summary[f"{of}psnr"] = finite(float(psnr(made, private).mean()))
    return Reconstruction(what, images, nearest, summary)


def _nearest(images: Tensor, behind: Sequence[Tensor]) -> Tensor:
    """For images (N, C, H, W) the nearest, by PSNR, of the private ones behind each."""
    groups = zip(images, behind, strict=True)
    return torch.stack([group[int(psnr(one.expand_as(group), group).argmax())] for one, group in groups])


def psnr(x: Tensor, y: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in decibels, image by image (N,): -10 log10 mean (x - y)^2; infinite if equal.

    Args:
        x, y: images (N, C, H, W) with values in [0, 1].
    """
    mse_N = (x - y).square().flatten(1).mean(dim=1)
    return 10 * torch.log10(1 / mse_N)


def total_variation(x: Tensor) -> Tensor:
    """Mean absolute difference of neighbors, down plus across, image by image (N,); a side of one pixel counts 0.

    Args:
        x: images (N, C, H, W).
    """
    down = x.diff(dim=2).abs().flatten(1)
    across = x.diff(dim=3).abs().flatten(1)
    return down.sum(dim=1) / max(1, down.shape[1]) + across.sum(dim=1) / max(1, across.shape[1])


def invert_features(
    function: Callable[[Tensor], Tensor],
    s: Tensor,
    start: Tensor,
    *,
    steps: int,
    lr: float,
    tv: float,
    pixel: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Move x until f(x) is what was sent (FedIN, Chan et al., arXiv:2304.00759, section 4.3).

    The attacker knows f, its weights and its BatchNorm statistics (white box), and nothing of the images. Adam on
    loss_m = mean (f(x_m) - s_m)^2 / mean s_m^2 + tv TV(pixel x_m), for all m at once.

    The paper's objective is the first term, but for its scale, which Adam does not see; dividing by the size of the
    target gives one `tv` the same weight in every network. The losses are summed, and f must treat rows apart (eval
    mode), so that a result does not depend on what is attacked beside it.

    Args:
        function: f, inputs (M, C, H, W) to features shaped like `s`, row by row. Takes no gradient in its weights
            where these ask for none.
        s: what was sent, (M, ...).
        start: where x begins; the paper: standard normal noise.
        steps: of Adam. lr: its rate, in the network's units.
        tv: weight of the total variation, not negative; 0 is off.
        pixel: size of one of the network's units as a share of the brightness range, per channel (C, 1, 1) or one
            number; total variation is taken in shares of the range.

    Returns:
        x after the last step, (M, C, H, W), and the losses (M,) there; detached.
    """
    x = start.detach().clone().requires_grad_()
    size_M = s.detach().square().flatten(1).mean(dim=1).clamp(min=_SMALLEST_TARGET)
    optimizer = torch.optim.Adam([x], lr=lr)

    def losses() -> Tensor:
        off_M = (function(x) - s).square().flatten(1).mean(dim=1) / size_M
        return off_M + tv * total_variation(x * pixel) if tv else off_M

    for _ in range(steps):
        (x.grad,) = torch.autograd.grad(losses().sum(), x)
        optimizer.step()
    return x.detach(), losses().detach()


def sums_as_features(
    sums: Mapping[str, Tensor], y: Tensor, phi: Callable[[Tensor], Tensor]
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """All that sums say of the rows behind them, as a function of these rows: inputs (1, N, ...) to numbers (1, K).

    With S = V L V', of as many eigenvalues L as there are rows, and A = phi(x) V L^(-1/4):  A'A is L^(1/2), the sums of
    A by class are those of M, and phi(x) has no part outside of V. The power balances large and small eigenvalues: the
    latter tell rows from each other.

    Args:
        sums: of `class_statistics.sum_rows`, with products. y: (N,) the rows' classes, which the counts tell.

    Returns:
        The function, and its values for the rows.
    """
    width = sums["sums"].shape[1]
    values, vectors = torch.linalg.eigh(class_statistics.unpack(sums["products"], width))
    most = min(len(y), width)
    kept = values[-most:].clamp(min=float(values[-1]) * _SMALLEST_SHARE).float()
    v_DR = vectors[:, -most:].float()
    balance_R = kept**-0.25
    means_CR = (sums["sums"].float() @ v_DR) * balance_R
    gram_RR = torch.diag(kept.sqrt())
    weight = gram_RR.norm() / means_CR.norm()
    outside = gram_RR.norm() / (kept[0].sqrt() * len(y))

    def told(x: Tensor) -> Tensor:
        phi_ND = phi(x.squeeze(0))
        within_NR = phi_ND @ v_DR
        a_NR = within_NR * balance_R
        by_class_CR = torch.zeros_like(means_CR).index_add(0, y, a_NR)
        beyond_ND = phi_ND - within_NR @ v_DR.T
        parts = (a_NR.T @ a_NR, weight * by_class_CR, outside * beyond_ND)
        return torch.cat([part.flatten() for part in parts]).unsqueeze(0)

    nothing = torch.zeros(len(y) * width)
    return told, torch.cat([gram_RR.flatten(), (weight * means_CR).flatten(), nothing]).unsqueeze(0)


def draw_images(found: Mapping[str, Reconstruction]) -> Figure:
    """For each run, by its name, private images and below them the reconstructed ones, with PSNR."""
    across = min(_ACROSS, max(len(one.images) for one in found.values()))
    about = (
        "First rows: the nearest of the private images behind what was attacked. Second rows: reconstructed from "
        f"uploads. Numbers: PSNR [dB]. At most {_ACROSS} images of a run."
    )
    height = 2 * len(found) * (_CELL + _TEXT_ROW)
    width = max(_NAMES + across * (_CELL + 0.08), 4.6)
    figure, axes = canvas("Images reconstructed from uploads", about, height, 2 * len(found), across, width=width)
    for line in axes:
        for cell in line:
            cell.set_xticks([])
            cell.set_yticks([])
            cell.set_frame_on(False)
    for number, (name, one) in enumerate(found.items()):
        captions = [f"{decibels:.1f}" for decibels in psnr(one.images, one.nearest).tolist()]
        private, made = axes[2 * number], axes[2 * number + 1]
        _show(private, "private", one.nearest, [""] * len(captions))
        _show(made, "\n".join(textwrap.wrap(name, _LETTERS)), one.images, captions)
    return figure


def _show(line: Sequence[Any], name: str, images: Tensor, captions: Sequence[str]) -> None:
    line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8.5, labelpad=6, parse_math=False)
    for cell, image, caption in zip(line, images, captions, strict=False):
        pixels = image if len(image) == 3 else image.mean(dim=0).expand(3, -1, -1)
        cell.imshow(pixels.permute(1, 2, 0).numpy(), interpolation="nearest")
        cell.set_xlabel(caption, fontsize=8, labelpad=1.5)
