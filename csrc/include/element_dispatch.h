// SPDX-License-Identifier: Apache-2.0
// From an element type known at run time to one known to the compiler: calls `use` with an instance of the
// format.
#pragma once

#include "rotary.h"

namespace kvcache {

template <class Use>
void with_type(ElementType type, Use use) {
    switch (type) {
        case ElementType::Float32:
            return use(Single{});
        case ElementType::Float16:
            return use(Half{});
        case ElementType::BFloat16:
            return use(BFloat16{});
        case ElementType::Float8E4M3:
            return use(Float8E4M3{});
        case ElementType::Float8E5M2:
            return use(Float8E5M2{});
    }
}

// As with_type for the types of a cos/sin table.
template <class Use>
void with_table_type(ElementType type, Use use) {
    if (type == ElementType::Float16) return use(Half{});
    if (type == ElementType::BFloat16) return use(BFloat16{});
    use(Single{});
}

}  // namespace kvcache
