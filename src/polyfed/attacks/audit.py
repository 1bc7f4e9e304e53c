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
    LabelInference,
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
    AttackConfig,
    AttackTarget,
    collect_target,
    decimals,
    describe_transforms,
    exposed_by,
    nearest_of,
    run_attack,
)
from polyfed.attacks.replay import (
    ExposedModel,
    MessageEntry,
    Replay,
    Transcript,
    describe,
    find_full_model,
    last_upload_rounds,
    list_entries,
    plaintext_facts,
    replay,
)
from polyfed.core.client import Client
from polyfed.core.message import Message, get_group
from polyfed.core.randomness import generator
from polyfed.data.samples import LabeledSamples
from polyfed.data.transforms import Prepare
from polyfed.errors import ConfigError
from polyfed.escaping import markdown_text
from polyfed.experiments.prediction import load_model
from polyfed.functional.image_quality import psnr, ssim
from polyfed.functional.membership_scores import Interval, roc
from polyfed.functional.modes import has_batchnorm
from polyfed.registry import suggest
from polyfed.report.grouping import looks_of
from polyfed.report.plot_style import canvas, legend, line_style, style_axes
from polyfed.report.run_records import RunRecord
from polyfed.report.statistics import finite
from polyfed.report.text_tables import Column, markdown_table, render_text, wrapped

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


@dataclass(frozen=True, eq=False)
class AuditReport:
    """One run.

    record: its folder. equal: see `Replay`. messages: client -> both directions. entries: of the first client's upload.
    clear: facts stated by all uploads. classes: see there. guesses: client -> its membership guesses; why_not_members:
    why the server makes none, or not all. rebuilt: images made again; why_not_images: why there are none.
    """

    record: RunRecord
    equal: bool
    messages: Mapping[int, Mapping[str, Any]]
    entries: tuple[MessageEntry, ...]
    clear: tuple[str, ...]
    classes: LabelInference
    guesses: Mapping[int, tuple[MembershipScores, ...]]
    why_not_members: str
    rebuilt: tuple[ReconstructionResult, ...]
    why_not_images: str

    @property
    def bytes_up(self) -> float:
        """Of a client in its last round, the mean over clients."""
        sent: list[int] = [each["up"]["bytes"] for each in self.messages.values()]
        return sum(sent) / len(sent)

    @property
    def pooled(self) -> dict[tuple[str, str], MembershipScores]:
        """(by, how) -> the guesses of all clients as one."""
        found: dict[tuple[str, str], list[MembershipScores]] = {}
        for guesses in self.guesses.values():
            for guess in guesses:
                found.setdefault((guess.by, guess.how), []).append(guess)
        return {key: pool(each) for key, each in found.items()}

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        run = self.record
        return {
            "name": run.name,
            "method": run.method,
            "hyperparameters": run.result.hyperparameters,
            "dataset": run.result.dataset,
            "run_seed": run.seed,
            "on_the_way": describe_transforms(run) or None,
            "replay_equal": self.equal,
            "bytes_up_per_client": self.bytes_up,
            "messages": {str(client): each for client, each in self.messages.items()},
            "in_the_clear": list(self.clear),
            "classes": self.classes.to_dict(),
            "membership": [
                {
                    "by": by,
                    "how": how,
                    "pooled": {**guess.summary(), "roc": guess.curve()},
                    "clients": {
                        str(client): each.summary()
                        for client, guesses in self.guesses.items()
                        for each in guesses
                        if (each.by, each.how) == (by, how)
                    },
                }
                for (by, how), guess in self.pooled.items()
            ],
            "membership_why_not": self.why_not_members or None,
            "reconstruction": [vars(each) for each in self.rebuilt],
            "reconstruction_why_not": self.why_not_images or None,
        }


