// SPDX-License-Identifier: Apache-2.0
// A batch as boxes: bytes that lie at regular distances on both sides, the largest pieces that a copy engine
// moves by itself. Pages scatter blocks, but within a block the tokens, and across layers the pages of one
// block, are equidistant.
#pragma once

#include <cstddef>
#include <vector>

#include "transfer.h"

namespace kvcache {

// `rows` x `slices` runs of `bytes`: rows are the tokens of a block, slices the layers. Distances in bytes.
struct Box {
    uint64_t paged, packed;  // of the first run
    size_t bytes;
    int64_t rows, slices;
    int64_t paged_row, packed_row;      // from a row to the next; of no meaning for one row
    int64_t paged_slice, packed_slice;  // likewise
};

// The batch must be checked. Of coded rows a load, into pages where they expand in place (see in_place.h):
// they have only come when that has run too. Throws std::invalid_argument for others.
std::vector<Box> plan_boxes(const Pages& pages, const Batch& batch);

// The same in portions of at most so many bytes, or of one slice where that is larger.
std::vector<std::vector<Box>> portions(const std::vector<Box>& boxes, size_t bytes);

// The copy engine moves the boxes, queued on `stream`; its host twin does the same at once.
void cuda_copy_boxes(const std::vector<Box>& boxes, bool store, int device, uint64_t stream);
void host_copy_boxes(const std::vector<Box>& boxes, bool store);

}  // namespace kvcache
