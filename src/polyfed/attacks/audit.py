"""`polyfed audit leakage RUN ...`: what an honest-but-curious server got in finished runs, from their messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from polyfed.attacks.inference import (
    FPRS,
    HOLDER,
    SERVER,
    MembershipSamples,
    MembershipScores,
    ShadowData,
    client_model_loss_attack,
    infer_labels,
    lira,
    loss_attack,
    membership_samples,
    pool,
    shadow_pool,
)
from polyfed.attacks.inversion import invert_gradients
from polyfed.attacks.reconstruction import (
    LR,
    AttackTarget,
    collect_target,
    decimals,
    describe_transforms,
    exposed_by,
    quality,
    run_attack,
)
from polyfed.attacks.replay import (
    ExposedModel,
    Replay,
    Transcript,
    describe,
    entry_text,
    find_full_model,
    last_upload_rounds,
    plaintext_facts,
    replay,
)
from polyfed.core.client import Client
from polyfed.core.message import Message, get_group
from polyfed.core.randomness import generator, numpy_generator
from polyfed.data.partition import draw_balanced
from polyfed.data.samples import LabeledSamples
from polyfed.data.transforms import Prepare
from polyfed.errors import ConfigError
from polyfed.escaping import markdown_text
from polyfed.experiments.prediction import load_model
from polyfed.functional.modes import has_batchnorm
from polyfed.registry import suggest
from polyfed.report.grouping import looks_of
from polyfed.report.plot_style import canvas, legend, line_style, style_axes
from polyfed.report.run_records import RunRecord
from polyfed.report.text_tables import Column, columns_of, markdown_table, render_text, wrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FEWEST = 4  # shadow models: two with and two without each row
_TV_FEATURES = 1.0  # weight of total variation for features; for changes of weights
_TV_CHANGES = 0.01
_FROM_PAIRS = "distance to the pairs sent"
_PANELS = (
    (SERVER, "loss", "server, loss"),
    (SERVER, "LiRA online", "server, LiRA online"),
    (HOLDER, "loss", "holder, loss"),
)
_ABOUT = (
    "Members: rows that a client trained on. Others: test rows that nobody trained on. AUC, and the share of members "
    "found where 1 % and 0.1 % of the others are called members, over the rows of all clients, with 95 % intervals."
)
_HOLDER_IS = "holder: an attacker with the clients' own networks as the run left them, in any way; not the server."


@dataclass(frozen=True)
class AuditOptions:
    """How the server proceeds.

    shadows: S, shadow models of each kind and client; 0: no LiRA. shadow_data: whose rows the offline ones train on.
    clients: the first so many; None: all. images: how many are made again, of the first client; 0: none. steps: of
    Adam for each. seed: of all draws.
    """

    shadows: int = 16
    shadow_data: ShadowData = "others"
    clients: int | None = None
    images: int = 4
    steps: int = 300
    seed: int = 0

    def __post_init__(self) -> None:
        known = get_args(ShadowData)
        if self.shadow_data not in known:
            raise ConfigError(
                f"--shadow-data: expected {' or '.join(known)}, got '{self.shadow_data}'"
                f"{suggest(self.shadow_data, known)}"
            )
        if self.shadows % 2 or not (self.shadows == 0 or self.shadows >= _FEWEST):
            raise ConfigError(f"--shadows: expected 0 or an even number of at least {_FEWEST}, got {self.shadows}")
        for name, least in (("clients", 1), ("images", 0), ("steps", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"--{name}: expected at least {least}, got {value}")


def audit_run(record: RunRecord, options: AuditOptions, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Look into one run: its entry in ``leakage.json``.

    Args:
        record: a finished run of a recipe. say: receives lines on the progress.

    Raises:
        ConfigError: numbers are predicted; or it cannot be run again, see `replay`.
    """
    if record.result.main_score.lower_is_better:
        raise ConfigError(f"expected a run on classes, got {record.path}, which predicts numbers")
    worked = list(last_upload_rounds(record))[: options.clients]
    if not worked:
        raise ConfigError(f"expected a run in which the server received an upload, got {record.path}")
    say(f"{record.name}: running its last rounds again")
    run = replay(record, worked)
    transcripts = {number: run.transcript(number) for number in worked}
    facts = [plaintext_facts(transcript.up, run.client(number)) for number, transcript in transcripts.items()]
    networks = {number: find_full_model(run, transcript) for number, transcript in transcripts.items()}
    target, no_features = _features(run, transcripts[worked[0]], options)
    guesses: dict[tuple[str, str], dict[int, MembershipScores]] = {}  # (by, how) -> client -> scores
    why_not_members = ""
    for number, transcript in transcripts.items():
        say(f"{record.name}: client {number}")
        rows = membership_samples(run.client(number), run.federation.task.test is not None, options.seed)
        if rows is None:
            why_not_members = "no test samples to tell members from"
            continue
        found, why = _members(run, transcript, networks[number], rows, options)
        why_not_members = why_not_members or why
        if target is not None and number == worked[0] and (guess := membership_from_features(target, rows)):
            found.append(guess)
        for guess in found:
            guesses.setdefault((guess.by, guess.how), {})[number] = guess
    first = worked[0]
    say(f"{record.name}: images")
    rebuilt, why_not_images = _rebuilt(run, transcripts[first], networks[first], target, no_features, options)
    messages = {str(number): describe(transcript) for number, transcript in transcripts.items()}
    pooled = {key: pool(list(found.values())) for key, found in guesses.items()}
    return {
        "name": record.name,
        "method": record.method,
        "hyperparameters": record.result.hyperparameters,
        "dataset": record.result.dataset,
        "run_seed": record.seed,
        "on_the_way": describe_transforms(record) or None,
        "replay_equal": run.equal,
        "bytes_up_per_client": sum(each["up"]["bytes"] for each in messages.values()) / len(messages),
        "messages": messages,
        "in_the_clear": [fact for fact in facts[0] if all(fact in other for other in facts)],
        "classes": infer_labels(run, transcripts),
        "membership": [
            {
                "by": by,
                "how": how,
                "pooled": {**pooled[by, how].summary(), "roc": pooled[by, how].curve()},
                "clients": {str(number): guess.summary() for number, guess in found.items()},
            }
            for (by, how), found in guesses.items()
        ],
        "membership_why_not": why_not_members or None,
        "reconstruction": rebuilt,
        "reconstruction_why_not": why_not_images or None,
    }


