// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>

#include "hashing.h"

namespace kvcache {

using HashSecret = std::array<uint8_t, 192>;

// What hash_chain.cpp makes with one set of vector instructions.
struct HashFunctions {
    // The chain of chunk_hashes for `chunks` chunks; digests has room for 16 bytes each.
    void (*chain)(const int32_t* tokens, size_t count, size_t chunk_size, size_t chunks, const Digest& parent,
                  const HashSecret& secret, char* digests);
    // As xxh3_128 of hashing.h.
    Digest (*pieces)(const void* data, size_t bytes, size_t piece);
};

extern const HashFunctions kHashFunctions;      // for every processor
extern const HashFunctions kHashFunctionsAvx2;  // x86-64 with AVX2 only

}  // namespace kvcache
