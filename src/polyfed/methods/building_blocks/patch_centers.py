"""Filters of images made of all clients' patches, by sums in exchanges of their own before the sums of rows.

    "patches"      up: the sum of patches and of their products;  the server whitens
    "centers 1"    down: the filters so far;  up: for each the sum of the patches that it answers most, and their number
     ...           the server moves the centers: each becomes the sum of its patches, whitened, with norm 1
    "centers 4"

The formulas are those of `feature_maps.images`. Whitening is linear, so that sums of patches as they are suffice, and
clients need the filters alone. All patches on a grid of all training rows count and none is drawn, so that it does not
matter how rows lie among clients. The clients of round 1 make the filters; whoever comes later is sent them. A center
without patches is drawn anew; where nobody sends patches all remain as they were drawn.

In the server's state: "map", the filters; during round 1 "whitening".
Shapes: P patches, d numbers of a patch, K filters.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from polyfed.core import inference
from polyfed.core.client import Client
from polyfed.core.message import Group, Message, State, get_group
from polyfed.core.method import Exchange
from polyfed.core.server import Server
from polyfed.core.upload_forms import Entry, Members, UploadContext
from polyfed.errors import ConfigError
from polyfed.functional import class_statistics
from polyfed.functional.class_statistics import ROUNDING, unpack
from polyfed.functional.feature_maps import images
from polyfed.methods.building_blocks.sums_of_rows import check_images, times

_ENTRY = "patches"  # of an upload
_MOVES = 4  # of the centers; with eight, accuracy was the same
_FIRST = "patches"
_NAMES = [_FIRST, *(f"centers {number}" for number in range(1, _MOVES + 1))]
_EXACT = (torch.float64,)
_AT_ONCE = 2**14  # patches whose filter is sought at the same time
NOT_FORGOTTEN = (
    "expected another map than 'patches' where clients are to be forgotten (keep_sums): its filters are made of every "
    "client's patches, and all others' sums with them; run it anew without the client"
)


def exchanges(round: int) -> Sequence[Exchange]:
    """Those before the round's own."""
    return tuple(Exchange(name, trains=False) for name in _NAMES) if round == 1 else ()


def is_under_way(exchange: str) -> bool:
    """Whether an exchange is one of these."""
    return exchange in _NAMES


def check(server: Server, method: str, keep_sums: bool, unit_features: bool) -> None:
    """Whether inputs are images, and a method's other settings can be what they are."""
    check_images(server, method, "patches")
    if keep_sums:
        raise ConfigError(f"{method}: {NOT_FORGOTTEN}")
    if unit_features:
        raise ConfigError(
            f"{method}: expected unit_features = false with map = 'patches', whose sums of patches no noise covers, "
            "got true"
        )


# client -----------------------------------------------------------------------------------------------------------


def sum_patches(client: Client) -> dict[str, Tensor]:
    """The sums of a client's patches in the present exchange, per patch."""
    patches_Pd = inference.map_batches(_patches_on_grid, client.model, client.data.train, client.prepare).cpu()
    if client.exchange == _FIRST:
        sums = class_statistics.sum_rows(patches_Pd, torch.zeros(len(patches_Pd), dtype=torch.int64), 1)
    else:
        filters = get_group(client.state, "map")
        nearest_P = _nearest(filters, patches_Pd)
        sums = class_statistics.sum_rows(patches_Pd, nearest_P, len(filters["offsets"]), products=False)
    return times(sums, 1 / len(patches_Pd))


def _patches_on_grid(x: Tensor) -> Tensor:
    """Normalized patches of images, from the top left corner on, neighbors with a line of pixels in common.

    Those that are not finite are zeros.
    """
    side = images.patch_side(x.shape[1:])
    patches_Pd = images.normalize_patches(x, side, side - 1)
    return torch.where(patches_Pd.isfinite().all(dim=1, keepdim=True), patches_Pd, 0.0)


def _nearest(filters: Group, patches_Pd: Tensor) -> Tensor:
    """The filter (P,) that answers a patch most; in float64, so that it hardly depends on what is computed beside."""
    directions_dK = filters["directions"].flatten(1).T.double()
    offsets_K = filters["offsets"].double()
    parts = patches_Pd.split(_AT_ONCE)
    return torch.cat([(part.double() @ directions_dK - offsets_K).argmax(dim=1) for part in parts])


# server -----------------------------------------------------------------------------------------------------------