def _members(
    run: Replay, transcript: Transcript, network: ExposedModel | None, rows: MembershipSamples, options: AuditOptions
) -> tuple[list[MembershipScores], str]:
    """All guesses about one client's rows, and the reason for none by the server, or no LiRA."""
    client = transcript.job.client
    found = []
    device = run.recipe.run.device
    why = ""
    if not transcript.up:
        why = "nothing goes up"
    elif network is None:
        why = _why_no_network(run, transcript)
    else:
        found.append(loss_attack(run, transcript, network, rows))
        if options.shadows and not network.was_broadcast(run, transcript):
            why = "no LiRA: where the client's weights started did not come down, so that no shadow model starts there"
        elif options.shadows:
            liras = lira(run, transcript, network, rows, options.shadows, options.shadow_data, options.seed)
            found += liras
            if not len(shadow_pool(run, client.id, options.shadow_data)):
                why = f"no offline LiRA: there are no rows of '{options.shadow_data}'"
            elif not liras:
                why = "no LiRA: shadow models were refused"
    try:
        holder = load_model(run.record.path, client.id, device, run.record.trusted, "personal")
    except ConfigError:  # networks that a run folder cannot rebuild
        return found, why
    return [*found, client_model_loss_attack(holder, rows)], why


def _why_no_network(run: Replay, transcript: Transcript) -> str:
    """The parts of a network that an upload lacks."""
    server, client = run.federation.server, transcript.job.client
    names = dict(server.model(client.architecture, {}, transcript.job.variant).named_parameters())
    sent = {
        name
        for value in transcript.up.values()
        if not isinstance(value, torch.Tensor)
        for name in value
        if name in names
    }
    if sent:
        return f"{len(sent)} of the network's {len(names)} parameters go up: no way from a row to a score"
    return f"what goes up ({', '.join(transcript.up)}) holds no network: no way from a row to a score"


def _features(run: Replay, transcript: Transcript, options: AuditOptions) -> tuple[AttackTarget | None, str]:
    """Features or class means that a client sent, as many as there are images to make again; the reason for none."""
    client = transcript.job.client
    if client.data.train.x.dtype != torch.uint8 or client.data.train.x.dim() != 4:
        return None, "its inputs are no images of bytes"
    wanted = max(1, options.images)
    try:
        exposed = exposed_by(run.federation.method)
        if exposed.kind == "features":
            features = transcript.up.get(exposed.entry)
            wanted = len(next(iter(features.values()))) if isinstance(features, Mapping) else wanted
        else:
            wanted = min(wanted, len(client.data.train.y.unique()))
        level = exposed.noise
        path = run.record.path
        target = collect_target(path, client.id, wanted, [level], None, run.recipe.run.device, run.record.trusted)
    except ConfigError as reason:
        return None, str(reason)
    if target.round != transcript.job.round:  # it trained once more, and that upload was lost
        return None, "the network of the round of its last upload is gone"
    return target, ""


