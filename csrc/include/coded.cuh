// SPDX-License-Identifier: Apache-2.0
// The kernel between pages and chunks of coded rows (see row_codec.h), a warp a row.
#pragma once

#include "layout.h"
#include "row_codec.h"
#include "transfer.cuh"

namespace kvcache {

struct CodedArgs {
    TransferArgs copy;          // but for what is said there of units, heads and vectors
    uint32_t elements;          // of a row
    FastDivisor head_elements;  // of what lies together in a page
    FastDivisor longest;        // tokens of the longest piece
    FastDivisor layers;         // copy.layers
    int32_t* refused;           // by the chunks' numbers: becomes 1 where a row has no code
};

// What coded rows add to `copy`, but for the units of work.
inline CodedArgs coded_args(const Pages& pages, const TransferArgs& copy) {
    const PagedLayout& page = pages.layout;
    const bool contiguous = page.heads == 1 || page.head_stride == page.head_bytes;
    CodedArgs args{};
    args.copy = copy;
    args.copy.planes = static_cast<uint32_t>(page.planes);
    args.copy.chunk_token_stride = pages.chunk_token_bytes();
    args.elements = static_cast<uint32_t>(pages.row_elements());
    args.head_elements =
        FastDivisor(static_cast<uint32_t>((contiguous ? page.row_bytes() : page.head_bytes) / 2));
    return args;
}

constexpr uint32_t kWarp = 32;
constexpr uint32_t kAll = 0xffffffff;
constexpr uint32_t kLaneElements = 8;  // 16 bytes

// Address of the row's vector `v` in its page.
__device__ __forceinline__ uint4* in_page(char* page, uint32_t v, const CodedArgs& args) {
    const uint32_t first = v * kLaneElements, head = args.head_elements.quotient(first);
    return reinterpret_cast<uint4*>(page + head * args.copy.head_stride +
                                    int64_t{first - head * args.head_elements.divisor} * 2);
}

// Elements 2 i and 2 i + 1 are the halves of word i.
__device__ __forceinline__ uint32_t element(const uint4& vector, uint32_t i) {
    const uint32_t word = i < 4 ? (i < 2 ? vector.x : vector.y) : (i < 6 ? vector.z : vector.w);
    return word >> (16 * (i & 1)) & 0xffff;
}

// Four numbers of a byte each, in the order of the elements; arithmetic on a word does not carry between
// them.
constexpr uint32_t kEach = 0x01010101;
constexpr uint32_t kHighBits = 0x80808080;

// The largest exponent below kInfinite of a row's words, of two elements each, is found as the largest number
// of 16 bits: the exponent and 1, which makes 0 of kInfinite, at the exponent's place.
__device__ __forceinline__ uint32_t next_exponents(uint32_t word) {
    constexpr uint32_t kExponents = 0x7f807f80;
    return ((word & kExponents) + 0x00800080) & kExponents;
}

__device__ inline uint32_t largest_exponent(char* page, const CodedArgs& args) {
    const uint32_t lane = threadIdx.x % kWarp, vectors = args.elements / kLaneElements;
    uint32_t most = 0;
    for (uint32_t first = lane; first < vectors; first += kWarp * kInFlight) {
        uint4 row[kInFlight];
#pragma unroll
        for (uint32_t i = 0; i < kInFlight; ++i) {
            const uint32_t v = first + i * kWarp;
            row[i] = v < vectors ? *in_page(page, v, args) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (uint32_t i = 0; i < kInFlight; ++i) {
            const uint32_t pairs = __vmaxu2(__vmaxu2(next_exponents(row[i].x), next_exponents(row[i].y)),
                                            __vmaxu2(next_exponents(row[i].z), next_exponents(row[i].w)));
            most = __vmaxu2(most, pairs);
        }
    }
    const uint32_t next = __reduce_max_sync(kAll, max(most & 0xffff, most >> 16)) >> 7;
    return next == 0 ? 0 : next - 1;
}

struct Coded {
    uint32_t bytes;       // signs and mantissas
    uint32_t codes;       // one a byte
    uint32_t exceptions;  // the high bit of each byte
};

// Four elements, of two words, over the base that is in each byte of `bases`.
__device__ __forceinline__ Coded coded_of(uint32_t one, uint32_t two, uint32_t bases) {
    const uint32_t lower = __byte_perm(one, two, 0x6420), upper = __byte_perm(one, two, 0x7531);
    const uint32_t exponents = (upper << 1 & ~kEach) | (lower >> 7 & kEach);
    const uint32_t low_bits = exponents & ~kHighBits;
    const uint32_t differences = ((bases | kHighBits) - low_bits) ^ ((bases ^ ~exponents) & kHighBits);
    const uint32_t above = (~bases & exponents) | ((~bases | exponents) & differences);  // than the base
    const uint32_t far = (differences & ~kHighBits) + (128 - kZeroCode) * kEach;         // or in 15 and more
    const uint32_t outside = (above | far | differences) & kHighBits;
    const uint32_t nonzero = (low_bits + ~kHighBits) | exponents;
    const uint32_t without = (outside | ~nonzero) & kHighBits;  // code
    return {(upper & kHighBits) | (lower & ~kHighBits),
            (differences & 15 * kEach) | without / 128 * kZeroCode, outside & nonzero};
}

// Eight codes as halves of four bytes.
__device__ __forceinline__ uint32_t packed(uint32_t low, uint32_t high) {
    return __byte_perm(low | low >> 4, high | high >> 4, 0x6420);
}

// Codes of a row over `base`; its exceptions, of which as many as there is room for are written.
__device__ inline uint32_t encode_over(uint32_t base, char* page, uint8_t* coded, const CodedArgs& args) {
    const uint32_t lane = threadIdx.x % kWarp, vectors = args.elements / kLaneElements;
    auto* const entries = reinterpret_cast<uint32_t*>(coded + args.elements + args.elements / 2) + 1;
    const uint32_t capacity = code_exceptions(args.elements), bases = base * kEach;
    uint32_t written = 0;  // exceptions of all lanes so far
    for (uint32_t first = 0; first < vectors; first += kWarp) {
        const uint32_t v = first + lane;
        uint4 row = make_uint4(0, 0, 0, 0);
        if (v < vectors) row = *in_page(page, v, args);
        const Coded low = coded_of(row.x, row.y, bases), high = coded_of(row.z, row.w, bases);
        if (v < vectors) {
            reinterpret_cast<uint2*>(coded)[v] = make_uint2(low.bytes, high.bytes);
            reinterpret_cast<uint32_t*>(coded + args.elements)[v] = packed(low.codes, high.codes);
        }
        if (!__any_sync(kAll, (low.exceptions | high.exceptions) != 0)) continue;
        const uint32_t exceptions = __popc(low.exceptions) + __popc(high.exceptions);
        uint32_t before = exceptions;
#pragma unroll
        for (uint32_t step = 1; step < kWarp; step *= 2) {
            const uint32_t other = __shfl_up_sync(kAll, before, step);
            if (lane >= step) before += other;
        }
        const uint32_t total = __shfl_sync(kAll, before, kWarp - 1);
        uint32_t at = written + before - exceptions;
#pragma unroll
        for (uint32_t i = 0; i < kLaneElements; ++i) {
            if (((i < 4 ? low : high).exceptions >> 8 * (i & 3) & 128) == 0) continue;
            if (at < capacity) entries[at] = (v * kLaneElements + i) | element(row, i) << 16;
            ++at;
        }
        written += total;
    }
    return written;
}

__device__ inline void encode(char* page, uint8_t* coded, uint32_t chunk, const CodedArgs& args) {
    const uint32_t lane = threadIdx.x % kWarp;
    uint8_t* const header = coded + args.elements + args.elements / 2;
    auto* const entries = reinterpret_cast<uint32_t*>(header) + 1;
    const uint32_t capacity = code_exceptions(args.elements);
    uint32_t base = largest_exponent(page, args);
    uint32_t written = encode_over(base, page, coded, args);
    for (uint32_t tried = 1; tried < kBases && written > capacity && base > 0; ++tried) {
        __syncwarp();  // over other lanes' entries
        written = encode_over(--base, page, coded, args);
    }
    const bool fits = written <= capacity;
    __syncwarp();  // zeros behind other lanes' entries
    for (uint32_t i = lane + (fits ? written : 0); i < capacity; i += kWarp) entries[i] = 0;
    if (lane == 0) {
        *reinterpret_cast<uint32_t*>(header) = fits ? base | written << 16 : 0;
        if (!fits) args.refused[chunk] = 1;
    }
}

// Exponents of four elements from their codes.
__device__ __forceinline__ uint32_t exponents(uint32_t codes, uint32_t bases) {
    const uint32_t zeros = (codes * 8 + 8 * kEach & kHighBits) / 128 * 255;  // 255 where a code is kZeroCode
    const uint32_t differences = ((bases | kHighBits) - codes) ^ (~bases & kHighBits);
    return differences & ~zeros;
}

// Eight elements of a row whose base is in each byte of `bases`.
__device__ __forceinline__ uint4 elements_of(const uint2& bytes, uint32_t codes, uint32_t bases) {
    const uint32_t even = exponents(codes & 15 * kEach, bases),
                   odd = exponents(codes >> 4 & 15 * kEach, bases);
    const uint32_t first = __byte_perm(even, odd, 0x5140), second = __byte_perm(even, odd, 0x7362);
    const auto lower = [](uint32_t byte, uint32_t exponent) {
        return (byte & ~kHighBits) | (exponent << 7 & kHighBits);
    };
    const auto upper = [](uint32_t byte, uint32_t exponent) {
        return (byte & kHighBits) | (exponent >> 1 & ~kHighBits);
    };
    const uint32_t low[2] = {lower(bytes.x, first), lower(bytes.y, second)};
    const uint32_t high[2] = {upper(bytes.x, first), upper(bytes.y, second)};
    return make_uint4(__byte_perm(low[0], high[0], 0x5140), __byte_perm(low[0], high[0], 0x7362),
                      __byte_perm(low[1], high[1], 0x5140), __byte_perm(low[1], high[1], 0x7362));
}

// Codes are read once: from memory that others need the cache for, or from a multiprocessor's own.
struct Streamed {
    template <class T>
    __device__ __forceinline__ T operator()(const T* address) const {
        return __ldcs(address);
    }
};
struct Shared {
    template <class T>
    __device__ __forceinline__ T operator()(const T* address) const {
        return *address;
    }
};

template <class Load>
__device__ inline void decode(const uint8_t* coded, char* page, const CodedArgs& args, Load load) {
    const uint32_t lane = threadIdx.x % kWarp, vectors = args.elements / kLaneElements;
    const auto* const header = reinterpret_cast<const uint32_t*>(coded + args.elements + args.elements / 2);
    const uint32_t bases = (*header & 255) * kEach;
    const uint32_t exceptions = min(*header >> 16, code_exceptions(args.elements));
    for (uint32_t first = lane; first < vectors; first += kWarp * kInFlight) {
        uint2 bytes[kInFlight];
        uint32_t codes[kInFlight];
#pragma unroll
        for (uint32_t i = 0; i < kInFlight; ++i) {
            const uint32_t v = first + i * kWarp;
            if (v >= vectors) continue;
            bytes[i] = load(reinterpret_cast<const uint2*>(coded) + v);
            codes[i] = load(reinterpret_cast<const uint32_t*>(coded + args.elements) + v);
        }
#pragma unroll
        for (uint32_t i = 0; i < kInFlight; ++i) {
            const uint32_t v = first + i * kWarp;
            if (v < vectors) __stcs(in_page(page, v, args), elements_of(bytes[i], codes[i], bases));
        }
    }
    if (exceptions == 0) return;
    __syncwarp();  // over other lanes' vectors
    for (uint32_t e = lane; e < exceptions; e += kWarp) {
        const uint32_t entry = header[1 + e], index = entry & 0xffff;
        if (index >= args.elements) continue;
        auto* const vector = reinterpret_cast<uint16_t*>(in_page(page, index / kLaneElements, args));
        vector[index % kLaneElements] = static_cast<uint16_t>(entry >> 16);
    }
}

template <bool kStore>
__global__ void __launch_bounds__(kThreads) coded_kernel(const CodedArgs args) {
    const TransferArgs& copy = args.copy;
    const uint32_t rows = copy.num_pieces * copy.layers * args.longest.divisor * copy.planes;
    const uint32_t warps = gridDim.x * (kThreads / kWarp);
    for (uint32_t row = (blockIdx.x * kThreads + threadIdx.x) / kWarp; row < rows; row += warps) {
        const uint32_t plane = row & (copy.planes - 1), number = row >> (copy.planes - 1);  // 1 or 2 planes
        const uint32_t slice = args.longest.quotient(number), token = number - slice * args.longest.divisor;
        const uint32_t place = args.layers.quotient(slice), layer = slice - place * copy.layers;
        const Piece piece = copy.pieces[place];
        if (token >= piece.tokens) continue;
        const int32_t slot = __ldg(copy.slots + piece.slot_begin + token);
        if (slot < 0) continue;
        const uint32_t block = copy.block_size.quotient(static_cast<uint32_t>(slot));
        const uint32_t offset = static_cast<uint32_t>(slot) - block * copy.block_size.divisor;
        char* const page =
            reinterpret_cast<char*>(copy.bases[(copy.layer_begin + layer) * copy.base_planes + plane]) +
            block * copy.block_stride + offset * copy.token_stride;
        auto* const coded = reinterpret_cast<uint8_t*>(piece.address) + layer * piece.layer_stride +
                            token * copy.chunk_token_stride + plane * piece.kv_stride;
        if (kStore)
            encode(page, coded, piece.chunk, args);
        else
            decode(coded, page, args, Streamed{});
    }
}

}  // namespace kvcache
