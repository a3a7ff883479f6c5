// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda_check.h"
#include "event.h"

namespace kvcache {
namespace {

// Lives until the process ends: CUDA may be gone when static objects are destroyed.
struct Pool {
    std::mutex mutex;
    std::map<std::pair<int, bool>, std::vector<uint64_t>> idle;  // by device, and whether they sleep
};

Pool& pool() {
    static Pool* const instance = new Pool;
    return *instance;
}

cudaEvent_t event_of(uint64_t handle) { return reinterpret_cast<cudaEvent_t>(handle); }
cudaStream_t stream_of(uint64_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

}  // namespace

Event::Event(int device, bool sleeping) : device_(device), sleeping_(sleeping) {
    {
        const std::lock_guard lock(pool().mutex);
        auto& idle = pool().idle[{device, sleeping}];
        if (!idle.empty()) {
            handle_ = idle.back();
            idle.pop_back();
            return;
        }
    }
    const DeviceScope scope(device);
    cudaEvent_t event = nullptr;
    const unsigned flags = cudaEventDisableTiming | (sleeping ? cudaEventBlockingSync : 0U);
    cuda_check(cudaEventCreateWithFlags(&event, flags), "cudaEventCreate");
    handle_ = reinterpret_cast<uint64_t>(event);
}

Event::~Event() {
    const std::lock_guard lock(pool().mutex);
    pool().idle[{device_, sleeping_}].push_back(handle_);
}

void Event::record(uint64_t stream) {
    const DeviceScope scope(device_);
    cuda_check(cudaEventRecord(event_of(handle_), stream_of(stream)), "cudaEventRecord");
}

void Event::order(uint64_t stream) const {
    const DeviceScope scope(device_);
    cuda_check(cudaStreamWaitEvent(stream_of(stream), event_of(handle_), 0), "cudaStreamWaitEvent");
}

bool Event::done() const {
    const DeviceScope scope(device_);
    const cudaError_t status = cudaEventQuery(event_of(handle_));
    if (status == cudaErrorNotReady) {
        cudaGetLastError();
        return false;
    }
    cuda_check(status, "cudaEventQuery");
    return true;
}

void Event::wait() const {
    const DeviceScope scope(device_);
    cuda_check(cudaEventSynchronize(event_of(handle_)), "cudaEventSynchronize");
}

}  // namespace kvcache
