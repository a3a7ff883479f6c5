// SPDX-License-Identifier: Apache-2.0
#include "transfer.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "device.h"
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
    const int64_t layers = batch.layers();
    const ChunkStrides strides = chunk_strides(pages, layers, chunk.end - chunk.start, batch.token_major);
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

// Chunks of coded rows. False where a row has no code.
bool copy_coded_chunk(const Pages& pages, const Batch& batch, const ChunkRef& chunk) {
    const PagedLayout& page = pages.layout;
    const int64_t layers = batch.layers(), elements = pages.row_elements();
    const ChunkStrides strides = chunk_strides(pages, layers, chunk.end - chunk.start, true);
    std::vector<uint16_t> row(static_cast<size_t>(elements));
    bool all = true;
    for (int64_t layer = 0; layer < layers; ++layer) {
        for (int64_t token = 0; token < chunk.end - chunk.start; ++token) {
            const int64_t slot = batch.slots[chunk.start + token];
            if (slot < 0) continue;
            for (int64_t plane = 0; plane < page.planes; ++plane) {
                const auto base_of = static_cast<size_t>((batch.layer_begin + layer) * page.planes + plane);
                char* const paged = reinterpret_cast<char*>(pages.bases[base_of]) +
                                    slot / page.block_size * page.block_stride +
                                    slot % page.block_size * page.token_stride;
                auto* const coded = reinterpret_cast<uint8_t*>(chunk.address) + layer * strides.layer +
                                    token * strides.token + plane * strides.kv;
                char* const packed = reinterpret_cast<char*>(row.data());
                const auto bytes = static_cast<size_t>(page.head_bytes);
                if (!batch.store) decode_row(coded, elements, row.data());
                for (int64_t head = 0; head < page.heads; ++head) {
                    char* const there = paged + head * page.head_stride;
                    char* const here = packed + head * page.head_bytes;
                    std::memcpy(batch.store ? here : there, batch.store ? there : here, bytes);
                }
                if (batch.store) all = encode_row(row.data(), elements, coded) && all;
            }
        }
    }
    return all;
}

}  // namespace

void check(const Pages& pages, const Batch& batch) {
    const PagedLayout& page = pages.layout;
    if (pages.coded && !batch.token_major)
        throw std::invalid_argument("coded rows lie token by token; token-major chunks are accepted");
    if (pages.coded && batch.store && batch.refused == nullptr)
        throw std::invalid_argument(
            "a store of coded rows without the address of numbers to say which chunk has none; give it");
    if (pages.coded && batch.store && pages.device >= 0 && !device_reaches(batch.refused))
        throw std::invalid_argument(
            "the numbers of refused chunks are in memory that the device does not reach; page-locked is "
            "accepted");
    if (batch.layer_begin < 0 || batch.layer_end > pages.layers() || batch.layer_begin >= batch.layer_end)
        throw std::invalid_argument("layers " + std::to_string(batch.layer_begin) + " to " +
                                    std::to_string(batch.layer_end) + " are not within the " +
                                    std::to_string(pages.layers()) + " layers of the pages");
    if (batch.group_layers < 0)
        throw std::invalid_argument("groups of " + std::to_string(batch.group_layers) +
                                    " layers; 0 (all at once) and above are accepted");
    if (!batch.events.empty() && static_cast<int64_t>(batch.events.size()) != batch.groups())
        throw std::invalid_argument(std::to_string(batch.events.size()) + " events for " +
                                    std::to_string(batch.groups()) +
                                    " groups of layers; as many are accepted");
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
    if (pages.coded) {
        for (const ChunkRef& chunk : batch.chunks)
            if (!copy_coded_chunk(pages, batch, chunk)) batch.refused[chunk.number] = 1;
        return;
    }
    int64_t tokens = 0;
    for (const ChunkRef& chunk : batch.chunks) tokens += chunk.end - chunk.start;
    const int64_t bytes = tokens * pages.layout.token_bytes() * batch.layers();
    const Copy copy = best_copy(static_cast<size_t>(bytes));
    for (const ChunkRef& chunk : batch.chunks) copy_chunk(pages, batch, chunk, copy);
    finish_copies();
}

}  // namespace kvcache
