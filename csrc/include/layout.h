// SPDX-License-Identifier: Apache-2.0
// Where KV lies: vLLM's (or SGLang's) pages and our chunks, both as strides in bytes. Plain data, used by the
// host code and by the kernels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "row_codec.h"

namespace kvcache {

// One layer's pages over a base pointer:
//   address(plane, block, token, head) = base + plane*kv_stride + block*block_stride + token*token_stride +
//   head*head_stride
// and head_bytes contiguous bytes from there. All strides are bytes, so one instance serves every dtype.
struct PagedLayout {
    int64_t kv_stride = 0;     // from a key to its value; 0 when planes == 1
    int64_t block_stride = 0;  // from a block to the next
    int64_t token_stride = 0;  // from a token to the next within its block
    int64_t head_stride = 0;   // from a head to the next
    int64_t heads = 0;
    int64_t head_bytes = 0;
    int64_t block_size = 0;  // tokens in a block
    int64_t num_blocks = 0;
    int64_t planes = 2;  // 2: keys and values, 1: one latent (MLA), or both as one (joined rows)

    int64_t row_bytes() const { return heads * head_bytes; }
    int64_t token_bytes() const { return planes * row_bytes(); }
    int64_t num_slots() const { return num_blocks * block_size; }
    // Bytes from the base to the end of the last element.
    int64_t extent() const {
        return (planes - 1) * kv_stride + (num_blocks - 1) * block_stride + (block_size - 1) * token_stride +
               (heads - 1) * head_stride + head_bytes;
    }
    bool operator==(const PagedLayout&) const = default;
};

// A dimension: how far apart, and how many.
struct Step {
    const char* name;
    int64_t stride, count;
};

// Bytes from the first element's start to the last one's end, elements of `bytes` lying at these steps.
// Throws std::invalid_argument that names the step by which they would overlap, or leave 64 bits.
inline int64_t nested_extent(const std::string& what, std::vector<Step> steps, int64_t bytes) {
    std::sort(steps.begin(), steps.end(),
              [](const Step& one, const Step& other) { return one.stride < other.stride; });
    int64_t within = bytes;
    for (const Step& step : steps) {
        if (step.count <= 1) continue;
        const std::string seen = what + ": " + step.name + " is " + std::to_string(step.stride) + " bytes";
        if (step.stride < within)
            throw std::invalid_argument(seen + ", below the " + std::to_string(within) +
                                        " that lie within it: elements would overlap");
        int64_t reach = 0;
        if (__builtin_mul_overflow(step.stride, step.count - 1, &reach) ||
            __builtin_add_overflow(within, reach, &within))
            throw std::invalid_argument(seen + ", " + std::to_string(step.count) +
                                        " times; less than 2^63 bytes in all are accepted");
    }
    return within;
}

// `together`: keys and values lie in one pool, so that kv_stride counts.
inline std::vector<Step> steps(const PagedLayout& layout, bool together) {
    return {{"kv_stride", layout.kv_stride, together ? layout.planes : 1},
            {"block_stride", layout.block_stride, layout.num_blocks},
            {"token_stride", layout.token_stride, layout.block_size},
            {"head_stride", layout.head_stride, layout.heads}};
}

// Throws std::invalid_argument that names the field.
inline void check(const PagedLayout& layout) {
    auto fail = [](const std::string& text) { throw std::invalid_argument("PagedLayout: " + text); };
    auto positive = [&](const char* name, int64_t value) {
        if (value <= 0) fail(std::string(name) + " is " + std::to_string(value) + "; it must be above 0");
    };
    positive("heads", layout.heads);
    positive("head_bytes", layout.head_bytes);
    positive("block_size", layout.block_size);
    positive("num_blocks", layout.num_blocks);
    if (layout.planes != 1 && layout.planes != 2)
        fail("planes is " + std::to_string(layout.planes) +
             "; 2 (keys and values) and 1 (one row of both, MLA) are accepted");
    if (layout.num_blocks > INT32_MAX / layout.block_size)
        fail(std::to_string(layout.num_blocks) + " blocks of " + std::to_string(layout.block_size) +
             " slots; at most 2^31-1 slots are accepted");
    nested_extent("PagedLayout", steps(layout, false), layout.head_bytes);
}

// The pages of all layers: one base address a layer and plane, so that keys and values may also lie in
// separate pools.
struct Pages {
    PagedLayout layout;
    std::vector<uint64_t> bases;  // [layers * planes]
    int device = -1;              // CUDA device, -1 for host memory
    bool coded = false;           // chunks hold coded rows (see row_codec.h): the elements are bfloat16

    int64_t layers() const { return static_cast<int64_t>(bases.size()) / layout.planes; }
    int64_t row_elements() const { return layout.row_bytes() / 2; }  // of coded rows
    // Of a token of one layer in a chunk.
    int64_t chunk_row_bytes() const { return coded ? coded_row_bytes(row_elements()) : layout.row_bytes(); }
    int64_t chunk_token_bytes() const { return layout.planes * chunk_row_bytes(); }
};

// One chunk of memory and the tokens of the slot mapping that belong to it.
struct ChunkRef {
    uint64_t address;
    int64_t start, end;   // token indices into the slot mapping
    uint32_t number = 0;  // of the caller's chunks
};

// Strides of a chunk that holds `tokens` tokens of `layers` layers.
//   token major: [layers, tokens, planes, row]   KV_LT2D, and for one layer KV_T2D and KV_MLA_FMT
//   plane major: [planes, layers, tokens, row]   KV_2LTD, and for one layer KV_2TD
struct ChunkStrides {
    int64_t layer, kv, token;
};

inline ChunkStrides chunk_strides(const Pages& pages, int64_t layers, int64_t tokens, bool token_major) {
    const int64_t row = pages.chunk_row_bytes(), token = pages.chunk_token_bytes();
    if (token_major) return {tokens * token, row, token};
    return {tokens * row, layers * tokens * row, row};
}

// What is contiguous on both sides is copied as one run. Decided once a call.
struct RunShape {
    int64_t planes, heads, bytes;  // a token is planes x heads runs of `bytes`
    bool tokens_contiguous;  // neighbouring slots of a block are neighbours on both sides (then heads == 1)
    bool blocks_contiguous;  // and so are neighbouring blocks
};

inline RunShape run_shape(const Pages& pages, const ChunkStrides& chunk) {
    const PagedLayout& page = pages.layout;
    RunShape run{page.planes, page.heads, page.head_bytes, false, false};
    if (page.heads == 1 || page.head_stride == page.head_bytes) {
        run.heads = 1;
        run.bytes = page.row_bytes();
        bool adjacent = page.planes == 2 && chunk.kv == run.bytes;
        for (size_t i = 0; adjacent && i < pages.bases.size(); i += 2)
            adjacent = pages.bases[i + 1] == pages.bases[i] + static_cast<uint64_t>(run.bytes);
        if (adjacent) {
            run.planes = 1;
            run.bytes *= 2;
        }
        run.tokens_contiguous = page.token_stride == run.bytes && chunk.token == run.bytes;
        run.blocks_contiguous =
            run.tokens_contiguous && page.block_stride == page.block_size * page.token_stride;
    }
    return run;
}

}  // namespace kvcache
