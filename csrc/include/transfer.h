// SPDX-License-Identifier: Apache-2.0
// Copies between pages and chunks: the batch that a caller describes, checked once before anything is
// written.
#pragma once

#include <algorithm>
#include <cstddef>

#include "layout.h"

namespace kvcache {

// Several chunks that share one slot mapping. slot = block * block_size + offset; -1: the token is skipped.
struct Batch {
    const int64_t* slots;
    int64_t num_slots;
    std::vector<ChunkRef> chunks;
    bool store;  // true: pages -> chunks, false: chunks -> pages
    bool token_major = true;
    int64_t layer_begin = 0, layer_end = 0;  // the layers that the chunks hold, of pages
    // Of a store of coded rows, by the chunks' numbers: becomes 1 where a row of the chunk has no code, so
    // that it is to be thrown away. On a device page-locked memory.
    int32_t* refused = nullptr;
    // On a device: the layers come so many at a time, 0 for all, and an event (a cudaEvent_t) is recorded
    // behind each of these groups; as many as there are groups, or none.
    int64_t group_layers = 0;
    std::vector<uint64_t> events = {};

    int64_t layers() const { return layer_end - layer_begin; }
    int64_t group() const { return group_layers == 0 ? layers() : std::min(group_layers, layers()); }
    int64_t groups() const { return (layers() + group() - 1) / group(); }
};

// Throws std::invalid_argument that names the chunk or the slot's index and value.
void check(const Pages& pages, const Batch& batch);

// The host twin. Host pages, host chunks, on the calling thread.
void host_transfer(const Pages& pages, const Batch& batch);

// The kernel over chunks in device or pinned host memory, all of them in one launch a group of layers on
// `stream` (a cudaStream_t), with `blocks` thread blocks of one SM each (0: as many as the device has SMs).
// Returns when the work is queued.
void cuda_transfer(const Pages& pages, const Batch& batch, uint64_t stream, int blocks);

}  // namespace kvcache
