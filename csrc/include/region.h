// SPDX-License-Identifier: Apache-2.0
// One pre-allocated range of host memory, populated and page-locked in the background.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace kvcache {

enum class PinState { Pageable, Pinning, Pinned, PinningFailed };

class HostRegion {
  public:
    // Reserves address space only. Throws std::runtime_error with the kernel's reason, std::invalid_argument
    // for 0 bytes.
    explicit HostRegion(size_t capacity, bool huge_pages = true);
    ~HostRegion();
    HostRegion(const HostRegion&) = delete;
    HostRegion& operator=(const HostRegion&) = delete;

    // Starts the background work: pages are populated and, with `pin` on a machine with a GPU, page-locked
    // piece by piece from the start. No multiple of `granule` bytes straddles two pieces, since one DMA must
    // not. With `required` only locked memory is ever ready; with `hold` nothing is locked before
    // start_pinning(). `device`: whose copies the memory is for. Once only.
    void prepare(bool pin, size_t granule, bool required, int numa_node, bool populate, bool hold,
                 int device);
    // Lets a region that was prepared with `hold` be page-locked. Idempotent.
    void start_pinning();
    // Stops the background work, unlocks and unmaps. Nothing may use the memory any more. Idempotent.
    void close();

    char* address() const { return base_; }  // nullptr after close()
    size_t capacity() const { return capacity_; }
    PinState state() const { return state_.load(); }
    std::string reason() const;
    size_t populated() const { return populated_.load(); }
    size_t pinned() const { return pinned_.load(); }
    // Bytes from the start that may be used now: while Pinning what is locked so far, so that no copy has to
    // be slow.
    size_t ready() const {
        const PinState now = state();
        return now == PinState::Pinning || (now == PinState::PinningFailed && required_) ? pinned()
                                                                                         : capacity_;
    }

    // Whether [address, address+bytes) lies in the page-locked part of an open region.
    static bool is_pinned(const void* address, size_t bytes);

  private:
    void run(bool pin, size_t granule, int device);
    bool may_pin(bool wait);
    void fail(const std::string& reason);

    char* base_ = nullptr;
    size_t capacity_;
    bool required_ = false, prepared_ = false;
    std::thread worker_;
    std::atomic<bool> stop_{false};
    bool may_pin_ = false;  // mutex_
    std::condition_variable wake_;
    std::atomic<PinState> state_{PinState::Pageable};
    std::atomic<size_t> populated_{0}, pinned_{0};
    std::vector<char*> locked_;  // first byte of each registered piece
    mutable std::mutex mutex_;   // reason_, may_pin_
    std::string reason_;
};

}  // namespace kvcache
