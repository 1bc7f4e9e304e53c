"""What an honest-but-curious server got in one finished run: from its messages, whatever the method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch

from polyfed.attacks.attack_target import AttackTarget, describe_transforms, exposed_by
from polyfed.attacks.label_inference import LabelInference, infer_labels
from polyfed.attacks.membership_inference import (
    MembershipSamples,
    MembershipScores,
    ShadowData,
    client_model_loss_attack,
    lira,
    loss_attack,
    membership_samples,
    pool,
    shadow_pool,
)
from polyfed.attacks.message_inspection import (
    ExposedModel,
    MessageEntry,
    describe,
    find_full_model,
    list_entries,
    plaintext_facts,
)
from polyfed.attacks.reconstruction_results import (
    ReconstructionResult,
    exposed,
    from_features,
    from_weight_updates,
    membership_from_features,
)
from polyfed.attacks.replay import Replay, Transcript, last_upload_rounds, replay
from polyfed.errors import ConfigError
from polyfed.experiments.prediction import load_model
from polyfed.registry import suggest
from polyfed.report.run_records import RunRecord

_FEWEST = 4  # shadow models: two with and two without each row


@dataclass(frozen=True)
class AuditOptions:
    """How the server goes about it.

    shadows: S, shadow models of each kind and client; 0: no LiRA. shadow_data: whose rows the offline ones train on.
    rows: at most so many members and others of each client; None: all. clients: the first so many; None: all.
    images: how many are made again, of the first client; 0: none. steps: of Adam for each. seed: of all draws.
    """

    shadows: int = 16
    shadow_data: ShadowData = "others"
    rows: int | None = None
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
        for name, least in (("rows", 2), ("clients", 1), ("images", 0), ("steps", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"--{name}: expected at least {least}, got {value}")


@dataclass(frozen=True, eq=False)
class AuditReport:
    """One run.

    record: its folder. on_the_way: what `[privacy]` and `[compression]` do. equal: see `Replay`. clients: whose
    messages. messages: client -> both directions. entries, bytes_up: of the first client's upload. clear: facts stated
    by all uploads. classes: see there. guesses: client -> its membership guesses; why_not_members: why the server makes
    none, or not all. rebuilt: images made again; why_not_images: why none, or none of another kind.
    """

    record: RunRecord
    on_the_way: str
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
    def clients(self) -> tuple[int, ...]:
        """Whose messages were looked at."""
        return tuple(self.messages)

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
            "on_the_way": self.on_the_way or None,
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
            "reconstruction": [each.to_dict() for each in self.rebuilt],
            "reconstruction_why_not": self.why_not_images or None,
        }


def audit_run(record: RunRecord, options: AuditOptions, say: Callable[[str], None] = lambda _: None) -> AuditReport:
    """Look into one run.

    Args:
        record: a finished run of a recipe. say: told what is being done.

    Raises:
        ConfigError: numbers are predicted; or it cannot be run again, see `replay`.
    """
    if record.result.main_score.lower_is_better:
        raise ConfigError(f"expected a run on classes, got {record.path}, which predicts numbers")
    worked = list(last_upload_rounds(record))[: options.clients]
    if not worked:
        raise ConfigError(f"expected a run in which the server heard of somebody, got {record.path}")
    say(f"{record.name}: running its last rounds again")
    heard = replay(record, worked)
    transcripts = {number: heard.transcript(number) for number in worked}
    facts = [plaintext_facts(transcript.up, heard.client(number)) for number, transcript in transcripts.items()]
    networks = {number: find_full_model(heard, transcript) for number, transcript in transcripts.items()}
    seen, no_features = _features(heard, transcripts[worked[0]], options)
    guesses = {}
    why_not_members = ""
    for number, transcript in transcripts.items():
        say(f"{record.name}: client {number}")
        asked = membership_samples(
            heard.client(number), heard.federation.task.test is not None, options.rows, options.seed
        )
        if asked is None:
            why_not_members = "no test samples to tell members from"
            continue
        found, why = _members(heard, transcript, networks[number], asked, options)
        why_not_members = why_not_members or why
        if seen is not None and number == worked[0] and (guess := membership_from_features(seen, asked, "server")):
            found.append(guess)
        guesses[number] = tuple(found)
    first = worked[0]
    say(f"{record.name}: images")
    rebuilt, why_not_images = _rebuilt(heard, transcripts[first], networks[first], seen, no_features, options)
    return AuditReport(
        record,
        describe_transforms(record),
        heard.equal,
        {number: describe(transcript) for number, transcript in transcripts.items()},
        tuple(list_entries(transcripts[first].traveled)),
        tuple(fact for fact in facts[0] if all(fact in other for other in facts)),
        infer_labels(heard, transcripts),
        guesses,
        why_not_members,
        tuple(rebuilt),
        why_not_images,
    )


def _members(
    heard: Replay, transcript: Transcript, network: ExposedModel | None, asked: MembershipSamples, options: AuditOptions
) -> tuple[list[MembershipScores], str]:
    """All guesses about one client's rows, and why the server makes none, or no LiRA."""
    client = transcript.job.client
    found = []
    device = heard.recipe.run.device
    why = ""
    if not transcript.up:
        why = "nothing goes up"
    elif network is None:
        why = _why_no_network(heard, transcript)
    else:
        found.append(loss_attack(heard, transcript, network, asked))
        if options.shadows and not network.was_broadcast(heard, transcript):
            why = "no LiRA: where the client's weights started did not come down, so that no shadow model starts there"
        elif options.shadows:
            liras = lira(heard, transcript, network, asked, options.shadows, options.shadow_data, options.seed)
            found += liras
            if not len(shadow_pool(heard, client.id, options.shadow_data)):
                why = f"no offline LiRA: there are no rows of '{options.shadow_data}'"
            elif not liras:
                why = "no LiRA: shadow models were refused"
    try:
        holder = load_model(heard.record.path, client.id, device, heard.record.trusted)
    except ConfigError:  # networks that a run folder cannot rebuild
        return found, why
    return [*found, client_model_loss_attack(holder, asked)], why


