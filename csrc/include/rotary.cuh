// SPDX-License-Identifier: Apache-2.0
// The kernel of rotary.h: one block a token (grid-stride), a thread a pair.
#pragma once

#include "rotary.h"

namespace kvcache {

constexpr int kRotaryThreads = 256;

template <class Type, class TableType>
__global__ void __launch_bounds__(kRotaryThreads) rotary_kernel(const RotaryJob job) {
    extern __shared__ float moves[];  // the cosines of half the rotary size, then the sines
    const int half = static_cast<int>(job.rotary_size / 2);
    const auto* const table = reinterpret_cast<const typename TableType::Storage*>(job.table);
    for (int64_t token = blockIdx.x; token < job.tokens; token += gridDim.x) {
        if (job.old_positions[token] == job.new_positions[token]) continue;  // the whole block
        const auto* const was = table + job.old_positions[token] * job.rotary_size;
        const auto* const is = table + job.new_positions[token] * job.rotary_size;
        for (int i = threadIdx.x; i < half; i += blockDim.x) {
            const Rotation move = move_rotation(TableType::widen(was[i]), TableType::widen(was[half + i]),
                                                TableType::widen(is[i]), TableType::widen(is[half + i]));
            moves[i] = move.cosine;
            moves[half + i] = move.sine;
        }
        __syncthreads();
        const int pairs = static_cast<int>(job.heads) * half;
        for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
            const int head = pair / half, i = pair % half;
            auto* const key = reinterpret_cast<typename Type::Storage*>(job.keys + token * job.token_stride +
                                                                        head * job.head_stride);
            rotate_pair<Type>(key + (job.neox ? i : 2 * i), key + (job.neox ? i + half : 2 * i + 1),
                              {moves[i], moves[half + i]});
        }
        __syncthreads();
    }
}

}  // namespace kvcache
