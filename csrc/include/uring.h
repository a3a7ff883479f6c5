// SPDX-License-Identifier: Apache-2.0
// Reads and writes of files through io_uring, by raw system calls: no library is needed where the module
// loads.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

struct io_uring_sqe;
struct io_uring_cqe;

namespace kvcache {

// One submission and completion queue. Not thread-safe: one thread uses it.
class Uring {
  public:
    // For at most `depth` transfers at a time. Throws std::system_error with the kernel's reason: ENOSYS or
    // EPERM where the kernel, its settings or the container's seccomp profile have none.
    explicit Uring(unsigned depth);
    ~Uring();
    Uring(const Uring&) = delete;
    Uring& operator=(const Uring&) = delete;

    // Starts a transfer of the pieces from or to `offset` of a file; they are one after the other there. The
    // memory is the kernel's until `wait` gives the tag back. `durable`: a write that is on the device when
    // it ends (RWF_DSYNC). Throws std::invalid_argument for a tag that is under way, std::length_error above
    // the depth.
    void submit(uint64_t tag, int fd, uint64_t offset, std::vector<iovec> pieces, bool write, bool durable);
    // The next transfer that ended: its tag, and its bytes (fewer than asked for only at the end of the file)
    // or the negative errno. Throws std::logic_error when nothing is under way.
    std::pair<uint64_t, int64_t> wait();
    size_t under_way() const { return transfers_.size(); }
    // Waits for all that is under way and gives the queues back. Idempotent.
    void close();

  private:
    struct Transfer {
        int fd;
        uint64_t offset;
        std::vector<iovec> pieces;
        size_t first = 0;  // piece that is not done
        int64_t done = 0;  // bytes
        bool write, durable;
    };

    void queue(uint64_t tag, const Transfer& transfer);
    unsigned enter(unsigned submit, unsigned complete);
    bool take(uint64_t* tag, int64_t* result);

    int fd_ = -1;
    unsigned depth_;
    char* rings_ = nullptr;  // both queues' indices, and the completions
    size_t rings_bytes_ = 0;
    io_uring_sqe* sqes_ = nullptr;
    size_t sqes_bytes_ = 0;
    unsigned *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    unsigned sq_mask_ = 0, cq_mask_ = 0;
    io_uring_cqe* cqes_ = nullptr;
    std::unordered_map<uint64_t, Transfer> transfers_;
};

}  // namespace kvcache
