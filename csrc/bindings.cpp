// SPDX-License-Identifier: Apache-2.0
// kvcache._native: one register function a group. No torch headers: memory comes as addresses, streams as
// integers.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <sstream>

#include "device.h"
#include "hashing.h"
#include "region.h"
#include "transfer.h"

namespace py = pybind11;
using namespace py::literals;

namespace kvcache {
namespace {

template <class T>
using Vector = py::array_t<T, py::array::c_style>;

// A one-dimensional contiguous array of exactly T: nothing is converted behind the caller's back.
template <class T>
Vector<T> vector_of(const char* name, const py::handle& value) {
    if (!py::isinstance<py::array>(value))
        throw std::invalid_argument(std::string(name) + " is a " +
                                    std::string(py::str(py::type::of(value).attr("__name__"))) +
                                    "; give a numpy array");
    const auto array = py::reinterpret_borrow<py::array>(value);
    if (!py::isinstance<Vector<T>>(value) || array.ndim() != 1)
        throw std::invalid_argument(
            std::string(name) + " is an array of " + std::string(py::str(array.dtype())) + " with " +
            std::to_string(array.ndim()) + " dimensions; a contiguous one-dimensional array of " +
            std::string(py::str(py::dtype::of<T>())) + " is accepted");
    return py::reinterpret_borrow<Vector<T>>(value);
}

Digest digest_of(const char* name, const py::bytes& value) {
    const std::string text = value;
    Digest digest;
    if (text.size() != digest.size())
        throw std::invalid_argument(std::string(name) + " has " + std::to_string(text.size()) +
                                    " bytes; it must have 16");
    std::memcpy(digest.data(), text.data(), digest.size());
    return digest;
}

void register_hashing(py::module_& m) {
    m.def(
        "chunk_hashes",
        [](const py::object& tokens, int64_t chunk_size, const py::bytes& parent, const py::bytes& secret,
           bool tail) {
            const auto array = vector_of<int32_t>("tokens", tokens);
            if (chunk_size <= 0)
                throw std::invalid_argument("chunk_size is " + std::to_string(chunk_size) +
                                            "; it must be above 0");
            const Digest first = digest_of("parent", parent), key = digest_of("secret", secret);
            std::string digests;
            {
                const py::gil_scoped_release release;
                digests = chunk_hashes(array.data(), static_cast<size_t>(array.size()),
                                       static_cast<size_t>(chunk_size), first, key, tail);
            }
            return py::bytes(digests);
        },
        "tokens"_a, "chunk_size"_a, "parent"_a, "secret"_a, "tail"_a = false);
    m.def(
        "xxh3_128",
        [](const py::buffer& data, std::optional<int64_t> piece) {
            const py::buffer_info info = data.request();
            const auto bytes = static_cast<size_t>(info.size * info.itemsize);
            if (piece && *piece <= 0)
                throw std::invalid_argument("piece is " + std::to_string(*piece) + "; it must be above 0");
            Digest digest;
            {
                const py::gil_scoped_release release;
                digest = xxh3_128(info.ptr, bytes,
                                  piece ? static_cast<size_t>(*piece) : std::max(bytes, size_t{1}));
            }
            return py::bytes(reinterpret_cast<const char*>(digest.data()), digest.size());
        },
        "data"_a, "piece"_a = py::none());
}

void register_memory(py::module_& m) {
    py::class_<HostRegion>(m, "HostRegion", py::buffer_protocol())
        .def(py::init<size_t, bool>(), "capacity"_a, "huge_pages"_a = true)
        .def("prepare", &HostRegion::prepare, "pin"_a, "granule"_a, "required"_a = false, "numa_node"_a = -1)
        .def("close", &HostRegion::close, py::call_guard<py::gil_scoped_release>())
        .def_property_readonly(
            "address", [](const HostRegion& region) { return reinterpret_cast<uintptr_t>(region.address()); })
        .def_property_readonly("capacity", &HostRegion::capacity)
        .def_property_readonly("state",
                               [](const HostRegion& region) {
                                   static constexpr const char* names[] = {"Pageable", "Pinning", "Pinned",
                                                                           "PinningFailed"};
                                   return names[static_cast<int>(region.state())];
                               })
        .def_property_readonly("reason", &HostRegion::reason)
        .def_property_readonly("populated_bytes", &HostRegion::populated)
        .def_property_readonly("pinned_bytes", &HostRegion::pinned)
        .def_property_readonly("ready_bytes", &HostRegion::ready)
        .def_buffer([](HostRegion& region) {
            if (region.address() == nullptr) throw std::runtime_error("HostRegion: the region is closed");
            return py::buffer_info(reinterpret_cast<uint8_t*>(region.address()),
                                   static_cast<py::ssize_t>(region.capacity()), false);
        });
    m.def(
        "is_pinned",
        [](uintptr_t address, size_t bytes) {
            return HostRegion::is_pinned(reinterpret_cast<void*>(address), bytes);
        },
        "address"_a, "num_bytes"_a);
    m.def("numa_node", &numa_node, "device"_a);
}

std::string describe(const PagedLayout& layout) {
    std::ostringstream text;
    text << "PagedLayout(kv_stride=" << layout.kv_stride << ", block_stride=" << layout.block_stride
         << ", token_stride=" << layout.token_stride << ", head_stride=" << layout.head_stride
         << ", heads=" << layout.heads << ", head_bytes=" << layout.head_bytes
         << ", block_size=" << layout.block_size << ", num_blocks=" << layout.num_blocks
         << ", planes=" << layout.planes << ")";
    return text.str();
}

Pages make_pages(const py::object& addresses, const PagedLayout& layout, int device) {
    const auto array = vector_of<uint64_t>("bases", addresses);
    Pages pages{layout, {}, device};
    for (py::ssize_t layer = 0; layer < array.size(); ++layer)
        for (int64_t plane = 0; plane < layout.planes; ++plane)
            pages.bases.push_back(array.at(layer) + static_cast<uint64_t>(plane * layout.kv_stride));
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
    return pages;
}

void transfer(const Pages& pages, const Batch& batch, uint64_t stream, int blocks) {
    check(pages, batch);
    if (pages.device < 0)
        host_transfer(pages, batch);
    else
        cuda_transfer(pages, batch, stream, blocks);
}

Batch make_batch(const Pages& pages, const Vector<int64_t>& slots, bool store, bool token_major,
                 int64_t layer_begin, std::optional<int64_t> layer_end) {
    return {
        slots.data(), slots.size(), {}, store, token_major, layer_begin, layer_end.value_or(pages.layers())};
}

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
        .def(py::init(&make_pages), "bases"_a, "layout"_a, "device"_a = -1)
        .def_static("unilateral", &make_unilateral, "key_bases"_a, "value_bases"_a, "layout"_a,
                    "device"_a = -1)
        .def_readonly("layout", &Pages::layout)
        .def_readonly("device", &Pages::device)
        .def_property_readonly("num_layers", &Pages::layers);

