// SPDX-License-Identifier: Apache-2.0
#include <cctype>
#include <fstream>

#include "cuda_check.h"
#include "device.h"

namespace kvcache {

std::string cuda_architectures() { return KVCACHE_CUDA_ARCHITECTURES; }

int cuda_device_count(std::string* why) {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess) {
        cudaGetLastError();
        count = 0;
        if (why != nullptr) *why = std::string("no usable GPU: ") + cudaGetErrorString(status);
    } else if (count == 0 && why != nullptr) {
        *why = "no GPU is visible";
    }
    return count;
}

void use_device(int device) {
    if (cudaSetDevice(device) != cudaSuccess) cudaGetLastError();  // the calls that follow will say so
}

std::string pin(void* address, size_t bytes) {
    // Another thread may be capturing a graph: a call like this one would break its capture, unless this
    // thread says that it has nothing to do with captures.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    const cudaError_t status =
        cudaHostRegister(address, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (status == cudaSuccess) return {};
    cudaGetLastError();
    return cudaGetErrorString(status);
}

void unpin(void* address) {
    cudaHostUnregister(address);
    cudaGetLastError();
}

bool device_reaches(const void* address) {
    cudaPointerAttributes attributes{};
    if (cudaPointerGetAttributes(&attributes, address) != cudaSuccess) {
        cudaGetLastError();
        return false;
    }
    return attributes.type != cudaMemoryTypeUnregistered;
}

int numa_node(int device) {
    char id[32];
    if (cudaDeviceGetPCIBusId(id, sizeof id, device) != cudaSuccess) {
        cudaGetLastError();
        return -1;
    }
    std::string name(id);
    for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    int node = -1;
    std::ifstream("/sys/bus/pci/devices/" + name + "/numa_node") >> node;
    return node;
}

}  // namespace kvcache
