"""`polyfed audit leakage RUN ...`: what an honest-but-curious server got in finished runs, from their messages."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from polyfed.attacks.inference import (
    HOLDER,
    SERVER,
    describe_guesses,
    infer_labels,
    loss_scores,
    membership_samples,
)
from polyfed.attacks.reconstruction import Reconstruction, draw_images, reconstruct
from polyfed.attacks.replay import (
    Replay,
    Transcript,
    describe,
    find_full_model,
    plaintext_facts,
    replay,
)
from polyfed.core.message import nbytes
from polyfed.errors import ConfigError
from polyfed.experiments.prediction import load
from polyfed.records.read import ATTACK, check_links, make_folder, write_whole
from polyfed.report.plot_style import save
from polyfed.report.run_records import RunRecord, format_setting, load_runs
from polyfed.report.text_tables import Column, columns_of, render_text, wrapped

FILES = ("leakage.json", "reconstructions.png", "reconstructions.svg")
_Guesses = dict[str, tuple[Tensor, Tensor]]  # attacker -> scores, and who is a member


def leakage(
    runs: str | Path | Sequence[str | Path],
    *,
    images: int = 4,
    steps: int = 300,
    out: str | Path | None = None,
    overwrite: bool = False,
    trust: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[list[dict[str, Any]], list[Path]]:
    """What an honest-but-curious server got in finished runs, side by side.

    Args:
        runs: run folders, or folders above them.
        images: how many of the first client's features or class means are attacked; 0: no reconstruction.
        steps: of Adam, for each of them.
        out: folder; None: ``attack`` in the run's folder, or in the one above all of them.
        overwrite: replace what an earlier report wrote there. say: receives lines on the progress.
        trust: whether code that the folders name ("package.module:name") may be imported.

    Returns:
        Each run's entry in ``leakage.json``, and the files written.

    Raises:
        ConfigError: the request is wrong, or a run does not come out as recorded; no file has been written.
    """
    for name, value, least in (("images", images, 0), ("steps", steps, 1)):
        if value < least:
            raise ConfigError(f"--{name}: expected at least {least}, got {value}")
    paths = [runs] if isinstance(runs, str | Path) else list(runs)
    records = [record for record in load_runs(paths, trust) if record.finished]
    names = [record.name for record in records]
    for place, record in enumerate(records):
        if names.count(record.name) > 1:
            records[place] = replace(record, name=f"{record.name}, seed {record.seed}")
    if not records:
        raise ConfigError(f"expected folders of finished runs, got {', '.join(map(str, paths))}")
    above = Path(os.path.commonpath([record.path.absolute() for record in records]))
    check_links(above)
    folder = above / ATTACK if out is None else Path(out)
    if not overwrite and any((folder / name).exists() for name in FILES):
        raise ConfigError(f"{folder} already holds a report; replace it with --overwrite or choose another --out")
    make_folder(folder)  # before the work, which takes minutes
    found = []
    pictures = {}
    for record in records:
        content, made = audit_run(record, images, steps, say)
        found.append(content)
        if made is not None:
            pictures[record.name] = made
    options = {"images": images, "steps": steps}
    text = json.dumps({"options": options, "runs": found}, indent=2, allow_nan=False) + "\n"
    files = [write_whole(folder / "leakage.json", text.encode())]
    if pictures:
        files += save(draw_images(pictures), folder, "reconstructions")
    return found, files


# one run --------------------------------------------------------------------------------------------------------------


def audit_run(
    record: RunRecord, images: int, steps: int, say: Callable[[str], None] = lambda _: None
) -> tuple[dict[str, Any], Reconstruction | None]:
    """The entry of one finished run in ``leakage.json``, and the images of its first client, where there are some.

    Raises:
        ConfigError: numbers are predicted; or it cannot be run again, see `replay`.
    """
    if record.result.main_score.lower_is_better:
        raise ConfigError(f"expected a run on classes, got {record.path}, which predicts numbers")
    say(f"{record.name}: running its last rounds again")
    run = replay(record)
    clients = run.federation.clients
    transcripts = run.transcripts
    first = next(iter(transcripts.values()))
    facts = [plaintext_facts(transcript.up, clients[number]) for number, transcript in transcripts.items()]
    guesses: dict[str, list[tuple[Tensor, Tensor]]] = {}  # attacker -> each client's
    why_not_members = ""
    for number, transcript in transcripts.items():
        say(f"{record.name}: client {number}")
        found, why = _members(run, transcript)
        why_not_members = why_not_members or why
        for attacker, guess in found.items():
            guesses.setdefault(attacker, []).append(guess)
    made: Reconstruction | None = None
    why_no_images: str | None = "not asked for"
    if images:
        say(f"{record.name}: images")
        made, why_no_images = reconstruct(run, first, images, steps)
    content = {
        "name": record.name,
        "method": record.method,
        "hyperparameters": record.result.hyperparameters,
        "dataset": record.result.dataset,
        "run_seed": record.seed,
        "upload_settings": ", ".join(f"{key} {format_setting(value)}" for key, value in record.recipe.privacy.items())
        or None,
        "replay_equal": run.equal,
        "bytes_up_per_client": sum(nbytes(each.up) for each in transcripts.values()) / len(transcripts),
        "goes_up": describe(first.up),
        "in_the_clear": [fact for fact in facts[0] if all(fact in other for other in facts)],
        "classes": infer_labels(run),
        "membership": [describe_guesses(attacker, found) for attacker, found in guesses.items()],
        "membership_why_not": why_not_members or None,
        "reconstruction": None if made is None else made.summary,
        "reconstruction_why_not": why_no_images,
    }
    return content, made


def _members(run: Replay, transcript: Transcript) -> tuple[_Guesses, str]:
    """All guesses about one client's rows, and the reason for none by the server."""
    client = run.federation.clients[transcript.job.client.id]
    if run.federation.task.test is not None or not len(client.data.test):
        return {}, "no test samples of its own to tell members from"
    samples, member = membership_samples(client)
    found: _Guesses = {}
    why = ""
    score = find_full_model(run, transcript)
    if not transcript.up:
        why = "nothing goes up"
    elif score is None:
        why = f"what goes up ({', '.join(transcript.up)}) holds no whole network: no way from a row to a score"
    else:
        losses = loss_scores(score(transcript.up, samples.x, client), samples.y)
        found[SERVER] = losses, member
    with contextlib.suppress(ConfigError):  # networks that a run folder cannot rebuild
        holder = load(run.record.path, client.id, run.recipe.run.device, run.record.trusted, "personal")
        found[HOLDER] = loss_scores(holder.scores(samples.x), samples.y), member
    return found, why


