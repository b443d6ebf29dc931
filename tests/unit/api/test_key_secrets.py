"""A secret shows in no repr and no error: of what holds one today, and of whatever will by its name."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import traceback
from collections.abc import Iterator

import pytest

import api
from api.access.key_shape import _checksum, digest, mint
from api.access.keys import Keys
from api.errors import Unauthorized
from tests.fakes import FakeKeys

#: Fields that hold a secret or what one is checked by.
TELLING = ("secret", "authorization", "password", "sha256", "bearer")
#: Digests of what is no secret.
PUBLIC = {"artifact_sha256"}


def classes() -> Iterator[type]:
    for module in pkgutil.walk_packages(api.__path__, "api."):
        if module.name != "api.__main__":
            for found in vars(importlib.import_module(module.name)).values():
                if isinstance(found, type) and found.__module__ == module.name and dataclasses.is_dataclass(found):
                    yield found


def test_no_field_that_holds_a_secret_is_in_a_repr() -> None:
    seen = [
        (found, field)
        for found in classes()
        for field in dataclasses.fields(found)
        if any(word in field.name for word in TELLING) and field.name not in PUBLIC
    ]
    assert {found.__name__ for found, _ in seen} >= {"MintedKey", "KeyRecord"}
    assert [f"{found.__name__}.{field.name}" for found, field in seen if field.repr] == []


async def test_no_object_and_no_error_on_a_keys_way_shows_it() -> None:
    source = FakeKeys()
    keys = Keys(source, environment="test")
    minted, other = source.add(), mint("test")
    revoked, start = source.add(revoked=True), minted.secret[:21] + other.secret[21:-8]
    caller = await keys.identify(f"Bearer {minted.secret}")
    said = [repr(o) for o in (minted, source.records[minted.key_id], caller, keys, *keys._known.values())]
    wrong = [start + _checksum(start), other.secret, minted.secret[:-1], minted.secret + "x", revoked.secret]
    wrong += [minted.secret.replace("_", "-"), minted.secret[:30] + "!" + minted.secret[31:], f"x {minted.secret}"]
    for key in (*wrong, minted.secret.replace("il_test", "il_live")):
        for header in (f"Bearer {key}", key, f"Basic {key}"):
            with pytest.raises(Unauthorized) as refused:
                await keys.identify(header)
            said.append(repr(refused.value) + refused.value.message + str(refused.value.headers))
            said += [str(line) for line in traceback.format_exception_only(refused.value)]
    for minted_or_wrong in (minted, other, revoked):
        key = minted_or_wrong.secret
        for trace in (key[21:33], key[-8:], digest(key).hex(), repr(digest(key))[2:-1]):
            assert trace not in "".join(said)