def audit_run(record: RunRecord, options: AuditOptions, say: Callable[[str], None] = lambda _: None) -> AuditReport:
    """Look into one run.

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
    guesses = {}
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
        guesses[number] = tuple(found)
    first = worked[0]
    say(f"{record.name}: images")
    rebuilt, why_not_images = _rebuilt(run, transcripts[first], networks[first], target, no_features, options)
    return AuditReport(
        record,
        run.equal,
        {number: describe(transcript) for number, transcript in transcripts.items()},
        tuple(list_entries(transcripts[first].traveled)),
        tuple(fact for fact in facts[0] if all(fact in other for other in facts)),
        infer_labels(run, transcripts),
        guesses,
        why_not_members,
        tuple(rebuilt),
        why_not_images,
    )


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
        holder = load_model(run.record.path, client.id, device, run.record.trusted)
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
    what = ", ".join(entry.name for entry in list_entries(transcript.up))
    return f"what goes up ({what}) holds no network: no way from a row to a score"


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
        elif "labels" in transcript.up:
            wanted = min(wanted, len(transcript.up["labels"]))
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
) -> tuple[list[ReconstructionResult], str]:
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


@dataclass(frozen=True)
class ReconstructionResult:
    """One attempt. what: its source. images: how many. psnr [dB], ssim: means over them.

    guess_psnr, guess_ssim: the same for the mean of the client's training images, which needs no upload.
    Each image made is held against the nearest, by PSNR, of the private ones behind what was attacked.
    """

    what: str
    images: int
    psnr: float | None
    ssim: float | None
    guess_psnr: float | None
    guess_ssim: float | None


def from_features(target: AttackTarget, steps: int, seed: int) -> ReconstructionResult:
    """Features or class means inverted as `polyfed audit attack` does it, with the prior, at the run's own noise."""
    result = run_attack(target, AttackConfig(steps, (_TV_FEATURES,), seed))
    trial = next(trial for trial in result.trials if trial.noise == target.noise_of_run)
    score, guess = trial.score, result.guess
    what = "features (s_in)" if target.kind == "features" else "class means (worst case: the extractor is known)"
    return ReconstructionResult(what, len(target.behind), score.mean("best_psnr"), score.mean("best_ssim"),
                   guess.mean("best_psnr"), guess.mean("best_ssim"))  # fmt: skip


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
) -> list[ReconstructionResult]:
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

    rows = _spread(train.y, images)
    if not has_batchnorm(network.load(replay, transcript.down)):  # which takes no single row
        one_step("weights after one step, one image", "one image", [train.select(row) for row in rows.split(1)])
    if images > 1:
        one_step(f"weights after one step, {images} images", "some images", [train.select(rows)])
    x = matched(transcript.up, _likely(transcript, network, images), seed)
    found.append(_scored(f"weights after the round, {client.n} images", client, x, [_pictures(train)] * images))
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


def _pictures(samples: LabeledSamples) -> Tensor:
    return samples.x.float() / 255


def _scored(what: str, client: Client, x: Tensor, behind: list[Tensor]) -> ReconstructionResult:
    """The score of images made, each against the nearest of the private ones behind it."""
    assert isinstance(client.prepare, Prepare)
    mean, std = (torch.tensor(part).view(-1, 1, 1) for part in (client.prepare.mean, client.prepare.std))
    made = (x * std + mean).clamp(0, 1)
    blind = _pictures(client.data.train).mean(dim=0).expand_as(made)
    scores = [_quality(images, behind) for images in (made, blind)]
    return ReconstructionResult(what, len(made), *scores[0], *scores[1])


def _quality(made: Tensor, behind: list[Tensor]) -> tuple[float | None, float | None]:
    """Mean PSNR and SSIM against the nearest of the private images."""
    other = nearest_of(made, behind)
    return finite(float(psnr(made, other).mean())), finite(float(ssim(made, other).mean()))


# the tables and the figure --------------------------------------------------------------------------------------------


def to_text(found: Sequence[AuditReport], width: int = 100) -> str:
    """All tables, one under the other, and the reasons for what is not in them."""
    parts = [render_text(columns, width) for _, columns in _tables(found)]
    return "\n".join([*("\n".join([part, ""]) for part in parts), *(wrapped(note, width) for note in _notes(found))])


def to_markdown(found: Sequence[AuditReport], options: AuditOptions) -> str:
    """`leakage.md`."""
    parts = ["# What an honest-but-curious server learns", "", _attacker(options), ""]
    for title, columns in _tables(found):
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


def _tables(found: Sequence[AuditReport]) -> list[tuple[str, list[Column]]]:
    """Titles and columns: what goes up, which rows were trained on, images."""
    names = [each.record.name for each in found]
    sent = [
        Column("run", names, words=True),
        Column("bytes up\nper client", [f"{each.bytes_up:,.0f}".replace(",", " ") for each in found]),
        Column("goes up", [", ".join(map(str, each.entries)) or "nothing" for each in found], words=True),
        Column("in the clear", [", ".join(each.clear) or "-" for each in found], words=True),
        Column("classes guessed by", [each.classes.how or "-" for each in found], words=True),
        Column("AUC", [_interval(each.classes.auc) for each in found]),
    ]
    tables = [("What goes up", sent), ("Which rows a client trained on", _member_table(found))]
    if any(each.rebuilt for each in found):
        tables.append(("Images made again", _image_table(found)))
    return tables


