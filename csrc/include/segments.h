// SPDX-License-Identifier: Apache-2.0
// How a batch is cut for a staging ring: parts that are contiguous in their chunk, and segments of parts that
// share a ring slot and a launch.
#pragma once

#include <cstddef>
#include <vector>

#include "transfer.h"

namespace kvcache {

// Some layers of all tokens of a chunk, or some tokens of one layer: one contiguous run of the chunk, one
// DMA.
struct Part {
    uint64_t address;                  // in the chunk
    size_t bytes;                      // of the run
    size_t offset;                     // in the ring slot
    int64_t token_begin, token_end;    // indices into the slot mapping
    int64_t layer_begin, layer_count;  // of the pages
    bool skips;                        // some of its tokens have no slot
    uint32_t chunk;                    // number of its chunk
};

struct Segment {
    size_t first, count;  // of the parts
    int64_t layer_begin, layer_count;
};

struct Segments {
    std::vector<Part> parts;
    std::vector<Segment> segments;
};

constexpr size_t kPartAlignment = 256;

// The batch must be checked and token major. Throws std::invalid_argument if not, or if a slot holds no
// token.
Segments plan_segments(const Pages& pages, const Batch& batch, size_t slot_bytes);

// A batch of the parts of one segment, whose memory is the ring slot at `slot`.
Batch slot_batch(const Batch& batch, const Segments& plan, const Segment& segment, uint64_t slot);

}  // namespace kvcache
