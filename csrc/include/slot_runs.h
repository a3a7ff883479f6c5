// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "layout.h"

namespace kvcache {

// Tokens whose slots follow each other in one block, and across blocks where those are contiguous.
struct SlotRun {
    int64_t token, count;  // from the chunk's first token on
    int64_t page_offset;   // bytes from a plane's base
};

// The runs of the tokens [start, end) of a checked mapping. Skipped tokens are in none.
inline std::vector<SlotRun> slot_runs(const PagedLayout& page, const int64_t* slots, int64_t start,
                                      int64_t end, bool across_blocks) {
    std::vector<SlotRun> runs;
    int64_t next = -1;
    for (int64_t i = start; i < end; ++i) {
        const int64_t slot = slots[i];
        if (slot < 0) {
            next = -1;
            continue;
        }
        const int64_t block = slot / page.block_size, offset = slot % page.block_size;
        if (slot == next && (across_blocks || offset != 0)) {
            ++runs.back().count;
        } else {
            runs.push_back({i - start, 1, block * page.block_stride + offset * page.token_stride});
        }
        next = slot + 1;
    }
    return runs;
}

}  // namespace kvcache
