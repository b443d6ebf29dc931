"""The shape of an API key, `il_<env>_<id>_<secret><checksum>`: made, taken apart, and what is stored of it.

The id is public and stands in lists, facts and requests; the secret is shown once, and never in a log, error or repr.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import zlib
from dataclasses import dataclass, field

from api.errors import Unauthorized

_BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_SECRET_BITS = 256
_SECRET_CHARS = 43  # 62**43 > 2**256
_KEY = re.compile(r"il_([a-z0-9]{1,12})_([0-9a-z]{12})_([0-9A-Za-z]{43})([0-9a-f]{8})")

HOW = "send the header 'Authorization: Bearer <your key>'"


@dataclass(frozen=True, slots=True, kw_only=True)
class MintedKey:
    """A new key: `secret` is the whole key and shown once, `secret_sha256` is what is stored."""

    key_id: str
    secret: str = field(repr=False)
    secret_sha256: bytes = field(repr=False)


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def digest(key: str) -> bytes:
    """What is stored of a key. A plain SHA-256 is enough, because a key holds 256 random bits."""
    return hashlib.sha256(key.encode()).digest()


def mint(environment: str) -> MintedKey:
    """A new random key `il_<env>_<id>_<secret><checksum>`."""
    key_id = "".join(secrets.choice(_ID_ALPHABET) for _ in range(12))
    number = secrets.randbits(_SECRET_BITS)
    chars = []
    for _ in range(_SECRET_CHARS):
        number, at = divmod(number, 62)
        chars.append(_BASE62[at])
    start = f"il_{environment}_{key_id}_{''.join(chars)}"
    key = start + _checksum(start)
    return MintedKey(key_id=key_id, secret=key, secret_sha256=digest(key))


def key_id_of(key: str, environment: str) -> str:
    """The public id inside a key. Raises Unauthorized, without any lookup, for what cannot be one of our keys."""
    match = _KEY.fullmatch(key)
    if match is None:
        raise Unauthorized("this is not an inferlog key; expected il_<environment>_<id>_<secret>")
    if _checksum(key[:-8]) != match[4]:
        raise Unauthorized("the key's checksum does not fit: a character was lost or changed")
    if match[1] != environment:
        raise Unauthorized(f"the key belongs to environment '{match[1]}', this is '{environment}'")
    return match[2]


def public_id(authorization: str | None) -> str:
    """The public id of the key in an Authorization header, "" where there is none; nothing is checked."""
    match = _KEY.search(authorization or "")
    return match[2] if match is not None else ""


def shown(authorization: str | None) -> tuple[str, bytes]:
    """The public id and the digest of the key in an Authorization header, however that is spelt; `("", b"")` where
    there is none. Nothing is checked."""
    match = _KEY.search(authorization or "")
    return (match[2], digest(match[0])) if match is not None else ("", b"")


def bearer(authorization: str | None) -> str:
    """The key in an Authorization header. Raises Unauthorized when there is none."""
    if authorization is None:
        raise Unauthorized(f"no key; {HOW}")
    scheme, _, key = authorization.partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key:
        raise Unauthorized(f"the Authorization header holds no bearer key; {HOW}")
    return key
