// SPDX-License-Identifier: Apache-2.0
#include "boxes.h"

#include <algorithm>
#include <cstring>

#include "in_place.h"
#include "slot_runs.h"

namespace kvcache {
namespace {

// Layers whose pages are equidistant in every plane.
struct LayerGroup {
    int64_t first, count;  // from the batch's first layer on
    int64_t distance;
};

std::vector<LayerGroup> equidistant_layers(const Pages& pages, const Batch& batch) {
    const int64_t planes = pages.layout.planes;
    const uint64_t* const bases = &pages.bases[static_cast<size_t>(batch.layer_begin * planes)];
    // Distance to the layer before; 0 where planes disagree or the layer lies below.
    auto distance = [&](int64_t layer) {
        const uint64_t* const now = bases + layer * planes;
        const uint64_t* const before = now - planes;
        for (int64_t plane = 0; plane < planes; ++plane)
            if (now[plane] <= before[plane] || now[plane] - before[plane] != now[0] - before[0])
                return int64_t{0};
        return static_cast<int64_t>(now[0] - before[0]);
    };
    std::vector<LayerGroup> groups;
    for (int64_t layer = 0; layer < batch.layers(); ++layer) {
        const int64_t apart = groups.empty() ? 0 : distance(layer);
        if (apart > 0 && (groups.back().count == 1 || groups.back().distance == apart)) {
            groups.back().distance = apart;
            ++groups.back().count;
        } else {
            groups.push_back({layer, 1, 0});
        }
    }
    return groups;
}

// A run of a layer is one box: its codes come to the end of its bytes (see in_place.h).
std::vector<Box> plan_codes(const Pages& pages, const Batch& batch) {
    if (batch.store || !expands_in_place(pages))
        throw std::invalid_argument(
            "the copy engine brings coded rows into pages whose tokens lie side by side, and takes none out; "
            "they need another way");
    const auto planes = static_cast<size_t>(pages.layout.planes);
    const int64_t layers = batch.layers(), token_bytes = pages.chunk_token_bytes();
    const std::vector<CodeRun> runs = code_runs(pages, batch);
    std::vector<Box> boxes;
    boxes.reserve(runs.size() * static_cast<size_t>(layers));
    for (size_t first = 0, last = 0; first < runs.size(); first = last) {
        while (last < runs.size() && runs[last].chunk == runs[first].chunk) ++last;
        const ChunkRef& chunk = batch.chunks[runs[first].chunk];
        const int64_t layer_bytes = (chunk.end - chunk.start) * token_bytes;
        for (int64_t layer = 0; layer < layers; ++layer) {
            const uint64_t base = pages.bases[static_cast<size_t>(batch.layer_begin + layer) * planes];
            for (size_t i = first; i < last; ++i) {
                Box box{};
                box.paged = base + static_cast<uint64_t>(runs[i].page_offset + runs[i].codes_offset(pages));
                box.packed =
                    chunk.address + static_cast<uint64_t>(layer * layer_bytes + runs[i].token * token_bytes);
                box.bytes = static_cast<size_t>(runs[i].tokens * token_bytes);
                box.rows = box.slices = 1;
                boxes.push_back(box);
            }
        }
    }
    return boxes;
}

}  // namespace

std::vector<Box> plan_boxes(const Pages& pages, const Batch& batch) {
    if (pages.coded) return plan_codes(pages, batch);
    const PagedLayout& page = pages.layout;
    const int64_t layers = batch.layers();
    const bool across_blocks = page.block_stride == page.block_size * page.token_stride;
    const std::vector<LayerGroup> groups = equidistant_layers(pages, batch);
    std::vector<LayerGroup> single;
    for (int64_t layer = 0; layer < layers; ++layer) single.push_back({layer, 1, 0});
    std::vector<Box> boxes;
    for (const ChunkRef& chunk : batch.chunks) {
        const ChunkStrides strides = chunk_strides(pages, layers, chunk.end - chunk.start, batch.token_major);
        const RunShape shape = run_shape(pages, strides);
        const std::vector<SlotRun> runs = slot_runs(page, batch.slots, chunk.start, chunk.end, across_blocks);
        // Runs are copied one by one in any case: in the order in which they lie in the chunk.
        for (const LayerGroup& group : shape.tokens_contiguous ? single : groups) {
            const uint64_t* const bases =
                &pages.bases[static_cast<size_t>((batch.layer_begin + group.first) * page.planes)];
            for (int64_t plane = 0; plane < shape.planes; ++plane) {
                for (const SlotRun& run : runs) {
                    for (int64_t head = 0; head < shape.heads; ++head) {
                        Box box;
                        box.paged =
                            bases[plane] + static_cast<uint64_t>(run.page_offset + head * page.head_stride);
                        box.packed = chunk.address +
                                     static_cast<uint64_t>(group.first * strides.layer + plane * strides.kv +
                                                           run.token * strides.token + head * shape.bytes);
                        const int64_t merged = shape.tokens_contiguous ? run.count : 1;
                        box.bytes = static_cast<size_t>(merged * shape.bytes);
                        box.rows = run.count / merged;
                        box.paged_row = page.token_stride;
                        box.packed_row = strides.token;
                        box.slices = group.count;
                        box.paged_slice = group.distance;
                        box.packed_slice = strides.layer;
                        boxes.push_back(box);
                    }
                }
            }
        }
    }
    return boxes;
}

std::vector<std::vector<Box>> portions(const std::vector<Box>& boxes, size_t bytes) {
    std::vector<std::vector<Box>> all;
    size_t room = 0;
    for (Box box : boxes) {
        const size_t slice_bytes = box.bytes * static_cast<size_t>(box.rows);
        for (int64_t left = box.slices; left > 0; left -= box.slices) {
            if (all.empty() || room < slice_bytes) {
                all.emplace_back();
                room = std::max(bytes, slice_bytes);
            }
            box.slices = std::min(left, static_cast<int64_t>(room / slice_bytes));
            all.back().push_back(box);
            room -= static_cast<size_t>(box.slices) * slice_bytes;
            box.paged += static_cast<uint64_t>(box.slices * box.paged_slice);
            box.packed += static_cast<uint64_t>(box.slices * box.packed_slice);
        }
    }
    return all;
}

void host_copy_boxes(const std::vector<Box>& boxes, bool store) {
    for (const Box& box : boxes) {
        for (int64_t slice = 0; slice < box.slices; ++slice) {
            for (int64_t row = 0; row < box.rows; ++row) {
                auto* const paged =
                    reinterpret_cast<char*>(box.paged) + slice * box.paged_slice + row * box.paged_row;
                auto* const packed =
                    reinterpret_cast<char*>(box.packed) + slice * box.packed_slice + row * box.packed_row;
                std::memcpy(store ? packed : paged, store ? paged : packed, box.bytes);
            }
        }
    }
}

}  // namespace kvcache
