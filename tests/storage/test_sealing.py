# SPDX-License-Identifier: Apache-2.0
"""Sealing: only who has the key reads it, only what was sealed is read, and keys can be changed."""

from __future__ import annotations

import base64
import os
import random
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvcache.memory.formats import KVShape
from kvcache.storage.object_format import ObjectFormatError, decode_header, encode_object, open_object
from kvcache.storage.sealing import Sealer, SealError
from kvcache.storage.tier import StoredObject
from kvcache.tokens.keys import CacheEngineKey

SHAPE = KVShape(num_layers=3, kv_planes=2, hidden=500, dtype=torch.float16, chunk_tokens=64)


def new_key() -> str:
    return base64.b64encode(os.urandom(32)).decode()


def write_keys(path: Path, *lines: str, mode: int = 0o440) -> Path:
    """Puts another file in its place, as Kubernetes does."""
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(line + "\n" for line in lines))
    fresh.chmod(mode)
    fresh.replace(path)
    return path


def make(tokens: int) -> StoredObject:
    rng = random.Random()
    key = CacheEngineKey(rng.randbytes(16), rng.randbytes(16), 1)
    return StoredObject(key, tokens, memoryview(rng.randbytes(tokens * SHAPE.token_bytes)))


@pytest.mark.parametrize("tokens", [1, 44, 64])
def test_sealed_payload_opens_to_itself_and_shows_nothing(tmp_path: Path, tokens: int) -> None:
    key = new_key()
    sealer = Sealer(write_keys(tmp_path / "keys", f"2026-03 {key}"))
    obj = make(tokens)
    header, stored = encode_object(obj, SHAPE, sealer)
    cipher = bytes(stored)
    assert len(cipher) == obj.payload.nbytes
    assert cipher[:64] not in bytes(obj.payload)
    # An implementation of its own reads it by the documented offsets.
    plain = AESGCM(base64.b64decode(key)).decrypt(header[168:180], cipher + header[184:200], header[:184])
    assert plain == obj.payload
    assert header[152:168].rstrip(b"\0") == b"2026-03"
    target = memoryview(bytearray(cipher))
    open_object(header, target, obj.key, SHAPE, sealer)
    assert target == obj.payload


def test_nonces_differ(tmp_path: Path) -> None:
    sealer = Sealer(write_keys(tmp_path / "keys", f"a {new_key()}"))
    obj = make(2)
    sealed = [encode_object(obj, SHAPE, sealer) for _ in range(50)]
    assert len({one.header[168:180] for one in sealed}) == 50
    assert len({bytes(one.payload) for one in sealed}) == 50


def test_header_cannot_be_moved_to_another_payload(tmp_path: Path) -> None:
    """Somebody without the key swaps the headers' key and mends all checksums: the tag tells."""
    sealer = Sealer(write_keys(tmp_path / "keys", f"a {new_key()}"))
    obj = make(3)
    header, stored = encode_object(obj, SHAPE, sealer)
    forged = decode_header(header)
    associated = bytearray(forged.associated)
    associated[56] ^= 1  # the tenant
    assert forged.seal is not None
    with pytest.raises(SealError) as error:
        sealer.unseal(forged.seal, forged.tag, bytes(associated), memoryview(bytearray(stored)))
    assert not error.value.key_missing


def test_rotation_reads_old_and_writes_new(tmp_path: Path) -> None:
    path, old, new = tmp_path / "keys", f"old {new_key()}", f"new {new_key()}"
    sealer = Sealer(write_keys(path, old))
    before = make(5)
    header_before, stored_before = encode_object(before, SHAPE, sealer)
    write_keys(path, "# since today", new, "", old)
    after = make(5)
    header_after, stored_after = encode_object(after, SHAPE, sealer)
    assert header_after[152:168].rstrip(b"\0") == b"new"
    for obj, header, stored in ((before, header_before, stored_before), (after, header_after, stored_after)):
        target = memoryview(bytearray(stored))
        open_object(header, target, obj.key, SHAPE, sealer)
        assert target == obj.payload
    write_keys(path, new)
    sealer.begin()
    with pytest.raises(ObjectFormatError, match="sealed by key old, which is not in") as error:
        open_object(header_before, memoryview(bytearray(stored_before)), before.key, SHAPE, sealer)
    assert error.value.reason == "ObjectSealed"


