"""What comes of a run: its history, one record per round, and the result that is made from the records alone."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from polyfed.core.settings import Keep
from polyfed.engine.device import device_name
from polyfed.engine.evaluation import not_evaluated
from polyfed.records.main_score import main_score_of
from polyfed.records.schema import RunResult, in_order
from polyfed.units import human_count
from polyfed.version import __version__


@dataclass(frozen=True)
class Run:
    """A finished run.

    Args:
        result: that of `result.json`. history: the records of `rounds.jsonl`.
        models: the networks that are scored, one per client, by number. path: the run folder, if there is one.
        personal_models: what clients keep; the same where that is scored.
    """

    result: Mapping[str, Any]
    history: History
    models: Mapping[int, nn.Module]
    path: Path | None
    personal_models: Mapping[int, nn.Module]

    def __repr__(self) -> str:
        result = self.result
        score = main_score_of(result)
        value = result[score.name]
        scored = "not scored" if value is None else f"{score.title} {value:.4f} ({result['evaluation']['stage']})"
        if result.get("nothing_learnt"):
            scored = f"nothing was learnt, {scored}"
        sent = f"{result['bytes_up']:,} bytes up, {result['bytes_down']:,} down"
        where = "" if self.path is None else f", in {self.path}"
        return f"Run({result['method']}, {human_count(len(self.history), 'round')}: {scored}, {sent}{where})"


class ClientModels(Mapping[int, nn.Module]):
    """Networks by client number, made when asked for."""

    def __init__(self, export: Callable[[int], nn.Module], present: Sequence[int]) -> None:
        self._export, self._present = export, present

    def __getitem__(self, client_id: int) -> nn.Module:
        if client_id not in self._present:
            raise KeyError(client_id)
        return self._export(client_id)

    def __iter__(self) -> Iterator[int]:
        return iter(self._present)

    def __len__(self) -> int:
        return len(self._present)


_LOST_LOSS = 1e3  # far above that of guessing, log C, 14 among a million classes
# how the reasons begin for which what is not finite is refused
_DIVERGED = ("the training loss is ", "the model is not finite", "the upload is not finite")


class History(list[dict[str, Any]]):
    """The records of a run, one per round, in order: a list that says in a line how the score has changed."""

    def __repr__(self) -> str:
        score = main_score_of(self[-1] if self else ())
        scored = [record[score.name] for record in self if record[score.name]]
        if not scored:
            return f"History({human_count(len(self), 'round')})"
        stage = next(iter(scored[-1]))
        means = [found[stage]["mean"] for found in scored if stage in found]
        change = f"{score.title} {means[0]:.4f} to {means[-1]:.4f} ({stage})"
        return f"History({human_count(len(self), 'round')}: {change})"


def is_best_wanted(keep: Keep, patience: int) -> bool:
    """Whether a run reports, and keeps, its best round by validation: where this is asked for, or ends the run."""
    return keep == "best" or patience > 0


def reported_record(records: Sequence[Mapping[str, Any]], wants_best: bool) -> Mapping[str, Any] | None:
    """Of the evaluated rounds the one whose scores a run reports, and whose models it keeps; None without any.

    It is the last one. Where the best is wanted, a final round begins from the best one, and if there is none, it is
    that one itself.
    """
    scored = [record for record in records if record["evaluated"]]
    last = scored[-1] if scored else None
    if not wants_best or last is None or last["final_round"]:
        return last
    return best_record(scored) or last


def best_record(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The (first) one with the best validation score, a final one included; None without validation data."""
    candidates = [record for record in records if record["validation"] is not None]
    if not candidates:
        return None
    best = main_score_of(candidates[0]).best(record["validation"] for record in candidates)
    return next(record for record in candidates if record["validation"] == best)


def early_stop_round(records: Sequence[Mapping[str, Any]], patience: int, min_delta: float) -> int | None:
    """The round after which a run stops early; None where it goes on.

    Args:
        records: one per round, in order.
        patience: so many evaluations in a row that do not improve the best validation score by more than `min_delta`
            end the run; 0: never. min_delta: in the unit of the score, accuracies being in [0, 1].
    """
    score = main_score_of(records[0] if records else ())
    best = score.nothing
    waited = 0  # evaluations since that one
    for record in records:
        value = record["validation"]
        if record["final_round"] or value is None:
            continue
        if score.is_better(value, best, min_delta):
            best = value
            waited = 0
        else:
            waited += 1
        if patience and waited >= patience:
            return int(record["round"])
    return None


