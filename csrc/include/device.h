// SPDX-License-Identifier: Apache-2.0
// What the host code asks of a GPU. Built with CUDA these reach the driver; built without it they say that
// there is none.
#pragma once

#include <cstddef>
#include <string>

namespace kvcache {

// "sm_80 sm_90" of the machine code in this module; empty when it was built without CUDA.
std::string cuda_architectures();

// The number of CUDA devices that the driver answers for now; 0 without a driver, and `why` says which it
// was.
int cuda_device_count(std::string* why = nullptr);

// This thread's calls are for `device` from now on. A thread begins with device 0, of whose memory its first
// call takes some hundred MiB, though all its work be for another one.
void use_device(int device);

// Page-locks [address, address+bytes) for all devices. Returns the driver's reason, empty on success.
std::string pin(void* address, size_t bytes);
void unpin(void* address);

// Whether a device reaches the byte at `address` by itself: device memory, or page-locked host memory.
bool device_reaches(const void* address);

// Whether many copies go to a copy engine as one operation of a stream.
bool dma_in_batches();

// NUMA node of a device, -1 when unknown.
int numa_node(int device);

}  // namespace kvcache