    m.def(
        "batched_kv_transfer",
        [](const Pages& pages, const py::object& addresses, const py::object& starts, const py::object& ends,
           const py::object& slots, bool store, bool token_major, int64_t layer_begin,
           std::optional<int64_t> layer_end, uint64_t stream, int blocks) {
            const auto address = vector_of<uint64_t>("addresses", addresses);
            const auto start = vector_of<int64_t>("starts", starts), end = vector_of<int64_t>("ends", ends);
            const auto slot = vector_of<int64_t>("slot_mapping", slots);
            if (address.size() != start.size() || address.size() != end.size())
                throw std::invalid_argument("addresses, starts and ends have " +
                                            std::to_string(address.size()) + ", " +
                                            std::to_string(start.size()) + " and " +
                                            std::to_string(end.size()) + " entries; they must have as many");
            Batch batch = make_batch(pages, slot, store, token_major, layer_begin, layer_end);
            for (py::ssize_t i = 0; i < address.size(); ++i)
                batch.chunks.push_back({address.at(i), start.at(i), end.at(i)});
            const py::gil_scoped_release release;
            transfer(pages, batch, stream, blocks);
        },
        "pages"_a, "addresses"_a, "starts"_a, "ends"_a, "slot_mapping"_a, "store"_a, py::kw_only(),
        "token_major"_a = true, "layer_begin"_a = 0, "layer_end"_a = py::none(), "stream"_a = 0,
        "blocks"_a = 0);
    m.def(
        "multi_layer_kv_transfer",
        [](const Pages& pages, uint64_t address, const py::object& slots, bool store, bool token_major,
           uint64_t stream, int blocks) {
            const auto slot = vector_of<int64_t>("slot_mapping", slots);
            Batch batch = make_batch(pages, slot, store, token_major, 0, std::nullopt);
            batch.chunks.push_back({address, 0, slot.size()});
            const py::gil_scoped_release release;
            transfer(pages, batch, stream, blocks);
        },
        "pages"_a, "address"_a, "slot_mapping"_a, "store"_a, py::kw_only(), "token_major"_a = true,
        "stream"_a = 0, "blocks"_a = 0);
    m.def(
        "single_layer_kv_transfer",
        [](const Pages& pages, int64_t layer, uint64_t address, const py::object& slots, bool store,
           bool token_major, uint64_t stream, int blocks) {
            const auto slot = vector_of<int64_t>("slot_mapping", slots);
            Batch batch = make_batch(pages, slot, store, token_major, layer, layer + 1);
            batch.chunks.push_back({address, 0, slot.size()});
            const py::gil_scoped_release release;
            transfer(pages, batch, stream, blocks);
        },
        "pages"_a, "layer"_a, "address"_a, "slot_mapping"_a, "store"_a, py::kw_only(), "token_major"_a = true,
        "stream"_a = 0, "blocks"_a = 0);
}

py::dict build_info() {
    const std::string architectures = cuda_architectures();
    py::dict info;
    info["cuda"] = !architectures.empty();
    info["architectures"] = py::str(architectures).attr("split")();
    info["compiler"] = KVCACHE_COMPILER;
    info["cuda_compiler"] = KVCACHE_CUDA_COMPILER;
    return info;
}

}  // namespace
}  // namespace kvcache

PYBIND11_MODULE(_native, m) {
    using namespace kvcache;
    m.def("build_info", &build_info);
    m.def("cuda_available", [] { return cuda_device_count() > 0; });
    m.def("cuda_unavailable_reason", [] {
        std::string why;
        return cuda_device_count(&why) > 0 ? std::string() : why;
    });
    register_hashing(m);
    register_memory(m);
    register_transfer(m);
}
