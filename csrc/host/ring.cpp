// SPDX-License-Identifier: Apache-2.0
#include "ring.h"

#include <cstdint>
#include <cstring>
#include <mutex>

#include "boxes.h"
#include "segments.h"

namespace kvcache {
namespace {

// The same cutting and the same two steps as on a device, done at once.
class HostRing final : public StagingRing {
  public:
    HostRing(size_t slot_bytes, size_t num_slots)
        : slot_bytes_(slot_bytes), num_slots_(num_slots), memory_(slot_bytes * num_slots) {}

    void transfer(const Pages& pages, const Batch& batch, uint64_t, int) override {
        const std::lock_guard lock(mutex_);
        const Segments plan = plan_segments(pages, batch, slot_bytes_);
        for (const Segment& segment : plan.segments) {
            char* const slot = memory_.data() + next_ * slot_bytes_;
            next_ = (next_ + 1) % num_slots_;
            for (size_t i = segment.first; i < segment.first + segment.count; ++i) {
                const Part& part = plan.parts[i];
                if (!batch.store || part.skips)
                    std::memcpy(slot + part.offset, reinterpret_cast<void*>(part.address), part.bytes);
            }
            host_transfer(pages, slot_batch(batch, plan, segment, reinterpret_cast<uint64_t>(slot)));
            for (size_t i = segment.first; batch.store && i < segment.first + segment.count; ++i) {
                const Part& part = plan.parts[i];
                std::memcpy(reinterpret_cast<void*>(part.address), slot + part.offset, part.bytes);
            }
        }
    }

    void strided_dma(const Pages& pages, const Batch& batch, uint64_t) override {
        for (const std::vector<Box>& portion : portions(plan_boxes(pages, batch), slot_bytes_))
            host_copy_boxes(portion, batch.store);
    }

    void record(uint64_t) override {}

  private:
    size_t slot_bytes_, num_slots_;
    std::vector<char> memory_;
    size_t next_ = 0;
    std::mutex mutex_;
};

}  // namespace

std::unique_ptr<StagingRing> make_ring(int device, size_t slot_bytes, int num_slots, int turn) {
    if (slot_bytes == 0 || num_slots < 1)
        throw std::invalid_argument("a ring of " + std::to_string(num_slots) + " slots of " +
                                    std::to_string(slot_bytes) + " bytes; both must be above 0");
    if (turn < 0)
        throw std::invalid_argument("a ring whose DMAs change streams after " + std::to_string(turn) +
                                    " slots; 0 (never) and above are accepted");
    if (slot_bytes > PTRDIFF_MAX / static_cast<size_t>(num_slots) - kPartAlignment)
        throw std::invalid_argument("a ring of " + std::to_string(num_slots) + " slots of " +
                                    std::to_string(slot_bytes) + " bytes; less than 2^63 bytes are accepted");
    slot_bytes = (slot_bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
    if (device >= 0) return make_cuda_ring(device, slot_bytes, num_slots, turn);
    return std::make_unique<HostRing>(slot_bytes, static_cast<size_t>(num_slots));
}

}  // namespace kvcache
