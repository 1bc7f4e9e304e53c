"""ClosedFormColumns: one linear model for clients whose tables have different columns, from sums over who has a pair
(after Friedman, JASA 1989, on moments by pairwise deletion, Little and Rubin 2002).

Of a federation's columns (a recipe's [data.features]) each client has some. phi stands by column: of a number z and
max(z - u, 0) at four u, of a category a 0/1 number each. i and j are the columns of the features f and g.

round 1, "scale"  everybody who is there: of each of its columns the number of values, their sum, that of their squares
                  server: mean and deviation of each column over whoever has it; z = (value - mean) / deviation.  A
                  column without values has mean 0 and deviation 1, a constant one deviation 1  `own_columns.scale_of`
then, once        client k, of its rows, with what each row has                          `column_moments.sum_rows`
                      N_c[i, j] = rows of class c that have the columns i and j,  M_c[f, j] = sum over them of phi_f
                      P[f, g] = sum over the rows of all classes that have i and j of phi_f phi_g
                  server: adds them up                                                   `aggregate`
for client k      of the columns that k has                                              `column_moments.marginal`
                      mu_c[f] = M_c[f, i] / N_c[i, i],  of a class without rows in i the mean over all classes
                      Sigma[f, g] = (P[f, g] - sum_c M_c[f, j] M_c[g, i] / N_c[i, j]) / sum_c N_c[i, j]
                  A = (1 - s) Sigma + s tr(Sigma) / D I,  W = A^-1 mu',  b_c = - mu_c' W_c / 2;  their means over
                  classes are taken from both                                            `closed_forms.discriminant_of`
prediction:       softmax(t (phi(x)' W + b) + log pi),  pi: the client's own class shares; t: as in closed-form
Missing values:   a row counts in the sums of what it has; in a prediction its feature is the mean of the mu_c, which
                  count by the rows of class c in that column of the client's which has most of them
Numbers:          W = (Sigma + s / (1 - s) tr(Sigma) / D I)^-1 cov(phi, y),  b = mean y - mu' W;  y is one more column,
                  in each client's own unit

No network is trained or sent. Any grouping of the rows gives the same sums. A client is sent the model of its own
columns alone: of a column that it lacks, also of who has it, it learns nothing. The server knows which columns a
client has. What two clients alone share, each of them can take its own sums from and guess at the other's.
If all clients have all columns and no value is missing, this is closed-form with these features. Without
[data.features] each number of an input is such a column, which everybody has.

Shapes: J columns of the federation, D features, C classes; J_k, D_k: those of client k.
Sent: up 2 * 3 J, then until they are taken in 2 (C J (J + 1) / 2 + C D J + D (D + 1) / 2); down in each exchange
2 * 2 J_k once there is a scale, and 2 (D_k C + 2 C + D_k) once there are sums; where numbers are predicted J and D are
one more, C is 1, and no shares go down. Kept: client: what it has received, its class shares, t; server: the sums, who
is in them, mean and deviation of columns.
Deviations from the papers: (1) A pair of columns that no client has both of counts as uncorrelated. (2) Sigma of pairs
of different rows may have negative eigenvalues; they become 0. The round's record has the share of the trace that they
had, the largest over the sets of columns that clients have (`repaired`), and the number of pairs without rows
(`pairs_without_rows`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core import inference
from polyfed.core.client import Client
from polyfed.core.message import Group, Message, State, get_group, get_tensor
from polyfed.core.method import Context, Exchange, Method, Requirements, TrainingResult, hyperparameters
from polyfed.core.server import Server
from polyfed.core.upload_forms import Entry, Members, UploadContext
from polyfed.errors import ConfigError
from polyfed.functional import closed_forms, column_moments
from polyfed.functional.class_statistics import add
from polyfed.functional.closed_forms import USUAL
from polyfed.methods.building_blocks import own_columns, solved_model

_EXACT = (torch.float64,)
_COUNT = (torch.int64,)


@hyperparameters
class ClosedFormColumns(Method):
    """A linear model of each client's own columns, solved at the server from sums over whoever has a pair of them."""

    shrinkage: Annotated[float, Field(gt=0, lt=1)] = 0.2  # s, how far the covariance is shrunk towards a multiple of I

    def exchanges(self, round: int) -> Sequence[Exchange]:
        scale = (Exchange("scale", who="all", trains=False),) if round == 1 else ()
        return (*scale, Exchange("sums", trains=False))

    def init_server(self, server: Server) -> None:
        if not server.prepare(server.input_example).is_floating_point():
            raise ConfigError(f"{self.name}: expected inputs of numbers, got ids of words")

    # client: the scale of columns, then sums of rows, once ------------------------------------------------------------
    def upload(self, client: Client, trained: TrainingResult) -> Message:
        own = own_columns.columns_of(client)
        if client.exchange == "scale":
            return {"scale": own_columns.sum_values(client, own)}
        if client.state.get("heard"):
            return {}
        made = get_group(client.state, "map")
        phi_ND, has_NJ = self._rows(client, made)
        sums = column_moments.sum_rows(phi_ND, has_NJ, made["column"], client.data.train.y, client.classes)
        return {"sums": own_columns.at_their_places(sums, own, client.classes)}

    def _rows(self, client: Client, made: Group) -> tuple[Tensor, Tensor]:
        """The training rows' features (N, D_k), and whether they have a value in each column (N, J_k)."""

        def both(x: Tensor) -> Tensor:
            phi_ND, has_NJ = own_columns.features_of_inputs(made, x)
            return torch.cat([phi_ND, has_NJ.to(phi_ND.dtype)], dim=1)

        rows = inference.map_batches(both, client.model, client.data.train, client.prepare).cpu()
        width = len(made["column"])
        return rows[:, :width], rows[:, width:].bool()

    # server: the sums of all, and the model of each client's columns --------------------------------------------------
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        if server.exchange == "scale":
            sent = [get_group(message, "scale") for message in uploads.values()]
            server.state["scale"] = own_columns.scale_of(sent, len(own_columns.widths_of(server)))
            return
        heard = _heard(server)
        new = {i: get_group(message, "sums") for i, message in uploads.items() if "sums" in message and i not in heard}
        possible = [i for i, sums in new.items() if self._add(server, sums, [i])]
        if len(possible) < len(new):
            server.log["sums_left_out"] = len(new) - len(possible)
        if possible:
            self._record(server)

    def _add(self, server: Server, sums: Group, senders: Collection[int]) -> bool:
        """Add sums of these clients to those of the others, if their rows can have them; whether they can."""
        rows = sum(server.clients[i].num_samples for i in senders)
        places = sorted({place for i in senders for place in own_columns.places(server, i)})
        if not column_moments.are_possible(sums, rows, torch.tensor(places), own_columns.of_features(server)):
            return False
        server.state["sums"] = add(get_group(server.state, "sums"), sums) if "sums" in server.state else dict(sums)
        server.state["heard"] = torch.tensor(sorted([*_heard(server), *senders]))
        return True

    def _record(self, server: Server) -> None:
        """How far pairs of columns are from moments of rows."""
        server.log["pairs_without_rows"] = column_moments.count_empty_pairs(get_group(server.state, "sums"))
        sets = {info.columns: client_id for client_id, info in server.clients.items()}
        server.log["repaired"] = max(float(self._gaussian(server, i)["repaired"]) for i in sets.values())

    def _gaussian(self, server: Server, client_id: int) -> dict[str, Tensor]:
        """Mu and Sigma of the client's columns."""
        places = torch.tensor(own_columns.places(server, client_id))
        return column_moments.marginal(get_group(server.state, "sums"), own_columns.of_features(server), places)

    def broadcast(self, server: Server, client_id: int) -> Message:
        message: State = {}
        if "scale" in server.state:
            scale = get_group(server.state, "scale")
            own = [place for place in own_columns.places(server, client_id) if place < len(scale["mean"])]
            message["scale"] = {name: tensor[own] for name, tensor in scale.items()}
        if "sums" in server.state:
            message["solution"] = self._solve(server, client_id)
        if client_id in _heard(server):
            message["heard"] = torch.ones((), dtype=torch.uint8)
        return message

    def _solve(self, server: Server, client_id: int) -> dict[str, Tensor]:
        """W (D_k, C), b (C,), what stands for a missing feature (D_k,) and, of classes, their shares (C,)."""
        gaussian = self._gaussian(server, client_id)
        mu_CD, sigma_DD, rows_C = gaussian["mean"], gaussian["covariance"], gaussian["rows"]
        fill_D = rows_C @ mu_CD / rows_C.sum().clamp(min=1)
        if not server.classes:
            weight, bias = closed_forms.ridge_of(mu_CD[0], sigma_DD, self.shrinkage)
            return {"weight": weight, "bias": bias, "fill": fill_D[:-1]}
        weight, bias = closed_forms.discriminant_of(mu_CD, sigma_DD, rows_C > 0, self.shrinkage)
        return {"weight": weight, "bias": bias, "fill": fill_D, "shares": solved_model.class_shares(rows_C)}

    # client: the model ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        if "scale" in message:
            client.state["map"] = own_columns.make_map(client, get_group(message, "scale"))
        if "solution" in message:
            solved_model.keep(client, get_group(message, "solution"), lambda x: _scores(x, client.state))
        client.state["heard"] = torch.tensor("heard" in message)
        return {}

    def predict(self, model: Any, x: Tensor, context: Context) -> Tensor:
        """Log probabilities, or numbers; before anybody has sent anything what the network gives."""
        if "solution" not in context:
            scores: Tensor = model(x)
            return scores
        scores_NC = _scores(x, context)
        if "shares" not in context["solution"]:  # numbers
            return scores_NC
        shares = solved_model.shares_of(context, "own", scores_NC.device)
        return closed_forms.log_posterior(float(context.get("temperature", USUAL)) * scores_NC, *shares)

    # the same, where the server sees totals alone ---------------------------------------------------------------------
    def sends_addends(self, server: Server, client_id: int) -> bool:
        return server.exchange == "scale" or client_id not in _heard(server)

    def addends(self, client: Client, upload: Message) -> tuple[Group, Message]:
        if "scale" in upload:
            return own_columns.shrink(client, get_group(upload, "scale")), {}
        return {name: tensor.double() for name, tensor in get_group(upload, "sums").items()}, {}

    def aggregate_sum(
        self, server: Server, total: Group, summed: Collection[int], others: Mapping[int, Message]
    ) -> None:
        if server.exchange == "scale":
            sent = [own_columns.grow(total)] if summed else []
            server.state["scale"] = own_columns.scale_of(sent, len(own_columns.widths_of(server)))
            return
        if not summed:
            return
        sums = {**total, "pairs": total["pairs"].round().long()}
        if self._add(server, sums, summed):
            self._record(server)
        else:
            server.log["sums_left_out"] = len(summed)

    def remembered(self, state: State) -> Collection[int]:
        raise ConfigError(
            f"{self.name}: expected another method where clients are to be forgotten, as the scale of columns "
            "is of everybody's rows; one round of a new run without the client forgets it"
        )

    # declared ---------------------------------------------------------------------------------------------------------
    name = "closed-form-columns"
    evaluation_stage = "received"
    same_addends = True
    staleness_weighting = "alike"  # sums are the same in any round
    supports_dp_sgd = False

    @property
    def requirements(self) -> Requirements:
        return Requirements(shared_outputs="it adds up rows by class")

    @staticmethod
    def _scale_form(known: UploadContext, name: str) -> Members:
        count = (len(own_columns.widths_of(known.server)),)
        entries = {
            "values": Entry(count, _COUNT, 0, "N"),
            "sums": Entry(count, _EXACT),
            "squares": Entry(count, _EXACT, 0),
        }
        return Members({key: (entry,) for key, entry in entries.items()})

    @staticmethod
    def _sums_form(known: UploadContext, name: str) -> Members:
        classes = known.server.classes
        width = len(own_columns.of_features(known.server))
        count = len(own_columns.widths_of(known.server)) + (not classes)
        entries = {
            "pairs": Entry((classes or 1, count * (count + 1) // 2), _COUNT, 0, "N"),
            "sums": Entry((classes or 1, width, count), _EXACT),
            "products": Entry((width * (width + 1) // 2,), _EXACT),
        }
        return Members({key: (entry,) for key, entry in entries.items()})

    upload_form = {"scale": _scale_form, "sums": _sums_form}
    fixed_entries = {"sums": "sums of rows, which would be solved with all that was done to them"}


def _heard(server: Server) -> list[int]:
    """The clients whose sums are in those of the server."""
    return get_tensor(server.state, "heard").tolist() if "heard" in server.state else []


def _scores(x: Tensor, context: Context) -> Tensor:
    """Scores of classes (N, C) without class shares, or numbers (N, 1); float64."""
    solution: Group = context["solution"]
    phi_ND, has_NJ = own_columns.features_of_inputs(context["map"], x)
    has_ND = has_NJ[:, context["map"]["column"].to(x.device)]
    return solved_model.linear_scores(solution, torch.where(has_ND, phi_ND, solution["fill"].to(phi_ND)))
