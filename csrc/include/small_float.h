// SPDX-License-Identifier: Apache-2.0
// Conversions between float and the small formats of KV caches, in integer arithmetic that host and device
// share, so that both round alike (to nearest, ties to even).
#pragma once

#include <cstdint>
#include <cstring>

#include "host_device.h"

namespace kvcache {

KVCACHE_INLINE uint32_t bits_of(float value) {
#if defined(__CUDA_ARCH__)
    return __float_as_uint(value);
#else
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
#endif
}

KVCACHE_INLINE float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
#endif
}

// A format of one sign bit, kExponent and kMantissa bits with IEEE's bias.
//   kInfinity: the highest exponent is infinity and NaN; else (e4m3fn) it is used for numbers but for all
//   ones, a NaN. kSaturate: a number too large becomes the largest one, else infinity.
template <class Bits, int kExponent, int kMantissa, bool kInfinity, bool kSaturate>
struct SmallFloat {
    using Storage = Bits;
    static constexpr uint32_t kBias = (1u << (kExponent - 1)) - 1;
    static constexpr uint32_t kSign = 1u << (kExponent + kMantissa);
    static constexpr uint32_t kHighest = (1u << kExponent) - 1;
    static constexpr uint32_t kNan =
        kInfinity ? (kHighest << kMantissa) | (1u << (kMantissa - 1)) : kSign - 1;
    static constexpr uint32_t kMost = kInfinity ? (kHighest << kMantissa) - 1 : kSign - 2;

    static KVCACHE_INLINE float widen(Bits stored) {
        const uint32_t magnitude = stored & (kSign - 1), sign = (stored & kSign) ? 0x80000000u : 0;
        const uint32_t exponent = magnitude >> kMantissa, mantissa = magnitude & ((1u << kMantissa) - 1);
        if (kInfinity ? exponent == kHighest : magnitude == kNan)
            return float_of(sign | 0x7f800000u | (mantissa << (23 - kMantissa)));
        if (exponent == 0) {  // subnormal: exact in float
            const float unit = float_of((127 + 1 - kBias - kMantissa) << 23);
            const float value = static_cast<float>(mantissa) * unit;
            return float_of(sign | bits_of(value));
        }
        return float_of(sign | ((exponent + 127 - kBias) << 23) | (mantissa << (23 - kMantissa)));
    }

    static KVCACHE_INLINE Bits narrow(float value) {
        const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
        const uint32_t sign = (bits >> 31) ? kSign : 0;
        if (magnitude > 0x7f800000u) return static_cast<Bits>(sign | kNan);
        const uint32_t most = kSaturate || !kInfinity ? kMost : kHighest << kMantissa;
        uint32_t rounded;
        const int32_t exponent = static_cast<int32_t>(magnitude >> 23) - 127 + static_cast<int32_t>(kBias);
        if (exponent >= 1) {
            const uint32_t shift = 23 - kMantissa;
            const uint32_t odd = (magnitude >> shift) & 1;
            const uint32_t base = magnitude - ((127 - kBias) << 23);
            rounded = (base + (1u << (shift - 1)) - 1 + odd) >> shift;
        } else {
            const int32_t shift = 23 - kMantissa + 1 - exponent;
            const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;  // a float subnormal is far below
            if (shift > 24) return static_cast<Bits>(sign);
            const uint32_t odd = (mantissa >> shift) & 1;
            rounded = (mantissa + (1u << (shift - 1)) - 1 + odd) >> shift;
        }
        return static_cast<Bits>(sign | (rounded > most ? most : rounded));
    }
};

using Half = SmallFloat<uint16_t, 5, 10, true, false>;
using Float8E4M3 = SmallFloat<uint8_t, 4, 3, false, true>;
using Float8E5M2 = SmallFloat<uint8_t, 5, 2, true, true>;

// The upper half of a float.
struct BFloat16 {
    using Storage = uint16_t;
    static KVCACHE_INLINE float widen(uint16_t stored) {
        return float_of(static_cast<uint32_t>(stored) << 16);
    }
    static KVCACHE_INLINE uint16_t narrow(float value) {
        const uint32_t bits = bits_of(value);
        if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
        return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
    }
};

struct Single {
    using Storage = float;
    static KVCACHE_INLINE float widen(float stored) { return stored; }
    static KVCACHE_INLINE float narrow(float value) { return value; }
};

}  // namespace kvcache
