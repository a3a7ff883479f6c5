// SPDX-License-Identifier: Apache-2.0
// In steps of simple loops over a few elements, which compilers turn into vector code.
#include "row_codec.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace kvcache {
namespace {

constexpr int64_t kStep = 256;     // elements
constexpr int64_t kTogether = 16;  // whose codes share words

// Calls `at` with the index of each of 16 elements that escapes and with its number, from `number` on; the
// number behind the last one.
template <class At>
uint32_t for_escapes(uint32_t lower, uint32_t third, uint32_t number, At at) {
    const uint32_t escapes = escapes_of(lower, third);
    if (escapes == 0) return number;
    for (uint32_t j = 0; j < 4; ++j)
        for (uint32_t found = escapes >> 2 * j & kEach; found != 0; found &= found - 1)
            at(4 * j + static_cast<uint32_t>(std::countr_zero(found)) / 8, number++);
    return number;
}

// The code of a row over `base`, with as many of those that escape as there is room for; how many do.
uint32_t encode_over(uint16_t base, const uint16_t* row, int64_t elements, uint8_t* coded) {
    uint8_t* const all_lower = coded + elements;
    uint8_t* const all_third = coded + third_bits_offset(elements);
    uint8_t* const tail = coded + code_tail_offset(elements);
    const uint32_t room = code_escapes(elements);
    uint32_t escapes = 0;
    for (int64_t first = 0; first < elements; first += kStep) {
        const int64_t count = std::min(kStep, elements - first);
        uint8_t codes[kStep];
        for (int64_t i = 0; i < count; ++i) {
            const uint16_t element = row[first + i];
            coded[first + i] = static_cast<uint8_t>(sign_and_mantissa(element));
            codes[i] = static_cast<uint8_t>(code_of(exponent_of(element), base));
        }
        for (int64_t i = 0; i < count; i += kTogether) {
            uint32_t lower = 0, third = 0;
            for (uint32_t j = 0; j < 4; ++j) {
                uint32_t four;
                std::memcpy(&four, codes + i + 4 * j, sizeof four);
                lower |= lower_bits(four, j);
                third |= third_bits(four, j);
            }
            escapes = for_escapes(lower, third, escapes, [&](uint32_t index, uint32_t number) {
                if (number < room)
                    tail[1 + number] = static_cast<uint8_t>(exponent_of(row[first + i + index]));
            });
            third = together(third);
            std::memcpy(all_lower + (first + i) / 4, &lower, 4);
            std::memcpy(all_third + (first + i) / 8, &third, 2);
        }
    }
    tail[0] = static_cast<uint8_t>(base);
    if (escapes < room) std::memset(tail + 1 + escapes, 0, room - escapes);
    return escapes;
}

}  // namespace

bool encode_row(const uint16_t* row, int64_t elements, uint8_t* coded) {
    uint16_t base = 0;
    for (int64_t i = 0; i < elements; ++i) {
        const auto exponent = static_cast<uint16_t>(exponent_of(row[i]));
        base = std::max(base, exponent == kInfinite ? uint16_t{0} : exponent);
    }
    const uint32_t room = code_escapes(elements);
    bool fits = encode_over(base, row, elements, coded) <= room;
    for (uint32_t tried = 1; tried < kBases && !fits && base > 0; ++tried)
        fits = encode_over(--base, row, elements, coded) <= room;
    return fits;
}

void decode_row(const uint8_t* coded, int64_t elements, uint16_t* row) {
    const uint8_t* const all_lower = coded + elements;
    const uint8_t* const all_third = coded + third_bits_offset(elements);
    const uint8_t* const tail = coded + code_tail_offset(elements);
    const uint32_t base = tail[0];
    const uint32_t room = code_escapes(elements);
    uint32_t escapes = 0;
    for (int64_t first = 0; first < elements; first += kStep) {
        const int64_t count = std::min(kStep, elements - first);
        uint8_t exponents[kStep];
        for (int64_t i = 0; i < count; i += kTogether) {
            uint32_t lower, third = 0;
            std::memcpy(&lower, all_lower + (first + i) / 4, 4);
            std::memcpy(&third, all_third + (first + i) / 8, 2);
            third = apart(third);
            for (uint32_t j = 0; j < 4; ++j) {
                const uint32_t four = exponents_of(codes_at(lower, third, j), base * kEach);
                std::memcpy(exponents + i + 4 * j, &four, sizeof four);
            }
            // No row that was coded here has more of them than there is room for.
            escapes = for_escapes(lower, third, escapes, [&](uint32_t index, uint32_t number) {
                exponents[i + index] = tail[1 + std::min(number, room - 1)];
            });
        }
        for (int64_t i = 0; i < count; ++i)
            row[first + i] = static_cast<uint16_t>(element_of(coded[first + i], exponents[i]));
    }
}

}  // namespace kvcache
