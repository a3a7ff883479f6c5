# SPDX-License-Identifier: Apache-2.0
"""XXH3-128 with a secret in plain Python, after the xxHash specification: the reference for the native hash.

Slow. Inputs of 17 bytes and more only. test_hashing holds it against the `xxhash` package.
"""

from __future__ import annotations

import struct

M64 = (1 << 64) - 1
P32_1, P32_2, P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
P64_1, P64_2, P64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
P64_4, P64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
MX1 = 0x165667919E3779F9

DEFAULT_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def _u32(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])


def _u64(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<Q", data, at)[0])


def _fold(a: int, b: int) -> int:
    product = a * b
    return (product & M64) ^ (product >> 64)


def _avalanche(h: int) -> int:
    h ^= h >> 37
    h = h * MX1 & M64
    return h ^ (h >> 32)


def _mix16(data: bytes, at: int, secret: bytes, key: int) -> int:
    return _fold(_u64(data, at) ^ _u64(secret, key), _u64(data, at + 8) ^ _u64(secret, key + 8))


def _mix32(acc: tuple[int, int], data: bytes, one: int, two: int, secret: bytes, key: int) -> tuple[int, int]:
    low = (acc[0] + _mix16(data, one, secret, key)) & M64
    low ^= (_u64(data, two) + _u64(data, two + 8)) & M64
    high = (acc[1] + _mix16(data, two, secret, key + 16)) & M64
    high ^= (_u64(data, one) + _u64(data, one + 8)) & M64
    return low, high


def _finish_short(acc: tuple[int, int], length: int) -> bytes:
    low = (acc[0] + acc[1]) & M64
    high = (acc[0] * P64_1 + acc[1] * P64_4 + length * P64_2) & M64
    return struct.pack(">QQ", -_avalanche(high) & M64, _avalanche(low))


def _short(data: bytes, secret: bytes) -> bytes:
    length = len(data)
    acc = (length * P64_1 & M64, 0)
    for i in range((length - 1) // 32, -1, -1):
        acc = _mix32(acc, data, 16 * i, length - 16 * (i + 1), secret, 32 * i)
    return _finish_short(acc, length)


def _medium(data: bytes, secret: bytes) -> bytes:
    length = len(data)
    acc = (length * P64_1 & M64, 0)
    for i in range(4):
        acc = _mix32(acc, data, 32 * i, 32 * i + 16, secret, 32 * i)
    acc = (_avalanche(acc[0]), _avalanche(acc[1]))
    for i in range(4, length // 32):
        acc = _mix32(acc, data, 32 * i, 32 * i + 16, secret, 3 + 32 * (i - 4))
    acc = _mix32(acc, data, length - 16, length - 32, secret, 136 - 17 - 16)
    return _finish_short(acc, length)


def _accumulate(acc: list[int], data: bytes, at: int, secret: bytes, key: int) -> None:
    for lane in range(8):
        value = _u64(data, at + 8 * lane)
        keyed = value ^ _u64(secret, key + 8 * lane)
        acc[lane ^ 1] = (acc[lane ^ 1] + value) & M64
        acc[lane] = (acc[lane] + (keyed & 0xFFFFFFFF) * (keyed >> 32)) & M64


def _merge(acc: list[int], secret: bytes, key: int, start: int) -> int:
    total = start
    for i in range(4):
        total += _fold(
            acc[2 * i] ^ _u64(secret, key + 16 * i), acc[2 * i + 1] ^ _u64(secret, key + 16 * i + 8)
        )
    return _avalanche(total & M64)


def _long(data: bytes, secret: bytes) -> bytes:
    acc = [P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1]
    length, per_block = len(data), (len(secret) - 64) // 8
    blocks = (length - 1) // (64 * per_block)
    for block in range(blocks):
        for stripe in range(per_block):
            _accumulate(acc, data, 64 * (block * per_block + stripe), secret, 8 * stripe)
        for lane in range(8):
            scrambled = acc[lane] ^ (acc[lane] >> 47) ^ _u64(secret, len(secret) - 64 + 8 * lane)
            acc[lane] = scrambled * P32_1 & M64
    done = blocks * per_block
    for stripe in range((length - 1) // 64 - done):
        _accumulate(acc, data, 64 * (done + stripe), secret, 8 * stripe)
    _accumulate(acc, data, length - 64, secret, len(secret) - 64 - 7)
    low = _merge(acc, secret, 11, length * P64_1 & M64)
    high = _merge(acc, secret, len(secret) - 64 - 11, ~(length * P64_2) & M64)
    return struct.pack(">QQ", high, low)


def xxh3_128(data: bytes, secret: bytes = DEFAULT_SECRET) -> bytes:
    """The canonical (big-endian) digest of 17 bytes or more."""
    if len(data) <= 16:
        raise ValueError("only 17 bytes and more are implemented")
    if len(data) <= 128:
        return _short(data, secret)
    if len(data) <= 240:
        return _medium(data, secret)
    return _long(data, secret)
