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

// Of a row a lane codes two vectors that follow each other, whose codes share words.
constexpr uint32_t kCodedTogether = 2 * kLaneElements;
// Of a warp over 32 times so many, the loads of which are under way at once.
constexpr uint32_t kPasses = 2;

struct Coded {
    uint32_t bytes;      // signs and mantissas
    uint32_t codes;      // one a byte
    uint32_t exponents;  // likewise
};

// Four elements, of two words, over the base that is in each byte of `bases`. Arithmetic on a word does not
// carry between its bytes.
__device__ __forceinline__ Coded coded_of(uint32_t one, uint32_t two, uint32_t bases) {
    const uint32_t lower = __byte_perm(one, two, 0x6420), upper = __byte_perm(one, two, 0x7531);
    const uint32_t exponents = (upper << 1 & ~kEach) | (lower >> 7 & kEach);
    const uint32_t below =
        ((bases | kHighBits) - (exponents & ~kHighBits)) ^ ((bases ^ ~exponents) & kHighBits);
    const uint32_t far = ((below & ~kHighBits) + (128 - kEscape) * kEach) | below;  // its high bits
    return {(upper & kHighBits) | (lower & ~kHighBits),
            (below | (far & kHighBits) / 128 * kEscape) & kEscape * kEach, exponents};
}

// How many of a number lie in the lanes before this one, and in all.
struct Before {
    uint32_t mine, all;
};
__device__ __forceinline__ Before before_lane(uint32_t number) {
    const uint32_t lane = threadIdx.x % kWarp;
    uint32_t sum = number;
#pragma unroll
    for (uint32_t step = 1; step < kWarp; step *= 2) {
        const uint32_t other = __shfl_up_sync(kAll, sum, step);
        if (lane >= step) sum += other;
    }
    return {sum - number, __shfl_sync(kAll, sum, kWarp - 1)};
}

// Codes of a row over `base`, and its tail as far as there is room; how many elements escape.
__device__ inline uint32_t encode_over(uint32_t base, char* page, uint8_t* coded, const CodedArgs& args) {
    const uint32_t lane = threadIdx.x % kWarp, vectors = args.elements / kCodedTogether;
    auto* const lower = reinterpret_cast<uint32_t*>(coded + args.elements);
    auto* const third = reinterpret_cast<uint16_t*>(coded + third_bits_offset(args.elements));
    uint8_t* const tail = coded + code_tail_offset(args.elements);
    const auto words = static_cast<uint32_t>(code_tail_bytes(args.elements) / 4);
    const uint32_t room = code_escapes(args.elements), bases = base * kEach;
    for (uint32_t i = lane; i < words; i += kWarp) reinterpret_cast<uint32_t*>(tail)[i] = i == 0 ? base : 0;
    __syncwarp();
    uint32_t written = 0;  // of all lanes so far
    for (uint32_t first = 0; first < vectors; first += kWarp) {
        const uint32_t v = first + lane;
        uint32_t exponents[4], escapes = 0;
        if (v < vectors) {
            uint32_t bytes[4], codes[4], low = 0, high = 0;
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                const uint4 row = *in_page(page, 2 * v + half, args);
                const Coded one = coded_of(row.x, row.y, bases), two = coded_of(row.z, row.w, bases);
                bytes[2 * half] = one.bytes;
                bytes[2 * half + 1] = two.bytes;
                codes[2 * half] = one.codes;
                codes[2 * half + 1] = two.codes;
                exponents[2 * half] = one.exponents;
                exponents[2 * half + 1] = two.exponents;
            }
#pragma unroll
            for (uint32_t j = 0; j < 4; ++j) {
                low |= lower_bits(codes[j], j);
                high |= third_bits(codes[j], j);
            }
            reinterpret_cast<uint4*>(coded)[v] = make_uint4(bytes[0], bytes[1], bytes[2], bytes[3]);
            lower[v] = low;
            third[v] = static_cast<uint16_t>(together(high));
            escapes = escapes_of(low, high);
        }
        const Before before = before_lane(__popc(escapes));
        uint32_t at = written + before.mine;
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j)
            for (uint32_t found = escapes >> 2 * j & kEach; found != 0; found &= found - 1, ++at)
                if (at < room) tail[1 + at] = static_cast<uint8_t>(exponents[j] >> (__ffs(found) - 1));
        written += before.all;
    }
    return written;
}

