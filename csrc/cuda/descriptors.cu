// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

#include "cuda_check.h"
#include "descriptors.h"

namespace kvcache {

struct Descriptors::Pair {
    int device_index = 0;
    size_t bytes = 0;
    char* host = nullptr;
    char* device = nullptr;
    cudaEvent_t passed = nullptr;
};

namespace {

constexpr size_t kLeastBytes = size_t{1} << 20;

// Lives until the process ends: CUDA may be gone when static objects are destroyed.
struct Pool {
    std::mutex mutex;
    std::map<int, std::vector<Descriptors::Pair*>> idle;
};

Pool& pool() {
    static Pool* const instance = new Pool;
    return *instance;
}

Descriptors::Pair* create(int device, size_t bytes) {
    auto* pair = new Descriptors::Pair;
    pair->device_index = device;
    pair->bytes = std::max(bytes, kLeastBytes);
    cuda_check(cudaHostAlloc(&pair->host, pair->bytes, cudaHostAllocPortable),
               "cudaHostAlloc of a descriptor");
    cuda_check(cudaMalloc(&pair->device, pair->bytes), "cudaMalloc of a descriptor");
    cuda_check(cudaEventCreateWithFlags(&pair->passed, cudaEventDisableTiming), "cudaEventCreate");
    return pair;
}

}  // namespace

Descriptors::Descriptors(size_t bytes) {
    int device = 0;
    cuda_check(cudaGetDevice(&device), "cudaGetDevice");
    {
        const std::lock_guard lock(pool().mutex);
        auto& idle = pool().idle[device];
        const auto found = std::find_if(idle.begin(), idle.end(), [&](const Pair* pair) {
            return pair->bytes >= bytes && cudaEventQuery(pair->passed) == cudaSuccess;
        });
        if (found != idle.end()) {
            pair_ = *found;
            idle.erase(found);
            return;
        }
    }
    cudaGetLastError();  // cudaErrorNotReady of the query
    pair_ = create(device, bytes);
}

Descriptors::~Descriptors() {
    // After an error between the two the upload, and what was launched, may still wait in the stream.
    if (uploading_ != nullptr) cudaEventRecord(pair_->passed, uploading_);
    const std::lock_guard lock(pool().mutex);
    pool().idle[pair_->device_index].push_back(pair_);
}

char* Descriptors::host() const { return pair_->host; }
char* Descriptors::device() const { return pair_->device; }

void Descriptors::upload(size_t bytes, cudaStream_t stream) {
    uploading_ = stream;
    cuda_check(cudaMemcpyAsync(pair_->device, pair_->host, bytes, cudaMemcpyHostToDevice, stream),
               "upload of a descriptor");
}

void Descriptors::done(cudaStream_t stream) {
    cuda_check(cudaEventRecord(pair_->passed, stream), "cudaEventRecord");
    uploading_ = nullptr;
}

}  // namespace kvcache
