// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace kvcache {

// Throws std::runtime_error with the runtime's text unless `status` is success.
inline void cuda_check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // an error that is reported here must not be found by the next call
    throw std::runtime_error(std::string("CUDA: ") + what + " failed: " + cudaGetErrorString(status));
}

// Makes `device` current for the scope, then the former one again.
class DeviceScope {
  public:
    explicit DeviceScope(int device) {
        cuda_check(cudaGetDevice(&former_), "cudaGetDevice");
        if (device == former_) return;
        cuda_check(cudaSetDevice(device), "cudaSetDevice");
        changed_ = true;
    }
    ~DeviceScope() {
        if (changed_) cudaSetDevice(former_);
    }
    DeviceScope(const DeviceScope&) = delete;
    DeviceScope& operator=(const DeviceScope&) = delete;

  private:
    int former_ = 0;
    bool changed_ = false;
};

}  // namespace kvcache
