// SPDX-License-Identifier: Apache-2.0
#include "uring.h"

#include <linux/fs.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>

namespace kvcache {
namespace {

constexpr int64_t kSector = 512;

std::system_error failure(int number, const char* what) {
    return std::system_error(number, std::generic_category(), std::string("io_uring: ") + what);
}

// Takes `bytes` off the front of the pieces.
void advance(std::vector<iovec>& pieces, size_t& first, size_t bytes) {
    while (bytes > 0) {
        iovec& piece = pieces[first];
        const size_t step = std::min(bytes, piece.iov_len);
        piece.iov_base = static_cast<char*>(piece.iov_base) + step;
        piece.iov_len -= step;
        bytes -= step;
        if (piece.iov_len == 0) ++first;
    }
    while (first < pieces.size() && pieces[first].iov_len == 0) ++first;
}

}  // namespace

Uring::Uring(unsigned depth) : depth_(depth) {
    if (depth == 0 || depth > 1024)
        throw std::invalid_argument("Uring: depth is " + std::to_string(depth) + "; 1 to 1024 are accepted");
    io_uring_params params{};
    fd_ = static_cast<int>(syscall(SYS_io_uring_setup, depth, &params));
    if (fd_ < 0) throw failure(errno, "io_uring_setup");
    // Linux 5.5: one mapping for both queues, and completions that are never dropped.
    constexpr unsigned needed = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP;
    if ((params.features & needed) != needed) {
        ::close(fd_);
        throw failure(ENOSYS, "the kernel is older than 5.5");
    }
    rings_bytes_ = std::max(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                            params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    sqes_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    const auto map = [this](size_t bytes, off_t where) {
        return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, where);
    };
    void* const rings = map(rings_bytes_, IORING_OFF_SQ_RING);
    void* const sqes = map(sqes_bytes_, IORING_OFF_SQES);
    if (rings == MAP_FAILED || sqes == MAP_FAILED) {
        const int number = errno;
        if (rings != MAP_FAILED) munmap(rings, rings_bytes_);
        if (sqes != MAP_FAILED) munmap(sqes, sqes_bytes_);
        ::close(fd_);
        throw failure(number, "its queues could not be mapped");
    }
    rings_ = static_cast<char*>(rings);
    sqes_ = static_cast<io_uring_sqe*>(sqes);
    const auto at = [this](uint32_t offset) { return reinterpret_cast<unsigned*>(rings_ + offset); };
    sq_tail_ = at(params.sq_off.tail);
    sq_array_ = at(params.sq_off.array);
    sq_mask_ = *at(params.sq_off.ring_mask);
    cq_head_ = at(params.cq_off.head);
    cq_tail_ = at(params.cq_off.tail);
    cq_mask_ = *at(params.cq_off.ring_mask);
    cqes_ = reinterpret_cast<io_uring_cqe*>(rings_ + params.cq_off.cqes);
}

Uring::~Uring() { close(); }

void Uring::submit(uint64_t tag, int fd, uint64_t offset, std::vector<iovec> pieces, bool write,
                   bool durable) {
    if (fd_ < 0) throw std::logic_error("Uring: it is closed");
    if (transfers_.size() >= depth_)
        throw std::length_error("Uring: " + std::to_string(depth_) +
                                " transfers are under way; wait for one before the next");
    if (pieces.empty() || pieces.size() > IOV_MAX)
        throw std::invalid_argument("Uring: " + std::to_string(pieces.size()) + " pieces; 1 to " +
                                    std::to_string(IOV_MAX) + " are accepted");
    const auto [entry, fresh] =
        transfers_.try_emplace(tag, Transfer{fd, offset, std::move(pieces), 0, 0, write, durable});
    if (!fresh) throw std::invalid_argument("Uring: tag " + std::to_string(tag) + " is under way already");
    advance(entry->second.pieces, entry->second.first, 0);
    try {
        queue(tag, entry->second);
    } catch (...) {
        transfers_.erase(entry);
        throw;
    }
}

void Uring::queue(uint64_t tag, const Transfer& transfer) {
    const unsigned tail = *sq_tail_, index = tail & sq_mask_;
    io_uring_sqe& sqe = sqes_[index];
    std::memset(&sqe, 0, sizeof sqe);
    sqe.opcode = transfer.write ? IORING_OP_WRITEV : IORING_OP_READV;
    sqe.fd = transfer.fd;
    sqe.off = transfer.offset + static_cast<uint64_t>(transfer.done);
    sqe.addr = reinterpret_cast<uint64_t>(transfer.pieces.data() + transfer.first);
    sqe.len = static_cast<uint32_t>(transfer.pieces.size() - transfer.first);
    sqe.rw_flags = transfer.write && transfer.durable ? RWF_DSYNC : 0;
    sqe.user_data = tag;
    sq_array_[index] = index;
    __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
    while (enter(1, 0) == 0) {
    }
}

// The kernel takes `submit` entries and waits for `complete` completions; how many entries it took.
unsigned Uring::enter(unsigned submit, unsigned complete) {
    for (;;) {
        const long taken = syscall(SYS_io_uring_enter, fd_, submit, complete,
                                   complete > 0 ? IORING_ENTER_GETEVENTS : 0u, nullptr, 0);
        if (taken >= 0) return static_cast<unsigned>(taken);
        if (errno == EINTR || errno == EAGAIN || errno == EBUSY) continue;
        throw failure(errno, "io_uring_enter");
    }
}

bool Uring::take(uint64_t* tag, int64_t* result) {
    const unsigned head = *cq_head_;
    if (head == __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) return false;
    const io_uring_cqe& cqe = cqes_[head & cq_mask_];
    *tag = cqe.user_data;
    *result = cqe.res;
    __atomic_store_n(cq_head_, head + 1, __ATOMIC_RELEASE);
    return true;
}

std::pair<uint64_t, int64_t> Uring::wait() {
    if (transfers_.empty()) throw std::logic_error("Uring: nothing is under way");
    for (;;) {
        uint64_t tag = 0;
        int64_t result = 0;
        while (!take(&tag, &result)) enter(0, 1);
        const auto entry = transfers_.find(tag);
        Transfer& transfer = entry->second;
        if (result == -EINTR || result == -EAGAIN) {
            queue(tag, transfer);
            continue;
        }
        if (result > 0) {
            transfer.done += result;
            advance(transfer.pieces, transfer.first, static_cast<size_t>(result));
            // Short: the rest, or nothing at the end of the file. Direct I/O cannot ask from within a sector.
            if (transfer.first < transfer.pieces.size() && (transfer.write || transfer.done % kSector == 0)) {
                queue(tag, transfer);
                continue;
            }
        }
        if (result == 0 && transfer.write) result = -EIO;
        const int64_t answer = result < 0 ? result : transfer.done;
        transfers_.erase(entry);
        return {tag, answer};
    }
}

void Uring::close() {
    if (fd_ < 0) return;
    while (!transfers_.empty()) {  // the kernel would go on writing into memory that others have by then
        try {
            wait();
        } catch (const std::system_error&) {
            break;
        }
    }
    munmap(sqes_, sqes_bytes_);
    munmap(rings_, rings_bytes_);
    ::close(fd_);
    fd_ = -1;
}

}  // namespace kvcache
