// SPDX-License-Identifier: Apache-2.0
// The kernel that expands coded rows in place (see in_place.h): a thread block a run of one layer, window by
// window through shared memory, a warp a row.
#pragma once

#include "coded.cuh"
#include "in_place.h"

namespace kvcache {

struct ExpandArgs {
    CodedArgs rows;       // bases, planes and strides of the pages, elements and head_elements of a row
    const CodeRun* runs;  // device memory
    uint32_t units;       // runs x layers
    FastDivisor num_runs;
    uint32_t token_codes, row_codes;  // bytes
    uint32_t window;                  // tokens at most
};

constexpr int kExpandThreads = 256;

__global__ void __launch_bounds__(kExpandThreads) expand_kernel(const ExpandArgs args) {
    __shared__ uint4 window[kWindowBytes / sizeof(uint4)];
    const TransferArgs& copy = args.rows.copy;
    const uint32_t warp = threadIdx.x / kWarp;
    const int64_t tail_at = code_tail_offset(args.rows.elements);
    const auto tail_bytes = static_cast<uint32_t>(code_tail_bytes(args.rows.elements));
    for (uint32_t unit = blockIdx.x; unit < args.units; unit += gridDim.x) {
        const uint32_t layer = args.num_runs.quotient(unit);
        const CodeRun run = args.runs[unit - layer * args.num_runs.divisor];
        const uint64_t* const bases = copy.bases + (copy.layer_begin + layer) * copy.base_planes;
        const auto tokens = static_cast<uint32_t>(run.tokens);
        const char* const codes = reinterpret_cast<const char*>(bases[0]) + run.page_offset +
                                  run.tokens * (copy.token_stride - int64_t{args.token_codes});
        // Windows of one size, as few as can be.
        const uint32_t windows = (tokens + args.window - 1) / args.window;
        const uint32_t length = (tokens + windows - 1) / windows;
        for (uint32_t first = 0; first < tokens; first += length) {
            const uint32_t count = min(length, tokens - first);
            const auto* const source =
                reinterpret_cast<const uint4*>(codes + int64_t{first} * args.token_codes);
            const uint32_t vectors = count * args.token_codes / static_cast<uint32_t>(sizeof(uint4));
            __syncthreads();  // the window before has been read
            for (uint32_t i = threadIdx.x; i < vectors; i += blockDim.x)
                __pipeline_memcpy_async(window + i, source + i, sizeof(uint4));
            __pipeline_commit();
            __pipeline_wait_prior(0);
            __syncthreads();
            for (uint32_t row = warp; row < count * copy.planes; row += blockDim.x / kWarp) {
                const uint32_t plane = row & (copy.planes - 1), token = row >> (copy.planes - 1);
                char* const page = reinterpret_cast<char*>(bases[plane]) + run.page_offset +
                                   int64_t{first + token} * copy.token_stride;
                const uint8_t* const coded = reinterpret_cast<const uint8_t*>(window) +
                                             token * args.token_codes + plane * args.row_codes;
                decode(coded, page, args.rows, Shared(coded + tail_at, tail_bytes));
            }
        }
    }
}

}  // namespace kvcache
