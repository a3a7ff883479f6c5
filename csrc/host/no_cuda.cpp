// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/cuda where the module is built without a CUDA compiler.
#include <stdexcept>

#include "boxes.h"
#include "device.h"
#include "event.h"
#include "in_place.h"
#include "ring.h"
#include "rotary.h"
#include "spans.h"
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

void use_device(int) {}
std::string pin(void*, size_t) { return kReason; }
void unpin(void*) {}
bool device_reaches(const void*) { return false; }
int numa_node(int) { return -1; }
bool dma_in_batches() { return false; }

Event::Event(int, bool) { throw std::runtime_error(kReason); }
Event::~Event() = default;
void Event::record(uint64_t) {}
void Event::order(uint64_t) const {}
bool Event::done() const { return true; }
void Event::wait() const {}

void cuda_transfer(const Pages&, const Batch&, uint64_t, int) { throw std::runtime_error(kReason); }
void cuda_copy_boxes(const std::vector<Box>&, bool, int, uint64_t) { throw std::runtime_error(kReason); }
void cuda_expand(const Pages&, const Batch&, uint64_t) { throw std::runtime_error(kReason); }
void cuda_rotate(const RotaryJob&, int, uint64_t) { throw std::runtime_error(kReason); }
void cuda_copy(const std::vector<Span>&, const std::vector<Span>&, int, uint64_t) {
    throw std::runtime_error(kReason);
}
void cuda_zero(const std::vector<Span>&, int, uint64_t) { throw std::runtime_error(kReason); }
std::unique_ptr<StagingRing> make_cuda_ring(int, size_t, int, int) { throw std::runtime_error(kReason); }

}  // namespace kvcache
