// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>

#include "boxes.h"
#include "cuda_check.h"
#include "device.h"
#include "dma.h"

#if CUDART_VERSION >= 13000  // before, cudaMemcpyBatchAsync is another function or none
#define KVCACHE_BATCHED_DMA
#endif

namespace kvcache {
namespace {

// A submission holds a lock of the driver while it is built; others must get in between.
constexpr size_t kMostCopies = 4096;

// One side of a box as CUDA names it: a pitch (from a row to the next) and a height (pitches from a slice to
// the next), which must come out even.
struct Pitch {
    size_t pitch, height;
};

std::optional<Pitch> pitch_of(const Box& box, int64_t row, int64_t slice) {
    if (box.slices == 1) return Pitch{static_cast<size_t>(row), static_cast<size_t>(box.rows)};
    if (slice % row != 0) return std::nullopt;
    return Pitch{static_cast<size_t>(row), static_cast<size_t>(slice / row)};
}

// False, and nothing queued, where CUDA does not take the box as one: its distances do not fit, or its layers
// lie in several allocations.
bool copy_whole(const Box& box, bool store, cudaStream_t stream) {
    const auto paged = pitch_of(box, box.paged_row, box.paged_slice);
    const auto packed = pitch_of(box, box.packed_row, box.packed_slice);
    if (!paged || !packed) return false;
    const auto side = [&](uint64_t address, const Pitch& pitch) {
        return make_cudaPitchedPtr(reinterpret_cast<void*>(address), pitch.pitch, box.bytes, pitch.height);
    };
    cudaMemcpy3DParms copy{};
    copy.srcPtr = store ? side(box.paged, *paged) : side(box.packed, *packed);
    copy.dstPtr = store ? side(box.packed, *packed) : side(box.paged, *paged);
    copy.extent = {box.bytes, static_cast<size_t>(box.rows), static_cast<size_t>(box.slices)};
    copy.kind = cudaMemcpyDefault;
    const cudaError_t error = cudaMemcpy3DAsync(&copy, stream);
    if (error == cudaErrorInvalidValue && box.slices > 1) {
        cudaGetLastError();
        return false;
    }
    cuda_check(error, "cudaMemcpy3DAsync");
    return true;
}

Box slice_of(const Box& box, int64_t slice) {
    Box one = box;
    one.paged += static_cast<uint64_t>(slice * box.paged_slice);
    one.packed += static_cast<uint64_t>(slice * box.packed_slice);
    one.slices = 1;
    return one;
}

}  // namespace

bool dma_in_batches() {
#ifdef KVCACHE_BATCHED_DMA
    return true;
#else
    return false;
#endif
}

void Copies::add(uint64_t to, uint64_t from, size_t bytes) {
    to_.push_back(reinterpret_cast<void*>(to));
    from_.push_back(reinterpret_cast<const void*>(from));
    bytes_.push_back(bytes);
}

void Copies::run(cudaStream_t stream) {
    for (size_t first = 0; first < bytes_.size(); first += kMostCopies) {
        const size_t count = std::min(kMostCopies, bytes_.size() - first);
#ifdef KVCACHE_BATCHED_DMA
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

void cuda_copy_boxes(const std::vector<Box>& boxes, bool store, int device, uint64_t stream_handle) {
    const DeviceScope scope(device);
    const auto stream = reinterpret_cast<cudaStream_t>(stream_handle);
    Copies runs;  // single rows: one submission takes thousands of them, wherever their layers lie
    for (const Box& box : boxes) {
        if (box.rows > 1 && copy_whole(box, store, stream)) continue;
        if (box.rows == 1 && !device_reaches(reinterpret_cast<void*>(box.packed))) runs.pageable();
        for (int64_t slice = 0; slice < box.slices; ++slice) {
            const Box one = slice_of(box, slice);
            if (box.rows == 1)
                runs.add(store ? one.packed : one.paged, store ? one.paged : one.packed, one.bytes);
            else
                copy_whole(one, store, stream);
        }
    }
    runs.run(stream);
}

}  // namespace kvcache
