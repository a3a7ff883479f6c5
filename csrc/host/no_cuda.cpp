// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/cuda where the module is built without a CUDA compiler.
#include <stdexcept>

#include "device.h"
#include "transfer.h"

namespace kvcache {
namespace {

constexpr const char* kReason = "this module was built without CUDA";

}  // namespace

std::string cuda_architectures() { return {}; }

int cuda_device_count(std::string* why) {
    if (why != nullptr) *why = kReason;
    return 0;
}

std::string pin(void*, size_t) { return kReason; }
void unpin(void*) {}
int numa_node(int) { return -1; }

void cuda_transfer(const Pages&, const Batch&, uint64_t, int) { throw std::runtime_error(kReason); }

}  // namespace kvcache
