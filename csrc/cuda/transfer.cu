// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <numeric>

#include "coded.cuh"
#include "cuda_check.h"
#include "device.h"
#include "launch.h"
#include "transfer.h"

namespace kvcache {
namespace {

template <class Vector>
void launch_as(const TransferArgs& args, bool store, int blocks, cudaStream_t stream) {
    if (store)
        transfer_kernel<Vector, true><<<blocks, kThreads, 0, stream>>>(args);
    else
        transfer_kernel<Vector, false><<<blocks, kThreads, 0, stream>>>(args);
}

int all_multiprocessors() {
    int device = 0, count = 0;
    cuda_check(cudaGetDevice(&device), "cudaGetDevice");
    cuda_check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
               "cudaDeviceGetAttribute");
    return count;
}

// Thread blocks of a launch over `units` of work: `blocks`, or one a multiprocessor for 0, or less where
// there is less to do.
int grid(uint64_t units, int blocks) {
    if (units > UINT32_MAX)
        throw std::invalid_argument("a launch of " + std::to_string(units) +
                                    " units of work; split the batch");
    if (blocks <= 0) blocks = all_multiprocessors();
    return static_cast<int>(std::min<uint64_t>(static_cast<uint64_t>(blocks), units));
}

}  // namespace

Launch::Launch(const Pages& pages, const Batch& batch, size_t pieces_at_most) : pages_(pages), batch_(batch) {
    first_slot_ = batch.num_slots;
    int64_t last_slot = 0;
    for (const ChunkRef& chunk : batch.chunks) {
        first_slot_ = std::min(first_slot_, chunk.start);
        last_slot = std::max(last_slot, chunk.end);
    }
    const auto slots = static_cast<size_t>(std::max<int64_t>(last_slot - first_slot_, 0));
    bases_bytes_ = pages.bases.size() * sizeof(uint64_t);
    pieces_bytes_ = pieces_at_most * sizeof(Piece);
    bytes_ = bases_bytes_ + pieces_bytes_ + slots * sizeof(int32_t);
    tables_ = std::make_unique<Descriptors>(bytes_);
    std::memcpy(tables_->host(), pages.bases.data(), bases_bytes_);
    auto* const table = reinterpret_cast<int32_t*>(tables_->host() + bases_bytes_ + pieces_bytes_);
    for (size_t i = 0; i < slots; ++i)
        table[i] = static_cast<int32_t>(batch.slots[first_slot_ + static_cast<int64_t>(i)]);
}

size_t Launch::add(const Piece& piece) {
    auto* const table = reinterpret_cast<Piece*>(tables_->host() + bases_bytes_);
    table[count_] = piece;
    table[count_].slot_begin -= static_cast<uint32_t>(first_slot_);
    addresses_ |=
        piece.address | static_cast<uint64_t>(piece.layer_stride) | static_cast<uint64_t>(piece.kv_stride);
    return count_++;
}

void Launch::upload(cudaStream_t stream) { tables_->upload(bytes_, stream); }

TransferArgs Launch::arguments(size_t begin, size_t end, int64_t layer_begin, int64_t layers) const {
    const PagedLayout& page = pages_.layout;
    TransferArgs args{};
    args.bases = reinterpret_cast<const uint64_t*>(tables_->device());
    args.pieces = reinterpret_cast<const Piece*>(tables_->device() + bases_bytes_) + begin;
    args.slots = reinterpret_cast<const int32_t*>(tables_->device() + bases_bytes_ + pieces_bytes_);
    args.num_pieces = static_cast<uint32_t>(end - begin);
    args.layers = static_cast<uint32_t>(layers);
    args.layer_begin = static_cast<uint32_t>(layer_begin);
    args.base_planes = static_cast<uint32_t>(page.planes);
    args.block_size = FastDivisor(static_cast<uint32_t>(page.block_size));
    args.block_stride = page.block_stride;
    args.token_stride = page.token_stride;
    args.head_stride = page.head_stride;
    return args;
}

