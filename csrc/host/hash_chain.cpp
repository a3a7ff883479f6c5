// SPDX-License-Identifier: Apache-2.0
// Compiled twice (see CMakeLists.txt): XXH3 takes its vector instructions from the compiler's flags.
#include "hash_chain.h"

#include <algorithm>
#include <cstring>

#define XXH_INLINE_ALL
#include <xxhash.h>

#if !defined(KVCACHE_HASH_FUNCTIONS)
#define KVCACHE_HASH_FUNCTIONS kHashFunctions
#endif

namespace kvcache {
namespace {

// A digest as two words whose bytes lie in canonical order. Words are read as they were written: a read of
// 16 bytes right behind two writes of 8 would wait for both to leave the processor's store buffer.
struct Words {
    uint64_t first, second;

    explicit Words(XXH128_hash_t hash)
        : first(__builtin_bswap64(hash.high64)), second(__builtin_bswap64(hash.low64)) {}
    explicit Words(const Digest& digest) {
        std::memcpy(&first, digest.data(), 8);
        std::memcpy(&second, digest.data() + 8, 8);
    }
    void write(void* out) const {
        std::memcpy(out, &first, 8);
        std::memcpy(static_cast<char*>(out) + 8, &second, 8);
    }
};

// The digests of `count` pieces of `bytes` each; the last one. The secret by value: one that the digests
// might overwrite would be read again for each of them.
Words links(const char* data, size_t count, size_t bytes, Words last, HashSecret secret, char* digests) {
    for (size_t i = 0; i < count; ++i) {
        const Words body(XXH3_128bits_withSecret(data + i * bytes, bytes, secret.data(), secret.size()));
        const uint64_t link[] = {last.first, last.second, body.first, body.second};
        last = Words(XXH3_128bits_withSecret(link, sizeof link, secret.data(), secret.size()));
        last.write(digests + 16 * i);
    }
    return last;
}

void chain(const int32_t* tokens, size_t count, size_t chunk_size, size_t chunks, const Digest& parent,
           const HashSecret& secret, char* digests) {
    const auto* const data = reinterpret_cast<const char*>(tokens);
    const size_t bytes = chunk_size * sizeof(int32_t), full = std::min(chunks, count / chunk_size);
    const Words last = links(data, full, bytes, Words(parent), secret, digests);
    if (full < chunks)
        links(data + full * bytes, 1, count * sizeof(int32_t) - full * bytes, last, secret,
              digests + 16 * full);
}

Digest pieces(const void* data, size_t bytes, size_t piece) {
    const char* const start = static_cast<const char*>(data);
    XXH128_hash_t all{}, last{};
    size_t at = 0;
    do {
        last = XXH3_128bits(start + at, std::min(piece, bytes - at));
        all.low64 ^= last.low64;  // keeps the compiler from dropping the others
        at += piece;
    } while (at < bytes);
    asm volatile("" : : "r"(all.low64));
    Digest digest;
    Words(last).write(digest.data());
    return digest;
}

}  // namespace

const HashFunctions KVCACHE_HASH_FUNCTIONS{chain, pieces};

}  // namespace kvcache
