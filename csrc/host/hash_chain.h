// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>

#include "hashing.h"

namespace kvcache {

using HashSecret = std::array<uint8_t, 192>;

// The chain of chunk_hashes for `chunks` chunks; digests has room for 16 bytes each.
using HashChain = void (*)(const int32_t* tokens, size_t count, size_t chunk_size, size_t chunks,
                           const Digest& parent, const HashSecret& secret, char* digests);

// hash_chain.cpp, compiled for every processor, and on x86-64 once more for those with AVX2.
void hash_chain(const int32_t* tokens, size_t count, size_t chunk_size, size_t chunks, const Digest& parent,
                const HashSecret& secret, char* digests);
void hash_chain_avx2(const int32_t* tokens, size_t count, size_t chunk_size, size_t chunks,
                     const Digest& parent, const HashSecret& secret, char* digests);

}  // namespace kvcache
