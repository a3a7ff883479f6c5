// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

namespace kvcache {

namespace py = pybind11;

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

// The value of an integer that is not negative; negative where it is none, with or without an exception set.
inline int64_t integer_of(PyObject* item) {
#if PY_VERSION_HEX >= 0x030c0000
    if (PyLong_CheckExact(item) && PyUnstable_Long_IsCompact(reinterpret_cast<PyLongObject*>(item)))
        return PyUnstable_Long_CompactValue(reinterpret_cast<PyLongObject*>(item));
#else
    // One digit of 30 bits: read where it lies, since a call for each of a long prompt's token ids costs
    // more than to hash them.
    if (PyLong_CheckExact(item) && Py_SIZE(item) == 1)
        return reinterpret_cast<PyLongObject*>(item)->ob_digit[0];
#endif
    return PyLong_AsLongLong(item);
}

void register_transfer(py::module_& m);
void register_rotary(py::module_& m);
void register_io(py::module_& m);

}  // namespace kvcache
