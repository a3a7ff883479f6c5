// SPDX-License-Identifier: Apache-2.0
#include "in_place.h"

#include <algorithm>
#include <cstring>

#include "slot_runs.h"

namespace kvcache {

bool expands_in_place(const Pages& pages) {
    const PagedLayout& page = pages.layout;
    const int64_t codes = pages.chunk_token_bytes();
    if (!pages.coded || codes > page.token_stride || codes > kWindowBytes) return false;
    if (page.token_stride != page.token_bytes()) return false;
    // The token's bytes from its first key on: head by head, or all keys and then all values.
    const bool one_row = page.heads == 1 || page.head_stride == page.head_bytes;
    const bool by_head = page.heads == 1 || page.head_stride == page.planes * page.head_bytes;
    const int64_t to_value = by_head ? page.head_bytes : page.row_bytes();
    if (page.planes == 1 ? !one_row : !one_row && !by_head) return false;
    uint64_t together = static_cast<uint64_t>(page.block_stride | page.token_stride | page.head_bytes);
    for (size_t i = 0; i < pages.bases.size(); ++i) {
        const auto plane = static_cast<int64_t>(i) % page.planes;
        const uint64_t first = pages.bases[i - static_cast<size_t>(plane)];
        if (pages.bases[i] != first + static_cast<uint64_t>(plane * to_value)) return false;
        together |= first;
    }
    return together % 16 == 0;
}

std::vector<CodeRun> code_runs(const Pages& pages, const Batch& batch) {
    const PagedLayout& page = pages.layout;
    const bool across_blocks = page.block_stride == page.block_size * page.token_stride;
    std::vector<CodeRun> runs;
    for (size_t i = 0; i < batch.chunks.size(); ++i) {
        const ChunkRef& chunk = batch.chunks[i];
        for (const SlotRun& run : slot_runs(page, batch.slots, chunk.start, chunk.end, across_blocks))
            runs.push_back({i, run.token, run.count, run.page_offset});
    }
    std::vector<CodeRun> ordered = runs;
    std::sort(ordered.begin(), ordered.end(),
              [](const CodeRun& one, const CodeRun& other) { return one.page_offset < other.page_offset; });
    for (size_t i = 1; i < ordered.size(); ++i) {
        const CodeRun& before = ordered[i - 1];
        if (before.page_offset + before.tokens * page.token_stride > ordered[i].page_offset)
            throw std::invalid_argument("two tokens of the load have the slot at byte " +
                                        std::to_string(ordered[i].page_offset) +
                                        " of a layer's pages; each needs its own");
    }
    return runs;
}

void host_expand(const Pages& pages, const Batch& batch) {
    const PagedLayout& page = pages.layout;
    const int64_t elements = pages.row_elements();
    std::vector<uint8_t> codes(static_cast<size_t>(pages.chunk_token_bytes()));
    std::vector<uint16_t> row(static_cast<size_t>(elements));
    for (const CodeRun& run : code_runs(pages, batch)) {
        for (int64_t layer = batch.layer_begin; layer < batch.layer_end; ++layer) {
            const uint64_t* const bases = &pages.bases[static_cast<size_t>(layer * page.planes)];
            const char* source =
                reinterpret_cast<char*>(bases[0]) + run.page_offset + run.codes_offset(pages);
            for (int64_t token = 0; token < run.tokens; ++token, source += codes.size()) {
                std::memcpy(codes.data(), source, codes.size());
                for (int64_t plane = 0; plane < page.planes; ++plane) {
                    decode_row(codes.data() + plane * pages.chunk_row_bytes(), elements, row.data());
                    char* const target =
                        reinterpret_cast<char*>(bases[plane]) + run.page_offset + token * page.token_stride;
                    for (int64_t head = 0; head < page.heads; ++head)
                        std::memcpy(target + head * page.head_stride,
                                    reinterpret_cast<char*>(row.data()) + head * page.head_bytes,
                                    static_cast<size_t>(page.head_bytes));
                }
            }
        }
    }
}

}  // namespace kvcache
