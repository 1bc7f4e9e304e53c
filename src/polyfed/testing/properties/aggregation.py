"""Uploads: their form, their order, whoever answers, and who counts how much."""

from __future__ import annotations

import torch
from torch import Tensor

from polyfed.core.message import first_nonfinite, flatten
from polyfed.core.randomness import seeded_global_rng
from polyfed.core.server import Server
from polyfed.core.settings import Training
from polyfed.core.upload_forms import UploadContext
from polyfed.data.samples import LabeledSamples
from polyfed.engine.uploads import find_mismatch
from polyfed.testing.fixtures import CLASSES, SHORT, draw
from polyfed.testing.kit import AggregationScene, ConformanceError, ConformanceKit, NotApplicable, copy_server, subsets


def uploads_have_their_form(kit: ConformanceKit) -> None:
    """What clients upload is of the `form` that the method declares, if it declares one."""
    form = kit.method.form
    if form is None:
        return

    def look(scene: AggregationScene) -> None:
        for number, message in scene.uploads.items():
            sent = kit.method.broadcast(scene.server, number)
            if problem := find_mismatch(form, message, UploadContext(kit.method, scene.server, number, sent)):
                kit.fail(f"client {number} uploads what `form` does not allow: {problem}")

    for scene in kit.scenes:
        look(scene)


def order_of_uploads(kit: ConformanceKit) -> None:
    """The order in which the uploads lie in their mapping changes nothing (up to rounding)."""

    def look(scene: AggregationScene) -> None:
        backwards = {number: scene.uploads[number] for number in reversed(list(scene.uploads))}
        a = scene.after(scene.uploads)
        b = scene.after(backwards)
        kit.same(flatten(a.state), flatten(b.state), "uploads in another order give another state", 1e-5)

    for scene in kit.scenes:
        look(scene)


def client_order_invariant(kit: ConformanceKit) -> None:
    """Renumbering the clients renumbers the result: no client is special."""

    def look(scene: AggregationScene) -> None:
        if scene.server.round > 1 or not scene.uploads:
            return
        last = len(scene.server.clients) - 1
        turned = copy_server(scene.server)
        turned.clients = {last - number: member for number, member in reversed(list(scene.server.clients.items()))}
        moved = {last - number: message for number, message in reversed(list(scene.uploads.items()))}
        a = scene.after(scene.uploads)
        b = scene.after(moved, turned)
        for server in (a, b):
            server.exchange = "train"
        for number in scene.server.clients:
            one = flatten(kit.method.broadcast(a, number))
            other = flatten(kit.method.broadcast(b, last - number))
            kit.same(one, other, f"with the clients renumbered, client {number} gets something else", 1e-5)

    for scene in kit.scenes:
        look(scene)


def any_subset(kit: ConformanceKit) -> None:
    """Whoever answers, nothing breaks; if nobody does, what the server sends stays as it is."""

    def look(scene: AggregationScene) -> None:
        for chosen in subsets(sorted(scene.uploads)):
            who = f"when of {sorted(scene.uploads)} only {chosen} answer"
            try:
                after = scene.after({number: scene.uploads[number] for number in chosen})
                messages = {number: kit.method.broadcast(after, number) for number in after.clients}
            except Exception as error:
                raise ConformanceError(f"{kit.name}: {type(error).__name__} {who}: {error}") from error
            for tensors in (after.state, *messages.values()):
                if name := first_nonfinite(tensors):
                    kit.fail(f"'{name}' is not finite {who}")
            if not chosen:
                last = scene.after({})
                for number in after.clients:
                    a = flatten(messages[number])
                    b = flatten(kit.method.broadcast(last, number))
                    kit.same(a, b, f"it is not deterministic {who}")
                _unmoved(kit, scene, after)

    for scene in kit.scenes:
        look(scene)
    few = SHORT.model_copy(update={"client_fraction": 0.34, "rounds": 3})
    kit.all_finite(kit.run(training=few), "with two of six clients a round")