def test_reader_finds_a_key_that_was_added_after_it_started(tmp_path: Path) -> None:
    mine, theirs = f"a {new_key()}", f"b {new_key()}"
    writer = Sealer(write_keys(tmp_path / "theirs", theirs))
    reader = Sealer(write_keys(tmp_path / "mine", mine))
    obj = make(1)
    header, stored = encode_object(obj, SHAPE, writer)
    write_keys(tmp_path / "mine", mine, theirs)
    target = memoryview(bytearray(stored))
    open_object(header, target, obj.key, SHAPE, reader)
    assert target == obj.payload


def test_plain_and_sealed_do_not_mix(tmp_path: Path) -> None:
    sealer = Sealer(write_keys(tmp_path / "keys", f"a {new_key()}"))
    obj = make(2)
    plain, sealed = encode_object(obj, SHAPE), encode_object(obj, SHAPE, sealer)
    with pytest.raises(ObjectFormatError, match="only sealed ones are trusted") as error:
        open_object(plain.header, memoryview(bytearray(plain.payload)), obj.key, SHAPE, sealer)
    assert error.value.reason == "ObjectUnsealed"
    with pytest.raises(ObjectFormatError, match="sealed by key a; its file is") as error:
        open_object(sealed.header, memoryview(bytearray(sealed.payload)), obj.key, SHAPE)
    assert error.value.reason == "ObjectSealed"


def test_another_key_of_the_same_id_opens_nothing(tmp_path: Path) -> None:
    obj = make(2)
    header, stored = encode_object(obj, SHAPE, Sealer(write_keys(tmp_path / "one", f"k {new_key()}")))
    other = Sealer(write_keys(tmp_path / "other", f"k {new_key()}"))
    with pytest.raises(ObjectFormatError, match="key k does not open it"):
        open_object(header, memoryview(bytearray(stored)), obj.key, SHAPE, other)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([], "it holds no key"),
        (["# nothing"], "it holds no key"),
        (["id-alone"], "line 1 is no id with 32 bytes in base64"),
        (["ok " + new_key(), "short " + base64.b64encode(bytes(16)).decode()], "line 2 is no id"),
        (["a-name-of-17-char " + new_key()], "line 1 is no id"),
        (["bad/id " + new_key()], "line 1 is no id"),
        (["k !!!!"], "line 1 is no id"),
        (["k " + new_key(), "k " + new_key()], "line 2 has the id k once more"),
        (["k " + new_key() + " more"], "line 1 is no id"),
        (["# " + 70_000 * "x"], "more than 65536 bytes"),
        (["ключ " + new_key()], "no ASCII text"),
    ],
)
def test_bad_key_file_is_named_and_shows_no_key(tmp_path: Path, lines: list[str], problem: str) -> None:
    path = write_keys(tmp_path / "keys", *lines)
    with pytest.raises(ValueError, match=problem) as error:
        Sealer(path)
    assert str(path) in str(error.value)
    secrets = [line.split()[1] for line in lines if len(line.split()) > 1 and not line.startswith("#")]
    assert not any(secret in str(error.value) for secret in secrets)


@pytest.mark.parametrize("mode", [0o444, 0o604, 0o460, 0o666])
def test_key_file_of_everybody_is_refused(tmp_path: Path, mode: int) -> None:
    path = write_keys(tmp_path / "keys", f"a {new_key()}", mode=mode)
    with pytest.raises(ValueError, match=f"mode {mode:04o} lets others read or change it; chmod 0440"):
        Sealer(path)


def test_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"keys: cannot be read \(No such file"):
        Sealer(tmp_path / "keys")
    with pytest.raises(ValueError, match="it is no file"):
        Sealer(tmp_path)


def test_change_that_is_no_good_leaves_the_keys_of_before(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys", f"a {new_key()}")
    sealer = Sealer(path)
    write_keys(path, "oops")
    obj = make(1)
    header, stored = encode_object(obj, SHAPE, sealer)
    assert "line 1 is no id" in sealer.problem
    target = memoryview(bytearray(stored))
    open_object(header, target, obj.key, SHAPE, sealer)
    assert target == obj.payload
    path.unlink()
    assert encode_object(obj, SHAPE, sealer).header[152:153] == b"a"
    assert "cannot be read" in sealer.problem
