// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda_check.h"
#include "device.h"
#include "dma.h"
#include "ring.h"
#include "slot_runs.h"

namespace kvcache {
namespace {

// A submission holds a lock of the driver while it is built; others must get in between.
constexpr size_t kMostCopies = 4096;

}  // namespace

void Copies::add(uint64_t to, uint64_t from, size_t bytes, bool extend) {
    if (extend && !bytes_.empty()) {
        const bool next_to = reinterpret_cast<uint64_t>(to_.back()) + bytes_.back() == to;
        const bool next_from = reinterpret_cast<uint64_t>(from_.back()) + bytes_.back() == from;
        if (next_to && next_from) {
            bytes_.back() += bytes;
            return;
        }
    }
    to_.push_back(reinterpret_cast<void*>(to));
    from_.push_back(reinterpret_cast<const void*>(from));
    bytes_.push_back(bytes);
}

void Copies::run(cudaStream_t stream) {
    for (size_t first = 0; first < bytes_.size(); first += kMostCopies) {
        const size_t count = std::min(kMostCopies, bytes_.size() - first);
#if CUDART_VERSION >= 13000
        if (count > 1 && !pageable_) {
            cudaMemcpyAttributes attributes{};
            attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
            size_t index = 0;
            cuda_check(cudaMemcpyBatchAsync(&to_[first], &from_[first], &bytes_[first], count, &attributes,
                                            &index, 1, stream),
                       "cudaMemcpyBatchAsync");
            continue;
        }
#endif
        for (size_t i = first; i < first + count; ++i)
            cuda_check(cudaMemcpyAsync(to_[i], from_[i], bytes_[i], cudaMemcpyDefault, stream),
                       "cudaMemcpyAsync");
    }
}

void cuda_batched_dma(const Pages& pages, const Batch& batch, uint64_t stream) {
    const DeviceScope scope(pages.device);
    const PagedLayout& page = pages.layout;
    const int64_t layers = batch.layer_end - batch.layer_begin;
    Copies copies;
    for (const ChunkRef& chunk : batch.chunks) {
        const ChunkStrides strides = chunk_strides(page, layers, chunk.end - chunk.start, batch.token_major);
        const RunShape shape = run_shape(pages, strides);
        if (!shape.tokens_contiguous)
            throw std::invalid_argument(
                "tokens are not contiguous in the pages and in the chunk: the copy engine would move rows "
                "of " +
                std::to_string(shape.bytes) + " bytes; stage such a layout");
        bool extend = false;
        if (!device_reaches(reinterpret_cast<void*>(chunk.address))) copies.pageable();
        const auto runs = slot_runs(page, batch.slots, chunk.start, chunk.end, shape.blocks_contiguous);
        for (int64_t layer = 0; layer < layers; ++layer) {
            const uint64_t* bases =
                &pages.bases[static_cast<size_t>((batch.layer_begin + layer) * page.planes)];
            for (int64_t plane = 0; plane < shape.planes; ++plane) {
                for (const SlotRun& run : runs) {
                    const uint64_t paged = bases[plane] + static_cast<uint64_t>(run.page_offset);
                    const uint64_t packed =
                        chunk.address + static_cast<uint64_t>(layer * strides.layer + plane * strides.kv +
                                                              run.token * strides.token);
                    const auto bytes = static_cast<size_t>(run.count * shape.bytes);
                    if (batch.store)
                        copies.add(packed, paged, bytes, extend);
                    else
                        copies.add(paged, packed, bytes, extend);
                    extend = true;
                }
            }
        }
    }
    copies.run(reinterpret_cast<cudaStream_t>(stream));
}

}  // namespace kvcache