def _member_table(found: Sequence[AuditReport]) -> list[Column]:
    rows: list[tuple[str, str, Mapping[str, Any] | None]] = []
    for each in found:
        pooled = each.pooled
        rows += [(each.record.name, f"{by}, {how}", guess.summary()) for (by, how), guess in pooled.items()]
        if not any(by == SERVER for by, _ in pooled):
            rows.append((each.record.name, SERVER, None))

    def column(heading: str, cell: Callable[[Mapping[str, Any]], str]) -> Column:
        return Column(heading, ["-" if summary is None else cell(summary) for _, _, summary in rows])

    return [
        Column("run", [name for name, _, _ in rows], words=True),
        Column("by", [by for _, by, _ in rows], words=True),
        column("AUC", lambda one: _interval(Interval(**one["auc"]))),
        column("balanced\naccuracy", lambda one: f"{one['balanced_accuracy']:.3f}"),
        *(
            column(f"TPR at\n{100 * fpr:g} %", lambda one, fpr=fpr: _rate(one["tpr_at_fpr"][f"{fpr:g}"]))  # type: ignore[misc]
            for fpr in FPRS
        ),
        column("members\nothers", lambda one: f"{one['members']} / {one['others']}"),
    ]


def _image_table(found: Sequence[AuditReport]) -> list[Column]:
    rows = [(each.record.name, one) for each in found for one in each.rebuilt]
    numbers = (("PSNR [dB]", "psnr", 2), ("guess", "guess_psnr", 2), ("SSIM", "ssim", 3), ("guess", "guess_ssim", 3))
    return [
        Column("run", [name for name, _ in rows], words=True),
        Column("made from", [one.what for _, one in rows], words=True),
        Column("images", [str(one.images) for _, one in rows]),
        *(Column(title, [decimals(getattr(one, key), digits) for _, one in rows]) for title, key, digits in numbers),
    ]


def _notes(found: Sequence[AuditReport]) -> list[str]:
    """What the numbers are, and why some are missing."""
    notes = [_ABOUT, _HOLDER_IS]
    if any((SERVER, _FROM_PAIRS) in each.pooled for each in found):
        notes.append("distance to the pairs sent: members are the rows behind the features that the first client sent.")
    if any(each.rebuilt for each in found):
        notes.append(
            "Images: each against the nearest private one behind what was attacked; guess: the mean of all the "
            "client's training images, made without anything that was sent."
        )
    for each in found:
        name = each.record.name
        if transforms := describe_transforms(each.record):
            notes.append(f"{name}: uploads on their way: {transforms}.")
        for what, why in (
            ("classes", each.classes.why_not),
            ("rows", each.why_not_members),
            ("images", each.why_not_images),
        ):
            if why:
                notes.append(f"{name}, {what}: {why}.")
        if not each.equal:
            notes.append(f"{name}: run again on this machine its last losses differ from the records by rounding.")
    return notes


def _interval(value: Interval | None) -> str:
    return "-" if value is None else f"{value.value:.3f} [{value.low:.3f}, {value.high:.3f}]"


def _rate(found: Mapping[str, float] | None) -> str:
    """A share in per cent; "few rows" where there are too few others for such a rate."""
    if found is None:
        return "few rows"
    return f"{100 * found['value']:.1f} [{100 * found['low']:.1f}, {100 * found['high']:.1f}]"


def roc_curves(found: Sequence[AuditReport], options: AuditOptions) -> Figure:
    """ROC curves on logarithmic axes: one panel for each attacker, one line for each run."""
    panels = [panel for panel in _PANELS if any(panel[:2] in each.pooled for each in found)]
    about = f"{_ABOUT.split('. AUC')[0]}. Logarithmic; dotted: by chance. {_attacker(options)} {_HOLDER_IS}"
    figure, (axes,) = canvas(
        "Which rows a client trained on", about, 2.8, 1, max(1, len(panels)), width=max(5.6, 2.7 * len(panels))
    )
    looks = looks_of(each.record for each in found)
    lines: dict[str, Any] = {}
    for one, (by, how, title) in zip(axes, panels, strict=False):
        style_axes(one)
        least = 1.0
        for each in found:
            guess = each.pooled.get((by, how))
            if guess is None:
                continue
            alarms, hits = (rates.clamp(min=1e-12) for rates in roc(guess.scores, guess.member))
            least = min(least, 1 / int((~guess.member).sum()))
            name = each.record.name
            (lines[name],) = one.plot(
                alarms.tolist(),
                hits.tolist(),
                **line_style(looks[name]),
                markersize=4,
                markevery=max(1, len(alarms) // 8),
            )
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
