// SPDX-License-Identifier: Apache-2.0
#include <mutex>
#include <vector>

#include "boxes.h"
#include "cuda_check.h"
#include "device.h"
#include "dma.h"
#include "launch.h"
#include "ring.h"
#include "segments.h"

namespace kvcache {
namespace {

cudaStream_t stream_of(uint64_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

class CudaRing final : public StagingRing {
  public:
    CudaRing(int device, size_t slot_bytes, int num_slots, int turn)
        : device_(device), slot_bytes_(slot_bytes), turn_(static_cast<size_t>(turn)) {
        const DeviceScope scope(device);
        cuda_check(cudaMalloc(&memory_, slot_bytes * static_cast<size_t>(num_slots)),
                   "cudaMalloc of a staging ring");
        int least = 0, greatest = 0;
        cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
        for (cudaStream_t& stream : copies_)
            cuda_check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest),
                       "cudaStreamCreate");
        last_stream_ = copies_[0];
        cuda_check(cudaEventCreateWithFlags(&border_, cudaEventDisableTiming), "cudaEventCreate");
        slots_.resize(static_cast<size_t>(num_slots));
        for (size_t i = 0; i < slots_.size(); ++i) {
            slots_[i].address = reinterpret_cast<uint64_t>(memory_) + i * slot_bytes;
            cuda_check(cudaEventCreateWithFlags(&slots_[i].full, cudaEventDisableTiming), "cudaEventCreate");
            cuda_check(cudaEventCreateWithFlags(&slots_[i].empty, cudaEventDisableTiming), "cudaEventCreate");
        }
    }

    ~CudaRing() override {
        int former = 0;
        cudaGetDevice(&former);
        cudaSetDevice(device_);
        for (const Slot& slot : slots_) {  // a kernel of the last load may still read its slot
            cudaEventSynchronize(slot.full);
            cudaEventSynchronize(slot.empty);
            cudaEventDestroy(slot.full);
            cudaEventDestroy(slot.empty);
        }
        for (const cudaStream_t stream : copies_) {
            cudaStreamSynchronize(stream);
            cudaStreamDestroy(stream);
        }
        cudaEventDestroy(border_);
        cudaFree(memory_);
        cudaSetDevice(former);
        cudaGetLastError();
    }

    void transfer(const Pages& pages, const Batch& batch, uint64_t stream, int blocks) override {
        const std::lock_guard lock(mutex_);
        const DeviceScope scope(device_);
        const Segments plan = plan_segments(pages, batch, slot_bytes_);
        if (plan.parts.empty()) return;
        const cudaStream_t kernels = stream_of(stream);
        Launch launch(pages, batch, plan.parts.size());
        size_t slot = next_;
        for (const Segment& segment : plan.segments) {
            for (size_t i = segment.first; i < segment.first + segment.count; ++i)
                launch.add(piece(pages, plan.parts[i], slots_[slot].address));
            slot = (slot + 1) % slots_.size();
        }
        // A load's tables go the way of its DMAs: on the kernels' stream they would wait for the kernels of
        // the batch before, and the DMAs behind them in the copy engine's queue with them.
        launch.upload(batch.store ? kernels : next_stream());
        for (const Segment& segment : plan.segments) {
            if (batch.store)
                store(launch, plan, segment, kernels, blocks);
            else
                load(launch, plan, segment, kernels, blocks);
            next_ = (next_ + 1) % slots_.size();
        }
        launch.done(kernels);
    }

    void strided_dma(const Pages& pages, const Batch& batch, uint64_t stream) override {
        const std::lock_guard lock(mutex_);
        const DeviceScope scope(device_);
        const size_t most = turn_ == 0 ? PTRDIFF_MAX : slot_bytes_;
        const std::vector<std::vector<Box>> all = portions(plan_boxes(pages, batch), most);
        if (all.empty()) return;
        const cudaStream_t caller = stream_of(stream);
        cuda_check(cudaEventRecord(border_, caller), "cudaEventRecord");
        for (size_t i = 0; i < all.size(); ++i) {
            const cudaStream_t copies = next_copies();
            // All others are behind the first.
            if (i == 0) cuda_check(cudaStreamWaitEvent(copies, border_, 0), "cudaStreamWaitEvent");
            cuda_copy_boxes(all[i], batch.store, device_, reinterpret_cast<uint64_t>(copies));
            // A slot's event; whoever fills that slot next records it anew.
            last_ = slots_[next_].full;
            next_ = (next_ + 1) % slots_.size();
            cuda_check(cudaEventRecord(last_, copies), "cudaEventRecord");
        }
        cuda_check(cudaStreamWaitEvent(caller, last_, 0), "cudaStreamWaitEvent");
    }

    void record(uint64_t event) override {
        const std::lock_guard lock(mutex_);
        const DeviceScope scope(device_);
        cuda_check(cudaEventRecord(reinterpret_cast<cudaEvent_t>(event), last_stream_), "cudaEventRecord");
    }

