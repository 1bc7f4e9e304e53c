"""Which share of one large network each client has, of a list of shares: client k the (k mod their number)-th.

So all shares have equally many clients, up to one, the first is never without a client, and a client keeps its share
whichever clients are available.
"""

from __future__ import annotations

import itertools
import re
from typing import Annotated

from pydantic import AfterValidator


def parse_shares(text: str) -> list[float]:
    """The shares in a list of them."""
    return [float(share) for share in text.split()]


def client_share(text: str, client_id: int) -> str:
    """A client's share, as the list has it."""
    shares = text.split()
    return shares[client_id % len(shares)]


def _checked(text: str) -> str:
    share = r"(0?\.\d+|1(\.0+)?)"
    shares = parse_shares(text) if re.fullmatch(f"{share}( {share})*", text) else []
    falling = all(one > other for one, other in itertools.pairwise(shares))
    if not shares or shares[0] < 1 or shares[-1] <= 0 or not falling:
        raise ValueError(f"expected shares of the network from 1 down, each above 0, as in '1 0.5 0.25'; got '{text}'")
    return text


Shares = Annotated[str, AfterValidator(_checked)]
