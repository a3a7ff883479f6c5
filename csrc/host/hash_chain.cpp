// SPDX-License-Identifier: Apache-2.0
// Compiled twice (see CMakeLists.txt): XXH3 takes its vector instructions from the compiler's flags.
#include "hash_chain.h"

#include <algorithm>
#include <cstring>

#define XXH_INLINE_ALL
#include <xxhash.h>

#if !defined(KVCACHE_HASH_CHAIN)
#define KVCACHE_HASH_CHAIN hash_chain
#endif

namespace kvcache {

void KVCACHE_HASH_CHAIN(const int32_t* tokens, size_t count, size_t chunk_size, size_t chunks,
                        const Digest& parent, const HashSecret& secret, char* digests) {
    auto big_endian = [](uint64_t word) { return __builtin_bswap64(word); };
    // Parent and chunk in canonical form, as words: bytes would be written and read back in other sizes.
    uint64_t link[4];
    std::memcpy(link, parent.data(), parent.size());
    for (size_t c = 0; c < chunks; ++c) {
        const size_t bytes = std::min(chunk_size, count - c * chunk_size) * sizeof(int32_t);
        const XXH128_hash_t body =
            XXH3_128bits_withSecret(tokens + c * chunk_size, bytes, secret.data(), secret.size());
        link[2] = big_endian(body.high64);
        link[3] = big_endian(body.low64);
        const XXH128_hash_t next = XXH3_128bits_withSecret(link, sizeof link, secret.data(), secret.size());
        link[0] = big_endian(next.high64);
        link[1] = big_endian(next.low64);
        std::memcpy(digests + 16 * c, link, 16);
    }
}

}  // namespace kvcache
