// SPDX-License-Identifier: Apache-2.0
// Small tables (addresses, slots) that a launch reads from device memory: pairs of a page-locked and a device
// buffer that are used again when the stream has passed them.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace kvcache {

class Descriptors {
  public:
    // A pair of at least `bytes` on the current device that no queued work uses.
    explicit Descriptors(size_t bytes);
    // Gives the pair back; it is free when the stream of `done()` has come there. Where that was not called,
    // it is free behind all that the stream of `upload()` was given, or at once without one.
    ~Descriptors();
    Descriptors(const Descriptors&) = delete;
    Descriptors& operator=(const Descriptors&) = delete;

    char* host() const;
    char* device() const;
    void upload(size_t bytes, cudaStream_t stream);
    // Everything on `stream` up to here may read the device buffer.
    void done(cudaStream_t stream);

    struct Pair;

  private:
    Pair* pair_;
    cudaStream_t uploading_ = nullptr;  // from upload() to done()
};

}  // namespace kvcache
