// SPDX-License-Identifier: Apache-2.0
// The groups of kvcache._native that touch KV: transfers, staging rings, rotation of keys, zeroing.
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <sstream>

#include "bindings_arrays.h"
#include "event.h"
#include "in_place.h"
#include "ring.h"
#include "rotary.h"
#include "spans.h"
#include "transfer.h"

using namespace pybind11::literals;

namespace kvcache {
namespace {

std::string describe(const PagedLayout& layout) {
    std::ostringstream text;
    text << "PagedLayout(kv_stride=" << layout.kv_stride << ", block_stride=" << layout.block_stride
         << ", token_stride=" << layout.token_stride << ", head_stride=" << layout.head_stride
         << ", heads=" << layout.heads << ", head_bytes=" << layout.head_bytes
         << ", block_size=" << layout.block_size << ", num_blocks=" << layout.num_blocks
         << ", planes=" << layout.planes << ")";
    return text.str();
}

void check(const Pages& pages) {
    if (pages.device < -1)
        throw std::invalid_argument("Pages: device is " + std::to_string(pages.device) +
                                    "; the number of a CUDA device and -1 (host memory) are accepted");
    for (size_t i = 0; i < pages.bases.size(); ++i)
        if (pages.bases[i] == 0)
            throw std::invalid_argument("Pages: layer " +
                                        std::to_string(static_cast<int64_t>(i) / pages.layout.planes) +
                                        " has the address 0");
    const int64_t row = pages.layout.row_bytes();
    if (pages.coded &&
        (row % (2 * kCodedElements) != 0 || row > 2 * kLongestCodedRow || pages.layout.head_bytes % 16 != 0))
        throw std::invalid_argument(
            "Pages: rows of " + std::to_string(pages.layout.heads) + " heads of " +
            std::to_string(pages.layout.head_bytes) +
            " bytes; coded ones have a multiple of 64 bytes, at most 131072, and heads "
            "of a multiple of 16");
}

Pages make_pages(const py::object& addresses, const PagedLayout& layout, int device, bool coded) {
    const auto array = vector_of<uint64_t>("bases", addresses);
    nested_extent("PagedLayout", steps(layout, true), layout.head_bytes);
    Pages pages{layout, {}, device, coded};
    for (py::ssize_t layer = 0; layer < array.size(); ++layer)
        for (int64_t plane = 0; plane < layout.planes; ++plane)
            pages.bases.push_back(array.at(layer) + static_cast<uint64_t>(plane * layout.kv_stride));
    check(pages);
    return pages;
}

Pages make_unilateral(const py::object& keys, const py::object& values, const PagedLayout& layout,
                      int device) {
    const auto k = vector_of<uint64_t>("key_bases", keys), v = vector_of<uint64_t>("value_bases", values);
    if (layout.planes != 2 || k.size() != v.size())
        throw std::invalid_argument(
            "Pages: separate pools need planes=2 and as many keys as values; got planes=" +
            std::to_string(layout.planes) + ", " + std::to_string(k.size()) + " and " +
            std::to_string(v.size()));
    Pages pages{layout, {}, device};
    for (py::ssize_t layer = 0; layer < k.size(); ++layer) {
        pages.bases.push_back(k.at(layer));
        pages.bases.push_back(v.at(layer));
    }
    check(pages);
    return pages;
}

void transfer(const Pages& pages, const Batch& batch, uint64_t stream, int blocks) {
    check(pages, batch);
    if (pages.device < 0)
        host_transfer(pages, batch);
    else
        cuda_transfer(pages, batch, stream, blocks);
}

void expand(const Pages& pages, const Batch& batch, uint64_t stream) {
    if (!expands_in_place(pages))
        throw std::invalid_argument(
            "coded rows do not expand in place in these pages; load them another way");
    if (pages.device < 0)
        host_expand(pages, batch);
    else
        cuda_expand(pages, batch, stream);
}

// A batch and the arrays that it points into.
struct BoundBatch {
    Vector<int64_t> slots;
    Batch batch;
};

BoundBatch one_chunk(const Pages& pages, uint64_t address, const py::object& slot_mapping, bool store,
                     bool token_major, int64_t layer_begin, std::optional<int64_t> layer_end) {
    const auto slots = vector_of<int64_t>("slot_mapping", slot_mapping);
    return {slots,
            {slots.data(),
             slots.size(),
             {{address, 0, slots.size()}},
             store,
             token_major,
             layer_begin,
             layer_end.value_or(pages.layers())}};
}

BoundBatch many_chunks(const Pages& pages, const py::object& addresses, const py::object& starts,
                       const py::object& ends, const py::object& slot_mapping, bool store, bool token_major,
                       int64_t layer_begin, std::optional<int64_t> layer_end) {
    const auto address = vector_of<uint64_t>("addresses", addresses);
    const auto start = vector_of<int64_t>("starts", starts), end = vector_of<int64_t>("ends", ends);
    if (address.size() != start.size() || address.size() != end.size())
        throw std::invalid_argument("addresses, starts and ends have " + std::to_string(address.size()) +
                                    ", " + std::to_string(start.size()) + " and " +
                                    std::to_string(end.size()) + " entries; they must have as many");
    BoundBatch bound = one_chunk(pages, 0, slot_mapping, store, token_major, layer_begin, layer_end);
    bound.batch.chunks.clear();
    for (py::ssize_t i = 0; i < address.size(); ++i)
        bound.batch.chunks.push_back({address.at(i), start.at(i), end.at(i), static_cast<uint32_t>(i)});
    return bound;
}

// The slots of blocks' tokens, -1 outside of [first, end).
Vector<int64_t> slots_of(const py::list& block_ids, int64_t block_size, int64_t num_tokens, int64_t first,
                         int64_t end) {
    const auto blocks = static_cast<int64_t>(block_ids.size());
    if (block_size <= 0 || block_size > INT32_MAX || num_tokens < 0 || num_tokens > blocks * block_size)
        throw std::invalid_argument(std::to_string(num_tokens) + " tokens of " + std::to_string(blocks) +
                                    " blocks of " + std::to_string(block_size) +
                                    "; no more than the blocks have are accepted");
    Vector<int64_t> slots(static_cast<py::ssize_t>(num_tokens));
    int64_t* const out = slots.mutable_data();
    for (int64_t block = 0; block * block_size < num_tokens; ++block) {
        const int64_t id = integer_of(PyList_GET_ITEM(block_ids.ptr(), static_cast<py::ssize_t>(block)));
        if (id < 0 || id > INT32_MAX) {
            PyErr_Clear();
            throw std::invalid_argument("block_ids[" + std::to_string(block) +
                                        "] is no block; give integers from 0 to 2147483647");
        }
        const int64_t at = block * block_size, count = std::min(block_size, num_tokens - at);
        for (int64_t i = 0; i < count; ++i)
            out[at + i] = at + i >= first && at + i < end ? id * block_size + i : -1;
    }
    return slots;
}

std::vector<Span> spans_of(const char* name, const py::object& addresses, const py::object& sizes) {
    const auto address = vector_of<uint64_t>(name, addresses);
    const auto size = vector_of<int64_t>("sizes", sizes);
    if (address.size() != size.size())
        throw std::invalid_argument(std::string(name) + " and sizes have " + std::to_string(address.size()) +
                                    " and " + std::to_string(size.size()) +
                                    " entries; they must have as many");
    std::vector<Span> spans;
    for (py::ssize_t i = 0; i < size.size(); ++i) {
        if (size.at(i) < 0)
            throw std::invalid_argument("sizes[" + std::to_string(i) + "] is " + std::to_string(size.at(i)) +
                                        "; it must not be below 0");
        if (address.at(i) == 0 && size.at(i) > 0)
            throw std::invalid_argument(std::string(name) + "[" + std::to_string(i) + "] is the address 0");
        spans.push_back({address.at(i), static_cast<uint64_t>(size.at(i))});
    }
    return spans;
}

}  // namespace

void register_transfer(py::module_& m) {
    py::class_<PagedLayout>(m, "PagedLayout")
        .def(py::init([](int64_t kv_stride, int64_t block_stride, int64_t token_stride, int64_t head_stride,
                         int64_t heads, int64_t head_bytes, int64_t block_size, int64_t num_blocks,
                         int64_t planes) {
                 const PagedLayout layout{kv_stride,  block_stride, token_stride, head_stride, heads,
                                          head_bytes, block_size,   num_blocks,   planes};
                 check(layout);
                 return layout;
             }),
             py::kw_only(), "kv_stride"_a, "block_stride"_a, "token_stride"_a, "head_stride"_a, "heads"_a,
             "head_bytes"_a, "block_size"_a, "num_blocks"_a, "planes"_a)
        .def_readonly("kv_stride", &PagedLayout::kv_stride)
        .def_readonly("block_stride", &PagedLayout::block_stride)
        .def_readonly("token_stride", &PagedLayout::token_stride)
        .def_readonly("head_stride", &PagedLayout::head_stride)
        .def_readonly("heads", &PagedLayout::heads)
        .def_readonly("head_bytes", &PagedLayout::head_bytes)
        .def_readonly("block_size", &PagedLayout::block_size)
        .def_readonly("num_blocks", &PagedLayout::num_blocks)
        .def_readonly("planes", &PagedLayout::planes)
        .def_property_readonly("row_bytes", &PagedLayout::row_bytes)
        .def_property_readonly("token_bytes", &PagedLayout::token_bytes)
        .def_property_readonly("num_slots", &PagedLayout::num_slots)
        .def_property_readonly("extent", &PagedLayout::extent)
        .def("__eq__", [](const PagedLayout& one, const PagedLayout& other) { return one == other; })
        .def("__hash__", [](const PagedLayout& layout) { return py::hash(py::str(describe(layout))); })
        .def("__repr__", &describe);

    py::class_<Pages>(m, "Pages")
        .def(py::init(&make_pages), "bases"_a, "layout"_a, "device"_a = -1, "coded"_a = false)
        .def_static("unilateral", &make_unilateral, "key_bases"_a, "value_bases"_a, "layout"_a,
                    "device"_a = -1)
        .def_readonly("layout", &Pages::layout)
        .def_readonly("device", &Pages::device)
        .def_readonly("coded", &Pages::coded)
        .def("uncoded",
             [](const Pages& pages) {
                 Pages plain = pages;
                 plain.coded = false;
                 return plain;
             })
        .def_property_readonly("chunk_row_bytes", &Pages::chunk_row_bytes)
        .def_property_readonly("chunk_token_bytes", &Pages::chunk_token_bytes)
        .def_property_readonly("expands_in_place", &expands_in_place)
        .def_property_readonly("num_layers", &Pages::layers);

    py::class_<Event>(m, "Event")
        .def(py::init<int, bool>(), "device"_a, "sleeping"_a = false,
             py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("device", &Event::device)
        .def_property_readonly("handle", &Event::handle)
        .def("record", &Event::record, "stream"_a, py::call_guard<py::gil_scoped_release>())
        .def("order", &Event::order, "stream"_a, py::call_guard<py::gil_scoped_release>())
        .def("done", &Event::done, py::call_guard<py::gil_scoped_release>())
        .def("wait", &Event::wait, py::call_guard<py::gil_scoped_release>());

    m.def("slots_of", &slots_of, "block_ids"_a, "block_size"_a, "num_tokens"_a, "first"_a, "end"_a);
    m.def("coded_row_bytes", &coded_row_bytes, "elements"_a);
    m.def("code_escapes", &code_escapes, "elements"_a);
    m.def(
        "batched_kv_transfer",
        [](const Pages& pages, const py::object& addresses, const py::object& starts, const py::object& ends,
           const py::object& slot_mapping, bool store, bool token_major, int64_t layer_begin,
           std::optional<int64_t> layer_end, uint64_t stream, int blocks, uint64_t refused,
           int64_t group_layers, std::vector<uint64_t> events) {
            BoundBatch bound = many_chunks(pages, addresses, starts, ends, slot_mapping, store, token_major,
                                           layer_begin, layer_end);
            bound.batch.refused = reinterpret_cast<int32_t*>(refused);
            bound.batch.group_layers = group_layers;
            bound.batch.events = std::move(events);
            const py::gil_scoped_release release;
            transfer(pages, bound.batch, stream, blocks);
        },
        "pages"_a, "addresses"_a, "starts"_a, "ends"_a, "slot_mapping"_a, "store"_a, py::kw_only(),
        "token_major"_a = true, "layer_begin"_a = 0, "layer_end"_a = py::none(), "stream"_a = 0,
        "blocks"_a = 0, "refused"_a = 0, "group_layers"_a = 0, "events"_a = std::vector<uint64_t>{});
    m.def(
        "expand_in_place",
        [](const Pages& pages, const py::object& addresses, const py::object& starts, const py::object& ends,
           const py::object& slot_mapping, int64_t layer_begin, std::optional<int64_t> layer_end,
           uint64_t stream) {
            const BoundBatch bound = many_chunks(pages, addresses, starts, ends, slot_mapping, false, true,
                                                 layer_begin, layer_end);
            const py::gil_scoped_release release;
            check(pages, bound.batch);
            expand(pages, bound.batch, stream);
        },
        "pages"_a, "addresses"_a, "starts"_a, "ends"_a, "slot_mapping"_a, py::kw_only(), "layer_begin"_a = 0,
        "layer_end"_a = py::none(), "stream"_a = 0);
    m.def(
        "multi_layer_kv_transfer",
        [](const Pages& pages, uint64_t address, const py::object& slot_mapping, bool store, bool token_major,
           uint64_t stream, int blocks) {
            const BoundBatch bound =
                one_chunk(pages, address, slot_mapping, store, token_major, 0, std::nullopt);
            const py::gil_scoped_release release;
            transfer(pages, bound.batch, stream, blocks);
        },
        "pages"_a, "address"_a, "slot_mapping"_a, "store"_a, py::kw_only(), "token_major"_a = true,
        "stream"_a = 0, "blocks"_a = 0);
    m.def(
        "single_layer_kv_transfer",
        [](const Pages& pages, int64_t layer, uint64_t address, const py::object& slot_mapping, bool store,
           bool token_major, uint64_t stream, int blocks) {
            const BoundBatch bound =
                one_chunk(pages, address, slot_mapping, store, token_major, layer, layer + 1);
            const py::gil_scoped_release release;
            transfer(pages, bound.batch, stream, blocks);
        },
        "pages"_a, "layer"_a, "address"_a, "slot_mapping"_a, "store"_a, py::kw_only(), "token_major"_a = true,
        "stream"_a = 0, "blocks"_a = 0);

    py::class_<StagingRing>(m, "StagingRing")
        .def(py::init(&make_ring), "device"_a, "slot_bytes"_a, "num_slots"_a, "turn"_a = 0)
        .def(
            "transfer",
            [](StagingRing& ring, const Pages& pages, const py::object& addresses, const py::object& starts,
               const py::object& ends, const py::object& slot_mapping, bool store, int64_t layer_begin,
               std::optional<int64_t> layer_end, uint64_t stream, int blocks, uint64_t refused) {
                BoundBatch bound = many_chunks(pages, addresses, starts, ends, slot_mapping, store, true,
                                               layer_begin, layer_end);
                bound.batch.refused = reinterpret_cast<int32_t*>(refused);
                const py::gil_scoped_release release;
                check(pages, bound.batch);
                ring.transfer(pages, bound.batch, stream, blocks);
            },
            "pages"_a, "addresses"_a, "starts"_a, "ends"_a, "slot_mapping"_a, "store"_a, py::kw_only(),
            "layer_begin"_a = 0, "layer_end"_a = py::none(), "stream"_a = 0, "blocks"_a = 0, "refused"_a = 0)
        .def(
            "strided_dma",
            [](StagingRing& ring, const Pages& pages, const py::object& addresses, const py::object& starts,
               const py::object& ends, const py::object& slot_mapping, bool store, int64_t layer_begin,
               std::optional<int64_t> layer_end, uint64_t stream) {
                const BoundBatch bound = many_chunks(pages, addresses, starts, ends, slot_mapping, store,
                                                     true, layer_begin, layer_end);
                const py::gil_scoped_release release;
                check(pages, bound.batch);
                ring.strided_dma(pages, bound.batch, stream);
            },
            "pages"_a, "addresses"_a, "starts"_a, "ends"_a, "slot_mapping"_a, "store"_a, py::kw_only(),
            "layer_begin"_a = 0, "layer_end"_a = py::none(), "stream"_a = 0)
        .def("record", &StagingRing::record, "event"_a, py::call_guard<py::gil_scoped_release>());
}

void register_rotary(py::module_& m) {
    m.def(
        "rotate_keys",
        [](uint64_t keys, int64_t heads, int64_t head_size, int64_t token_stride, int64_t head_stride,
           const std::string& dtype, const py::object& old_positions, const py::object& new_positions,
           uint64_t table, int64_t positions, int64_t rotary_size, const std::string& table_dtype, bool neox,
           int device, uint64_t stream) {
            const auto was = vector_of<int64_t>("old_positions", old_positions);
            const auto is = vector_of<int64_t>("new_positions", new_positions);
            if (was.size() != is.size())
                throw std::invalid_argument("old_positions and new_positions have " +
                                            std::to_string(was.size()) + " and " + std::to_string(is.size()) +
                                            " entries; they must have as many");
            const RotaryJob job{keys,
                                was.size(),
                                heads,
                                head_size,
                                token_stride,
                                head_stride,
                                element_type(dtype),
                                table,
                                positions,
                                rotary_size,
                                element_type(table_dtype),
                                neox,
                                was.data(),
                                is.data()};
            const py::gil_scoped_release release;
            check(job);
            if (device < 0)
                host_rotate(job);
            else
                cuda_rotate(job, device, stream);
        },
        py::kw_only(), "keys"_a, "heads"_a, "head_size"_a, "token_stride"_a, "head_stride"_a, "dtype"_a,
        "old_positions"_a, "new_positions"_a, "table"_a, "positions"_a, "rotary_size"_a, "table_dtype"_a,
        "neox"_a, "device"_a = -1, "stream"_a = 0);
    m.def(
        "copy_spans",
        [](const py::object& targets, const py::object& sources, const py::object& sizes, int device,
           uint64_t stream) {
            const std::vector<Span> to = spans_of("targets", targets, sizes);
            const std::vector<Span> from = spans_of("sources", sources, sizes);
            const py::gil_scoped_release release;
            if (device < 0)
                host_copy(to, from);
            else
                cuda_copy(to, from, device, stream);
        },
        "targets"_a, "sources"_a, "sizes"_a, "device"_a = -1, "stream"_a = 0);
    m.def(
        "zero_spans",
        [](const py::object& addresses, const py::object& sizes, int device, uint64_t stream) {
            const std::vector<Span> spans = spans_of("addresses", addresses, sizes);
            const py::gil_scoped_release release;
            if (device < 0)
                host_zero(spans);
            else
                cuda_zero(spans, device, stream);
        },
        "addresses"_a, "sizes"_a, "device"_a = -1, "stream"_a = 0);
}

}  // namespace kvcache
