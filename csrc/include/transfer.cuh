// SPDX-License-Identifier: Apache-2.0
// The gather/scatter kernel between pages and chunks. Framework-free: the launcher fills TransferArgs.
#pragma once

#include <cstdint>

namespace kvcache {

// Division of an unsigned number below 2^31 by a constant divisor, without a division.
struct FastDivisor {
    uint32_t divisor = 1, multiplier = 0, shift = 0;

    FastDivisor() = default;
    explicit FastDivisor(uint32_t d) : divisor(d) {
        uint32_t bits = 0;
        while (bits < 31 && (uint64_t{1} << bits) < d) ++bits;
        shift = bits;
        multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + bits)) + d - 1) / d);
    }
    __device__ __forceinline__ uint32_t quotient(uint32_t n) const {
        return static_cast<uint32_t>((uint64_t{n} * multiplier) >> (31 + shift));
    }
};

// One chunk's part of a launch.
struct Piece {
    uint64_t address;      // of token 0 of the first layer
    int64_t layer_stride;  // bytes
    int64_t kv_stride;     // bytes
    uint32_t slot_begin;   // index of token 0 in the slots
    uint32_t tokens;
    uint32_t chunk;  // number of its chunk
};

struct TransferArgs {
    const uint64_t* bases;  // [layers of the pages * base_planes], device memory
    const Piece* pieces;    // device memory
    const int32_t* slots;   // device memory, negative: skip
    uint32_t num_pieces, layers, layer_begin, base_planes;
    uint32_t units_per_slice;  // a slice is one layer of one piece, a unit `tokens_per_unit` tokens of it
    uint32_t tokens_per_unit;
    // A token is planes x heads runs of vectors_per_run vectors (see RunShape).
    uint32_t planes, heads, vectors_per_run;
    FastDivisor block_size;
    int64_t block_stride, token_stride, head_stride;  // pages, bytes
    int64_t chunk_token_stride;                       // bytes; heads lie packed in a chunk
};

constexpr int kThreads = 1024;
// Independent loads of a thread before its first store: 1,024 threads hold 64 KiB in flight with 16-byte
// vectors, about what a round trip to host memory over PCIe 5 needs.
constexpr int kInFlight = 4;

// Copies units of tokens, block-stride. A thread keeps its place within the token, so that index arithmetic
// stays outside of the loop over tokens; consecutive threads touch consecutive vectors of a run.
template <class Vector, bool kStore>
__global__ void __launch_bounds__(kThreads) transfer_kernel(const TransferArgs args) {
    const uint32_t vectors = args.planes * args.heads * args.vectors_per_run;
    const uint32_t lanes = vectors < kThreads ? vectors : kThreads;
    const uint32_t rows = kThreads / lanes;  // tokens side by side in a pass
    const uint32_t row = threadIdx.x / lanes, lane = threadIdx.x % lanes;
    if (row >= rows) return;

    const uint32_t units = args.num_pieces * args.layers * args.units_per_slice;
    for (uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
        const uint32_t slice = unit / args.units_per_slice;
        const uint32_t layer = slice % args.layers;
        const Piece piece = args.pieces[slice / args.layers];
        const uint32_t first = unit % args.units_per_slice * args.tokens_per_unit;
        const uint32_t last = min(first + args.tokens_per_unit, piece.tokens);
        const int32_t* slots = args.slots + piece.slot_begin;
        char* const memory = reinterpret_cast<char*>(piece.address) + layer * piece.layer_stride;

        for (uint32_t vector = lane; vector < vectors; vector += lanes) {
            const uint32_t run = vector / args.vectors_per_run;
            const uint32_t inner = vector % args.vectors_per_run * static_cast<uint32_t>(sizeof(Vector));
            const uint32_t plane = run / args.heads, head = run % args.heads;
            char* const pages =
                reinterpret_cast<char*>(args.bases[(args.layer_begin + layer) * args.base_planes + plane]) +
                head * args.head_stride + inner;
            char* const packed = memory + plane * piece.kv_stride +
                                 int64_t{head} * args.vectors_per_run * static_cast<int64_t>(sizeof(Vector)) +
                                 inner;

            for (uint32_t token = first + row; token < last; token += rows * kInFlight) {
                char* paged[kInFlight];
                Vector value[kInFlight];
#pragma unroll
                for (int i = 0; i < kInFlight; ++i) {
                    const uint32_t t = token + i * rows;
                    const int32_t slot = t < last ? __ldg(slots + t) : -1;
                    const uint32_t block = args.block_size.quotient(static_cast<uint32_t>(slot));
                    const uint32_t offset = static_cast<uint32_t>(slot) - block * args.block_size.divisor;
                    paged[i] =
                        slot < 0 ? nullptr : pages + block * args.block_stride + offset * args.token_stride;
                }
#pragma unroll
                for (int i = 0; i < kInFlight; ++i) {
                    const char* source =
                        kStore ? paged[i] : packed + (token + i * rows) * args.chunk_token_stride;
                    if (paged[i] != nullptr) value[i] = __ldcs(reinterpret_cast<const Vector*>(source));
                }
#pragma unroll
                for (int i = 0; i < kInFlight; ++i) {
                    char* target = kStore ? packed + (token + i * rows) * args.chunk_token_stride : paged[i];
                    if (paged[i] != nullptr) __stcs(reinterpret_cast<Vector*>(target), value[i]);
                }
            }
        }
    }
}

}  // namespace kvcache
