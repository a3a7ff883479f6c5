// SPDX-License-Identifier: Apache-2.0
// The group of kvcache._native that reads and writes files.
#include <pybind11/stl.h>

#include <exception>
#include <system_error>
#include <unordered_map>

#include "bindings_arrays.h"
#include "uring.h"

using namespace pybind11::literals;

namespace kvcache {
namespace {

// A ring, and the buffers that its transfers use: exported, so that nobody frees or resizes them meanwhile.
class BoundUring {
  public:
    explicit BoundUring(unsigned depth) : ring_(depth) {}

    void submit(uint64_t tag, int fd, uint64_t offset, const std::vector<py::buffer>& buffers, bool write,
                bool durable) {
        std::vector<py::buffer_info> held;
        std::vector<iovec> pieces;
        for (const py::buffer& buffer : buffers) {
            held.push_back(buffer.request(!write));
            const py::buffer_info& info = held.back();
            if (info.ndim != 1 || info.strides[0] != info.itemsize)
                throw std::invalid_argument("Uring: a buffer with " + std::to_string(info.ndim) +
                                            " dimensions; contiguous ones of one dimension are accepted");
            pieces.push_back({info.ptr, static_cast<size_t>(info.size * info.itemsize)});
        }
        {
            const py::gil_scoped_release release;
            ring_.submit(tag, fd, offset, std::move(pieces), write, durable);
        }
        held_.emplace(tag, std::move(held));
    }

    std::pair<uint64_t, int64_t> wait() {
        std::pair<uint64_t, int64_t> done;
        {
            const py::gil_scoped_release release;
            done = ring_.wait();
        }
        held_.erase(done.first);
        return done;
    }

    void close() {
        {
            const py::gil_scoped_release release;
            ring_.close();
        }
        held_.clear();
    }

    size_t under_way() const { return ring_.under_way(); }

  private:
    Uring ring_;
    std::unordered_map<uint64_t, std::vector<py::buffer_info>> held_;
};

}  // namespace

void register_io(py::module_& m) {
    py::register_local_exception_translator([](std::exception_ptr pending) {
        try {
            if (pending) std::rethrow_exception(pending);
        } catch (const std::system_error& error) {  // Python makes the fitting subclass of the number
            const py::tuple arguments = py::make_tuple(error.code().value(), error.what());
            PyErr_SetObject(PyExc_OSError, arguments.ptr());
        }
    });
    py::class_<BoundUring>(m, "Uring")
        .def(py::init<unsigned>(), "depth"_a)
        .def("submit", &BoundUring::submit, "tag"_a, "fd"_a, "offset"_a, "buffers"_a, "write"_a,
             "durable"_a = false)
        .def("wait", &BoundUring::wait)
        .def("close", &BoundUring::close)
        .def_property_readonly("under_way", &BoundUring::under_way);
}

}  // namespace kvcache