def _rebuilt(
    run: Replay,
    transcript: Transcript,
    network: ExposedModel | None,
    target: AttackTarget | None,
    no_features: str,
    options: AuditOptions,
) -> tuple[list[dict[str, Any]], str]:
    """Images made again from the upload of one client, in every possible way; the reason for none."""
    if not options.images:
        return [], "not asked for"
    if not transcript.up:
        return [], "nothing goes up"
    x = transcript.job.client.data.train.x
    if x.dtype != torch.uint8 or x.dim() != 4:
        return [], no_features
    found = []
    if target is not None:
        found.append(from_features(target.first(options.images), options.steps, options.seed))
    if network is not None and network.was_broadcast(run, transcript):
        found += from_weight_updates(run, transcript, network, options.images, options.steps, options.seed)
    if found:
        return found, ""
    return [], "nothing in it is a function of single images that the server could turn round"


# images made again ---------------------------------------------------------------------------------------------------


def from_features(target: AttackTarget, steps: int, seed: int) -> dict[str, Any]:
    """Features or class means inverted as `polyfed audit attack` does it, with the prior, at the run's own noise."""
    result = run_attack(target, steps, (_TV_FEATURES,), seed).content
    score = next(trial for trial in result["results"] if trial["noise"] == target.noise_of_run)
    known = "the map is known" if target.is_public else "worst case: the extractor is known"
    what = "features (s_in)" if target.kind == "features" else f"class means ({known})"
    return _attempt(what, len(target.behind), score, result["guess"])


def _attempt(what: str, images: int, score: Mapping[str, Any], guess: Mapping[str, Any]) -> dict[str, Any]:
    """One attempt: its source, and PSNR [dB] and SSIM against the nearest private images, means over the images made.

    guess: the same for the mean of the client's training images, which needs no upload.
    """
    scores = {"psnr": score["best_psnr"], "ssim": score["best_ssim"]}
    guesses = {"guess_psnr": guess["best_psnr"], "guess_ssim": guess["best_ssim"]}
    return {"what": what, "images": images, **scores, **guesses}


def membership_from_features(target: AttackTarget, rows: MembershipSamples) -> MembershipScores | None:
    """Which rows are among the pairs sent: the distance to the nearest of them; None where features were not sent.

    Members are the rows behind the pairs.
    """
    if target.kind != "features":
        return None
    sent = next(iter(target.sent))
    s = sent.values[target.noise_of_run].flatten(1)
    others = rows.samples.x[~rows.member].float() / 255
    pictures = torch.cat([*(images.cpu() for images in target.behind), others]).to(target.mean.device)
    with torch.no_grad():
        own = torch.cat([sent.function((part - target.mean) / target.std).flatten(1) for part in pictures.split(100)])
    scores = -torch.cdist(own, s, compute_mode="donot_use_mm_for_euclid_dist").min(dim=1).values.double().cpu()
    return MembershipScores(SERVER, _FROM_PAIRS, scores, torch.arange(len(scores)) < len(target.behind))


