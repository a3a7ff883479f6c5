// SPDX-License-Identifier: Apache-2.0
// A staging ring: few multiprocessors gather pages into a ring slot in device memory and one DMA moves the
// slot to the chunks; for loads the other way round. The copy engine then always moves large contiguous
// pieces, whatever the layout.
#pragma once

#include <cstddef>
#include <memory>

#include "transfer.h"

namespace kvcache {

// One direction's ring of one device. Thread-safe; calls are queued in their order.
class StagingRing {
  public:
    virtual ~StagingRing() = default;
    // Queues a checked batch. Kernels run on `stream` with `blocks` thread blocks; the DMAs run on the ring's
    // own streams: those of a load do not wait for what is on `stream`, those of a store may end after it
    // (see record).
    virtual void transfer(const Pages& pages, const Batch& batch, uint64_t stream, int blocks) = 0;
    // Queues a checked batch past the slots: the copy engine moves its boxes (see boxes.h) by itself. Behind
    // what is on `stream`, and what comes there next behind it. Where DMAs take turns, in portions of a
    // slot's bytes (of one run at least) that do. Of coded rows see in_place.h: an expansion must follow.
    virtual void strided_dma(const Pages& pages, const Batch& batch, uint64_t stream) = 0;
    // Records an event (a cudaEvent_t) behind all DMAs queued so far. No stream waits: the kernels of the
    // next store run beside the DMAs of this one.
    virtual void record(uint64_t event) = 0;
};

// `turn`: so many slots' DMAs go to one stream, the next ones to another one behind them, so that copies of
// others get in between; 0: all go to one. Device -1: a ring in host memory that copies at once. Throws
// std::invalid_argument for sizes of 0 and a turn below 0, and std::runtime_error where memory cannot be had.
std::unique_ptr<StagingRing> make_ring(int device, size_t slot_bytes, int num_slots, int turn);

// For make_ring.
std::unique_ptr<StagingRing> make_cuda_ring(int device, size_t slot_bytes, int num_slots, int turn);

}  // namespace kvcache