def _unmoved(kit: ConformanceKit, scene: AggregationScene, after: Server) -> None:
    """What was sent in this round may be gone (it was this round's); what is still there must be the same."""
    for number in after.clients:
        before = flatten(kit.method.broadcast(copy_server(scene.server), number))
        now = flatten(kit.method.broadcast(after, number))
        common = {name for name in now if name in before and now[name].shape == before[name].shape}
        kit.same(
            {name: before[name] for name in sorted(common)},
            {name: now[name] for name in sorted(common)},
            "nobody answered, yet the server sends something else",
        )


def missing_upload_is_not_zero(kit: ConformanceKit) -> None:
    """Who does not answer, or lacks a class, does not count as zeros: nothing shrinks for want of an answer."""
    among = kit.world(one=True, sizes=(12,) * 6, labels=((0, 1, 2), *((1, 2),) * 5))

    def look(scene: AggregationScene) -> None:
        if 0 not in scene.uploads:
            return
        alone = scene.after({0: scene.uploads[0]})
        together = scene.after(scene.uploads)
        one, all_ = (flatten(kit.method.broadcast(server, 0)) for server in (alone, together))
        for name in one.keys() & all_.keys():
            if one[name].shape == all_[name].shape and one[name].is_floating_point() and one[name].dim():
                _no_shrinking(kit, name, one[name], all_[name])

    kit.aggregations(among, SHORT.model_copy(update={"lr": 0.0, "rounds": 1}), look)


def _no_shrinking(kit: ConformanceKit, name: str, one: Tensor, all_: Tensor) -> None:
    rows = [(f"'{name}'", one, all_)]
    if one.dim() > 1 and len(one) == CLASSES:
        rows += [(f"class {c} of '{name}'", one[c], all_[c]) for c in range(CLASSES)]
    for what, a, b in rows:
        single = float(a.norm())
        whole = float(b.norm())
        if single > 1e-4 and whole < single / 3:
            kit.fail(
                f"{what} shrinks from {single:.3g} to {whole:.3g} when those answer who know nothing of it (averaged "
                "weights do so where clients begin with different ones: set common_head or common_start)"
            )
        if whole > 1e-4 and single < whole / 3:
            kit.fail(f"{what} shrinks from {whole:.3g} to {single:.3g} when one client of six answers")


def samples_counted_once(kit: ConformanceKit) -> None:
    """Every sample counts once: splitting a client's data among two clients changes nothing at the server."""
    if kit.counted is None:
        raise NotApplicable("no claim that every sample counts once")
    sizes = (20, 8)
    labels = ((0, 1, 2), (1, 2))
    whole = [draw(size, own, place) for place, (size, own) in enumerate(zip(sizes, labels, strict=True))]
    rows = torch.arange(sizes[0])
    parts = [whole[0].select(rows[:3]), whole[0].select(rows[3:]), whole[1]]
    parts[0] = LabeledSamples(parts[0].x, parts[0].y)
    step = Training(rounds=1, local_epochs=1, batch_size=64, lr=0.0 if kit.counted == "statistics" else 0.05)
    found = []
    for data in (whole, parts):
        kept: list[dict[str, Tensor]] = []

        def look(scene: AggregationScene, kept: list[dict[str, Tensor]] = kept) -> None:
            kept.append(flatten(kit.method.broadcast(scene.after(scene.uploads), 0)))

        among = kit.world(one=True, data=data)
        one = among.builders["net0"]
        with seeded_global_rng(0):
            start = one()
        for client in among.clients:  # all start from the same weights, however many they are
            client.given, client.architecture = start, ""
        kit.aggregations(among, step, look)
        found.append(kept[-1])
    common = sorted(name for name in found[0] if name in found[1] and found[0][name].shape == found[1][name].shape)
    first, second = ({name: one[name] for name in common} for one in found)
    kit.same(first, second, "a client's samples count otherwise when they lie at two clients", 1e-4)