def from_weight_updates(
    replay: Replay, transcript: Transcript, network: ExposedModel, images: int, steps: int, seed: int
) -> list[dict[str, Any]]:
    """Gradient matching on one step with one image, on one step with `images` of them, and on the round as it was.

    One step is the client's upload with these rows alone, one epoch and one batch, `[privacy]` and all. The classes are
    known to the attacker; of the round they are those whose bias in the head has grown most.
    """
    client = transcript.job.client
    train = client.data.train
    base = get_group(transcript.down, network.group)
    black_white = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, train.x.shape[1], 1, 1)
    found = []

    def matched(message: Message, y: Tensor, seed: int) -> Tensor:
        """Images (N, C, H, W) as the network takes them, on the CPU."""
        module = network.load(replay, transcript.down)
        place = next(module.parameters()).device
        sent = get_group(message, network.group)
        change = {name: sent[name].float().cpu() - t.float().cpu() for name, t in base.items() if name in sent}
        low, high = client.prepare(black_white).to(place)
        draw = torch.randn((len(y), *train.x.shape[1:]), generator=generator(seed, "match", client.id)).to(place)
        options = {"steps": steps, "lr": LR, "tv": _TV_CHANGES, "low": low, "high": high}
        return invert_gradients(module, change, y.to(place), draw.clamp(low, high), **options)[0].cpu()

    def one_step(what: str, purpose: str, batches: Sequence[LabeledSamples]) -> None:
        made = []
        behind = []
        for number, batch in enumerate(batches):
            message = replay.rerun_with(transcript, batch, purpose, number, local_epochs=1, batch_size=len(batch))
            if message is not None:
                made.append(matched(message, batch.y, seed + number))
                behind += [_pictures(batch)] * len(batch)
        if made:
            found.append(_scored(what, client, torch.cat(made), behind))

    rows = torch.from_numpy(draw_balanced(train.y.numpy(), images, numpy_generator(seed, "images", client.id)))
    if not has_batchnorm(network.load(replay, transcript.down)):  # which takes no single row
        one_step("weights after one step, one image", "one image", [train.select(row) for row in rows.split(1)])
    if images > 1:
        one_step(f"weights after one step, {images} images", "some images", [train.select(rows)])
    x = matched(transcript.up, _likely(transcript, network, images), seed)
    found.append(_scored(f"weights after the round, {client.n} images", client, x, [_pictures(train)] * images))
    return found


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


def _pictures(samples: LabeledSamples) -> Tensor:
    return samples.x.float() / 255


def _scored(what: str, client: Client, x: Tensor, behind: list[Tensor]) -> dict[str, Any]:
    """The score of images made, each against the nearest of the private ones behind it."""
    assert isinstance(client.prepare, Prepare)
    mean, std = (torch.tensor(part).view(-1, 1, 1) for part in (client.prepare.mean, client.prepare.std))
    made = (x * std + mean).clamp(0, 1)
    guess = _pictures(client.data.train).mean(dim=0).expand_as(made)
    return _attempt(what, len(made), quality(made, behind), quality(guess, behind))


# the tables and the figure --------------------------------------------------------------------------------------------


def to_text(found: Sequence[Mapping[str, Any]], width: int = 100) -> str:
    """All tables, one under the other, and the reasons for what is not in them."""
    parts = [f"{render_text(columns, width)}\n" for columns in _tables(found).values()]
    return "\n".join([*parts, *(wrapped(note, width) for note in _notes(found))])


def to_markdown(found: Sequence[Mapping[str, Any]], options: AuditOptions) -> str:
    """`leakage.md`."""
    parts = ["# What an honest-but-curious server learns", "", _attacker(options), ""]
    for title, columns in _tables(found).items():
        parts += [f"## {title}", "", markdown_table(columns), ""]
    return "\n".join([*parts, *(f"- {markdown_text(note)}" for note in _notes(found)), ""])


def _attacker(options: AuditOptions) -> str:
    """One paragraph: what the attacker has and does."""
    if not options.shadows:
        return "No shadow models."
    rows = "the other clients' training rows" if options.shadow_data == "others" else "the rows held out for the server"
    return (
        f"LiRA with {options.shadows} shadow models per client; offline they are trained on {rows}, online on halves "
        f"of the rows asked for. Seed {options.seed}."
    )


def _tables(found: Sequence[Mapping[str, Any]]) -> dict[str, list[Column]]:
    """Title -> columns: what goes up, which rows were trained on, images."""
    sent = [
        {
            "run": each["name"],
            "bytes up\nper client": f"{each['bytes_up_per_client']:,.0f}".replace(",", " "),
            "goes up": ", ".join(map(entry_text, next(iter(each["messages"].values()))["up"]["entries"])) or "nothing",
            "in the clear": ", ".join(each["in_the_clear"]) or "-",
            "classes guessed by": each["classes"]["how"] or "-",
            "AUC": _interval(each["classes"]["auc"]),
        }
        for each in found
    ]
    images = [
        {
            "run": each["name"],
            "made from": one["what"],
            "images": str(one["images"]),
            "PSNR [dB]": decimals(one["psnr"], 2),
            "guess\nPSNR": decimals(one["guess_psnr"], 2),
            "SSIM": decimals(one["ssim"], 3),
            "guess\nSSIM": decimals(one["guess_ssim"], 3),
        }
        for each in found
        for one in each["reconstruction"]
    ]
    members = [row for each in found for row in _member_rows(each)]
    tables = {"What goes up": sent, "Which rows a client trained on": members, "Images made again": images}
    words = ("run", "goes up", "in the clear", "classes guessed by", "by", "made from")
    return {title: columns_of(rows, words) for title, rows in tables.items() if rows}


