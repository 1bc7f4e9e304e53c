"""Sums of rows that every client sends once, and a model that the server solves from those of all.

A method says how a model is solved from the sums of all (`solve`), and how it predicts. Here is the rest: the map phi,
sums of a client (`upload`), how they go up, in the clear or as secure sums, how a solution comes down, and how a client
is forgotten.

Solutions are numbered: "version" is the number of the latest, 0 before the first. A client sends the version that it
has, and its sums until it was heard.
In the server's state: "sums" of all, "solution", "version", and "versions", those last sent by who was heard. With
`keep_sums` also "sums of client 7", and "order", in which they came: numbers that are added up in another order are
rounded otherwise.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Group, Message, State, get_group, get_tensor, members
from polyfed.core.method import Exchange, Exposed, Method, TrainingResult, hyperparameters
from polyfed.core.model_factory import AuxiliaryModel
from polyfed.core.randomness import generator
from polyfed.core.server import Server
from polyfed.core.settings import Privacy
from polyfed.core.upload_forms import Entry
from polyfed.errors import ConfigError
from polyfed.functional import class_statistics, noisy_sums
from polyfed.functional.class_statistics import add
from polyfed.functional.feature_maps.feature_map import FeatureMap, draw_map
from polyfed.methods.building_blocks import network_map, sums_of_rows
from polyfed.methods.building_blocks.network_map import NetworkMap
from polyfed.methods.building_blocks.sums_of_rows import times
from polyfed.validation.effect import ActsWith

_MAPS = ("default", "random", "photographs")


def _known_map(name: str) -> str:
    if name not in _MAPS and ":" not in name and "?" not in name:
        known = ", ".join(f"'{one}'" for one in _MAPS)
        raise ValueError(f"expected {known} or the name of a network ('timm:...', 'package.module:name'), got '{name}'")
    return name


@hyperparameters
class SumsSentOnce(Method):
    """Sums up once, solutions down whenever there is a newer one."""

    # phi, from inputs to features: "random"; of images, filters made of two "photographs", the same for everybody;
    # "default": photographs for images, random for all else; or what a frozen network gives before its head:
    # "timm:NAME?pretrained", "torchvision:NAME?pretrained", "package.module:name"
    map: Annotated[str, AfterValidator(_known_map)] = "default"
    views: bool = True  # rows count with the views of training.augmentation, where it is set
    # D, numbers that an input becomes; of texts, all words count; a network has as many as it has
    features: Annotated[int, Field(ge=1), ActsWith("map", _MAPS)] = 576
    keep_sums: bool = False  # the server keeps each client's sums, so that a client can be forgotten
    unit_features: bool = False  # rows of features have norm 1, as noise on the sums needs

    # what a method says ---------------------------------------------------------------------------------------
    def solve(self, sums: Group, classes: int) -> dict[str, Tensor]:
        """The model of the sums of all who were heard."""
        raise NotImplementedError

    @property
    def sends_means(self) -> bool:
        """Whether n and M are all that is sent."""
        return False

    # client ---------------------------------------------------------------------------------------------------
    def exchanges(self, round: int) -> Sequence[Exchange]:
        return (Exchange(trains=False),)

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        version = client.state.get("version", torch.tensor(0))
        if client.state.get("heard"):
            return {"version": version}
        phi = self.phi_of(client)
        has_products = not self.sends_means and (not client.classes or "words" not in phi.tensors)
        sums = sums_of_rows.sum_rows(client, phi, self.views, has_products)  # n_k, M_k, S_k
        made: Message = {"version": version, "sums": self._as_sent(client, sums)}
        return {**made, "network": phi.tensors["digest"]} if isinstance(phi, NetworkMap) else made

    def _as_sent(self, client: Client, sums: Group) -> Group:
        """The sums per row; or such that a row changes them by little, with the client's noise."""
        if not self.unit_features:
            return times(sums, 1 / client.n)
        noise = self._noise(client.privacy)
        if not noise:
            return {**sums, "counts": sums["counts"].double()}
        return noisy_sums.add_noise(sums, noise, sums_of_rows.normals(client, noise, self.views, sorted(sums)))

    def _noise(self, privacy: Privacy) -> float:
        """z, of noise on the sums; 0: none."""
        return privacy.noise_multiplier if self.bounds_rows else 0.0

    def note_what_came(self, client: Client, message: Message) -> None:
        """The version, and whether the client was heard."""
        if "version" in message:
            client.state["version"] = get_tensor(message, "version").clone()
            client.state.pop("solution", None)  # where all who had sent something have been forgotten, none follows
        client.state["heard"] = torch.tensor("heard" in message)

    # server ---------------------------------------------------------------------------------------------------
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        new = [i for i, message in uploads.items() if "sums" in message and not _is_heard(server, i)]
        possible = [i for i in new if self._add_upload(server, i, uploads[i])]
        _note_versions(server, uploads)  # sums come but once
        if len(possible) < len(new):
            server.log["sums_left_out"] = len(new) - len(possible)
        if possible:
            self._renew(server)

    def _add_upload(self, server: Server, client_id: int, message: Message) -> bool:
        if self.auxiliary_model is not None and not network_map.is_ours(server, client_id, message):
            return False
        sent = get_group(message, "sums")
        sums = sent if self.unit_features else times(sent, server.clients[client_id].num_samples)
        return self._add(server, sums, [client_id])

    def _add(self, server: Server, sums: Group, senders: Collection[int]) -> bool:
        """Add sums of these clients to those of the others, if their rows can have them; whether they can."""
        rows = sum(server.clients[i].num_samples for i in senders)
        noise = self._noise(server.privacy) * math.sqrt(len(senders))
        if self.unit_features and not noisy_sums.are_within(sums, rows, noise):
            return False
        if self.sends_means:
            sums = class_statistics.from_class_means(sums)
        if not noise and not class_statistics.are_possible(sums, rows):
            return False
        before = members(server.state, "sums")
        server.state["sums"] = add(before, sums) if before else dict(sums)
        if self.keep_sums:  # beside them, so that they can be taken out
            (client_id,) = senders
            server.state[f"sums of client {client_id}"] = dict(sums)
            server.state["order"] = torch.tensor([*_kept_clients(server.state), client_id])
        return True

    def _renew(self, server: Server) -> None:
        """A new solution, of the sums that there are."""
        server.state["solution"] = self.solve(get_group(server.state, "sums"), server.classes)
        server.state["version"] = _next_version(server.state)

    def broadcast(self, server: Server, client_id: int) -> Message:
        """Whether the client was heard; the latest solution, if it has another one, and its version."""
        has = members(server.state, "versions").get(str(client_id))
        message: State = {} if has is None else {"heard": torch.ones((), dtype=torch.uint8)}
        if "version" not in server.state:
            return message
        version = get_tensor(server.state, "version")
        if has is None or int(has) != int(version):
            message["version"] = version
            if "solution" in server.state:
                message["solution"] = dict(get_group(server.state, "solution"))
        return message

    # the same, where the server sees sums alone: of n_k, M_k and S_k -----------------------------------------
    def check_addends(self, server: Server) -> None:
        for setting, is_set in (
            ("keep_sums = false, as no client's own sums are known", self.keep_sums),
            ("second_moments = 'rows', as squares of means do not add up", self.sends_means),
        ):
            if is_set:
                raise ConfigError(f"secure_sums: expected {setting}, got another one")

    def sends_addends(self, server: Server, client_id: int) -> bool:
        return not _is_heard(server, client_id)

    def addends(self, client: Client, upload: Message) -> tuple[Group, Message]:
        others = {name: value for name, value in upload.items() if name != "sums"}
        if "sums" not in upload:
            return {}, others
        return {name: tensor.double() for name, tensor in self._sums_in(upload).items()}, others

    def aggregate_sum(
        self, server: Server, total: Group, summed: Collection[int], others: Mapping[int, Message]
    ) -> None:
        ours = self.auxiliary_model is None or all(network_map.is_ours(server, i, others[i]) for i in summed)
        sums = total if self.unit_features or not summed else {**total, "counts": total["counts"].round().long()}
        is_new = bool(summed) and ours and self._add(server, sums, summed)
        heard = [i for i in others if _is_heard(server, i) or (is_new and i in summed)]
        _note_versions(server, {i: others[i] for i in heard})
        if is_new:
            self._renew(server)
        elif summed:
            server.log["sums_left_out"] = len(summed)

    # a client can be forgotten --------------------------------------------------------------------------------
    def remembered(self, state: State) -> Collection[int]:
        if not self.keep_sums:
            raise ConfigError("expected method.keep_sums = true, so that a client's sums can be taken out, got false")
        return _kept_clients(state)

    def forget(self, state: State, client_id: int) -> State:
        """Add up the others' sums anew and solve again.

        The client is among those who are heard, so that it does not send them again, and none are taken from it.
        """
        versions = members(state, "versions")
        if client_id not in _kept_clients(state) and str(client_id) in versions:
            return state
        left = _without_client(state, client_id)
        if "solution" in left:
            classes = len(get_group(left, "solution").get("shares", ()))
            del left["solution"]
            if "sums" in left:
                left["solution"] = self.solve(get_group(left, "sums"), classes)
        versions = {str(client_id): torch.tensor(0), **versions}
        return {**left, "versions": versions, "version": _next_version(state)}

    def forget_upload(self, message: Message) -> Message:
        return {name: value for name, value in message.items() if name != "sums"} if "sums" in message else message

    def forget_at_client(self, state: State, server: State) -> State:
        if "solution" not in state:
            return state
        left = {name: value for name, value in state.items() if name not in ("solution", "temperature")}
        return left | {"solution": dict(get_group(server, "solution"))} if "solution" in server else left

    # phi ----------------------------------------------------------------------------------------------------
    @property
    def auxiliary_model(self) -> AuxiliaryModel | None:
        return None if self.map in _MAPS else AuxiliaryModel(self.map, frozen=True)

    def phi_of(self, client: Client) -> FeatureMap | NetworkMap:
        """phi, made the first time."""
        if self.auxiliary_model is not None:
            return network_map.map_of(client, self.unit_features)
        if "map" not in client.state:
            example = client.prepare(client.data.train.x[:1])
            draws = generator(client.seed, "random features")
            drawn = draw_map(
                example,
                self.features,
                draws,
                client.categories,
                client.words,
                unit=self.unit_features,
                photographs=self.uses_photographs,
            )
            client.state["map"] = dict(drawn.tensors)
        return FeatureMap(get_group(client.state, "map"))

    @property
    def uses_photographs(self) -> bool:
        """Whether filters of images are those of photographs."""
        return self.map in {"default", "photographs"}

    def _phi(self, model: Any, tensors: Group) -> FeatureMap | NetworkMap:
        return FeatureMap(tensors) if self.auxiliary_model is None else network_map.network_map(model, tensors)

    # settings without effect ----------------------------------------------------------------------------------
    def init_server(self, server: Server) -> None:
        if self.uses_photographs:
            sums_of_rows.check_photographs(server, self.name, self.features, self.map == "photographs")
        if not self.views and server.training.augmentation == "none":
            raise ConfigError(
                f"{self.name}: views = false does nothing without training.augmentation; leave it at true"
            )
        if self.unit_features and not server.prepare(server.input_example).is_floating_point():
            raise ConfigError(f"{self.name}: expected inputs of floats with unit_features, got ids of words")

    # declared -------------------------------------------------------------------------------------------------
    evaluation_stage = "received"
    same_addends = True
    staleness_weighting = "alike"  # sums are the same in any round
    supports_dp_sgd = False
    upload_form = {
        "sums": sums_of_rows.form,
        "version": Entry(types=(torch.int64,), least=0),
        "network": network_map.DIGEST,
    }
    fixed_entries = {"sums": "sums of rows, which would be solved with all that was done to them; see unit_features"}

    @property
    def bounds_rows(self) -> bool:
        return self.unit_features and not self.is_alone

    @property
    def exposed(self) -> Exposed | None:
        return Exposed("sums", "sums", self.phi_of, sums=self._sums_in)

    def _sums_in(self, upload: Message) -> Group:
        sums = get_group(upload, "sums")
        return sums if self.unit_features else times(sums, int(sums["counts"].sum()))


