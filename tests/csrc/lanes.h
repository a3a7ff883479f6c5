// SPDX-License-Identifier: Apache-2.0
// As much of CUDA as lets a kernel's source run on the CPU, one thread a lane and one warp at a time. It
// shows whether the arithmetic and what lanes tell each other are right, not the order of memory between
// lanes.
#pragma once

#include <algorithm>
#include <barrier>
#include <bit>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static

struct uint2 {
    uint32_t x, y;
};
struct uint4 {
    uint32_t x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

namespace lanes {

constexpr int kLanes = 32;

struct Index {
    uint32_t x;
};

inline std::barrier<> meet(kLanes);
inline uint32_t told[kLanes];

// What `read` finds once every lane has told its value.
template <class Read>
uint32_t exchange(uint32_t lane, uint32_t value, Read read) {
    told[lane] = value;
    meet.arrive_and_wait();
    const uint32_t found = read();
    meet.arrive_and_wait();
    return found;
}

}  // namespace lanes

inline thread_local lanes::Index threadIdx{0}, blockIdx{0};
inline lanes::Index gridDim{1}, blockDim{lanes::kLanes};

inline uint32_t lane_of_warp() { return threadIdx.x % lanes::kLanes; }
inline uint32_t __reduce_max_sync(uint32_t, uint32_t value) {
    return lanes::exchange(lane_of_warp(), value,
                           [] { return *std::max_element(lanes::told, lanes::told + lanes::kLanes); });
}
inline bool __any_sync(uint32_t, bool value) {
    return lanes::exchange(lane_of_warp(), value, [] {
        return uint32_t{std::any_of(lanes::told, lanes::told + lanes::kLanes, [](uint32_t v) { return v; })};
    });
}
inline uint32_t __shfl_up_sync(uint32_t, uint32_t value, uint32_t step) {
    const uint32_t lane = lane_of_warp();
    return lanes::exchange(lane, value, [=] { return lanes::told[lane >= step ? lane - step : lane]; });
}
inline uint32_t __shfl_sync(uint32_t, uint32_t value, uint32_t from) {
    return lanes::exchange(lane_of_warp(), value, [=] { return lanes::told[from]; });
}
inline void __syncwarp() { lanes::meet.arrive_and_wait(); }
inline void __syncthreads() { lanes::meet.arrive_and_wait(); }  // of a block of one warp
inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes) {
    std::memcpy(to, from, bytes);
}
inline void __pipeline_commit() {}
inline void __pipeline_wait_prior(size_t) {}
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t bytes = uint64_t{high} << 32 | low;
    uint32_t result = 0;
    for (uint32_t i = 0; i < 4; ++i)
        result |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return result;
}
inline uint32_t __vmaxu2(uint32_t one, uint32_t other) {
    return std::max(one >> 16, other >> 16) << 16 | std::max(one & 0xffff, other & 0xffff);
}
inline int __popc(uint32_t value) { return std::popcount(value); }
inline int __ffs(uint32_t value) { return value == 0 ? 0 : std::countr_zero(value) + 1; }
template <class T>
T __ldg(const T* address) {
    return *address;
}
template <class T>
T __ldcs(const T* address) {
    return *address;
}
template <class T>
void __stcs(T* address, T value) {
    *address = value;
}
template <class T>
T min(T one, T other) {
    return std::min(one, other);
}
template <class T>
T max(T one, T other) {
    return std::max(one, other);
}

namespace lanes {

// Runs a kernel in one block of `threads` threads, its warps one after the other.
template <class Kernel>
void run(Kernel kernel, uint32_t threads) {
    std::vector<std::thread> running;
    for (uint32_t lane = 0; lane < kLanes; ++lane)
        running.emplace_back([=] {
            for (uint32_t warp = 0; warp < threads; warp += kLanes) {
                threadIdx.x = warp + lane;
                kernel();
                meet.arrive_and_wait();
            }
        });
    for (std::thread& thread : running) thread.join();
}

}  // namespace lanes