# the tables -----------------------------------------------------------------------------------------------------------


def to_text(found: Sequence[Mapping[str, Any]], width: int = 100) -> str:
    """All tables, one under the other, and the reasons for what is not in them."""
    parts = [f"{render_text(columns, width)}\n" for columns in _tables(found).values()]
    return "\n".join([*parts, *(wrapped(note, width) for note in _notes(found))])


def _tables(found: Sequence[Mapping[str, Any]]) -> dict[str, list[Column]]:
    """Title -> columns: what goes up, which rows were trained on, images."""
    sent = [
        {
            "run": each["name"],
            "bytes up\nper client": f"{each['bytes_up_per_client']:,.0f}".replace(",", " "),
            "goes up": ", ".join(each["goes_up"]) or "nothing",
            "in the clear": ", ".join(each["in_the_clear"]) or "-",
            "classes guessed by": each["classes"]["how"] or "-",
            "AUC": _interval(each["classes"]["auc"]),
        }
        for each in found
    ]
    members = [
        {
            "run": each["name"],
            "by": one["by"],
            "AUC": _interval(one["auc"]),
            "TPR at\n1 %": _interval(one["tpr_at_1_percent"]),
            "members\nothers": f"{one['members']} / {one['others']}",
        }
        for each in found
        for one in each["membership"]
    ]
    images = [
        {
            "run": each["name"],
            "attacked": one["what"],
            "images": str(one["images"]),
            **{
                heading: "-" if one[key] is None else f"{one[key]:.2f}"
                for heading, key in (("PSNR [dB]", "psnr"), ("guess\nPSNR", "guess_psnr"))
            },
        }
        for each in found
        if (one := each["reconstruction"])
    ]
    tables = {"What goes up": sent, "Which rows a client trained on": members, "Reconstructed images": images}
    words = ("run", "goes up", "in the clear", "classes guessed by", "by", "attacked")
    return {title: columns_of(rows, words) for title, rows in tables.items() if rows}


def _interval(value: Mapping[str, float] | None) -> str:
    return "-" if value is None else f"{value['value']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


def _notes(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the numbers are, and why some are missing."""
    notes = [
        "Members: rows that a client trained on; others: its test rows. Intervals: 95 %. holder: an attacker with the "
        "clients' own networks. Guess: the mean of the client's training images."
    ]
    for each in found:
        name = each["name"]
        if each["upload_settings"]:
            notes.append(f"{name}: privacy of uploads: {each['upload_settings']}.")
        missing = {
            "classes": each["classes"]["why_not"],
            "rows": each["membership_why_not"],
            "images": each["reconstruction_why_not"],
        }
        notes += [f"{name}, {what}: {why}." for what, why in missing.items() if why]
        if not each["replay_equal"]:
            notes.append(f"{name}: run again on this machine its last losses differ from the records by rounding.")
    return notes
