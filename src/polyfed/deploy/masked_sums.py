"""Sums of which a server can open the total alone, of clients who may vanish on the way.

A sum has clients U, of whom t are needed at its end (`SecureSums.needed`). All is modulo 2^40.

    keys      u has two key pairs (X25519): (c_u, C_u) and (s_u, S_u); the server tells everybody C and S of all of U
    shares    u to v, encrypted with the key of c_u and C_v: v's shares of b_u and of s_u, of which any t give them
    upload    y_u = x_u + G(b_u) + sum over v in U2 of +-G(key of s_u, S_v and all that the sum is known by);  + where
              u < v;  U2: who has shared
    unmask    from t of U3, whose uploads are there: shares of b_u of u in U3, shares of s_u of u in U2 without U3
    server    sum of x_u = sum of y_u, less all G(b_u) and the masks that U3 shared with those who vanished

G: AES-256 in counter mode. Keys: HKDF with SHA-256. Shares: Shamir's, modulo 2^130 - 5. Encryption: AES-256-GCM.
b_u, s_u and c_u are functions of a secret of u's and of the sum's name, so that u needs no memory and answers a
repeated message by the same bytes; Flower's shares, which are drawn, would differ.

Where two clients were told of different sums (other clients, another unit of x), their masks do not cancel, and no
total can be opened. The server is trusted to pass on true keys; nothing is signed.

Source: Bonawitz et al., Practical secure aggregation for privacy-preserving machine learning, CCS 2017, section 4.
Deviations: (1) x_u are in fixed point (`functional.fixed_point`). (2) 16 bytes are shared, of which s_u is made.
(3) The secrets are derived, not drawn. (4) Instead of signed lists, each client answers one list of each kind.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyfed.errors import RunError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEYS = 64  # bytes of C_u and S_u
_KEY = 32
_SEED = 16  # bytes of b_u, and of what s_u is made of
SHARE = 17  # bytes of a share
SEALED = 2 * SHARE + 16  # of the two that one client encrypts for another
_PRIME = 2**130 - 5
_MASK = 2**40 - 1
_NONCE = bytes(12)  # a key encrypts one text


class Participant:
    """A client of one sum, by its name. secret: 32 bytes that nobody else knows."""

    def __init__(self, secret: bytes, client: int, name: str) -> None:
        self._client = client
        self._name = name.encode()
        self._root = hmac.digest(secret, b"sum " + self._name, "sha256")
        self._secrets = (self._derive("mask"), self._derive("pairs"))  # b_u, and what s_u is made of
        self._sealing = _private(self._derive("sealing"))

    def _derive(self, purpose: str) -> bytes:
        return hmac.digest(self._root, purpose.encode(), "sha256")[:_SEED]

    def keys(self) -> bytes:
        """C_u and S_u."""
        return _public(self._sealing) + _public(_private(self._secrets[1]))

    def shares(self, keys: Mapping[int, bytes], needed: int) -> dict[int, bytes]:
        """What each client is to get, encrypted for it. keys: of all, by number. needed: t."""
        values = self._own_shares(keys, needed)
        return {
            other: self._cipher(self._client, other, keys).encrypt(_NONCE, values[other], self._name) for other in keys
        }

    def _own_shares(self, clients: Collection[int], needed: int) -> dict[int, bytes]:
        parts = []
        for number, secret in enumerate(self._secrets):
            drawn = [hmac.digest(self._root, f"{number} {power}".encode(), "sha512") for power in range(1, needed)]
            polynomial = [int.from_bytes(secret), *(int.from_bytes(one) % _PRIME for one in drawn)]
            parts.append(_values(polynomial, len(clients)))
        return dict(zip(sorted(clients), map(bytes.__add__, *parts), strict=True))

    def mask(self, x: Tensor, keys: Mapping[int, bytes], sharers: Collection[int], known: bytes) -> Tensor:
        """y_u of limbs (L,) int64. sharers: U2. known: all that the sum is known by."""
        own = _private(self._secrets[1])
        y = x + _stream(self._secrets[0], len(x))
        for other in sharers:
            if other != self._client:
                y = y + _sign(self._client, other) * _stream(_pair(own, keys[other], known), len(x))
        return y & _MASK

    def unmask(
        self, keys: Mapping[int, bytes], shared: Mapping[int, bytes], survivors: Collection[int]
    ) -> dict[int, bytes]:
        """A share of b_v of each survivor v (U3), of what s_v is made of for all others.

        shared: U2, what each of them has encrypted for this client. RunError: it was not, for this client and sum.
        """
        from cryptography.exceptions import InvalidTag

        found = {}
        for other, sealed in shared.items():
            try:
                shares = self._cipher(other, self._client, keys).decrypt(_NONCE, sealed, self._name)
            except InvalidTag:
                raise RunError(f"expected the shares of client {other} for this client, got something else") from None
            found[other] = shares[:SHARE] if other in survivors else shares[SHARE:]
        return found

    def _cipher(self, sender: int, receiver: int, keys: Mapping[int, bytes]) -> AESGCM:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        other = receiver if sender == self._client else sender
        return AESGCM(_shared_key(self._sealing, keys[other][:_KEY], f"shares of {sender} for {receiver}".encode()))


class MaskOfTotal:
    """What a server takes from the sum of uploads.

    keys: of all clients. sharers: U2. survivors: U3. answers: what `Participant.unmask` gave, of t of these. known: as
    the clients know the sum. RunError: the shares do not give what they are of.
    """

    def __init__(
        self,
        keys: Mapping[int, bytes],
        sharers: Collection[int],
        survivors: Collection[int],
        answers: Mapping[int, Mapping[int, bytes]],
        known: bytes,
    ) -> None:
        places = {client: place for place, client in enumerate(sorted(keys), 1)}
        weights = _weights([places[client] for client in answers])
        self._keys, self._survivors, self._known = keys, survivors, known
        self._seeds: dict[int, bytes] = {}
        for client in sharers:
            parts = [int.from_bytes(answers[one][client]) for one in answers]
            value = sum(w * part for w, part in zip(weights, parts, strict=True)) % _PRIME
            if value >= 2 ** (8 * _SEED):
                raise RunError(f"expected shares of client {client} that give a secret, got others")
            self._seeds[client] = value.to_bytes(_SEED)
            if client not in survivors and _public(_private(self._seeds[client])) != keys[client][_KEY:]:
                raise RunError(f"expected shares that give the key of client {client}, got others")

    def limbs(self, length: int) -> Tensor:
        """(L,) int64."""
        total = torch.zeros(length, dtype=torch.int64)
        for client, seed in self._seeds.items():
            if client in self._survivors:
                total = total + _stream(seed, length)
                continue
            own = _private(seed)
            for survivor in self._survivors:
                pair = _pair(own, self._keys[survivor], self._known)
                total = total + _sign(survivor, client) * _stream(pair, length)
        return total & _MASK


# Shamir's shares ----------------------------------------------------------------------------------------------------


def _values(polynomial: Sequence[int], count: int) -> list[bytes]:
    """The polynomial at 1, 2, ..., count. polynomial: from the constant on, which is the secret."""
    found = []
    for x in range(1, count + 1):
        value = 0
        for factor in reversed(polynomial):
            value = (value * x + factor) % _PRIME
        found.append(value.to_bytes(SHARE))
    return found


def _weights(places: Sequence[int]) -> list[int]:
    """By how much a polynomial's values at these places count in its value at 0 (Lagrange)."""
    found = []
    for own in places:
        above = below = 1
        for other in places:
            if other != own:
                above = above * other % _PRIME
                below = below * (other - own) % _PRIME
        found.append(above * pow(below, -1, _PRIME) % _PRIME)
    return found


