// SPDX-License-Identifier: Apache-2.0
// A row (one token's keys or values of one layer) of bfloat16, coded without loss into some 0.81 of its
// bytes, of which most rows of 1,024 elements use 0.70.
//
// The exponents of a row lie close together: the largest (base) is written once, and each element as sign and
// mantissa (8 bits) and by how much its exponent is smaller (3 bits). Those that are smaller by 7 and more
// escape: their exponents are written behind all codes. Where they are too many, for a few elements are much
// larger than all others, as those of some channels of keys are, a smaller base is taken: these escape
// instead. E elements, a multiple of 32; n = code_escapes(E):
//
// | offset      | bytes | what                                                                      |
// |-------------|-------|---------------------------------------------------------------------------|
// | 0           | E     | of each element the sign (bit 7) and the mantissa                         |
// | E           | E / 4 | of each 16 elements 4 bytes with the lower two bits of the codes: those   |
// |             |       | of element i in byte i mod 4, from bit 2 (i / 4) on                       |
// | 1.25 E      | E / 8 | of each 16 elements 2 bytes with the third bits: element i's is bit       |
// |             |       | 4 (i mod 4) + i / 4                                                       |
// | 1.375 E     | 1     | base: of the largest exponent below 255 and the 15 before it the largest  |
// |             |       | over which at most n elements escape                                      |
// | 1.375 E + 1 | n     | exponents of the elements that escape, in their order; zeros behind them  |
//
// The code is base - exponent (mod 256) up to 6, and 7 where the element escapes. All integers are
// little-endian. A row without such a base has no code. There is room for many to escape, which keys of real
// models need in a row here and there; most need little of it, and kernels read no more than that. Whoever
// changes what a code means gives it another number in the namespace (kvcache/integration/vllm/identity.py).
#pragma once

#include <cstdint>

#include "host_device.h"

namespace kvcache {

constexpr int64_t kCodedElements = 32;  // a row has a multiple of so many
constexpr int64_t kLongestCodedRow = 65536;

// Where the parts of a row lie: the tail, of base and exponents, from a multiple of 4 bytes on.
KVCACHE_INLINE int64_t third_bits_offset(int64_t elements) { return elements + elements / 4; }
KVCACHE_INLINE int64_t code_tail_offset(int64_t elements) {
    return third_bits_offset(elements) + elements / 8;
}
KVCACHE_INLINE int64_t code_tail_bytes(int64_t elements) {
    return elements / 8 + (elements + 127) / 128 * 16;
}
KVCACHE_INLINE int64_t coded_row_bytes(int64_t elements) {
    return code_tail_offset(elements) + code_tail_bytes(elements);
}
KVCACHE_INLINE uint32_t code_escapes(int64_t elements) {
    return static_cast<uint32_t>(code_tail_bytes(elements) - 1);
}

constexpr uint32_t kBases = 16;  // that are tried

constexpr uint32_t kInfinite = 255;  // exponent of what is not finite: no base
constexpr uint32_t kEscape = 7;

KVCACHE_INLINE uint32_t exponent_of(uint32_t element) { return element >> 7 & 255; }
KVCACHE_INLINE uint32_t sign_and_mantissa(uint32_t element) {
    return (element >> 8 & 0x80) | (element & 0x7f);
}
KVCACHE_INLINE uint32_t code_of(uint32_t exponent, uint32_t base) {
    const uint32_t below = (base - exponent) & 255;
    return below < kEscape ? below : kEscape;
}
KVCACHE_INLINE uint32_t element_of(uint32_t sign_mantissa, uint32_t exponent) {
    return (sign_mantissa & 0x80) << 8 | exponent << 7 | (sign_mantissa & 0x7f);
}

// Codes of 16 elements are read and written four at a time, a byte each in a word: elements 4 j to 4 j + 3,
// the first one in the lowest byte. `third` has their third bits where `lower` has the first of the other
// two.
constexpr uint32_t kEach = 0x01010101;
constexpr uint32_t kHighBits = 0x80808080;

// 16 bits to the even ones of a word, and back.
KVCACHE_INLINE uint32_t apart(uint32_t bits) {
    bits = (bits | bits << 8) & 0x00ff00ff;
    bits = (bits | bits << 4) & 0x0f0f0f0f;
    bits = (bits | bits << 2) & 0x33333333;
    return (bits | bits << 1) & 0x55555555;
}
KVCACHE_INLINE uint32_t together(uint32_t bits) {
    bits = (bits | bits >> 1) & 0x33333333;
    bits = (bits | bits >> 2) & 0x0f0f0f0f;
    bits = (bits | bits >> 4) & 0x00ff00ff;
    return (bits | bits >> 8) & 0xffff;
}

KVCACHE_INLINE uint32_t codes_at(uint32_t lower, uint32_t third, uint32_t j) {
    return (lower >> 2 * j & 3 * kEach) | (third >> 2 * j & kEach) << 2;
}
// What four codes add to both.
KVCACHE_INLINE uint32_t lower_bits(uint32_t codes, uint32_t j) { return (codes & 3 * kEach) << 2 * j; }
KVCACHE_INLINE uint32_t third_bits(uint32_t codes, uint32_t j) { return (codes >> 2 & kEach) << 2 * j; }
// Exponents of four elements that do not escape. Nothing is carried between bytes.
KVCACHE_INLINE uint32_t exponents_of(uint32_t codes, uint32_t bases) {
    return ((bases | kHighBits) - codes) ^ (~bases & kHighBits);
}
// Bit 2 j of each byte where an element escapes.
KVCACHE_INLINE uint32_t escapes_of(uint32_t lower, uint32_t third) { return lower & lower >> 1 & third; }

// The host's: `coded` has coded_row_bytes(elements). encode_row returns false, having written something,
// where the row has no code.
bool encode_row(const uint16_t* row, int64_t elements, uint8_t* coded);
void decode_row(const uint8_t* coded, int64_t elements, uint16_t* row);

}  // namespace kvcache
