// SPDX-License-Identifier: Apache-2.0
// Moves rotated keys from the positions that they were computed for to others: the old rotation taken back
// and the new one made, as one rotation in float and one rounding.
#pragma once

#include <cstddef>
#include <string>

#include "small_float.h"

namespace kvcache {

enum class ElementType { Float32, Float16, BFloat16, Float8E4M3, Float8E5M2 };

// Throws std::invalid_argument that names what is accepted: float32, float16, bfloat16, float8_e4m3fn,
// float8_e5m2.
ElementType element_type(const std::string& name);
size_t element_bytes(ElementType type);

// Keys [tokens, heads, head_size] in place, and the table [positions, rotary_size] of vLLM: cosines, then
// sines.
struct RotaryJob {
    uint64_t keys;
    int64_t tokens, heads, head_size;
    int64_t token_stride, head_stride;  // bytes
    ElementType type;
    uint64_t table;
    int64_t positions, rotary_size;
    ElementType table_type;  // Float32, Float16 or BFloat16
    bool neox;               // pairs (i, i + rotary_size/2), else (2i, 2i + 1)
    const int64_t* old_positions;
    const int64_t* new_positions;
};

// Throws std::invalid_argument that names the field, or a position's index and value.
void check(const RotaryJob& job);
void host_rotate(const RotaryJob& job);
// Positions lie in host memory. Queued on `stream`.
void cuda_rotate(const RotaryJob& job, int device, uint64_t stream);

struct Rotation {
    float cosine, sine;
};

// (c_new + i s_new) / (c_old + i s_old). The division takes back a scale that the table carries (YaRN's
// attention factor) and the rounding of its entries; equal positions give exactly 1.
KVCACHE_INLINE Rotation move_rotation(float old_cos, float old_sin, float new_cos, float new_sin) {
    const float norm = old_cos * old_cos + old_sin * old_sin;
    return {(new_cos * old_cos + new_sin * old_sin) / norm, (new_sin * old_cos - new_cos * old_sin) / norm};
}

template <class Type>
KVCACHE_INLINE void rotate_pair(typename Type::Storage* first, typename Type::Storage* second, Rotation by) {
    const float x = Type::widen(*first), y = Type::widen(*second);
    *first = Type::narrow(x * by.cosine - y * by.sine);
    *second = Type::narrow(y * by.cosine + x * by.sine);
}

}  // namespace kvcache
