"""What of a client's images can be made again from what it sent: from features, class means, or a change of weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyfed.attacks.attack_target import AttackTarget, collect_target, exposed_by
from polyfed.attacks.gradient_inversion import invert_gradients
from polyfed.attacks.membership_inference import MembershipSamples, MembershipScores
from polyfed.attacks.message_inspection import ExposedModel
from polyfed.attacks.reconstruction_runs import AttackConfig, run_attack
from polyfed.attacks.replay import Replay, Transcript
from polyfed.core.client import Client
from polyfed.core.message import Group, Message, get_group
from polyfed.core.randomness import generator
from polyfed.data.samples import LabeledSamples
from polyfed.data.transforms import Prepare
from polyfed.functional.image_quality import psnr, ssim
from polyfed.functional.modes import has_batchnorm
from polyfed.report.text_tables import finite

_TV_FEATURES = 1.0  # weight of total variation for features; for changes of weights
_TV_CHANGES = 0.01
_LR = 0.1


@dataclass(frozen=True)
class ReconstructionResult:
    """One attempt. what: it was made from. images: how many. psnr [dB], ssim: means over them.

    guess_psnr, guess_ssim: the same for the mean of the client's training images, which takes nothing that was sent.
    Each image made is held against the nearest, by PSNR, of the private ones behind what was attacked.
    """

    what: str
    images: int
    psnr: float | None
    ssim: float | None
    guess_psnr: float | None
    guess_ssim: float | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return dict(vars(self))


# features and class means -------------------------------------------------------------------------------------------


def exposed(replay: Replay, client: int, images: int, device: str) -> AttackTarget:
    """Features or class means that a client sent last, as `polyfed audit attack` sees them.

    Raises:
        ConfigError: it sent neither.
    """
    level = exposed_by(replay.federation.method).noise
    return collect_target(replay.record.path, client, images, [level], None, device, replay.record.trusted)


def from_features(seen: AttackTarget, steps: int, seed: int) -> ReconstructionResult:
    """Features or class means inverted as `polyfed audit attack` does it, with the prior, at the run's own noise."""
    found = run_attack(seen, AttackConfig(steps, _LR, (_TV_FEATURES,), seed))
    trial = next(trial for trial in found.trials if trial.noise == seen.noise_of_run)
    score, guess = trial.score, found.guess
    what = "features (s_in)" if seen.kind == "features" else "class means (worst case: the extractor is known)"
    return ReconstructionResult(what, len(seen.behind), score.mean("best_psnr"), score.mean("best_ssim"),
                   guess.mean("best_psnr"), guess.mean("best_ssim"))  # fmt: skip


def membership_from_features(seen: AttackTarget, asked: MembershipSamples, by: str) -> MembershipScores | None:
    """Which rows are among the pairs sent: the distance to the nearest of them; None where features were not sent.

    Members are the rows behind the pairs.
    """
    if seen.kind != "features":
        return None
    sent = next(iter(seen.sent))
    s = sent.values[seen.noise_of_run].flatten(1)
    others = asked.samples.x[~asked.member].float() / 255
    pictures = torch.cat([*(images.cpu() for images in seen.behind), others]).to(seen.mean.device)
    with torch.no_grad():
        own = torch.cat([sent.function((part - seen.mean) / seen.std).flatten(1) for part in pictures.split(100)])
    scores = -torch.cdist(own, s, compute_mode="donot_use_mm_for_euclid_dist").min(dim=1).values.double().cpu()
    return MembershipScores(by, "distance to the pairs sent", scores, torch.arange(len(scores)) < len(seen.behind))


# a change of weights ------------------------------------------------------------------------------------------------


