// SPDX-License-Identifier: Apache-2.0
#include "rotary.h"

#include <stdexcept>
#include <vector>

#include "element_dispatch.h"
#include "layout.h"

namespace kvcache {
namespace {

constexpr struct {
    const char* name;
    ElementType type;
    size_t bytes;
} kTypes[] = {
    {"float32", ElementType::Float32, 4},        {"float16", ElementType::Float16, 2},
    {"bfloat16", ElementType::BFloat16, 2},      {"float8_e4m3fn", ElementType::Float8E4M3, 1},
    {"float8_e5m2", ElementType::Float8E5M2, 1},
};

std::vector<float> widen_row(const RotaryJob& job, int64_t position) {
    std::vector<float> row(static_cast<size_t>(job.rotary_size));
    with_table_type(job.table_type, [&](auto type) {
        using Type = decltype(type);
        const auto* stored =
            reinterpret_cast<const typename Type::Storage*>(job.table) + position * job.rotary_size;
        for (size_t i = 0; i < row.size(); ++i) row[i] = Type::widen(stored[i]);
    });
    return row;
}

}  // namespace

ElementType element_type(const std::string& name) {
    for (const auto& known : kTypes)
        if (name == known.name) return known.type;
    throw std::invalid_argument("dtype " + name +
                                "; float32, float16, bfloat16, float8_e4m3fn and float8_e5m2 are accepted");
}

size_t element_bytes(ElementType type) {
    for (const auto& known : kTypes)
        if (type == known.type) return known.bytes;
    return 0;
}

void check(const RotaryJob& job) {
    auto fail = [](const std::string& text) { throw std::invalid_argument("rotary embedding: " + text); };
    if (job.tokens < 0 || job.heads < 1 || job.head_size < 1)
        fail("keys of " + std::to_string(job.tokens) + " tokens, " + std::to_string(job.heads) +
             " heads of " + std::to_string(job.head_size));
    if (job.tokens > 0 && (job.keys == 0 || job.table == 0))
        fail(std::string(job.keys == 0 ? "the keys have" : "the table has") + " the address 0");
    nested_extent(
        "rotary embedding",
        {{"token_stride", job.token_stride, job.tokens}, {"head_stride", job.head_stride, job.heads}},
        job.head_size * static_cast<int64_t>(element_bytes(job.type)));
    if (job.rotary_size < 2 || job.rotary_size % 2 != 0 || job.rotary_size > job.head_size)
        fail("the table has " + std::to_string(job.rotary_size) +
             " entries a position; an even number of at most " + std::to_string(job.head_size) +
             " is accepted");
    if (job.table_type != ElementType::Float32 && job.table_type != ElementType::Float16 &&
        job.table_type != ElementType::BFloat16)
        fail("the table's dtype is a float8; float32, float16 and bfloat16 are accepted");
    auto positions = [&](const char* name, const int64_t* values) {
        for (int64_t i = 0; i < job.tokens; ++i)
            if (values[i] < 0 || values[i] >= job.positions)
                fail(std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(values[i]) +
                     "; the table has the positions 0 to " + std::to_string(job.positions - 1));
    };
    positions("old_positions", job.old_positions);
    positions("new_positions", job.new_positions);
}

void host_rotate(const RotaryJob& job) {
    const int64_t half = job.rotary_size / 2;
    std::vector<Rotation> moves(static_cast<size_t>(half));
    with_type(job.type, [&](auto type) {
        using Type = decltype(type);
        for (int64_t token = 0; token < job.tokens; ++token) {
            if (job.old_positions[token] == job.new_positions[token]) continue;
            const std::vector<float> was = widen_row(job, job.old_positions[token]);
            const std::vector<float> is = widen_row(job, job.new_positions[token]);
            for (size_t i = 0; i < moves.size(); ++i)
                moves[i] = move_rotation(was[i], was[moves.size() + i], is[i], is[moves.size() + i]);
            for (int64_t head = 0; head < job.heads; ++head) {
                auto* key = reinterpret_cast<typename Type::Storage*>(
                    job.keys + static_cast<uint64_t>(token * job.token_stride + head * job.head_stride));
                for (int64_t i = 0; i < half; ++i)
                    rotate_pair<Type>(key + (job.neox ? i : 2 * i), key + (job.neox ? i + half : 2 * i + 1),
                                      moves[static_cast<size_t>(i)]);
            }
        }
    });
}

}  // namespace kvcache