__device__ inline void encode(char* page, uint8_t* coded, uint32_t chunk, const CodedArgs& args) {
    const uint32_t lane = threadIdx.x % kWarp, room = code_escapes(args.elements);
    uint32_t base = largest_exponent(page, args);
    uint32_t escapes = encode_over(base, page, coded, args);
    for (uint32_t tried = 1; tried < kBases && escapes > room && base > 0; ++tried) {
        __syncwarp();  // over other lanes' bytes
        escapes = encode_over(--base, page, coded, args);
    }
    if (escapes > room && lane == 0) args.refused[chunk] = 1;
}

// Four elements, two words.
__device__ __forceinline__ uint2 elements_of(uint32_t bytes, uint32_t exponents) {
    const uint32_t lower = (bytes & ~kHighBits) | (exponents << 7 & kHighBits);
    const uint32_t upper = (bytes & kHighBits) | (exponents >> 1 & ~kHighBits);
    return make_uint2(__byte_perm(lower, upper, 0x5140), __byte_perm(lower, upper, 0x7362));
}

// Codes that are read once, from memory that others need the cache for and that may be the host's: of a tail
// no more than a row needs, and that at once.
class Streamed {
  public:
    // `near` is the warp's own shared memory, of kNearBytes.
    __device__ __forceinline__ Streamed(const uint8_t* tail, uint32_t tail_bytes, uint8_t* near)
        : tail_(tail), near_(near), tail_bytes_(tail_bytes), held_(first_bytes(tail_bytes)) {
        const uint32_t lane = threadIdx.x % kWarp;
        if (lane * 4 < held_) word_ = __ldcs(reinterpret_cast<const uint32_t*>(tail) + lane);
    }
    template <class T>
    __device__ __forceinline__ static T load(const T* address) {
        return __ldcs(address);
    }
    // Where the warp waits for the first bytes.
    __device__ __forceinline__ void open() {
        const uint32_t lane = threadIdx.x % kWarp;
        __syncwarp();  // the row before has been read
        if (lane * 4 < held_) reinterpret_cast<uint32_t*>(near_)[lane] = word_;
        __syncwarp();
    }
    // The warp will ask for bytes below `end`.
    __device__ __forceinline__ void reach(uint32_t end) {
        const uint32_t most = min(kNearBytes, tail_bytes_);
        if (end <= held_ || held_ >= most) return;
        const uint32_t first = held_ / 4 + threadIdx.x % kWarp;
        held_ = min((end + kSectorBytes - 1) / kSectorBytes * kSectorBytes, most);
        for (uint32_t i = first; i < held_ / 4; i += kWarp)
            reinterpret_cast<uint32_t*>(near_)[i] = __ldcs(reinterpret_cast<const uint32_t*>(tail_) + i);
        __syncwarp();
    }
    __device__ __forceinline__ uint32_t byte(uint32_t at) const {
        return at < held_ ? near_[at] : __ldcs(tail_ + min(at, tail_bytes_ - 1));
    }
    static constexpr uint32_t kNearBytes = 256;  // all of a row of 1,024 elements

  private:
    static constexpr uint32_t kSectorBytes = 32;  // the least that is read from host memory
    // Of normal numbers one in 38 escapes, that is 27 in 1,024: with these four rows in five have enough.
    __device__ __forceinline__ static uint32_t first_bytes(uint32_t tail_bytes) {
        return min(min(max(kSectorBytes, tail_bytes / 8), kWarp * 4), tail_bytes);
    }
    const uint8_t* tail_;
    uint8_t* near_;
    uint32_t tail_bytes_, held_, word_ = 0;
};

// Codes in a multiprocessor's own memory.
class Shared {
  public:
    __device__ __forceinline__ Shared(const uint8_t* tail, uint32_t tail_bytes)
        : tail_(tail), tail_bytes_(tail_bytes) {}
    template <class T>
    __device__ __forceinline__ static T load(const T* address) {
        return *address;
    }
    __device__ __forceinline__ void open() {}
    __device__ __forceinline__ void reach(uint32_t) {}
    __device__ __forceinline__ uint32_t byte(uint32_t at) const { return tail_[min(at, tail_bytes_ - 1)]; }