def from_weight_updates(
    replay: Replay, transcript: Transcript, network: ExposedModel, images: int, steps: int, seed: int
) -> list[ReconstructionResult]:
    """Gradient matching on one step with one image, on one step with `images` of them, and on the round as it was.

    One step is what the client would have sent with these rows alone, one epoch and one batch, `[privacy]` and all. The
    classes are known to the attacker; of the round they are those whose bias in the head has grown most.
    """
    client = transcript.job.client
    train = client.data.train
    rows = _spread(train.y, images)
    base = get_group(transcript.down, network.group)
    single = has_batchnorm(network.load(replay, transcript.down))  # which takes no single row
    found = []
    if not single:
        made = []
        behind = []
        for number, row in enumerate(rows.tolist()):
            one = train.select(torch.tensor([row]))
            message = replay.rerun_with(transcript, one, "one image", number, local_epochs=1, batch_size=1)
            if message is not None:
                made.append(_matched(replay, transcript, network, base, message, one.y, steps, seed + number))
                behind.append(_pictures(one))
        if made:
            found.append(_told("weights after one step, one image", client, torch.cat(made), behind))
    if images > 1:
        some = train.select(rows)
        message = replay.rerun_with(transcript, some, "some images", 0, local_epochs=1, batch_size=images)
        if message is not None:
            x = _matched(replay, transcript, network, base, message, some.y, steps, seed)
            what = f"weights after one step, {images} images"
            found.append(_told(what, client, x, [_pictures(some)] * images))
    x = _matched(replay, transcript, network, base, transcript.up, _likely(transcript, network, images), steps, seed)
    found.append(_told(f"weights after the round, {client.n} images", client, x, [_pictures(train)] * images))
    return found


def _spread(y: Tensor, count: int) -> Tensor:
    """Places of `count` samples of classes as different as can be, the first of each class first."""
    seen: dict[int, int] = {}
    turns = []
    for label in y.tolist():
        turns.append(seen.get(label, 0))
        seen[label] = turns[-1] + 1
    return torch.tensor(turns).argsort(stable=True)[:count]


def _likely(transcript: Transcript, network: ExposedModel, count: int) -> Tensor:
    """(N,) the classes whose bias in the head grew most; round and round where there are fewer."""
    sent = get_group(transcript.up, network.group)
    down = get_group(transcript.down, network.group)
    classes = transcript.job.client.classes
    steps = [sent[name].float() - down[name].float() for name in sent if tuple(sent[name].shape) == (classes,)]
    growth = steps[-1] if steps else torch.zeros(classes)
    order = growth.argsort(descending=True)
    likely = order[: max(1, int((growth > 0).sum()))]
    return likely.repeat(math.ceil(count / len(likely)))[:count]


def _matched(
    replay: Replay,
    transcript: Transcript,
    network: ExposedModel,
    base: Group,
    message: Message,
    y: Tensor,
    steps: int,
    seed: int,
) -> Tensor:
    """Images (N, C, H, W) as the network takes them, on the CPU."""
    client = transcript.job.client
    module = network.load(replay, transcript.down)
    place = next(module.parameters()).device
    sent = get_group(message, network.group)
    change = {name: sent[name].float().cpu() - t.float().cpu() for name, t in base.items() if name in sent}
    low, high = (t.to(place) for t in _bounds(client))
    shape = (len(y), *client.data.train.x.shape[1:])
    draw = torch.randn(shape, generator=generator(seed, "match", client.id)).to(place)
    start = draw.clamp(low, high)
    x, _ = invert_gradients(module, change, y.to(place), start, steps=steps, lr=_LR, tv=_TV_CHANGES, low=low, high=high)
    return x.cpu()


def _bounds(client: Client) -> tuple[Tensor, Tensor]:
    """(C, 1, 1) each: black and white as the network takes them."""
    channels = client.data.train.x.shape[1]
    ends = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, channels, 1, 1)
    low, high = client.prepare(ends)
    return low, high


def _pictures(samples: LabeledSamples) -> Tensor:
    return samples.x.float() / 255


def _told(what: str, client: Client, x: Tensor, behind: list[Tensor]) -> ReconstructionResult:
    """The score of images made, each against the nearest of the private ones behind it."""
    assert isinstance(client.prepare, Prepare)
    mean, std = (torch.tensor(part).view(-1, 1, 1) for part in (client.prepare.mean, client.prepare.std))
    made = (x * std + mean).clamp(0, 1)
    blind = _pictures(client.data.train).mean(dim=0).expand_as(made)
    scores = [_nearest(images, behind) for images in (made, blind)]
    return ReconstructionResult(what, len(made), *scores[0], *scores[1])


def _nearest(made: Tensor, behind: list[Tensor]) -> tuple[float | None, float | None]:
    nearest = [g[int(psnr(one.expand_as(g), g).argmax())] for one, g in zip(made, behind, strict=True)]
    other = torch.stack(nearest)
    return finite(float(psnr(made, other).mean())), finite(float(ssim(made, other).mean()))
