"""What a server that lies gets out of one node: it asks for all that the node might answer, and uses what it gets.

    python benchmarks/hostile_server.py --out benchmarks/hostile-server.json
    python benchmarks/hostile_server.py --out benchmarks/hostile-server.json --table    what the file has

The node is client 0 of three, with handwritten digits: `polyfed.deploy.node.Node`, which answers over Flower, too. It
is started anew for every request, and has its disk alone from one to the next. Of each recipe the server asks

1. what no honest server asks: other figures, classes, rounds, exchanges, networks, noise, settings;
2. the same again and again, changed, in every round, under other names of the run: training, scores after receiving its
   own networks, the model;
3. (FedAvg) training of networks that it has planted: neurons of the first layer fire for rows above a threshold each,
   so that the changes of neighbors differ by the rows between their thresholds (Fowl et al., ICLR 2022,
   arXiv:2110.13057). A row counts as rebuilt where all 64 pixels are right;
4. scores of networks that always predict one class: how many test rows it has;
5. (secure sums) sums without others, and a sum in which it has invented all others.

Bits a row are those of all different answers to 2, as if each bit told something; in a run, of an honest server's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyfed.config.recipe import Recipe
from polyfed.core.message import ADDENDS, State, flatten, unflatten
from polyfed.deploy.answer_table import answer_table, facts_nbytes
from polyfed.deploy.masked_sums import MaskOfTotal, Participant
from polyfed.deploy.node import Node
from polyfed.deploy.node_config import NodeConfig
from polyfed.deploy.protocol import Envelope, Kind, SumRequest, decode_body, shared_config
from polyfed.engine.wire import encode
from polyfed.errors import PolyfedError
from polyfed.experiments.build import build_federation
from polyfed.experiments.data_cache import DataCache
from polyfed.functional import fixed_point

BASE: Mapping[str, Any] = {
    "data": {"dataset": "digits", "num_clients": 3, "limit_train": 400, "split": "6:1:3"},
    "models": {"architectures": ["mlp-16-32"]},
    "training": {"rounds": 4, "batch_size": 16, "lr": 0.05},
    "evaluation": {"every_n_rounds": 2},
}
NOISY_UPLOAD = {"upload_clip_norm": 1.0, "upload_noise_multiplier": 2.0}
CASES: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {"method": {"name": "fedavg"}},
    "fedavg, noise on uploads": {"method": {"name": "fedavg"}, "privacy": NOISY_UPLOAD},
    "fedgh": {"method": {"name": "fedgh"}},
    "closed-form": {"method": {"name": "closed-form", "features": 64}},
    "closed-form, noise on sums": {
        "method": {"name": "closed-form", "features": 64, "unit_features": True},
        "privacy": {"noise_multiplier": 2.0},
    },
    "closed-form, secure sums": {
        "method": {"name": "closed-form", "features": 64},
        "secure_sums": {"enabled": True},
    },
}
EXTRA = ("rows_rebuilt", "classes_counted", "own_counts_by_invented_others")
LEVELS = 16  # steps between black and white
SPREAD = 4.0  # of rows in the planted direction
MOVED = 1e-6  # by which a repeated question differs


class Server:
    """Asks one node.

    Args:
        recipe: the node's. folder: of its disk.

    Attributes:
        federation: with what an honest server has in the end. asked, answered: requests by kind, and different answers.
    """

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe = recipe
        self.config = NodeConfig.model_validate(
            {"client-id": 0, "state-dir": str(folder), "secret-noise": True, "share-model": True}
        )
        self._data = DataCache()
        self.federation = build_federation(recipe.with_run(executor="serial", workers=1), data=self._data)
        self.federation.run()
        self.federation.server.state.pop("versions", None)  # of the closed form: who has its solution gets no other
        self.asked: defaultdict[str, int] = defaultdict(int)
        self.answered: defaultdict[str, dict[bytes, int]] = defaultdict(dict)

    def ask(self, kind: Kind, message: State, **facts: Any) -> Envelope | None:
        """The node's answer, of a node that has just been started; None: it gives none."""
        task = {"settings": shared_config(self.recipe), "round": 1, **facts}
        try:
            return Node(self.recipe, self.config, self._data).answer(Envelope(kind, task, encode(message)))
        except PolyfedError:
            return None

    def learn(self, kind: Kind, message: State, **facts: Any) -> Envelope | None:
        """The same, noted with the bytes of what it tells."""
        answer = self.ask(kind, message, **facts)
        self.asked[kind] += 1
        if answer is not None:
            content = flatten_all(decode_body(answer.body) if answer.body else {})
            told = dict(answer.facts)
            digest = hashlib.sha256(encode(content) + json.dumps(told, sort_keys=True).encode()).digest()
            size = sum(tensor.nbytes for tensor in content.values()) + facts_nbytes(told)
            self.answered[kind][digest] = size
        return answer

    @property
    def message(self) -> State:
        """What an honest server sends."""
        sent = self.federation.method.broadcast(self.federation.server, 0)
        return unflatten({name: tensor.clone() for name, tensor in flatten(sent).items()})