  private:
    const uint8_t* tail_;
    uint32_t tail_bytes_;
};

// `codes` was made of the row's tail just now.
template <class Codes>
__device__ inline void decode(const uint8_t* coded, char* page, const CodedArgs& args, Codes codes) {
    const uint32_t lane = threadIdx.x % kWarp, vectors = args.elements / kCodedTogether;
    const auto* const all_lower = reinterpret_cast<const uint32_t*>(coded + args.elements);
    const auto* const pairs = reinterpret_cast<const uint32_t*>(coded + third_bits_offset(args.elements));
    uint32_t bases = 0, behind = 1;  // of the tail's bytes those that were used
    for (uint32_t first = 0; first < vectors; first += kWarp * kPasses) {
        uint4 bytes[kPasses];
        uint32_t lower[kPasses], third[kPasses];
#pragma unroll
        for (uint32_t i = 0; i < kPasses; ++i) {
            const uint32_t v = first + i * kWarp + lane;
            lower[i] = 0;
            if (v >= vectors) continue;
            bytes[i] = Codes::load(reinterpret_cast<const uint4*>(coded) + v);
            lower[i] = Codes::load(all_lower + v);
        }
        // The third bits of both passes in one request, of two vectors each.
        const uint32_t pair = first / 2 + lane;
        const uint32_t thirds = 2 * pair < vectors ? Codes::load(pairs + pair) : 0;
        if (first == 0) {
            codes.open();
            bases = codes.byte(0) * kEach;
        }
        uint32_t escapes[kPasses], counts = 0;  // of each pass in 16 bits: at most 512
#pragma unroll
        for (uint32_t i = 0; i < kPasses; ++i) {
            const uint32_t two = __shfl_sync(kAll, thirds, i * kWarp / 2 + lane / 2);
            third[i] = apart(two >> 16 * (lane & 1) & 0xffff);
            escapes[i] = escapes_of(lower[i], third[i]);
            counts |= __popc(escapes[i]) << 16 * i;
        }
        const Before before = before_lane(counts);
        const uint32_t used = (before.all & 0xffff) + (before.all >> 16);
        codes.reach(behind + used);
#pragma unroll
        for (uint32_t i = 0; i < kPasses; ++i) {
            const uint32_t v = first + i * kWarp + lane;
            if (v >= vectors) continue;
            uint32_t at =
                behind + (i == 0 ? before.mine & 0xffff : (before.all & 0xffff) + (before.mine >> 16));
            const uint32_t four[4] = {bytes[i].x, bytes[i].y, bytes[i].z, bytes[i].w};
            uint2 words[4];
#pragma unroll
            for (uint32_t j = 0; j < 4; ++j) {
                uint32_t exponents = exponents_of(codes_at(lower[i], third[i], j), bases);
                for (uint32_t found = escapes[i] >> 2 * j & kEach; found != 0; found &= found - 1, ++at) {
                    const uint32_t shift = __ffs(found) - 1;
                    exponents = (exponents & ~(255u << shift)) | codes.byte(at) << shift;
                }
                words[j] = elements_of(four[j], exponents);
            }
            __stcs(in_page(page, 2 * v, args), make_uint4(words[0].x, words[0].y, words[1].x, words[1].y));
            __stcs(in_page(page, 2 * v + 1, args),
                   make_uint4(words[2].x, words[2].y, words[3].x, words[3].y));
        }
        behind += used;
    }
}

template <bool kStore>
__global__ void __launch_bounds__(kThreads) coded_kernel(const CodedArgs args) {
    __shared__ uint4 shared[kThreads / kWarp * Streamed::kNearBytes / sizeof(uint4)];
    auto* const near = reinterpret_cast<uint8_t*>(shared) + threadIdx.x / kWarp * Streamed::kNearBytes;
    const auto tail_bytes = static_cast<uint32_t>(code_tail_bytes(args.elements));
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
            decode(coded, page, args, Streamed(coded + code_tail_offset(args.elements), tail_bytes, near));
    }
}

}  // namespace kvcache
