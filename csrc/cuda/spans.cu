// SPDX-License-Identifier: Apache-2.0
#include "cuda_check.h"
#include "device.h"
#include "dma.h"
#include "spans.h"

namespace kvcache {

void cuda_copy(const std::vector<Span>& to, const std::vector<Span>& from, int device, uint64_t stream) {
    const DeviceScope scope(device);
    Copies copies;
    for (size_t i = 0; i < to.size(); ++i) {
        if (!device_reaches(reinterpret_cast<void*>(to[i].address)) ||
            !device_reaches(reinterpret_cast<void*>(from[i].address)))
            copies.pageable();
        copies.add(to[i].address, from[i].address, to[i].bytes);
    }
    copies.run(reinterpret_cast<cudaStream_t>(stream));
}

void cuda_zero(const std::vector<Span>& spans, int device, uint64_t stream) {
    const DeviceScope scope(device);
    for (const Span& span : spans)
        cuda_check(cudaMemsetAsync(reinterpret_cast<void*>(span.address), 0, span.bytes,
                                   reinterpret_cast<cudaStream_t>(stream)),
                   "cudaMemsetAsync");
}

}  // namespace kvcache
