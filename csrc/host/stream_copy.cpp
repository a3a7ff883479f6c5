// SPDX-License-Identifier: Apache-2.0
#include "stream_copy.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvcache {
namespace {

constexpr size_t kCacheBytes = size_t{8}
                               << 20;  // above it the destination would push everything else out of the cache
constexpr size_t kLine = 64;

void plain_copy(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }

#if defined(__x86_64__)
__attribute__((target("avx2"))) void avx2_copy(void* to, const void* from, size_t bytes) {
    char* target = static_cast<char*>(to);
    const char* source = static_cast<const char*>(from);
    const size_t head = (kLine - reinterpret_cast<uintptr_t>(target) % kLine) % kLine;
    if (bytes < head + kLine) {
        std::memcpy(target, source, bytes);
        return;
    }
    std::memcpy(target, source, head);
    target += head;
    source += head;
    bytes -= head;
    for (; bytes >= kLine; bytes -= kLine, target += kLine, source += kLine) {
        const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
        const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + 32));
        _mm256_stream_si256(reinterpret_cast<__m256i*>(target), low);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(target + 32), high);
    }
    std::memcpy(target, source, bytes);
}
#endif

}  // namespace

Copy best_copy(size_t batch_bytes) {
#if defined(__x86_64__)
    static const bool avx2 = __builtin_cpu_supports("avx2");
    if (avx2 && batch_bytes > kCacheBytes) return avx2_copy;
#endif
    return plain_copy;
}

void finish_copies() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

}  // namespace kvcache
