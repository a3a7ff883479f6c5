// SPDX-License-Identifier: Apache-2.0
// The CUDA source of coded rows (csrc/include/coded.cuh) against the host twin, lane by lane on the CPU.
// coded_lanes SEED: prints what differs and ends with 1, or how many batches had a refused chunk and with 0.
#include "lanes.h"
// After the above, which stands for CUDA.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "coded.cuh"
#include "transfer.h"

using namespace kvcache;

namespace {

std::mt19937 dice;

uint32_t upto(uint32_t limit) { return std::uniform_int_distribution<uint32_t>(0, limit)(dice); }

// Bits of numbers such as a model's, one in `rare` far from the others.
void fill(std::vector<uint16_t>& elements, uint32_t rare) {
    std::normal_distribution<float> normal;
    for (uint16_t& element : elements) {
        float value = normal(dice);
        if (upto(rare) == 0) value = std::ldexp(value, -30);
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
    const int64_t plane_bytes = num_blocks * layout.block_stride;

    std::vector<int64_t> slots;
    for (int64_t slot = 0; slot < layout.num_slots(); ++slot) slots.push_back(slot);
    std::shuffle(slots.begin(), slots.end(), dice);
    for (int64_t& slot : slots)
        if (upto(5) == 0) slot = -1;
    const int64_t cut = 1 + upto(7), end = cut + 1 + upto(10);

    Sides host, device;
    host.pages.resize(static_cast<size_t>(layers * planes * plane_bytes / 2));
    fill(host.pages, upto(5) == 0 ? 20 : 40 + upto(400));
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
        CodedArgs args{};
        args.copy.bases = pages.bases.data();
        args.copy.pieces = pieces.data();
        args.copy.slots = narrow.data();
        args.copy.num_pieces = 2;
        args.copy.layers = layers;
        args.copy.base_planes = args.copy.planes = static_cast<uint32_t>(planes);
        args.copy.block_size = FastDivisor(block_size);
        args.copy.block_stride = layout.block_stride;
        args.copy.token_stride = layout.token_stride;
        args.copy.head_stride = layout.head_stride;
        args.copy.chunk_token_stride = token;
        args.elements = static_cast<uint32_t>(elements);
        args.head_elements = FastDivisor(static_cast<uint32_t>(head_major && heads > 1 ? head : elements));
        args.longest = FastDivisor(static_cast<uint32_t>(std::max(cut, end - cut)));
        args.layers = FastDivisor(layers);
        args.refused = side.refused.data();
        lanes::run([&] { store ? coded_kernel<true>(args) : coded_kernel<false>(args); }, kThreads);
    };
    run(host, true);
    run(device, true);
    refused = host.refused[0] != 0 || host.refused[1] != 0;
    int wrong = differences("chunks", host.chunks.data(), device.chunks.data(), 8 * host.chunks.size());
    wrong += differences("refused chunks", host.refused.data(), device.refused.data(), 8);
    for (Sides* side : {&host, &device}) std::fill(side->pages.begin(), side->pages.end(), 0x5A5A);
    run(host, false);
    run(device, false);
    return wrong + differences("pages", host.pages.data(), device.pages.data(), 2 * host.pages.size());
}

}  // namespace

int main(int, char** arguments) {
    dice.seed(static_cast<uint32_t>(std::atoi(arguments[1])));
    int wrong = 0, batches_refused = 0;
    for (int batch = 0; batch < 24; ++batch) {
        bool refused = false;
        wrong += compare(refused);
        batches_refused += refused;
    }
    std::printf("%d of 24 batches with a refused chunk\n", batches_refused);
    return wrong != 0;
}
