// SPDX-License-Identifier: Apache-2.0
// Byte ranges: copies between them, and zeros for the rows of gaps between chunks.
#pragma once

#include <cstdint>
#include <vector>

namespace kvcache {

struct Span {
    uint64_t address;
    uint64_t bytes;
};

// Bytes of `from[i]` to `to[i]`; both lists have as many spans of the same sizes.
void host_copy(const std::vector<Span>& to, const std::vector<Span>& from);
void host_zero(const std::vector<Span>& spans);

// Queued on `stream`, which for copies must not be the default stream.
void cuda_copy(const std::vector<Span>& to, const std::vector<Span>& from, int device, uint64_t stream);
void cuda_zero(const std::vector<Span>& spans, int device, uint64_t stream);

}  // namespace kvcache