def start(server: Server, features: int) -> None:
    """Filters of any directions, in case nobody sends patches."""
    shape = _shape(server)
    width = shape[0] * images.patch_side(shape) ** 2
    count = max(1, features // images.count_cells(shape) ** 2)
    _set_filters(
        server,
        _draw_centers(count, width, server.generator("centers")),
        torch.zeros(width, dtype=torch.float64),
        torch.eye(width, dtype=torch.float64),
    )


def message(server: Server) -> State:
    """To who has no filters yet: those that there are, if they are needed."""
    if "map" not in server.state or server.exchange == _FIRST:
        return {}
    return {"map": dict(get_group(server.state, "map"))}


def improve(server: Server, uploads: Mapping[int, Message]) -> None:
    """Make the whitening, or move the centers, by sums that patches can have, added up in the order of the clients."""
    sent = {number: get_group(upload, _ENTRY) for number, upload in uploads.items() if _ENTRY in upload}
    read = [_read(server, number, sums) for number, sums in sent.items()]
    possible = [sums for sums in read if sums is not None]
    if len(possible) < len(read):
        server.log["patches_left_out"] = server.log.get("patches_left_out", 0) + len(read) - len(possible)
    if possible:
        total = functools.reduce(class_statistics.add, possible)
        draws = server.generator("centers", _NAMES.index(server.exchange))
        count = len(get_group(server.state, "map")["offsets"])
        fresh_Kd = _draw_centers(count, total["sums"].shape[1], draws)
        make = _whiten if server.exchange == _FIRST else _move
        make(server, total, fresh_Kd)
    if server.exchange == _NAMES[-1]:
        del server.state["whitening"]


def _whiten(server: Server, total: Group, fresh_Kd: Tensor) -> None:
    products_dd = unpack(total["products"], fresh_Kd.shape[1])
    mean_d, whitening_dd = images.whitening(int(total["counts"].sum()), total["sums"][0], products_dd)
    _set_filters(server, fresh_Kd, mean_d, whitening_dd)


def _move(server: Server, total: Group, fresh_Kd: Tensor) -> None:
    """Move the centers to their patches. fresh_Kd: centers for those without any."""
    known = get_group(server.state, "whitening")
    counts_K1 = total["counts"].double().unsqueeze(1)
    whitened_Kd = (total["sums"] - counts_K1 * known["mean"]) @ known["matrix"]
    centers_Kd = torch.where(counts_K1 > 0, F.normalize(whitened_Kd, dim=1), fresh_Kd)
    _set_filters(server, centers_Kd, known["mean"], known["matrix"])


def _draw_centers(count: int, width: int, generator: torch.Generator) -> Tensor:
    """Unit vectors (K, d) of any direction."""
    return F.normalize(torch.randn(count, width, generator=generator, dtype=torch.float64), dim=1)


def _set_filters(server: Server, centers_Kd: Tensor, mean_d: Tensor, whitening_dd: Tensor) -> None:
    shape = _shape(server)
    side = images.patch_side(shape)
    server.state["whitening"] = {"mean": mean_d, "matrix": whitening_dd}
    server.state["map"] = images.filters_of_centers(centers_Kd, mean_d, whitening_dd, shape[0], side)


def _read(server: Server, number: int, sent: Group) -> dict[str, Tensor] | None:
    """The sums of a client's patches; None where so many patches cannot have them.

    A patch has a norm of at most sqrt(d), as its standard deviation is at most 1.
    """
    patches = _count_patches(server, number)
    sums = times(sent, patches)
    width = sums["sums"].shape[1]
    if "products" in sums:
        trace = float(unpack(sums["products"], width).trace())
        is_possible = trace <= patches * width * (1 + ROUNDING) and class_statistics.are_possible(sums, patches)
    else:
        most_K = sums["counts"] * width**0.5 * (1 + ROUNDING)
        is_possible = int(sums["counts"].sum()) == patches and bool((sums["sums"].norm(dim=1) <= most_K).all())
    return sums if is_possible else None


def _shape(server: Server) -> torch.Size:
    """(C, H, W) of an image."""
    return server.prepare(server.input_example).shape[1:]


def _count_patches(server: Server, number: int) -> int:
    shape = _shape(server)
    side = images.patch_side(shape)
    down, across = ((pixels - side) // (side - 1) + 1 for pixels in shape[1:])
    return server.clients[number].num_samples * down * across


def form(known: UploadContext, name: str) -> Members:
    """Of the present exchange; nothing in another one."""
    server = known.server
    if not is_under_way(server.exchange):
        return Members({})
    directions = get_group(server.state, "map")["directions"]
    width = directions[0].numel()
    groups = 1 if server.exchange == _FIRST else len(directions)
    counts = Entry((groups,), (torch.int64,), 0, _count_patches(server, known.client_id))
    entries = {"counts": counts, "sums": Entry((groups, width), _EXACT)}
    if server.exchange == _FIRST:
        entries["products"] = Entry((width * (width + 1) // 2,), _EXACT)
    return Members({key: (entry,) for key, entry in entries.items()})
