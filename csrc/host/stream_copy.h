// SPDX-License-Identifier: Apache-2.0
// Copies that bypass the cache where that pays: a large gather made of small pieces reads every destination
// line before it writes it, which memcpy avoids for one large copy only.
#pragma once

#include <cstddef>

namespace kvcache {

using Copy = void (*)(void* to, const void* from, size_t bytes);

// memcpy for a batch that fits in the cache, else a copy with non-temporal stores (x86-64 with AVX2 and
// above).
Copy best_copy(size_t batch_bytes);

// Orders non-temporal stores before whatever the caller does next.
void finish_copies();

}  // namespace kvcache
