// SPDX-License-Identifier: Apache-2.0
#include "segments.h"

#include <algorithm>

namespace kvcache {
namespace {

bool any_skipped(const int64_t* slots, int64_t begin, int64_t end) {
    return std::any_of(slots + begin, slots + end, [](int64_t slot) { return slot < 0; });
}

void cut_chunk(const Pages& pages, const Batch& batch, const ChunkRef& chunk, size_t slot_bytes,
               std::vector<Part>& parts) {
    const int64_t token_bytes = pages.chunk_token_bytes();
    const int64_t tokens = chunk.end - chunk.start, layers = batch.layers();
    const int64_t layer_bytes = tokens * token_bytes;
    const auto room = static_cast<int64_t>(slot_bytes);
    if (tokens == 0) return;
    auto add = [&](int64_t layer, int64_t layer_count, int64_t token, int64_t count) {
        const int64_t begin = chunk.start + token;
        parts.push_back({chunk.address + static_cast<uint64_t>(layer * layer_bytes + token * token_bytes),
                         static_cast<size_t>(layer_count * count * token_bytes), 0, begin, begin + count,
                         batch.layer_begin + layer, layer_count,
                         any_skipped(batch.slots, begin, begin + count), chunk.number});
    };
    if (layer_bytes <= room) {
        const int64_t step = room / layer_bytes;
        for (int64_t layer = 0; layer < layers; layer += step)
            add(layer, std::min(step, layers - layer), 0, tokens);
        return;
    }
    const int64_t step = room / token_bytes;
    for (int64_t layer = 0; layer < layers; ++layer)
        for (int64_t token = 0; token < tokens; token += step)
            add(layer, 1, token, std::min(step, tokens - token));
}

}  // namespace

Segments plan_segments(const Pages& pages, const Batch& batch, size_t slot_bytes) {
    if (!batch.token_major)
        throw std::invalid_argument(
            "staging needs token-major chunks, whose layers are contiguous; copy others directly");
    if (static_cast<int64_t>(slot_bytes) < pages.chunk_token_bytes())
        throw std::invalid_argument("a ring slot of " + std::to_string(slot_bytes) +
                                    " bytes holds no token of " + std::to_string(pages.chunk_token_bytes()) +
                                    " bytes; make the slots larger");
    Segments plan;
    for (const ChunkRef& chunk : batch.chunks) cut_chunk(pages, batch, chunk, slot_bytes, plan.parts);
    size_t used = 0;
    for (size_t i = 0; i < plan.parts.size(); ++i) {
        Part& part = plan.parts[i];
        const bool same_layers = !plan.segments.empty() &&
                                 plan.segments.back().layer_begin == part.layer_begin &&
                                 plan.segments.back().layer_count == part.layer_count;
        used = (used + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
        if (!same_layers || used + part.bytes > slot_bytes) {
            plan.segments.push_back({i, 0, part.layer_begin, part.layer_count});
            used = 0;
        }
        part.offset = used;
        used += part.bytes;
        ++plan.segments.back().count;
    }
    return plan;
}

Batch slot_batch(const Batch& batch, const Segments& plan, const Segment& segment, uint64_t slot) {
    Batch part_batch = batch;
    part_batch.layer_begin = segment.layer_begin;
    part_batch.layer_end = segment.layer_begin + segment.layer_count;
    part_batch.chunks.clear();
    for (size_t i = segment.first; i < segment.first + segment.count; ++i) {
        const Part& part = plan.parts[i];
        part_batch.chunks.push_back({slot + part.offset, part.token_begin, part.token_end, part.chunk});
    }
    return part_batch;
}

}  // namespace kvcache
