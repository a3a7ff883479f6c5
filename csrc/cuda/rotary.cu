// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "cuda_check.h"
#include "descriptors.h"
#include "element_dispatch.h"
#include "rotary.cuh"

namespace kvcache {

void cuda_rotate(const RotaryJob& host_job, int device, uint64_t stream_handle) {
    if (host_job.tokens == 0) return;
    const DeviceScope scope(device);
    const auto stream = reinterpret_cast<cudaStream_t>(stream_handle);
    const auto count = static_cast<size_t>(host_job.tokens);
    Descriptors positions(2 * count * sizeof(int64_t));
    auto* const staged = reinterpret_cast<int64_t*>(positions.host());
    std::memcpy(staged, host_job.old_positions, count * sizeof(int64_t));
    std::memcpy(staged + count, host_job.new_positions, count * sizeof(int64_t));
    positions.upload(2 * count * sizeof(int64_t), stream);

    RotaryJob job = host_job;
    job.old_positions = reinterpret_cast<const int64_t*>(positions.device());
    job.new_positions = job.old_positions + count;
    constexpr int64_t kMostBlocks = 65536;
    const auto blocks = static_cast<unsigned>(std::min(job.tokens, kMostBlocks));
    const size_t shared = static_cast<size_t>(job.rotary_size) * sizeof(float);
    with_type(job.type, [&](auto type) {
        with_table_type(job.table_type, [&](auto table_type) {
            rotary_kernel<decltype(type), decltype(table_type)>
                <<<blocks, kRotaryThreads, shared, stream>>>(job);
        });
    });
    cuda_check(cudaGetLastError(), "launch of the rotary kernel");
    positions.done(stream);
}

}  // namespace kvcache