# keys ---------------------------------------------------------------------------------------------------------------


def _private(seed: bytes) -> X25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(_expanded(seed, b"private key"))


def _public(key: X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def _shared_key(own: X25519PrivateKey, other: bytes, purpose: bytes) -> bytes:
    """32 bytes that the two owners alone can make. other: a public key.

    Raises:
        RunError: it is none.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    try:
        return _expanded(own.exchange(X25519PublicKey.from_public_bytes(other)), purpose)
    except ValueError:
        raise RunError("expected public keys of the sum's clients, got something else") from None


def _pair(own: X25519PrivateKey, keys: bytes, known: bytes) -> bytes:
    """The seed of the mask that two clients share. keys: C and S of the other one."""
    return _shared_key(own, keys[_KEY:], b"mask of a pair " + known)


def _expanded(secret: bytes, purpose: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), _KEY, salt=None, info=purpose).derive(secret)


def _sign(client: int, other: int) -> int:
    """Of the mask that two clients share, at the first one."""
    return 1 if client < other else -1


def _stream(seed: bytes, length: int) -> Tensor:
    """G: uniform whole numbers below 2^40, (L,) int64."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import CTR

    counter = Cipher(AES(_expanded(seed, b"mask")), CTR(bytes(16))).encryptor()
    return torch.frombuffer(bytearray(counter.update(bytes(8 * length))), dtype=torch.int64) & _MASK