def _why_no_network(heard: Replay, transcript: Transcript) -> str:
    """What of a network is missing in an upload."""
    server, client = heard.federation.server, transcript.job.client
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


def _features(heard: Replay, transcript: Transcript, options: AuditOptions) -> tuple[AttackTarget | None, str]:
    """Features or class means that a client sent, as many as there are images to make again; why there are none."""
    client = transcript.job.client
    if client.data.train.x.dtype != torch.uint8 or client.data.train.x.dim() != 4:
        return None, "its inputs are no images of bytes"
    wanted = max(1, options.images)
    try:
        exposed_there = exposed_by(heard.federation.method)
        if exposed_there.kind == "features":
            features = transcript.up.get(exposed_there.entry)
            wanted = len(next(iter(features.values()))) if isinstance(features, Mapping) else wanted
        elif "labels" in transcript.up:
            wanted = min(wanted, len(transcript.up["labels"]))
        seen = exposed(heard, client.id, wanted, heard.recipe.run.device)
    except ConfigError as reason:
        return None, str(reason)
    if seen.round != transcript.job.round:  # it trained once more, and that upload was lost
        return None, "the network of the round in which it was heard last is gone"
    return seen, ""


def _rebuilt(
    heard: Replay,
    transcript: Transcript,
    network: ExposedModel | None,
    seen: AttackTarget | None,
    no_features: str,
    options: AuditOptions,
) -> tuple[list[ReconstructionResult], str]:
    """Images made again from the upload of one client, in every way that there is; why there is none."""
    if not options.images:
        return [], "not asked for"
    if not transcript.up:
        return [], "nothing goes up"
    x = transcript.job.client.data.train.x
    if x.dtype != torch.uint8 or x.dim() != 4:
        return [], no_features
    found = []
    if seen is not None:
        found.append(from_features(seen.first(options.images), options.steps, options.seed))
    if network is not None and network.was_broadcast(heard, transcript):
        found += from_weight_updates(heard, transcript, network, options.images, options.steps, options.seed)
    if found:
        return found, ""
    return [], "nothing in it is a function of single images that the server could turn round"
