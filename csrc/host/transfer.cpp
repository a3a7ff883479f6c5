// SPDX-License-Identifier: Apache-2.0
#include "transfer.h"

#include <algorithm>
#include <cstring>

#include "stream_copy.h"

namespace kvcache {
namespace {

// Tokens whose slots follow each other in one block (or in adjacent blocks where those are contiguous).
struct SlotRun {
    int64_t token, count;
    int64_t page_offset;
};

std::vector<SlotRun> slot_runs(const PagedLayout& page, const int64_t* slots, int64_t start, int64_t end,
                               bool across_blocks) {
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

void copy_chunk(const Pages& pages, const Batch& batch, const ChunkRef& chunk, Copy copy) {
    const PagedLayout& page = pages.layout;
    const int64_t layers = batch.layer_end - batch.layer_begin;
    const ChunkStrides strides = chunk_strides(page, layers, chunk.end - chunk.start, batch.token_major);
    const RunShape shape = run_shape(pages, strides);
    const std::vector<SlotRun> runs =
        slot_runs(page, batch.slots, chunk.start, chunk.end, shape.blocks_contiguous);
    char* const memory = reinterpret_cast<char*>(chunk.address);
    auto move = [&](char* paged, char* packed, int64_t bytes) {
        if (batch.store)
            copy(packed, paged, static_cast<size_t>(bytes));
        else
            copy(paged, packed, static_cast<size_t>(bytes));
    };
    for (int64_t layer = 0; layer < layers; ++layer) {
        const uint64_t* bases = &pages.bases[static_cast<size_t>((batch.layer_begin + layer) * page.planes)];
        for (const SlotRun& run : runs) {
            char* const packed = memory + layer * strides.layer + run.token * strides.token;
            const int64_t steps = shape.tokens_contiguous ? 1 : run.count;
            const int64_t bytes = shape.tokens_contiguous ? run.count * shape.bytes : shape.bytes;
            for (int64_t token = 0; token < steps; ++token) {
                for (int64_t plane = 0; plane < shape.planes; ++plane) {
                    char* paged =
                        reinterpret_cast<char*>(bases[plane]) + run.page_offset + token * page.token_stride;
                    char* row = packed + token * strides.token + plane * strides.kv;
                    for (int64_t head = 0; head < shape.heads; ++head)
                        move(paged + head * page.head_stride, row + head * page.head_bytes, bytes);
                }
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