  private:
    struct Slot {
        uint64_t address = 0;
        cudaEvent_t full = nullptr, empty = nullptr;
    };

    static Piece piece(const Pages& pages, const Part& part, uint64_t slot) {
        const int64_t tokens = part.token_end - part.token_begin;
        const ChunkStrides strides = chunk_strides(pages, part.layer_count, tokens, true);
        return {slot + part.offset,
                strides.layer,
                strides.kv,
                static_cast<uint32_t>(part.token_begin),
                static_cast<uint32_t>(tokens),
                part.chunk};
    }

    static void add(Copies& copies, uint64_t slot, const Part& part, bool store) {
        if (!device_reaches(reinterpret_cast<void*>(part.address))) copies.pageable();
        copies.add(store ? part.address : slot, store ? slot : part.address, part.bytes);
    }

    // Waiting for an event that was never recorded returns at once, so that a fresh slot needs no special
    // case.
    void store(Launch& launch, const Segments& plan, const Segment& segment, cudaStream_t kernels,
               int blocks) {
        const Slot& slot = slots_[next_];
        cuda_check(cudaStreamWaitEvent(kernels, slot.empty, 0), "cudaStreamWaitEvent");
        Copies kept;
        for (size_t i = segment.first; i < segment.first + segment.count; ++i) {
            const Part& part = plan.parts[i];
            // The DMA of a part with skipped tokens must bring back what the chunk held there.
            if (!part.skips) continue;
            kept.add(slot.address + part.offset, part.address, part.bytes);
            kept.pageable();  // also keeps the default stream, on which no batch may be, a possible `kernels`
        }
        kept.run(kernels);
        launch.run(segment.first, segment.first + segment.count, segment.layer_begin, segment.layer_count,
                   blocks, kernels);
        cuda_check(cudaEventRecord(slot.full, kernels), "cudaEventRecord");
        const cudaStream_t copies = next_copies();
        cuda_check(cudaStreamWaitEvent(copies, slot.full, 0), "cudaStreamWaitEvent");
        Copies out;
        for (size_t i = segment.first; i < segment.first + segment.count; ++i)
            add(out, slot.address + plan.parts[i].offset, plan.parts[i], true);
        out.run(copies);
        cuda_check(cudaEventRecord(slot.empty, copies), "cudaEventRecord");
        last_ = slot.empty;
    }

    void load(Launch& launch, const Segments& plan, const Segment& segment, cudaStream_t kernels,
              int blocks) {
        const Slot& slot = slots_[next_];
        const cudaStream_t copies = next_copies();
        cuda_check(cudaStreamWaitEvent(copies, slot.empty, 0), "cudaStreamWaitEvent");
        Copies in;
        for (size_t i = segment.first; i < segment.first + segment.count; ++i)
            add(in, slot.address + plan.parts[i].offset, plan.parts[i], false);
        in.run(copies);
        cuda_check(cudaEventRecord(slot.full, copies), "cudaEventRecord");
        last_ = slot.full;
        cuda_check(cudaStreamWaitEvent(kernels, slot.full, 0), "cudaStreamWaitEvent");
        launch.run(segment.first, segment.first + segment.count, segment.layer_begin, segment.layer_count,
                   blocks, kernels);
        cuda_check(cudaEventRecord(slot.empty, kernels), "cudaEventRecord");
    }

    // Where the next DMA goes: after a turn to the other of two streams, behind the one before. A copy engine
    // goes on with one stream as long as that has copies that may run, and all that others move in copies of
    // 64 KiB and more (smaller ones go another way), inputs of the model's next step among them, stands
    // still: for 77 ms of a load of 4 GiB. Where the stream changes, others get in between. A change costs
    // some 7 us, a slot of 16 MiB takes 0.3 ms (H200).
    cudaStream_t next_stream() const { return copies_[turn_ == 0 ? 0 : dmas_ / turn_ % kStreams]; }

    cudaStream_t next_copies() {
        const cudaStream_t next = next_stream();
        ++dmas_;
        if (last_ != nullptr && next != last_stream_)
            cuda_check(cudaStreamWaitEvent(next, last_, 0), "cudaStreamWaitEvent");
        return last_stream_ = next;
    }

    static constexpr size_t kStreams = 2;

    int device_;
    size_t slot_bytes_;
    size_t turn_;  // slots; 0: the stream never changes
    void* memory_ = nullptr;
    cudaStream_t copies_[kStreams] = {};
    size_t dmas_ = 0;
    cudaStream_t last_stream_ = nullptr;  // of the last DMA
    cudaEvent_t last_ = nullptr;          // behind it
    cudaEvent_t border_ = nullptr;        // behind what the caller's stream was given
    std::vector<Slot> slots_;
    size_t next_ = 0;
    std::mutex mutex_;
};

}  // namespace

std::unique_ptr<StagingRing> make_cuda_ring(int device, size_t slot_bytes, int num_slots, int turn) {
    return std::make_unique<CudaRing>(device, slot_bytes, num_slots, turn);
}

}  // namespace kvcache
