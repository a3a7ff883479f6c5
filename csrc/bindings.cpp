// SPDX-License-Identifier: Apache-2.0
// kvcache._native: one register function a group. No torch headers: memory comes as addresses, streams as
// integers.
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "bindings_arrays.h"
#include "device.h"
#include "hashing.h"
#include "region.h"

using namespace pybind11::literals;

namespace kvcache {
namespace {

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
        .def("prepare", &HostRegion::prepare, "pin"_a, "granule"_a, "required"_a = false, "numa_node"_a = -1,
             "populate"_a = true, "hold"_a = false)
        .def("start_pinning", &HostRegion::start_pinning)
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
    m.def(
        "device_reaches",
        [](const py::object& addresses) {
            const auto array = vector_of<uint64_t>("addresses", addresses);
            return std::all_of(array.data(), array.data() + array.size(), [](uint64_t address) {
                return device_reaches(reinterpret_cast<void*>(address));
            });
        },
        "addresses"_a);
    m.def("numa_node", &numa_node, "device"_a);
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
    register_rotary(m);
}