def _member_rows(run: Mapping[str, Any]) -> list[dict[str, str]]:
    headings = ("AUC", "balanced\naccuracy", *(f"TPR at\n{100 * fpr:g} %" for fpr in FPRS), "members\nothers")
    rows = []
    for guess in run["membership"]:
        one = guess["pooled"]
        rates = [_rate(one["tpr_at_fpr"][f"{fpr:g}"]) for fpr in FPRS]
        counts = f"{one['members']} / {one['others']}"
        cells = (_interval(one["auc"]), f"{one['balanced_accuracy']:.3f}", *rates, counts)
        row = {"run": run["name"], "by": f"{guess['by']}, {guess['how']}"}
        rows.append(row | dict(zip(headings, cells, strict=True)))
    if not any(guess["by"] == SERVER for guess in run["membership"]):
        rows.append({"run": run["name"], "by": SERVER, **dict.fromkeys(headings, "-")})
    return rows


def _notes(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the numbers are, and why some are missing."""
    notes = [_ABOUT, _HOLDER_IS]
    if any(guess["how"] == _FROM_PAIRS for each in found for guess in each["membership"]):
        notes.append("distance to the pairs sent: members are the rows behind the features that the first client sent.")
    if any(each["reconstruction"] for each in found):
        notes.append(
            "Images: each against the nearest private one behind what was attacked; guess: the mean of all the "
            "client's training images, made without anything that was sent."
        )
    for each in found:
        name = each["name"]
        if each["on_the_way"]:
            notes.append(f"{name}: uploads on their way: {each['on_the_way']}.")
        missing = {
            "classes": each["classes"]["why_not"],
            "rows": each["membership_why_not"],
            "images": each["reconstruction_why_not"],
        }
        notes += [f"{name}, {what}: {why}." for what, why in missing.items() if why]
        if not each["replay_equal"]:
            notes.append(f"{name}: run again on this machine its last losses differ from the records by rounding.")
    return notes


def _interval(value: Mapping[str, float] | None) -> str:
    return "-" if value is None else f"{value['value']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


def _rate(found: Mapping[str, float] | None) -> str:
    """A share in per cent; "few rows" where there are too few others for such a rate."""
    if found is None:
        return "few rows"
    return f"{100 * found['value']:.1f} [{100 * found['low']:.1f}, {100 * found['high']:.1f}]"


def roc_curves(records: Sequence[RunRecord], found: Sequence[Mapping[str, Any]], options: AuditOptions) -> Figure:
    """ROC curves on logarithmic axes: one panel for each attacker, one line for each run."""
    guesses = [{(one["by"], one["how"]): one["pooled"] for one in each["membership"]} for each in found]
    panels = [panel for panel in _PANELS if any(panel[:2] in each for each in guesses)]
    about = f"{_ABOUT.split('. AUC')[0]}. Logarithmic; dotted: by chance. {_attacker(options)} {_HOLDER_IS}"
    width = max(5.6, 2.7 * len(panels))
    figure, (axes,) = canvas("Which rows a client trained on", about, 2.8, 1, max(1, len(panels)), width=width)
    looks = looks_of(records)
    lines: dict[str, Any] = {}
    for one, (by, how, title) in zip(axes, panels, strict=False):
        style_axes(one)
        shown = {record.name: of[by, how] for record, of in zip(records, guesses, strict=True) if (by, how) in of}
        for name, guess in shown.items():
            rates = [[max(rate, 1e-12) for rate in guess["roc"][key]] for key in ("fpr", "tpr")]
            marks = {"markersize": 4, "markevery": max(1, len(rates[0]) // 8)}
            (lines[name],) = one.plot(*rates, **line_style(looks[name]), **marks)
        least = min(1 / guess["others"] for guess in shown.values())
        one.plot([1e-9, 1], [1e-9, 1], color="black", linewidth=1, linestyle=(0, (1, 1.5)))
        one.set_xscale("log")
        one.set_yscale("log")
        one.set_xlim(least, 1)
        one.set_ylim(least, 1.05)
        one.set_title(title, loc="left", fontsize=9)
        one.set_xlabel("false positives")
    axes[0].set_ylabel("true positives")
    if lines:
        legend(axes[0], list(lines.values()), list(lines))
    return figure
