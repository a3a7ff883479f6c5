// SPDX-License-Identifier: Apache-2.0
#include <cuda_pipeline.h>

#include <algorithm>
#include <cstring>

#include "cuda_check.h"
#include "descriptors.h"
#include "device.h"
#include "in_place.cuh"

namespace kvcache {
namespace {

// Of one multiprocessor with 228 KiB of shared memory; the device itself takes 1 KiB for each.
constexpr int kBlocksOfMultiprocessor = 4;

}  // namespace

void cuda_expand(const Pages& pages, const Batch& batch, uint64_t stream_handle) {
    const DeviceScope scope(pages.device);
    const auto stream = reinterpret_cast<cudaStream_t>(stream_handle);
    const PagedLayout& page = pages.layout;
    const std::vector<CodeRun> runs = code_runs(pages, batch);
    const int64_t layers = batch.layers();
    if (runs.empty()) return;
    const size_t units = runs.size() * static_cast<size_t>(layers);
    if (units > INT32_MAX / 2)
        throw std::invalid_argument("a launch of " + std::to_string(units) +
                                    " units of work; split the batch");

    const size_t bases_bytes = pages.bases.size() * sizeof(uint64_t);
    const size_t runs_bytes = runs.size() * sizeof(CodeRun);
    Descriptors tables(bases_bytes + runs_bytes);
    std::memcpy(tables.host(), pages.bases.data(), bases_bytes);
    std::memcpy(tables.host() + bases_bytes, runs.data(), runs_bytes);
    tables.upload(bases_bytes + runs_bytes, stream);

    TransferArgs copy{};
    copy.bases = reinterpret_cast<const uint64_t*>(tables.device());
    copy.layer_begin = static_cast<uint32_t>(batch.layer_begin);
    copy.base_planes = static_cast<uint32_t>(page.planes);
    copy.token_stride = page.token_stride;
    copy.head_stride = page.head_stride;
    ExpandArgs args{};
    args.rows = coded_args(pages, copy);
    args.runs = reinterpret_cast<const CodeRun*>(tables.device() + bases_bytes);
    args.units = static_cast<uint32_t>(units);
    args.num_runs = FastDivisor(static_cast<uint32_t>(runs.size()));
    args.token_codes = static_cast<uint32_t>(pages.chunk_token_bytes());
    args.row_codes = static_cast<uint32_t>(pages.chunk_row_bytes());
    args.window = static_cast<uint32_t>(kWindowBytes) / args.token_codes;

    int count = 0;
    cuda_check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, pages.device),
               "cudaDeviceGetAttribute");
    const auto blocks = std::min<size_t>(units, static_cast<size_t>(count) * kBlocksOfMultiprocessor);
    expand_kernel<<<static_cast<unsigned>(blocks), kExpandThreads, 0, stream>>>(args);
    cuda_check(cudaGetLastError(), "launch of the kernel that expands coded rows");
    tables.done(stream);
}

}  // namespace kvcache
