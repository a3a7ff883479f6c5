// SPDX-License-Identifier: Apache-2.0
#include "hashing.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>

#include "hash_chain.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvcache {
namespace {

static_assert(std::endian::native == std::endian::little, "tokens are hashed as they lie in memory");

Digest canonical(XXH128_hash_t hash) {
    XXH128_canonical_t bytes;
    XXH128_canonicalFromHash(&bytes, hash);
    Digest digest;
    std::memcpy(digest.data(), bytes.digest, digest.size());
    return digest;
}

HashSecret expand(const Digest& key) {
    HashSecret secret;
    for (size_t n = 0; n < secret.size() / 16; ++n) {
        const Digest part = canonical(XXH3_128bits_withSeed(key.data(), key.size(), n));
        std::copy(part.begin(), part.end(), secret.begin() + static_cast<std::ptrdiff_t>(16 * n));
    }
    return secret;
}

const HashFunctions& hash_functions() {
#if defined(KVCACHE_HASH_AVX2)
    static const bool avx2 = __builtin_cpu_supports("avx2");
    if (avx2) return kHashFunctionsAvx2;
#endif
    return kHashFunctions;
}

}  // namespace

std::string chunk_hashes(const int32_t* tokens, size_t count, size_t chunk_size, const Digest& parent,
                         const Digest& key, bool tail) {
    const size_t chunks = count / chunk_size + (tail && count % chunk_size != 0 ? 1 : 0);
    std::string digests(16 * chunks, '\0');
    hash_functions().chain(tokens, count, chunk_size, chunks, parent, expand(key), digests.data());
    return digests;
}

StreamingHash::StreamingHash() : state_(XXH3_createState()) {
    if (state_ == nullptr) throw std::bad_alloc();
    XXH3_128bits_reset(static_cast<XXH3_state_t*>(state_));
}

StreamingHash::~StreamingHash() { XXH3_freeState(static_cast<XXH3_state_t*>(state_)); }

void StreamingHash::update(const void* data, size_t bytes) {
    XXH3_128bits_update(static_cast<XXH3_state_t*>(state_), data, bytes);
}

Digest StreamingHash::digest() const {
    return canonical(XXH3_128bits_digest(static_cast<const XXH3_state_t*>(state_)));
}

Digest xxh3_128(const void* data, size_t bytes, size_t piece) {
    return hash_functions().pieces(data, bytes, piece);
}

}  // namespace kvcache
