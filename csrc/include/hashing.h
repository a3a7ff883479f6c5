// SPDX-License-Identifier: Apache-2.0
// Names of token prefixes: a chain of keyed 128-bit hashes, one a chunk.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace kvcache {

using Digest = std::array<uint8_t, 16>;  // canonical: big-endian, the same on every machine

// H_i = X(H_{i-1} || X(tokens of chunk i, little endian)), H_{-1} = parent, X = XXH3-128 with a secret. Two
// levels, so that the tokens are hashed where they lie: one message of parent and tokens would need a copy,
// and costs twice as much. The 192-byte secret of XXH3 is XXH3-128(seed = n, key) for n = 0..11, each in
// canonical form. One digest of 16 bytes for each full chunk, and with `tail` one more for a partial last
// chunk.
std::string chunk_hashes(const int32_t* tokens, size_t count, size_t chunk_size, const Digest& parent,
                         const Digest& key, bool tail);

// Plain XXH3-128 of bytes that come piece by piece.
class StreamingHash {
  public:
    StreamingHash();
    ~StreamingHash();
    StreamingHash(const StreamingHash&) = delete;
    StreamingHash& operator=(const StreamingHash&) = delete;

    void update(const void* data, size_t bytes);
    Digest digest() const;  // of all so far

  private:
    void* state_;
};

// Plain XXH3-128 of the last of the buffer's pieces, after hashing them all: the yardstick of the bench.
Digest xxh3_128(const void* data, size_t bytes, size_t piece);

}  // namespace kvcache
