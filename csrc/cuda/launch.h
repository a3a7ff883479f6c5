// SPDX-License-Identifier: Apache-2.0
// One batch's tables on the device and the launches over parts of it.
#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "descriptors.h"
#include "transfer.cuh"
#include "transfer.h"

namespace kvcache {

// The batch must be checked and outlive the object. Use: add() all pieces, upload(), run() parts in any
// order, done().
class Launch {
  public:
    Launch(const Pages& pages, const Batch& batch, size_t pieces_at_most);

    // Adds a piece (slot_begin is its token index in the batch's slot mapping) and returns its index.
    size_t add(const Piece& piece);
    void upload(cudaStream_t stream);
    // Copies the pieces [begin, end), each `layers` layers from `layer_begin` of the pages on, with `blocks`
    // thread blocks.
    void run(size_t begin, size_t end, int64_t layer_begin, int64_t layers, int blocks, cudaStream_t stream);
    // After the last run(): the tables are free when `stream` gets here.
    void done(cudaStream_t stream);

  private:
    TransferArgs arguments(size_t begin, size_t end, int64_t layer_begin, int64_t layers) const;
    void run_coded(const TransferArgs& copy, uint32_t longest, int blocks, cudaStream_t stream) const;

    const Pages& pages_;
    const Batch& batch_;
    std::unique_ptr<Descriptors> tables_;
    size_t bases_bytes_ = 0, pieces_bytes_ = 0, bytes_ = 0, count_ = 0;
    int64_t first_slot_ = 0;
    uint64_t addresses_ = 0;  // all pieces' addresses and strides or-ed: their common alignment
};

}  // namespace kvcache
