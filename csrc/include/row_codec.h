// SPDX-License-Identifier: Apache-2.0
// A row (one token's keys or values of one layer) of bfloat16, coded without loss into some 0.81 of its
// bytes.
//
// The exponents of a row lie close together: the largest (base) is written once, and each element as sign and
// mantissa (8 bits) and by how much its exponent is smaller (4 bits). The few that are smaller by 15 and more
// are written once again as they are. Where they are too many, for a few elements are much larger than all
// others, as those of some channels of keys are, a smaller base is taken: these become exceptions instead.
// E elements, a multiple of 32; n = code_exceptions(E):
//
// | offset    | bytes | what                                                                        |
// |-----------|-------|-----------------------------------------------------------------------------|
// | 0         | E     | of each element the sign (bit 7) and the mantissa                           |
// | E         | E / 2 | of each element the code, in the low half the even one's: base - exponent   |
// |           |       | up to 14; 15 for the exponent 0 (zeros, subnormals) and for exceptions      |
// | 1.5 E     | 1     | base: of the largest exponent below 255 and the 15 before it the largest    |
// |           |       | with at most n exceptions                                                   |
// | 1.5 E + 1 | 1     | 0                                                                           |
// | 1.5 E + 2 | 2     | number of exceptions, at most n                                             |
// | 1.5 E + 4 | 4 n   | exceptions by index: 2 bytes index, 2 bytes element; zeros behind them      |
//
// All integers are little-endian. A row without such a base has no code. Whoever changes what a code means
// gives it another number in the namespace (kvcache/integration/vllm/identity.py).
#pragma once

#include <cstdint>

#include "host_device.h"

namespace kvcache {

constexpr int64_t kCodedElements = 32;  // a row has a multiple of so many
constexpr int64_t kLongestCodedRow = 65536;

KVCACHE_INLINE int64_t code_header_bytes(int64_t elements) { return (elements + 127) / 128 * 16; }
KVCACHE_INLINE int64_t coded_row_bytes(int64_t elements) {
    return elements + elements / 2 + code_header_bytes(elements);
}
KVCACHE_INLINE uint32_t code_exceptions(int64_t elements) {
    return static_cast<uint32_t>(code_header_bytes(elements) / 4 - 1);
}

constexpr uint32_t kBases = 16;  // that are tried

constexpr uint32_t kInfinite = 255;  // exponent of what is not finite: always an exception
constexpr uint32_t kZeroCode = 15;   // exponent 0: zeros and what is too small for a leading 1

KVCACHE_INLINE uint32_t exponent_of(uint32_t element) { return element >> 7 & 255; }
KVCACHE_INLINE uint32_t sign_and_mantissa(uint32_t element) {
    return (element >> 8 & 0x80) | (element & 0x7f);
}
KVCACHE_INLINE bool is_exception(uint32_t exponent, uint32_t base) {
    return exponent != 0 && (exponent > base || base - exponent >= kZeroCode);
}
KVCACHE_INLINE uint32_t code_of(uint32_t exponent, uint32_t base) {
    return exponent == 0 || is_exception(exponent, base) ? kZeroCode : base - exponent;
}
KVCACHE_INLINE uint32_t element_of(uint32_t sign_mantissa, uint32_t code, uint32_t base) {
    const uint32_t exponent = code == kZeroCode ? 0 : (base - code) & 255;
    return (sign_mantissa & 0x80) << 8 | exponent << 7 | (sign_mantissa & 0x7f);
}

// The host's: `coded` has coded_row_bytes(elements). encode_row returns false, having written something,
// where the row has no code.
bool encode_row(const uint16_t* row, int64_t elements, uint8_t* coded);
void decode_row(const uint8_t* coded, int64_t elements, uint16_t* row);

}  // namespace kvcache