def _is_heard(server: Server, client_id: int) -> bool:
    """Whether the client's sums have come."""
    return str(client_id) in members(server.state, "versions")


def _note_versions(server: Server, uploads: Mapping[int, Message]) -> None:
    """From now on these clients are heard, and have the versions that they say."""
    told = {str(i): get_tensor(message, "version") for i, message in uploads.items() if "version" in message}
    if told:
        server.state["versions"] = {**members(server.state, "versions"), **told}


def _next_version(state: State) -> Tensor:
    """1 is the first."""
    return get_tensor(state, "version") + 1 if "version" in state else torch.tensor(1)


def _kept_clients(state: State) -> list[int]:
    """Whose sums are kept, in the order in which they came."""
    return [int(number) for number in get_tensor(state, "order")] if "order" in state else []


def _without_client(state: State, client_id: int) -> dict[str, Any]:
    """The state with the others' sums, added up anew, so that not even a rounding is left of the client's."""
    others = [number for number in _kept_clients(state) if number != client_id]
    left = {
        name: value for name, value in state.items() if name not in (f"sums of client {client_id}", "sums", "order")
    }
    if others:
        sums = functools.reduce(add, (get_group(left, f"sums of client {number}") for number in others))
        left |= {"sums": dict(sums), "order": torch.tensor(others)}
    return left