void Launch::run(size_t begin, size_t end, int64_t layer_begin, int64_t layers, int blocks,
                 cudaStream_t stream) {
    const PagedLayout& page = pages_.layout;
    const auto* const host_pieces = reinterpret_cast<const Piece*>(tables_->host() + bases_bytes_);
    uint32_t longest = 0;
    for (size_t i = begin; i < end; ++i) longest = std::max(longest, host_pieces[i].tokens);
    if (longest == 0 || layers == 0) return;
    TransferArgs args = arguments(begin, end, layer_begin, layers);
    if (pages_.coded) return run_coded(args, longest, blocks, stream);

    // Of the chunks, of which these may be some of the layers.
    const ChunkStrides strides = chunk_strides(pages_, batch_.layers(), longest, batch_.token_major);
    const RunShape shape = run_shape(pages_, strides);
    uint64_t alignment = addresses_ | static_cast<uint64_t>(shape.bytes | page.block_stride |
                                                            page.token_stride | strides.token);
    if (shape.heads > 1) alignment |= static_cast<uint64_t>(page.head_stride | page.head_bytes);
    for (const uint64_t base : pages_.bases) alignment |= base;
    const auto width = static_cast<uint32_t>(std::min<uint64_t>(alignment & -alignment, sizeof(uint4)));

    args.planes = static_cast<uint32_t>(shape.planes);
    args.heads = static_cast<uint32_t>(shape.heads);
    args.vectors_per_run = static_cast<uint32_t>(shape.bytes) / width;
    const uint32_t vectors = args.planes * args.heads * args.vectors_per_run;
    args.tokens_per_unit = kThreads / std::min<uint32_t>(vectors, kThreads) * kInFlight;
    args.units_per_slice = (longest + args.tokens_per_unit - 1) / args.tokens_per_unit;
    args.chunk_token_stride = strides.token;

    blocks = grid(uint64_t{args.num_pieces} * args.layers * args.units_per_slice, blocks);
    switch (width) {
        case 16:
            launch_as<uint4>(args, batch_.store, blocks, stream);
            break;
        case 8:
            launch_as<uint2>(args, batch_.store, blocks, stream);
            break;
        case 4:
            launch_as<uint32_t>(args, batch_.store, blocks, stream);
            break;
        case 2:
            launch_as<uint16_t>(args, batch_.store, blocks, stream);
            break;
        default:
            launch_as<uint8_t>(args, batch_.store, blocks, stream);
            break;
    }
    cuda_check(cudaGetLastError(), "launch of the transfer kernel");
}

void Launch::run_coded(const TransferArgs& copy, uint32_t longest, int blocks, cudaStream_t stream) const {
    const PagedLayout& page = pages_.layout;
    const bool contiguous = page.heads == 1 || page.head_stride == page.head_bytes;
    const int64_t head_bytes = contiguous ? page.row_bytes() : page.head_bytes;
    auto alignment = addresses_ | static_cast<uint64_t>(page.block_stride | page.token_stride | head_bytes);
    if (!contiguous) alignment |= static_cast<uint64_t>(page.head_stride);
    for (const uint64_t base : pages_.bases) alignment |= base;
    if (alignment % sizeof(uint4) != 0)
        throw std::invalid_argument(
            "coded rows at addresses or distances that are no multiples of 16 bytes; store them as they are");
    CodedArgs args = coded_args(pages_, copy);
    args.longest = FastDivisor(longest);
    args.layers = FastDivisor(copy.layers);
    args.refused = batch_.refused;
    const uint64_t rows = uint64_t{copy.num_pieces} * copy.layers * longest * args.copy.planes;
    constexpr uint32_t kRows = kThreads / kWarp;
    blocks = grid((rows + kRows - 1) / kRows, blocks);
    if (rows + static_cast<uint64_t>(blocks) * kRows > INT32_MAX)
        throw std::invalid_argument("a launch of " + std::to_string(rows) + " coded rows; split the batch");
    if (batch_.store)
        coded_kernel<true><<<blocks, kThreads, 0, stream>>>(args);
    else
        coded_kernel<false><<<blocks, kThreads, 0, stream>>>(args);
    cuda_check(cudaGetLastError(), "launch of the kernel of coded rows");
}

void Launch::done(cudaStream_t stream) { tables_->done(stream); }

void cuda_transfer(const Pages& pages, const Batch& batch, uint64_t stream_handle, int blocks) {
    const DeviceScope scope(pages.device);
    const auto stream = reinterpret_cast<cudaStream_t>(stream_handle);
    const int64_t layers = batch.layers(), group = batch.group();
    const size_t chunks = batch.chunks.size(), groups = static_cast<size_t>(batch.groups());
    Launch launch(pages, batch, groups * chunks);
    for (int64_t first = 0; first < layers; first += group)
        for (const ChunkRef& chunk : batch.chunks) {
            const ChunkStrides strides =
                chunk_strides(pages, layers, chunk.end - chunk.start, batch.token_major);
            launch.add({chunk.address + static_cast<uint64_t>(first * strides.layer), strides.layer,
                        strides.kv, static_cast<uint32_t>(chunk.start),
                        static_cast<uint32_t>(chunk.end - chunk.start), chunk.number});
        }
    launch.upload(stream);
    for (size_t i = 0; i < groups; ++i) {
        const int64_t first = static_cast<int64_t>(i) * group;
        launch.run(i * chunks, (i + 1) * chunks, batch.layer_begin + first, std::min(group, layers - first),
                   blocks, stream);
        if (!batch.events.empty())
            cuda_check(cudaEventRecord(reinterpret_cast<cudaEvent_t>(batch.events[i]), stream),
                       "cudaEventRecord");
    }
    launch.done(stream);
}

}  // namespace kvcache