def flatten_all(content: Any) -> dict[str, Tensor]:
    """The tensors of an answer, of a model's stages and parts, too."""
    if isinstance(content, Tensor):
        return {"": content}
    pairs = content.items() if isinstance(content, Mapping) else enumerate(content)
    return {f"{key} {name}": tensor for key, value in pairs for name, tensor in flatten_all(value).items()}


# 1. what no honest server asks ------------------------------------------------------------------------------------


def beyond(server: Server) -> tuple[int, int]:
    """How many such requests there are, and how many were answered."""
    settings = shared_config(server.recipe)
    rounds = server.recipe.training.rounds
    no_noise = {**settings, "privacy": {}} if settings.get("privacy") else {**settings, "run": {"seed": 9}}
    other = [
        {"figures": ["confusion"]},
        {"class_names": ["a", "b"]},
        {"rows": True},
        {"scores": True},
        {"parts": ["train"]},
        {"parts": ["test", "validation", "test"]},
        {"round": 0},
        {"round": rounds + 1},
        {"round": 10**6},
        {"exchange_index": 1},
        {"is_final": True},
        {"auxiliary_model": "resnet18"},
        {"base": "000009-00"},
        {"settings": no_noise},
        {"settings": {**settings, "evaluation": {"metrics": ["confusion"]}}},
        {"settings": {**settings, "training": {**settings["training"], "rounds": rounds + 1}}},
    ]
    return len(other), sum(server.ask("train", server.message, **facts) is not None for facts in other)


# 2. the same again and again --------------------------------------------------------------------------------------


def variations(server: Server, times: int) -> Iterator[tuple[State, State, dict[str, Any]]]:
    """Messages moved a little, to be trained, and far, to be scored, in each round, under other names of the run."""
    draws = torch.Generator().manual_seed(0)
    sent = flatten(server.message)
    for number in range(1, server.recipe.training.rounds + 1):
        for step in range(times):
            moves = {name: torch.randn(t.shape, generator=draws) for name, t in sent.items() if t.is_floating_point()}
            near, far = (
                unflatten({name: t + size * moves[name] if name in moves else t for name, t in sent.items()})
                for size in (MOVED * step, 0.3 * step)
            )
            yield near, far, {"round": number, "experiment": f"{step % 3:016x}"}


# 3. planted networks ----------------------------------------------------------------------------------------------


