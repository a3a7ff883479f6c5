// SPDX-License-Identifier: Apache-2.0
#include "region.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <set>
#include <shared_mutex>
#include <stdexcept>

#include "device.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace kvcache {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
// A registration holds a lock of the driver, and with it every other CUDA call of the process, for about 0.1
// s a GiB.
constexpr size_t kPiece = size_t{256} << 20;
constexpr int kNice = 10;  // serving threads go first

std::shared_mutex regions_mutex;
std::set<const HostRegion*> regions;

std::string system_error(const std::string& what) { return what + ": " + std::strerror(errno); }

// Writes every page without changing it: the memory may be in use already.
void populate(char* start, size_t bytes) {
    if (madvise(start, bytes, MADV_POPULATE_WRITE) == 0) return;
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    for (size_t offset = 0; offset < bytes; offset += page)
        __atomic_fetch_or(start + offset, char{0}, __ATOMIC_RELAXED);
}

}  // namespace

HostRegion::HostRegion(size_t capacity, bool huge_pages) : capacity_(capacity) {
    if (capacity == 0 || capacity > PTRDIFF_MAX)
        throw std::invalid_argument("HostRegion: the capacity is " + std::to_string(capacity) +
                                    " bytes; give at least one chunk and less than 2^63 bytes");
    void* mapped = mmap(nullptr, capacity + kHugePage, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED)
        throw std::runtime_error(
            system_error("HostRegion: " + std::to_string(capacity) + " bytes could not be mapped") +
            "; lower the capacity or raise the limit of address space");
    char* const raw = static_cast<char*>(mapped);
    const size_t skip = (kHugePage - reinterpret_cast<uintptr_t>(raw) % kHugePage) % kHugePage;
    base_ = raw + skip;
    if (skip != 0) munmap(raw, skip);
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t end = (capacity + page - 1) / page * page;
    if (skip + end < capacity + kHugePage) munmap(base_ + end, capacity + kHugePage - skip - end);
    if (huge_pages) madvise(base_, capacity_, MADV_HUGEPAGE);
    madvise(base_, capacity_, MADV_DONTFORK);  // a child must not copy pages that a DMA writes
    const std::unique_lock lock(regions_mutex);
    regions.insert(this);
}

HostRegion::~HostRegion() { close(); }

void HostRegion::prepare(bool pin, size_t granule, bool required, int numa_node, bool populate, bool hold,
                         int device) {
    if (base_ == nullptr || prepared_)
        throw std::invalid_argument("HostRegion: prepare() is called once, before close()");
    if (granule == 0 || granule > capacity_)
        throw std::invalid_argument("HostRegion: the granule is " + std::to_string(granule) + " bytes of " +
                                    std::to_string(capacity_));
    if (numa_node >= 0 && numa_node < 64) {
        const uint64_t mask = uint64_t{1} << numa_node;
        syscall(SYS_mbind, base_, capacity_, MPOL_PREFERRED, &mask, 65UL,
                0U);  // a wish: it may be refused in a container
    }
    std::string why;
    const bool lock = pin && cuda_device_count(&why) > 0;
    if (pin && !lock) {
        const std::lock_guard guard(mutex_);
        reason_ = why;
    }
    required_ = required;
    may_pin_ = !hold;
    state_ = lock ? PinState::Pinning : PinState::Pageable;
    prepared_ = true;
    if (lock || populate) worker_ = std::thread([=, this] { run(lock, granule, device); });
}

void HostRegion::start_pinning() {
    {
        const std::lock_guard guard(mutex_);
        may_pin_ = true;
    }
    wake_.notify_all();
}

bool HostRegion::may_pin(bool wait) {
    std::unique_lock lock(mutex_);
    if (wait) wake_.wait(lock, [this] { return may_pin_ || stop_; });
    return may_pin_;
}

void HostRegion::run(bool pin_pieces, size_t granule, int device) {
    if (pin_pieces) use_device(device);
    setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kNice);
    const size_t piece = std::max(kPiece / granule, size_t{1}) * granule;
    size_t filled = 0, locked = 0;
    while (!stop_ && (filled < capacity_ || (pin_pieces && locked < capacity_))) {
        // What is populated is locked first; while that may not be yet, the rest is populated.
        if (pin_pieces && locked < filled && may_pin(filled == capacity_)) {
            const size_t bytes = std::min(piece, capacity_ - locked);
            if (const std::string error = pin(base_ + locked, bytes); !error.empty()) {
                fail(std::to_string(locked) + " of " + std::to_string(capacity_) +
                     " bytes are page-locked, then: " + error +
                     "; raise the limit of locked memory or lower the capacity");
                pin_pieces = false;
                continue;
            }
            locked_.push_back(base_ + locked);
            locked += bytes;
            pinned_ = locked;
        } else if (filled < capacity_) {
            const size_t bytes = std::min(piece, capacity_ - filled);
            populate(base_ + filled, bytes);
            filled += bytes;
            populated_ = filled;
        }
    }
    if (pin_pieces && !stop_) state_ = PinState::Pinned;
}

void HostRegion::fail(const std::string& reason) {
    {
        const std::lock_guard guard(mutex_);
        reason_ = reason;
    }
    state_ = PinState::PinningFailed;
}

void HostRegion::close() {
    if (base_ == nullptr) return;
    {
        const std::lock_guard guard(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    if (worker_.joinable()) worker_.join();
    {
        const std::unique_lock lock(regions_mutex);
        regions.erase(this);
    }
    for (char* start : locked_) unpin(start);
    locked_.clear();
    munmap(base_, capacity_);
    base_ = nullptr;
    pinned_ = populated_ = 0;
    state_ = PinState::Pageable;
}

std::string HostRegion::reason() const {
    const std::lock_guard guard(mutex_);
    return reason_;
}

bool HostRegion::is_pinned(const void* address, size_t bytes) {
    const char* const start = static_cast<const char*>(address);
    const std::shared_lock lock(regions_mutex);
    return std::any_of(regions.begin(), regions.end(), [&](const HostRegion* region) {
        return start >= region->base_ && start + bytes <= region->base_ + region->pinned();
    });
}

}  // namespace kvcache
