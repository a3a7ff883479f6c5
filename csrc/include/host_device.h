// SPDX-License-Identifier: Apache-2.0
// Marks small functions that host code and kernels share, so that both compute alike.
#pragma once

#if defined(__CUDACC__)
#define KVCACHE_INLINE __host__ __device__ __forceinline__
#else
#define KVCACHE_INLINE inline
#endif