def planted(server: Server, thresholds: Tensor) -> State:
    """Weights of which each neuron of the first layer fires for rows above its threshold. thresholds: (16,) rising."""
    model = {name: tensor.clone() for name, tensor in flatten(server.message).items()}
    first, last = "model/extractor.narrow_fc", "model/intermediate.narrow_last"
    direction = torch.randn(64, generator=torch.Generator().manual_seed(0)) / 8  # of no two rows the same, as a rule
    model[f"{first}.weight"].copy_(direction.expand(len(thresholds), 64))
    model[f"{first}.bias"].copy_(-thresholds)
    model[f"{last}.weight"].fill_(0.1)
    model[f"{last}.bias"].fill_(1.0)
    classes = torch.linspace(1.0, 2.0, len(model["model/head.bias"]))
    model["model/head.weight"].copy_(0.03 * classes[:, None].expand_as(model["model/head.weight"]))
    model["model/head.bias"].zero_()
    return unflatten(model)


def rows_between(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Tensor:
    """(15, 64) What lies between the thresholds of neighbors: a row, where there is one alone."""
    weight, bias = (
        (after[f"model/extractor.narrow_fc.{name}"] - before[f"model/extractor.narrow_fc.{name}"]).double()
        for name in ("weight", "bias")
    )
    return (weight[:-1] - weight[1:]) / (bias[:-1] - bias[1:])[:, None]


def rebuild(server: Server) -> int:
    """How many training rows the server has rebuilt pixel by pixel, with all the answers that it gets."""
    client = server.federation.clients[0]
    mean, deviation = (float(value[0]) for value in (client.prepare.mean, client.prepare.std))
    own = {tuple(row.tolist()) for row in (client.data.train.x.flatten(1) / 255 * LEVELS).round().long()}
    found: set[tuple[int, ...]] = set()
    rounds = server.recipe.training.rounds
    for place in range(10 * rounds):
        low = SPREAD * (2 * place / (10 * rounds) - 1)  # pixels are standardized, so that rows are about 0
        message = planted(server, low + 2 * SPREAD / (10 * rounds) * torch.linspace(0, 1, 16))
        answer = server.ask("train", message, round=1 + place % rounds)
        if answer is None or not answer.body:
            continue
        pixels = rows_between(flatten(message), flatten(decode_body(answer.body))) * deviation + mean
        levels = (pixels.nan_to_num(-1.0) * LEVELS).round().long()
        found |= {tuple(row) for row in levels.tolist()} & own
    return len(found)


# 4. scores of planted networks ------------------------------------------------------------------------------------


def count_classes(server: Server) -> int:
    """Of how many classes the server knows how many test rows there are."""
    labels = server.federation.clients[0].data.test.y
    known = 0
    for label in range(server.federation.classes):
        flat = {
            name: tensor if name.endswith(("shares", "version")) else torch.zeros_like(tensor)
            for name, tensor in flatten(server.message).items()
        }
        bias = next(name for name in flat if name.endswith("bias") and len(flat[name]) == server.federation.classes)
        flat[bias][label] = 1e3
        answer = server.ask("score", unflatten(flat), parts=["test"])
        if answer is not None:
            share = answer.facts["test"]["figures"]["accuracy"]
            known += round(share * len(labels)) == int((labels == label).sum())
    return known


# 5. sums ------------------------------------------------------------------------------------------------------------


def invent_others(server: Server) -> bool:
    """Whether the server gets the client's own class counts out of a sum of which all other clients are its own."""
    place = {"round": 1, "experiment": "0" * 16}
    name = json.dumps([place["experiment"], 1, 0, False, "0" * 16])
    others = {number: Participant(bytes([number]) * 32, number, name) for number in (1, 2)}
    everybody, rows = [0, *others], 240
    asked: dict[str, Any] = {"name": "0" * 16, "all_rows": rows}

    def ask(kind: Kind) -> Envelope:
        answer = server.ask(kind, server.message, **place, sum=asked)
        assert answer is not None, f"the node takes no part in a sum ({kind})"
        return answer

    keys = {0: bytes.fromhex(ask("keys").facts["keys"]), **{number: one.keys() for number, one in others.items()}}
    asked |= {"clients": everybody, "keys": [keys[number].hex() for number in everybody]}
    shares = {0: dict(zip(everybody, map(bytes.fromhex, ask("shares").facts["shares"]), strict=True))}
    shares |= {number: one.shares(keys, 2) for number, one in others.items()}
    asked |= {"sharers": everybody}
    known = SumRequest(**asked).digest(server.federation.method, server.message)
    masked = decode_body(ask("train").body)[ADDENDS]
    limbs = fixed_point.limbs_of(masked)
    limbs = limbs + sum(one.mask(torch.zeros_like(limbs), keys, everybody, known) for one in others.values())
    opened = {
        number: one.unmask(keys, {sharer: shares[sharer][number] for sharer in everybody}, everybody)
        for number, one in others.items()
    }
    mask = MaskOfTotal(keys, everybody, everybody, opened, known)
    total = fixed_point.decode(fixed_point.from_limbs(limbs - mask.limbs(len(limbs)), masked), rows)
    own = server.federation.clients[0].data.train.y.bincount(minlength=server.federation.classes)
    return bool(torch.equal(total["counts"].round().long(), own))


# all of it ---------------------------------------------------------------------------------------------------------


def play(case: str, times: int) -> dict[str, Any]:
    """What a hostile server learns. times: questions of each kind in each round."""
    recipe = Recipe.from_dict({**BASE, **CASES[case]})
    with tempfile.TemporaryDirectory() as folder:
        server = Server(recipe, Path(folder, "asked"))
        table = answer_table(recipe, server.config)
        asked, granted = beyond(server)
        for near, far, facts in variations(server, times):
            server.learn("train", near, **facts)
            server.learn("score", far, **facts, parts=["test", "validation"])
            server.learn("finish", far, **facts)
        data = server.federation.clients[0].data
        most = {
            "train": sum(one.most for one in table.answers if one.name.startswith("training")),
            "score": sum(one.most for one in table.answers if one.name.startswith("scores")),
            "finish": table.answers[-1].most,
        }
        honest = sum(one.usual * one.nbytes for one in table.answers if one.name.startswith("training"))
        entry = {
            "case": case,
            "training_rows": len(data.train),
            "test_rows": len(data.test),
            "beyond": {"asked": asked, "answered": granted},
            **{
                kind: {"asked": server.asked[kind], "different": len(server.answered[kind]), "at_most": most[kind]}
                for kind in most
            },
            "bits_a_training_row": round(8 * sum(server.answered["train"].values()) / len(data.train), 1),
            "of_a_run": round(8 * honest / len(data.train), 1),
        }
        if case.startswith("fedavg"):
            entry["rows_rebuilt"] = rebuild(Server(recipe, Path(folder, "planted")))
        if "secure_sums" in CASES[case]:
            entry["own_counts_by_invented_others"] = invent_others(Server(recipe, Path(folder, "summed")))
        return {**entry, "classes_counted": count_classes(Server(recipe, Path(folder, "scored")))}


def print_table(entries: Sequence[Mapping[str, Any]]) -> None:
    """A line for each recipe."""
    for entry in entries:
        kinds = ("train", "score", "finish")
        told = ", ".join(f"{kind} {entry[kind]['different']} of {entry[kind]['at_most']}" for kind in kinds)
        bits = f"{entry['bits_a_training_row']} bits a row, in a run {entry['of_a_run']}"
        more = ", ".join(f"{key} {entry[key]}" for key in EXTRA if key in entry)
        print(f"{entry['case']:28} {entry['beyond']['answered']} beyond; {told}; {bits}; {more}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="recipes [all]")
    parser.add_argument("--times", type=int, default=15, help="questions of each kind in each round [15]")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument("--table", action="store_true", help="only show what the file has")
    given = parser.parse_args()
    if given.table:
        print_table(json.loads(given.out.read_text()))
        return
    entries = []
    for case in given.cases:
        entries.append(play(case, given.times))
        print(json.dumps(entries[-1]), flush=True)
    if given.out:
        given.out.write_text(json.dumps(entries, indent=1) + "\n")


if __name__ == "__main__":
    main()
