// SPDX-License-Identifier: Apache-2.0
// Marks in a device's streams, by which copies and kernels of several streams keep their order.
#pragma once

#include <cstdint>

namespace kvcache {

// A CUDA event. It comes from a pool and goes back there with the object, for a load wants several and making
// one takes longer than all else that is done with it. Whoever made a stream wait for it may let go of it
// before the stream has: what was recorded by then counts.
class Event {
  public:
    // `sleeping`: who waits for it on the host sleeps instead of asking again and again. Throws
    // std::runtime_error with CUDA's reason.
    Event(int device, bool sleeping);
    ~Event();
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;

    int device() const { return device_; }
    // As a cudaEvent_t.
    uint64_t handle() const { return handle_; }
    // Behind what `stream` (a cudaStream_t of the device) was given so far.
    void record(uint64_t stream);
    // What `stream` is given next comes behind the event.
    void order(uint64_t stream) const;
    // Whether the device has come to it.
    bool done() const;
    void wait() const;

  private:
    int device_;
    bool sleeping_;
    uint64_t handle_ = 0;
};

}  // namespace kvcache
