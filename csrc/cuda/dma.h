// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

namespace kvcache {

// Copies that the copy engine makes in one submission.
class Copies {
  public:
    // Not across two chunks: those may lie in two registrations of host memory.
    void add(uint64_t to, uint64_t from, size_t bytes);
    // The host side of some copies is pageable: they are not made as a batch, and each returns when it is
    // done.
    void pageable() { pageable_ = true; }
    // Queues them on `stream`, which must not be the default stream.
    void run(cudaStream_t stream);

  private:
    std::vector<void*> to_;
    std::vector<const void*> from_;
    std::vector<size_t> bytes_;
    bool pageable_ = false;
};

}  // namespace kvcache
