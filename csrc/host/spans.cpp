// SPDX-License-Identifier: Apache-2.0
#include "spans.h"

#include <cstring>

namespace kvcache {

void host_copy(const std::vector<Span>& to, const std::vector<Span>& from) {
    for (size_t i = 0; i < to.size(); ++i)
        std::memcpy(reinterpret_cast<void*>(to[i].address), reinterpret_cast<const void*>(from[i].address),
                    to[i].bytes);
}

void host_zero(const std::vector<Span>& spans) {
    for (const Span& span : spans) std::memset(reinterpret_cast<void*>(span.address), 0, span.bytes);
}

}  // namespace kvcache