# what a result has of the reported round as it is; the second ones where they were asked for
_OF_THE_ROUND = ("metrics", "confusion", "validation")
_IF_ASKED = ("accuracy_by_classes", "held_out", "held_out_per_client")
_SUMS = ("bytes_up", "bytes_down", "bytes_up_paper", "bytes_down_paper", "samples", "seconds", "processor_seconds")


def summarize_run(
    records: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any],
    clients: Sequence[Mapping[str, Any]],
    device: torch.device,
) -> dict[str, Any]:
    """`result.json`: the run's facts, and what its records add up to. A resumed run gives the same.

    Args:
        records: one per round, in order.
        facts: method, hyperparameters, dataset, clients, rounds, seed, evaluation, label.
        clients: one per client, in order: id, architecture, samples.
        device: where networks computed.
    """
    stage = facts["evaluation"]["stage"]
    scored = [record for record in records if record["evaluated"]]
    score = main_score_of(records[0] if records else ())
    wants_best = facts["evaluation"].get("round") == "best"
    reported = reported_record(records, wants_best) or not_evaluated(score)
    main = reported[score.name].get(stage, {})
    sums = {key: sum(record[key] for record in records) for key in _SUMS}
    regular_records = [record for record in records if not record["final_round"]]
    has_final_round = bool(records) and bool(records[-1]["final_round"])
    regular = [record for record in scored if not record["final_round"]]
    before, last = (
        record and record[score.name].get(stage, {}).get("mean")
        for record in (reported_record(regular, wants_best), reported_record(regular, False))
    )
    means = [record[score.name][stage]["mean"] for record in scored if stage in record[score.name]]
    best_validated = best_record([record for record in scored if stage in record[score.name]])
    best_regular = best_record(regular) if wants_best else None
    result = {
        **facts,
        score.name: main.get("mean"),
        f"{score.name}_std": main.get("std"),
        f"{score.name}_bottom_decile": main.get("bottom_decile"),
        f"{score.name}_before_final_round": before if has_final_round else None,
        f"{score.name}_last_round": last,
        f"{score.name}_best_by_validation": best_validated and best_validated[score.name][stage]["mean"],
        # as PFLlib and HtFLlib report it; chosen on test data, so nothing rests on it
        f"{score.name}_best_test_round": score.best(means) if means else None,
        f"{score.name}_by_stage": reported[score.name],
        f"{score.name}_by_predictor": reported.get(f"{score.name}_by_predictor", {}),
        **{f"{score.name}_{name}": reported[f"{score.name}_{name}"] for name in ("per_client", "per_architecture")},
        **{name: reported[name] for name in _OF_THE_ROUND},
        **{name: reported[name] for name in _IF_ASKED if name in reported},
        "clients_table": _clients_table(records, clients, score.name, reported[f"{score.name}_per_client"]),
        **sums,
        **_sums_where_known(records),
        **_epsilon(records),
        "stopped_after": len(regular_records) if len(regular_records) < facts["rounds"] else None,
        "best_round": best_regular and best_regular["round"],
        "final_round": has_final_round,
        "refused": sum(len(record["refused"]) for record in records),
        "nothing_learnt": _nothing_learnt(records),
        "samples_per_second": sums["samples"] / sums["seconds"] if sums["seconds"] else None,
        "versions": environment_versions(device),
    }
    return in_order(result, RunResult)


