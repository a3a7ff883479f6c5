// SPDX-License-Identifier: Apache-2.0
// kvcache._native: one register function a group. No torch headers: memory comes as addresses, streams as
// integers.
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
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

// A buffer's bytes where they lie. Throws what Python says of one that is not contiguous.
class Bytes {
  public:
    explicit Bytes(const py::buffer& data) {
        if (PyObject_GetBuffer(data.ptr(), &view_, PyBUF_SIMPLE) != 0) throw py::error_already_set();
    }
    ~Bytes() { PyBuffer_Release(&view_); }
    Bytes(const Bytes&) = delete;
    Bytes& operator=(const Bytes&) = delete;

    const void* data() const { return view_.buf; }
    size_t size() const { return static_cast<size_t>(view_.len); }

  private:
    Py_buffer view_;
};

Vector<int32_t> token_ids(const py::list& tokens, size_t start, size_t stop) {
    if (start > stop || stop > tokens.size())
        throw std::invalid_argument("tokens [" + std::to_string(start) + ", " + std::to_string(stop) +
                                    ") were asked of a list of " + std::to_string(tokens.size()));
    Vector<int32_t> ids(static_cast<py::ssize_t>(stop - start));
    int32_t* out = ids.mutable_data();
    for (size_t at = start; at < stop; ++at) {
        const int64_t id = integer_of(PyList_GET_ITEM(tokens.ptr(), static_cast<py::ssize_t>(at)));
        if (id < 0 || id > INT32_MAX) {
            PyErr_Clear();
            throw std::invalid_argument("tokens[" + std::to_string(at) +
                                        "] is no token id; give integers from 0 to 2147483647");
        }
        *out++ = static_cast<int32_t>(id);
    }
    return ids;
}

void register_hashing(py::module_& m) {
    m.def("token_ids", &token_ids, "tokens"_a, "start"_a, "stop"_a);
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
            const Bytes bytes(data);
            if (piece && *piece <= 0)
                throw std::invalid_argument("piece is " + std::to_string(*piece) + "; it must be above 0");
            Digest digest;
            {
                const py::gil_scoped_release release;
                digest = xxh3_128(bytes.data(), bytes.size(),
                                  piece ? static_cast<size_t>(*piece) : std::max(bytes.size(), size_t{1}));
            }
            return py::bytes(reinterpret_cast<const char*>(digest.data()), digest.size());
        },
        "data"_a, "piece"_a = py::none());
    py::class_<StreamingHash>(m, "Xxh3_128")
        .def(py::init<>())
        .def(
            "update",
            [](StreamingHash& hash, const py::buffer& data) {
                const Bytes bytes(data);
                const py::gil_scoped_release release;
                hash.update(bytes.data(), bytes.size());
            },
            "data"_a)
        .def("digest", [](const StreamingHash& hash) {
            const Digest digest = hash.digest();
            return py::bytes(reinterpret_cast<const char*>(digest.data()), digest.size());
        });
}

void register_memory(py::module_& m) {
    py::class_<HostRegion>(m, "HostRegion", py::buffer_protocol())
        .def(py::init<size_t, bool>(), "capacity"_a, "huge_pages"_a = true)
        .def("prepare", &HostRegion::prepare, "pin"_a, "granule"_a, "required"_a = false, "numa_node"_a = -1,
             "populate"_a = true, "hold"_a = false, "device"_a = 0)
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
    m.def("use_device", &use_device, "device"_a);
    m.def(
        "device_reaches",
        [](const py::object& addresses) {
            const auto array = vector_of<uint64_t>("addresses", addresses);
            return std::all_of(array.data(), array.data() + array.size(), [](uint64_t address) {
                // A region knows what of it is page-locked, sooner than the driver does.
                auto* const first = reinterpret_cast<void*>(address);
                return HostRegion::is_pinned(first, 1) || device_reaches(first);
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
    m.def("dma_in_batches", &dma_in_batches);
    m.def("cuda_unavailable_reason", [] {
        std::string why;
        return cuda_device_count(&why) > 0 ? std::string() : why;
    });
    register_hashing(m);
    register_memory(m);
    register_transfer(m);
    register_rotary(m);
    register_io(m);
}
