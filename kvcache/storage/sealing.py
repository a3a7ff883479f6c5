# SPDX-License-Identifier: Apache-2.0
"""Sealing of objects at rest by AES-256-GCM, with the keys of a file.

The file has one key a line, the newest first: an id of 1 to 16 letters, digits, `.`, `_` or `-`, and 32
random bytes in base64. Empty lines and lines that begin with `#` do not count. To make one:

    echo "2026-03 $(openssl rand -base64 32)" > keys && chmod 0440 keys

Objects are sealed by the first key and opened by whichever sealed them. To rotate, put a new line above the
others, and drop the old one when the objects that it sealed have left. The file is read again when it
changes. It must not be readable for everybody (a Kubernetes Secret: `defaultMode: 0440`).

Nonces are 96 random bits, so a key is good for 2^32 objects (NIST SP 800-38D, 8.3).
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
import threading
from pathlib import Path
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

KEY_ID_BYTES = 16
NONCE_BYTES = 12
TAG_BYTES = 16
MAX_KEY_FILE_BYTES = 64 << 10

_KEY_BYTES = 32
_ID = re.compile(r"[A-Za-z0-9._-]{1,16}")
_PIECE = 256 << 10
"""Bytes sealed in one call: others get the interpreter between two of them."""


class Seal(NamedTuple):
    """What opens a sealed payload, apart from the key."""

    key_id: bytes
    """16 bytes: the id in ASCII with zeros behind."""
    nonce: bytes
    """12 bytes."""


class SealError(ValueError):
    """A payload could not be opened: its key is missing (`key_missing`), or it was not sealed by that key."""

    def __init__(self, text: str, *, key_missing: bool = False) -> None:
        super().__init__(text)
        self.key_missing = key_missing


class Sealer:
    """Seals and opens payloads with the keys of a file. Thread-safe.

    Raises:
        ValueError: the file cannot be read, may be read by everybody, or holds something else than keys.
            Later changes that are no good are not taken up: the keys of before stay, and `problem` says why.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()
        self._version: tuple[int, ...] = ()
        self._keys: dict[bytes, bytes] = {}
        self.problem = ""
        self._refresh()
        if self.problem:
            raise ValueError(self.problem)

    def begin(self) -> Seal:
        """A nonce that was never used, for the newest key."""
        self._refresh()
        with self._lock:
            return Seal(next(iter(self._keys)), os.urandom(NONCE_BYTES))

    def seal(self, seal: Seal, associated: bytes, payload: memoryview, out: memoryview) -> bytes:
        """Writes the ciphertext of `payload` into `out`, of the same length.

        Args:
            seal: of `begin`, each used once.
            associated: what the tag vouches for besides.

        Returns:
            The tag, 16 bytes.

        Raises:
            ValueError: `out` has another length.
            SealError: the key was dropped from the file meanwhile.
        """
        if out.nbytes != payload.nbytes:
            raise ValueError(f"{out.nbytes} bytes for a ciphertext of {payload.nbytes}; give as many")
        context = Cipher(algorithms.AES(self._key(seal.key_id)), modes.GCM(seal.nonce)).encryptor()
        context.authenticate_additional_data(associated)
        _run(context, payload, out)
        context.finalize()
        return context.tag

    def unseal(self, seal: Seal, tag: bytes, associated: bytes, payload: memoryview) -> None:
        """Makes plain text of a ciphertext, in place.

        Raises:
            SealError: the key is not in the file, or tag, associated data and ciphertext do not belong
                together. The memory is undefined then.
        """
        key = self._key(seal.key_id)
        context = Cipher(algorithms.AES(key), modes.GCM(seal.nonce, tag)).decryptor()
        context.authenticate_additional_data(associated)
        _run(context, payload, payload)
        try:
            context.finalize()
        except InvalidTag:
            raise SealError(
                f"key {key_name(seal.key_id)} does not open it: it was changed, or that id was another key"
            ) from None

    def _key(self, key_id: bytes) -> bytes:
        if key_id not in self._keys:
            self._refresh()
        with self._lock:
            key = self._keys.get(key_id)
        if key is None:
            raise SealError(
                f"it is sealed by key {key_name(key_id)}, which is not in {self._path}; add it to read it",
                key_missing=True,
            )
        return key

    def _refresh(self) -> None:
        """Reads the file if it was changed or replaced."""
        with self._lock:
            try:
                status = self._path.stat()
                version = (
                    status.st_dev,
                    status.st_ino,
                    status.st_mtime_ns,
                    status.st_ctime_ns,
                    status.st_size,
                )
                if version == self._version:
                    return
                self._version = version
                self._keys = _read(self._path, status)
                self.problem = ""
            except OSError as error:
                self._version = ()
                self.problem = f"{self._path}: cannot be read ({error.strerror}); mount the file of keys"
            except ValueError as error:
                self.problem = f"{self._path}: {error}"


def key_name(key_id: bytes) -> str:
    """The id as it stands in the file; in hex if it is none."""
    text = key_id.rstrip(b"\0")
    return text.decode() if text.isascii() and _ID.fullmatch(text.decode()) else key_id.hex()


def _run(context: CipherContext, source: memoryview, target: memoryview) -> None:
    for start in range(0, source.nbytes, _PIECE):
        piece = slice(start, start + _PIECE)
        context.update_into(source[piece], target[piece])


def _read(path: Path, status: os.stat_result) -> dict[bytes, bytes]:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is no file; name a file with keys")
    if status.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise ValueError(
            f"mode {stat.S_IMODE(status.st_mode):04o} lets others read or change it; chmod 0440 (a Secret: "
            "defaultMode: 0440)"
        )
    with path.open("rb") as file:
        data = file.read(MAX_KEY_FILE_BYTES + 1)
    if len(data) > MAX_KEY_FILE_BYTES or not data.isascii():
        raise ValueError(f"it has more than {MAX_KEY_FILE_BYTES} bytes or is no ASCII text; write keys only")
    keys: dict[bytes, bytes] = {}
    for number, line in enumerate(data.decode().splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        key = _decode(words[1]) if len(words) == 2 else None
        if key is None or not _ID.fullmatch(words[0]):  # never the line itself: it may hold a key
            raise ValueError(f"line {number} is no id with {_KEY_BYTES} bytes in base64 behind it; mend it")
        key_id = words[0].encode().ljust(KEY_ID_BYTES, b"\0")
        if key_id in keys:
            raise ValueError(f"line {number} has the id {words[0]} once more; give each key its own")
        keys[key_id] = key
    if not keys:
        raise ValueError("it holds no key; write a line such as: 2026-03 BASE64-OF-32-RANDOM-BYTES")
    return keys


def _decode(text: str) -> bytes | None:
    try:
        key = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return key if len(key) == _KEY_BYTES else None