def _sums_where_known(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Times and stragglers on simulated devices."""
    found: dict[str, Any] = {}
    if seconds := [record["simulated_seconds"] for record in records if "simulated_seconds" in record]:
        found["simulated_seconds"] = sum(seconds)
    if stragglers := [len(record["stragglers"]) for record in records if "stragglers" in record]:
        found["stragglers"] = sum(stragglers)
    return found


def _nothing_learnt(records: Sequence[Mapping[str, Any]]) -> str | None:
    """A line for a run in which nobody has learnt anything.

    Their work was refused, in all or most rounds, or all dropped out, in all.
    """
    refused = [entry for record in records for entry in record["refused"]]
    lost = [record for record in records if _is_lost(record)]
    is_all = len(lost) == len(records) and (refused or any(record.get("dropped") for record in records))
    if not is_all and 2 * sum(bool(record["refused"]) for record in lost) <= len(records):
        return None
    rounds = sum(not record["final_round"] for record in records)
    where = "in the only round" if rounds == 1 else f"in each of {rounds} rounds"
    where = where if is_all else f"in {len(lost)} of {len(records)} rounds"
    if not refused:
        return f"nothing was learnt: {where} all clients dropped out; see availability.dropout_rate"
    why = "no client's work counted"
    if any(record["samples"] for record in lost):
        why = f"most clients' work was refused, and the others' training loss was beyond {_LOST_LOSS:g}"
    reasons = [str(entry["reason"]) for entry in refused]
    hint = "see 'refused' in the records of the rounds"
    if all(reason.startswith(_DIVERGED) for reason in reasons):
        lr = max(record["lr"] for record in records)
        hint = f"training diverges: try a lower training.lr than {lr:g}, or clip gradients with privacy.max_grad_norm"
    return f"nothing was learnt: {where} {why} ({len(refused)} refused: {reasons[0]}, ...); {hint}"


def _is_lost(record: Mapping[str, Any]) -> bool:
    """Whether nobody has learnt anything in a round: no training counted, or that of few, which had diverged."""
    refused = {entry["client"] for entry in record["refused"]}
    if not record["samples"]:  # nobody trained; where none was to, sums may have been sent
        return refused | set(record.get("dropped", ())) >= set(record["clients"])
    few = 2 * len(refused) > len(record["clients"])
    return few and record["train_loss"] > _LOST_LOSS


def _epsilon(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the run has cost in privacy, where it is known, and of what that is."""
    if not records or "epsilon" not in records[-1]:
        return {}
    made = [entry for record in records for entry in record["releases"]]
    units = dict.fromkeys(entry["unit"] for entry in made)
    of = {unit: sorted({entry["what"] for entry in made if entry["unit"] == unit}) for unit in units}
    return {**{key: records[-1][key] for key in ("epsilon", "delta")}, "epsilon_of": of}


def _clients_table(
    records: Sequence[Mapping[str, Any]],
    clients: Sequence[Mapping[str, Any]],
    score: str,
    values: Sequence[float | None],
) -> list[dict[str, Any]]:
    """One row per client: who it is, its reported score in the main stage, what it sent and was sent in all, and how
    long its simulated device was busy.
    """
    sent = {str(client["id"]): {"up": 0, "down": 0} for client in clients}
    busy = {str(client["id"]): 0.0 for client in clients if "device" in client}  # seconds
    for record in records:
        for number, spent in record.get("simulated_by_client", {}).items():
            busy[number] += spent["down"] + spent["train"] + spent["up"]
        for number, traffic in record["bytes_by_client"].items():
            sent[number]["up"] += traffic["up"]
            sent[number]["down"] += traffic["down"]
    evaluated = {  # client -> the last round in which it was
        number: record["round"]
        for record in records
        for number, value in enumerate(record[f"{score}_per_client"])
        if value is not None
    }
    rows = []
    for client, value in zip(clients, values or [None] * len(clients), strict=True):
        number = str(client["id"])
        row = {**client, score: value, "bytes_up": sent[number]["up"], "bytes_down": sent[number]["down"]}
        if value is None and client["id"] in evaluated:
            row["last_evaluated"] = evaluated[client["id"]]
        if busy:
            row["simulated_seconds"] = busy[number]
        rows.append(row)
    return rows


def environment_versions(device: torch.device) -> dict[str, str]:
    """Of what the numbers depend on; with the device, where that is no CPU."""
    found = {
        "polyfed": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "platform": platform.platform(),
    }
    return found if device.type == "cpu" else {**found, "device": device_name(device)}
