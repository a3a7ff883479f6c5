// SPDX-License-Identifier: Apache-2.0
// In steps of simple loops over a few elements, which compilers turn into vector code.
#include "row_codec.h"

#include <algorithm>
#include <cstring>

namespace kvcache {
namespace {

constexpr int64_t kStep = 256;  // elements

// The codes of at most kStep elements; how many of these are exceptions.
uint32_t codes_of(const uint16_t* row, int64_t count, uint16_t base, uint8_t* codes) {
    uint16_t wide[kStep], exceptions = 0;
    for (int64_t i = 0; i < count; ++i) {
        const auto exponent = static_cast<uint16_t>(exponent_of(row[i]));
        const auto below = static_cast<uint16_t>(base - exponent);  // huge where it is above
        const bool zero = exponent == 0, near = below < kZeroCode;
        wide[i] = static_cast<uint16_t>(near && !zero ? below : kZeroCode);
        exceptions = static_cast<uint16_t>(exceptions + (!near && !zero));
    }
    for (int64_t i = 0; i < count / 2; ++i)
        codes[i] = static_cast<uint8_t>(wide[2 * i] | wide[2 * i + 1] << 4);
    return exceptions;
}

}  // namespace

bool encode_row(const uint16_t* row, int64_t elements, uint8_t* coded) {
    uint16_t base = 0;
    for (int64_t i = 0; i < elements; ++i) {
        const auto exponent = static_cast<uint16_t>(exponent_of(row[i]));
        base = std::max(base, exponent == kInfinite ? uint16_t{0} : exponent);
    }
    for (int64_t i = 0; i < elements; ++i) coded[i] = static_cast<uint8_t>(sign_and_mantissa(row[i]));
    uint8_t* const codes = coded + elements;
    uint32_t exceptions = code_exceptions(elements) + 1;
    for (uint32_t tried = 0; tried < kBases && exceptions > code_exceptions(elements); ++tried) {
        if (tried > 0 && base-- == 0) break;
        exceptions = 0;
        for (int64_t i = 0; i < elements; i += kStep)
            exceptions += codes_of(row + i, std::min(kStep, elements - i), base, codes + i / 2);
    }

    uint8_t* const header = codes + elements / 2;
    std::memset(header, 0, static_cast<size_t>(code_header_bytes(elements)));
    if (exceptions > code_exceptions(elements)) return false;
    const auto count = static_cast<uint16_t>(exceptions);
    header[0] = static_cast<uint8_t>(base);
    std::memcpy(header + 2, &count, sizeof count);
    for (int64_t i = 0, written = 0; written < count; ++i) {
        if (!is_exception(exponent_of(row[i]), base)) continue;
        const uint16_t entry[2] = {static_cast<uint16_t>(i), row[i]};
        std::memcpy(header + 4 * ++written, entry, sizeof entry);
    }
    return true;
}

void decode_row(const uint8_t* coded, int64_t elements, uint16_t* row) {
    const uint8_t* const codes = coded + elements;
    const uint8_t* const header = codes + elements / 2;
    const uint16_t base = header[0];
    for (int64_t i = 0; i < elements; i += 2) {
        row[i] = codes[i / 2] & 15;
        row[i + 1] = codes[i / 2] >> 4;
    }
    for (int64_t i = 0; i < elements; ++i) row[i] = static_cast<uint16_t>(element_of(coded[i], row[i], base));
    uint16_t count;
    std::memcpy(&count, header + 2, sizeof count);
    const uint32_t exceptions = std::min<uint32_t>(count, code_exceptions(elements));
    for (uint32_t i = 1; i <= exceptions; ++i) {
        uint16_t entry[2];
        std::memcpy(entry, header + 4 * i, sizeof entry);
        if (entry[0] < elements) row[entry[0]] = entry[1];
    }
}

}  // namespace kvcache
