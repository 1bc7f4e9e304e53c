"""FedMD: distillation on public data (Li and Wang, NeurIPS workshop 2019, arXiv:1910.03581).

f_k(x) are logits. The public data D_0 are hold-out rows (`data.holdout`) or, with
`public_epochs = 0`, unlabeled inputs of another data set (`data.public_dataset`); d are the rows
of a round.
once:      `public_epochs` of SGD on CE(f_k(x), y) over D_0, then `private_epochs` on its own rows
client k:  1. sends f_k(x) for x in d, in eval mode
           2. `digest_epochs` of SGD over d on  mean over classes of |f_k(x) - s(x)|
           3. E epochs of CE on its own rows
server:    s(x) = mean over responding clients of f_k(x)
With a `control`, step 2 is CE(f_k(x), t(x)). "labels": t(x) = y, the labels of the public rows.
"pseudo-labels": t(x) = argmax of f_k(x) as the round begins, where its softmax exceeds 0.95 (Lee,
ICML workshop 2013; the bound of FixMatch, Sohn et al., NeurIPS 2020); nothing is sent.
Sent: down L C, L public rows; up L C. Kept: client: whether transfer learning is done; server: s.
Deviations from the paper: (1) D_0 has the task's own classes. In the paper it is another data set, whose classes the
networks also learn. (2) Transfer learning takes a number of epochs; the paper trains to convergence. (3) d is all of
D_0; the paper draws 5000 rows in each round. (4) Clients take part as the recipe says; in
the paper all always do. (5) Batch size, optimizer and learning rate of all phases are the recipe's. (6) All scores
count equally; the paper suggests smaller weights for weaker models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core import inference, upload_forms
from polyfed.core.client import Client
from polyfed.core.message import Message, get_tensor
from polyfed.core.method import (
    Batch,
    Context,
    Exchange,
    Method,
    Phase,
    Requirements,
    TrainingResult,
    follows_device,
    hyperparameters,
)
from polyfed.core.server import Server
from polyfed.core.settings import Training
from polyfed.functional import averaging
from polyfed.functional.device_copies import move_together
from polyfed.functional.losses import task_loss, weighted_mean

_SURE = 0.95  # largest probability of a row above which its pseudo-label counts


@hyperparameters
class FedMD(Method):
    """Distillation from the clients' mean scores on public data, then training on own data."""

    # epochs on labeled public rows, once; 0: none, and public rows may come from another data set
    public_epochs: Annotated[int, Field(ge=0)] = 10
    private_epochs: Annotated[int, Field(ge=0)] = 10  # epochs on the client's own rows after that, once; 0: none
    digest_epochs: Annotated[int, Field(ge=0)] = 1  # epochs per round towards the consensus; 0: nothing is sent
    # digested in place of the scores: the public rows' "labels", or the client's own confident "pseudo-labels"
    control: Literal["none", "labels", "pseudo-labels"] = "none"

    # server ------------------------------------------------------------------------------------------------
    def exchanges(self, round: int) -> Sequence[Exchange]:
        exchanges = [Exchange()]
        if self.digest_epochs and self.control != "pseudo-labels":
            exchanges.insert(0, Exchange("scores", trains=False))
        if round == 1 and self._transfer():
            exchanges.insert(0, Exchange("transfer", who="all", phases=self._transfer()))
        return exchanges

    def start_round(self, server: Server, selected: Sequence[int]) -> None:
        server.state.pop("consensus", None)  # it was of networks as they were

    def broadcast(self, server: Server, client_id: int) -> Message:
        if server.exchange != "train" or "consensus" not in server.state:
            return {}
        return {"consensus": get_tensor(server.state, "consensus")}

    @follows_device
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        scores = {i: get_tensor(message, "scores") for i, message in uploads.items() if "scores" in message}
        if scores:
            shares = {i: server.share(i, "uniform") for i in scores}
            mean = averaging.weighted_mean([{"s": one} for one in scores.values()], list(shares.values()))
            server.state["consensus"] = mean["s"]

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        held = len(client.public or ())
        is_transferred = "transferred" in client.state
        context = {
            "public": torch.arange(0 if is_transferred else held),
            "own": torch.arange(0 if is_transferred else client.n),
            "rows": torch.arange(held),
        }
        if client.exchange != "train" or not self.digest_epochs:
            return context
        if self.control == "pseudo-labels":
            return {**context, **self._pseudo_labels(client)}
        if "consensus" not in message:  # nobody has sent scores
            return {**context, "rows": torch.arange(0)}
        device = next(client.model.parameters()).device
        (targets,) = move_together([get_tensor(message, "consensus")], [device])
        return {**context, "targets": targets}

    def _pseudo_labels(self, client: Client) -> Context:
        """Context with "rows", those of d of whose class the client is sure, and "targets", their classes."""
        assert client.public is not None  # see `requirements`
        public = client.public
        d = torch.randperm(len(public), generator=client.generator("rows"))
        scores = inference.map_rows(client.model, client.model, public.samples, d, public.prepare)
        sure, classes = scores[:, : client.classes].softmax(1).max(1)
        targets = torch.zeros(len(public), dtype=torch.int64)
        targets[d] = classes.cpu()
        return {"rows": d[(sure > _SURE).cpu()], "targets": targets.to(scores.device)}

    def phases(self, training: Training) -> Sequence[Phase]:
        phases = [*self._transfer()]
        if self.digest_epochs:
            phases.append(Phase(self.digest_epochs, data="public", rows="rows", name="digest"))
        return (*phases, Phase(training.local_epochs, name="revisit"))

    def _transfer(self) -> tuple[Phase, ...]:
        """Context with "public" and "own": all rows, or none once transfer learning is done."""
        public = Phase(self.public_epochs, data="public", rows="public", name="public")
        own = Phase(self.private_epochs, rows="own", name="own")
        return tuple(phase for phase in (public, own) if phase.epochs)

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        return {"digests": client.phase == "digest"}

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        scores = model(batch.x)
        if not context["digests"] or self.control == "labels":
            return task_loss(scores, batch.y, batch.w)
        target = context["targets"][batch.rows]
        if self.control == "pseudo-labels":
            return task_loss(scores, target, batch.w)
        return weighted_mean((scores[:, : target.shape[1]] - target).abs().mean(dim=1), batch.w)

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        is_ready = "transferred" in client.state or not self._transfer()
        if client.exchange != "scores":
            if not is_ready:
                client.state["transferred"] = torch.tensor(True)
            return {}
        if not is_ready or client.public is None:
            return {}
        scores = inference.map_rows(client.model, client.model, client.public.samples, None, client.public.prepare)
        return {"scores": scores[:, : client.classes]}

    # declared -------------------------------------------------------------------------------------------------
    upload_form = {"scores": upload_forms.Entry((lambda known: len(known.server.public or ()), "C"))}
    aligned_entries = ("scores",)

    @property
    def requirements(self) -> Requirements:
        if not (self.public_epochs or self.digest_epochs):
            return Requirements()
        uses_labels = self.public_epochs or self.control == "labels"
        origin: Literal["holdout", ""] = "holdout" if uses_labels else ""  # labels of another set mean nothing
        return Requirements(
            public=1,
            public_origin=origin,
            same_input_shape=True,
            classes="it averages scores of classes",
        )
