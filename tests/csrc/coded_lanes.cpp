// SPDX-License-Identifier: Apache-2.0
// The CUDA source of coded rows (csrc/include/coded.cuh, in_place.cuh) against the host twins, lane by lane
// on the CPU. coded_lanes SEED: prints what differs and ends with 1, or how many batches had a refused chunk
// and with 0.
#include "lanes.h"
// After the above, which stands for CUDA.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "boxes.h"
#include "coded.cuh"
#include "in_place.cuh"
#include "transfer.h"

using namespace kvcache;

namespace {

std::mt19937 dice;

uint32_t upto(uint32_t limit) { return std::uniform_int_distribution<uint32_t>(0, limit)(dice); }

// Bits of numbers such as a model's, one in `rare` far from the others, below or above.
void fill(std::vector<uint16_t>& elements, uint32_t rare) {
    std::normal_distribution<float> normal;
    for (uint16_t& element : elements) {
        float value = normal(dice);
        if (upto(rare) == 0) value = std::ldexp(value, upto(2) == 0 ? 12 : -30);
        if (upto(500) == 0) value = 0;
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        element = upto(900) == 0 ? 0x7f80 : static_cast<uint16_t>(bits >> 16);
    }
}

struct Sides {
    std::vector<uint16_t> pages;
    std::vector<uint64_t> chunks;
    std::vector<int32_t> refused;
};

int differences(const char* what, const void* one, const void* other, size_t bytes) {
    if (std::memcmp(one, other, bytes) == 0) return 0;
    std::printf("%s differ\n", what);
    return 1;
}

// One batch of two chunks, both ways; 0 where the two sides agree. Sets whether a chunk was refused.
int compare(bool& refused) {
    const bool head_major = upto(1) == 1;
    const int64_t planes = 1 + upto(1), layers = 2, block_size = 4, num_blocks = 5;
    const int64_t heads = 1 + upto(9), head = 32 * (1 + upto(4)), elements = heads * head;
    PagedLayout layout;
    layout.heads = heads;
    layout.head_bytes = 2 * head;
    layout.token_stride = head_major ? layout.head_bytes : 2 * elements;
    layout.head_stride = head_major ? block_size * layout.head_bytes : layout.head_bytes;
    layout.block_stride = block_size * 2 * elements;
    layout.kv_stride = planes == 2 ? num_blocks * layout.block_stride : 0;
    layout.block_size = block_size;
    layout.num_blocks = num_blocks;
    layout.planes = planes;
    const int64_t plane_bytes = num_blocks * layout.block_stride,
                  coded_token = planes * coded_row_bytes(elements);

    std::vector<int64_t> slots;
    for (int64_t slot = 0; slot < layout.num_slots(); ++slot) slots.push_back(slot);
    std::shuffle(slots.begin(), slots.end(), dice);
    for (int64_t& slot : slots)
        if (upto(5) == 0) slot = -1;
    const int64_t cut = 1 + upto(7), end = cut + 1 + upto(10);

    Sides host, device;
    host.pages.resize(static_cast<size_t>(layers * planes * plane_bytes / 2));
    fill(host.pages, upto(5) == 0 ? 4 : 20 + upto(400));
    device.pages = host.pages;
    const auto run = [&](Sides& side, bool store) {
        Pages pages{layout, {}, -1, true};
        for (int64_t i = 0; i < layers * planes; ++i)
            pages.bases.push_back(reinterpret_cast<uint64_t>(side.pages.data()) +
                                  static_cast<uint64_t>(i * plane_bytes));
        const int64_t token = pages.chunk_token_bytes();
        if (store) side.chunks.assign(static_cast<size_t>(layers * end * token / 8), 0xA5A5A5A5A5A5A5A5);
        side.refused.assign(2, 0);
        const auto memory = reinterpret_cast<uint64_t>(side.chunks.data());
        Batch batch{slots.data(), static_cast<int64_t>(slots.size()), {}, store, true, 0, layers, nullptr};
        batch.chunks = {{memory, 0, cut, 0},
                        {memory + static_cast<uint64_t>(layers * cut * token), cut, end, 1}};
        batch.refused = side.refused.data();
        if (&side == &host) return host_transfer(pages, batch);

        std::vector<Piece> pieces;
        std::vector<int32_t> narrow(slots.begin(), slots.end());
        for (const ChunkRef& chunk : batch.chunks) {
            const ChunkStrides strides = chunk_strides(pages, layers, chunk.end - chunk.start, true);
            pieces.push_back({chunk.address, strides.layer, strides.kv, static_cast<uint32_t>(chunk.start),
                              static_cast<uint32_t>(chunk.end - chunk.start), chunk.number});
        }
        TransferArgs copy{};
        copy.bases = pages.bases.data();
        copy.pieces = pieces.data();
        copy.slots = narrow.data();
        copy.num_pieces = 2;
        copy.layers = layers;
        copy.base_planes = static_cast<uint32_t>(planes);
        copy.block_size = FastDivisor(block_size);
        copy.block_stride = layout.block_stride;
        copy.token_stride = layout.token_stride;
        copy.head_stride = layout.head_stride;
        CodedArgs args = coded_args(pages, copy);
        args.longest = FastDivisor(static_cast<uint32_t>(std::max(cut, end - cut)));
        args.layers = FastDivisor(layers);
        args.refused = side.refused.data();
        lanes::run([&] { store ? coded_kernel<true>(args) : coded_kernel<false>(args); }, kThreads);
    };
    run(host, true);
    run(device, true);
    refused = host.refused[0] != 0 || host.refused[1] != 0;
    int wrong = differences("refused chunks", host.refused.data(), device.refused.data(), 8);
    const size_t first = static_cast<size_t>(layers * cut * coded_token), all = 8 * host.chunks.size();
    const auto bytes = [](Sides& side) { return reinterpret_cast<char*>(side.chunks.data()); };
    if (host.refused[0] == 0) wrong += differences("first chunks", bytes(host), bytes(device), first);
    if (host.refused[1] == 0)
        wrong += differences("chunks", bytes(host) + first, bytes(device) + first, all - first);
    if (refused || upto(5) == 0)  // what no row has become stays within it
        for (uint64_t& word : host.chunks) word = uint64_t{dice()} << 32 | dice();
    device.chunks = host.chunks;
    for (Sides* side : {&host, &device}) std::fill(side->pages.begin(), side->pages.end(), 0x5A5A);
    run(host, false);
    run(device, false);
    return wrong + differences("pages", host.pages.data(), device.pages.data(), 2 * host.pages.size());
}

// What becomes of each element over each base, four at a time; how many of these are not what row_codec.h
// says.
int elements() {
    int wrong = 0;
    for (uint32_t base = 0; base < kInfinite; ++base)
        for (uint32_t first = 0; first < 65536; first += 4) {
            uint32_t values[4];  // an odd factor: each comes once, between others that are unlike it
            for (uint32_t i = 0; i < 4; ++i) values[i] = (first + i) * 40503 & 0xffff;
            const Coded found =
                coded_of(values[0] | values[1] << 16, values[2] | values[3] << 16, base * kEach);
            Coded right{};
            uint32_t exponents = exponents_of(found.codes, base * kEach);
            for (uint32_t i = 0; i < 4; ++i) {
                const uint32_t exponent = exponent_of(values[i]), code = code_of(exponent, base);
                right.bytes |= sign_and_mantissa(values[i]) << 8 * i;
                right.codes |= code << 8 * i;
                right.exponents |= exponent << 8 * i;
                if (code == kEscape) exponents = (exponents & ~(255u << 8 * i)) | exponent << 8 * i;
            }
            const uint2 back = elements_of(found.bytes, exponents);
            wrong += found.bytes != right.bytes || found.codes != right.codes ||
                     found.exponents != right.exponents || back.x != (values[0] | values[1] << 16) ||
                     back.y != (values[2] | values[3] << 16);
        }
    if (wrong != 0) std::printf("%d groups of four elements differ\n", wrong);
    return wrong;
}

// What the kernel does with some layers of a batch.
void device_expand(const Pages& pages, const Batch& batch) {
    const std::vector<CodeRun> runs = code_runs(pages, batch);
    TransferArgs copy{};
    copy.bases = pages.bases.data();
    copy.layer_begin = static_cast<uint32_t>(batch.layer_begin);
    copy.base_planes = static_cast<uint32_t>(pages.layout.planes);
    copy.token_stride = pages.layout.token_stride;
    copy.head_stride = pages.layout.head_stride;
    ExpandArgs args{};
    args.rows = coded_args(pages, copy);
    args.runs = runs.data();
    args.units =
        static_cast<uint32_t>(runs.size()) * static_cast<uint32_t>(batch.layer_end - batch.layer_begin);
    args.num_runs = FastDivisor(static_cast<uint32_t>(runs.size()));
    args.token_codes = static_cast<uint32_t>(pages.chunk_token_bytes());
    args.row_codes = static_cast<uint32_t>(pages.chunk_row_bytes());
    args.window = 1 + upto(static_cast<uint32_t>(kWindowBytes) / args.token_codes - 1);
    lanes::run([&] { expand_kernel(args); }, lanes::kLanes);
}

// Codes of random rows that were copied into pages, expanded by both sides, beside rows that were loaded at
// once; 0 where all agree. Rows of keys and values lie head by head, or one after the other.
int compare_in_place() {
    const bool by_head = upto(1) == 1;
    const int64_t planes = 1 + upto(1), layers = 3, block_size = 1 + upto(6), num_blocks = 9;
    const int64_t heads = 1 + upto(9), head = 32 * (1 + upto(4));
    PagedLayout layout;
    layout.heads = heads;
    layout.head_bytes = 2 * head;
    layout.planes = planes;
    layout.head_stride = by_head ? planes * layout.head_bytes : layout.head_bytes;
    layout.token_stride = layout.token_bytes();
    layout.block_stride = block_size * layout.token_stride * (1 + upto(1));
    layout.block_size = block_size;
    layout.num_blocks = num_blocks;
    const int64_t layer_bytes = num_blocks * layout.block_stride;
    const auto pages_over = [&](std::vector<uint16_t>& memory) {
        Pages pages{layout, {}, -1, true};
        for (int64_t i = 0; i < layers * planes; ++i)
            pages.bases.push_back(
                reinterpret_cast<uint64_t>(memory.data()) +
                static_cast<uint64_t>(i / planes * layer_bytes +
                                      i % planes * (by_head ? 2 * head : 2 * head * heads)));
        return pages;
    };
    std::vector<int64_t> slots;
    const int64_t first = upto(static_cast<uint32_t>(block_size));
    for (int64_t slot = first; slot < layout.num_slots() - 2; ++slot)
        slots.push_back(upto(9) == 0 ? -1 : slot);
    if (upto(1) == 1)  // blocks in another order
        std::rotate(slots.begin(), slots.begin() + static_cast<int64_t>(slots.size()) / 2, slots.end());
    std::vector<uint16_t> mine(static_cast<size_t>(layers * layer_bytes / 2));
    fill(mine, 2000);
    const Pages host = pages_over(mine);
    const int64_t count = static_cast<int64_t>(slots.size()),
                  cut = 1 + upto(static_cast<uint32_t>(count) - 2);
    const int64_t token = host.chunk_token_bytes();
    std::vector<uint64_t> chunks(static_cast<size_t>(layers * count * token / 8));
    std::vector<int32_t> refused(2, 0);
    const auto memory = reinterpret_cast<uint64_t>(chunks.data());
    Batch batch{slots.data(), count, {}, true, true, 0, layers, refused.data()};
    batch.chunks = {{memory, 0, cut, 0},
                    {memory + static_cast<uint64_t>(layers * cut * token), cut, count, 1}};
    host_transfer(host, batch);
    std::fill(mine.begin(), mine.end(), 0x5A5A);
    batch.store = false;
    std::vector<uint16_t> whole = mine;
    host_transfer(pages_over(whole), batch);
    if (!expands_in_place(host)) {
        std::printf("pages do not expand\n");
        return 1;
    }
    host_copy_boxes(plan_boxes(host, batch), false);
    std::vector<uint16_t> theirs = mine;
    const Pages device = pages_over(theirs);
    host_expand(host, batch);
    const int64_t middle = upto(static_cast<uint32_t>(layers));
    for (const auto& [begin, end] : {std::pair{middle, layers}, std::pair{int64_t{0}, middle}}) {
        batch.layer_begin = begin;
        batch.layer_end = end;
        if (begin < end) device_expand(device, batch);
    }
    return differences("expanded pages", mine.data(), theirs.data(), 2 * mine.size()) +
           differences("loaded pages", mine.data(), whole.data(), 2 * mine.size());
}

}  // namespace

int main(int, char** arguments) {
    dice.seed(static_cast<uint32_t>(std::atoi(arguments[1])));
    int wrong = elements(), batches_refused = 0;
    for (int batch = 0; batch < 24; ++batch) {
        bool refused = false;
        wrong += compare(refused);
        batches_refused += refused;
        wrong += compare_in_place();
    }
    std::printf("%d of 24 batches with a refused chunk\n", batches_refused);
    return wrong != 0;
}
