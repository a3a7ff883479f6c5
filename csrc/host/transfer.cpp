// SPDX-License-Identifier: Apache-2.0
#include "transfer.h"

#include <algorithm>
#include <iterator>

#include "slot_runs.h"
#include "stream_copy.h"

namespace kvcache {
namespace {

// One of the loops over a run: how often, and how far apart on both sides.
struct Loop {
    int64_t count, paged, packed;
};

void copy_chunk(const Pages& pages, const Batch& batch, const ChunkRef& chunk, Copy copy) {
    const PagedLayout& page = pages.layout;
    const int64_t layers = batch.layer_end - batch.layer_begin;
    const ChunkStrides strides = chunk_strides(page, layers, chunk.end - chunk.start, batch.token_major);
    const RunShape shape = run_shape(pages, strides);
    const auto runs = slot_runs(page, batch.slots, chunk.start, chunk.end, shape.blocks_contiguous);
    char* const memory = reinterpret_cast<char*>(chunk.address);
    for (int64_t layer = 0; layer < layers; ++layer) {
        const uint64_t* bases = &pages.bases[static_cast<size_t>((batch.layer_begin + layer) * page.planes)];
        const int64_t to_value = shape.planes == 2 ? static_cast<int64_t>(bases[1] - bases[0]) : 0;
        for (const SlotRun& run : runs) {
            char* const paged = reinterpret_cast<char*>(bases[0]) + run.page_offset;
            char* const packed = memory + layer * strides.layer + run.token * strides.token;
            const bool whole = shape.tokens_contiguous;
            const auto bytes = static_cast<size_t>(whole ? run.count * shape.bytes : shape.bytes);
            Loop loops[] = {{whole ? 1 : run.count, page.token_stride, strides.token},
                            {shape.planes, to_value, strides.kv},
                            {shape.heads, page.head_stride, page.head_bytes}};
            // In the order of the chunk, whichever side is written: sequential reads are what the prefetcher
            // needs, and stores that bypass the cache do not mind where they go.
            std::sort(std::begin(loops), std::end(loops),
                      [](const Loop& one, const Loop& other) { return one.packed > other.packed; });
            const auto& [outer, middle, inner] = loops;
            for (int64_t i = 0; i < outer.count; ++i)
                for (int64_t j = 0; j < middle.count; ++j)
                    for (int64_t k = 0; k < inner.count; ++k) {
                        char* there = paged + i * outer.paged + j * middle.paged + k * inner.paged;
                        char* here = packed + i * outer.packed + j * middle.packed + k * inner.packed;
                        if (batch.store)
                            copy(here, there, bytes);
                        else
                            copy(there, here, bytes);
                    }
        }
    }
}

}  // namespace

void check(const Pages& pages, const Batch& batch) {
    const PagedLayout& page = pages.layout;
    if (batch.layer_begin < 0 || batch.layer_end > pages.layers() || batch.layer_begin >= batch.layer_end)
        throw std::invalid_argument("layers " + std::to_string(batch.layer_begin) + " to " +
                                    std::to_string(batch.layer_end) + " are not within the " +
                                    std::to_string(pages.layers()) + " layers of the pages");
    const int64_t limit = page.num_slots();
    for (size_t c = 0; c < batch.chunks.size(); ++c) {
        const ChunkRef& chunk = batch.chunks[c];
        if (chunk.start < 0 || chunk.start > chunk.end || chunk.end > batch.num_slots)
            throw std::invalid_argument("chunk " + std::to_string(c) + " spans tokens " +
                                        std::to_string(chunk.start) + " to " + std::to_string(chunk.end) +
                                        "; the slot mapping has " + std::to_string(batch.num_slots));
        if (chunk.address == 0 && chunk.start < chunk.end)
            throw std::invalid_argument("chunk " + std::to_string(c) + " has the address 0");
        for (int64_t i = chunk.start; i < chunk.end; ++i)
            if (batch.slots[i] < -1 || batch.slots[i] >= limit)
                throw std::invalid_argument("slot_mapping[" + std::to_string(i) + "] is " +
                                            std::to_string(batch.slots[i]) + "; slots from 0 to " +
                                            std::to_string(limit - 1) + " and -1 (skip) are accepted");
    }
}

void host_transfer(const Pages& pages, const Batch& batch) {
    int64_t tokens = 0;
    for (const ChunkRef& chunk : batch.chunks) tokens += chunk.end - chunk.start;
    const int64_t bytes = tokens * pages.layout.token_bytes() * (batch.layer_end - batch.layer_begin);
    const Copy copy = best_copy(static_cast<size_t>(bytes));
    for (const ChunkRef& chunk : batch.chunks) copy_chunk(pages, batch, chunk, copy);
    finish_copies();
}

}  // namespace kvcache
